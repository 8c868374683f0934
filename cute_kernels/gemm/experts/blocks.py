"""Which mixtures of experts of other libraries mean what `QuantizedMoE` computes.

A block is looked at in three ways, since none sees all: its parts and what its router asks for; the experts' own gated
activation over the whole range of numbers; and tokens of several sizes and both signs through the whole block, which
see what its forward does besides.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from cute_kernels.gemm.activations import ActivationFunction, ClampedSwiglu, Swiglu

SHARED_NAMES = ("shared_experts", "shared_expert")  # an expert that takes all tokens
SHARED_GATE = "shared_expert_gate"  # what its result is multiplied with, after a sigmoid

_PROBE_TOKENS = 2
_PROBE_TOLERANCE = 0.05  # relative; what another meaning would change is far more, what rounding to bf16 does far less
_GATE_TOLERANCE = 1e-4  # relative, in fp32; a clamp after SiLU is off from one before it by 9e-4 at a limit of 7
_MAGNITUDES = (0.5, 4.0, 30.0, 500.0, 1e4)  # of the largest gate or up; published clamps are at 7 to 16
_SMALL_EXPERTS, _SMALL_INNER, _SMALL_HIDDEN = 4, 16, 32  # of experts that are tried in small
_BLOCK_MAGNITUDE = 60.0  # the one, beside that of random tokens, for whole blocks: theirs are large weights
_FP16_MAGNITUDE = 100.0  # its square, what the second product takes, is still a number in fp16


def is_experts(module: object) -> bool:
    """Whether it is a module with the weights, and no others, that `QuantizedRoutedExperts.from_experts` takes."""
    if not isinstance(module, nn.Module) or {name for name, _ in module.named_children()} - {"act_fn"}:
        return False
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    if any(True for _ in module.buffers()) or len(shapes.get("gate_up_proj", ())) != 3:
        return False
    count, rows, hidden = shapes["gate_up_proj"]
    wanted = {"gate_up_proj": (count, rows, hidden), "down_proj": (count, hidden, rows // 2)}
    if shapes.keys() == {*wanted}:
        return shapes == wanted and activation_of(module) is not None
    hidden, rows = rows, hidden  # with biases weights are transposed, as gpt-oss has them
    wanted = {"gate_up_proj": (count, hidden, rows), "down_proj": (count, rows // 2, hidden)}
    wanted |= {"gate_up_proj_bias": (count, rows), "down_proj_bias": (count, hidden)}
    return shapes == wanted and activation_of(module) is not None


def experts_sizes(experts: nn.Module) -> tuple[int, int, int]:
    """(experts, hidden, inner) of a module of experts."""
    count, *sizes = cast("torch.Tensor", experts.down_proj).shape
    hidden, inner = reversed(sizes) if has_biases(experts) else sizes
    return count, hidden, inner


def has_biases(experts: object) -> bool:
    """Whether experts have biases; their weights are transposed then, and gates and ups come in turn."""
    return hasattr(experts, "gate_up_proj_bias")


def activation_of(experts: object) -> ActivationFunction | None:
    """What experts' attributes say of their activation, which `experts_refusal` tries; None if they say of none that is
    known. A limit without an alpha is DeepSeek V4's and GLM 5's, of gated SiLU; with one, gpt-oss's."""
    alpha, limit = (_number_of(experts, (name, f"swiglu_{name}")) for name in ("alpha", "limit"))
    if limit is not None and alpha is not None:
        return ClampedSwiglu(alpha, limit)
    if has_biases(experts):
        return None
    function = getattr(experts, "act_fn", None)
    if not (_is_silu(function) or (function is None and limit is not None)):
        return None
    return Swiglu() if limit is None else ClampedSwiglu(1.0, limit, 0.0)


def _number_of(experts: object, names: tuple[str, ...]) -> float | None:
    """The first attribute that is a finite number."""
    found = (getattr(experts, name, None) for name in names)
    return next((float(each) for each in found if isinstance(each, (int, float)) and math.isfinite(each)), None)


def is_moe_block(module: object) -> bool:
    """Whether it is a module with the parts, and no others, that `QuantizedMoE.from_block` makes a layer of."""
    if not isinstance(module, nn.Module):
        return False
    children = dict(module.named_children())
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    others = children.keys() - {"gate", "experts", *SHARED_NAMES, SHARED_GATE}
    if own or others or not {"gate", "experts"} <= children.keys() or all(name in children for name in SHARED_NAMES):
        return False
    return is_experts(children["experts"])


def shared_of(block: nn.Module) -> dict[str, nn.Module]:
    """The block's shared expert and its gate by name, if it has them."""
    return {name: child for name, child in block.named_children() if name in (*SHARED_NAMES, SHARED_GATE)}


def with_shared(module: nn.Module, shared: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y and what the shared expert says of x."""
    z = module.get_submodule(shared)(x)
    if hasattr(module, SHARED_GATE):
        z = torch.sigmoid(module.get_submodule(SHARED_GATE)(x)) * z
    return y + z


def refusal(block: nn.Module) -> str | None:
    """Why a block with the parts of one (`is_moe_block`) cannot be served, or None if it can.

    Of a block on the meta device its experts are tried in small, and its router by what it asks for.
    """
    reason = _router_refusal(block) or experts_refusal(block.get_submodule("experts"))
    if reason is None and not any(tensor.is_meta for tensor in block.parameters()):
        reason = _probe_refusal(block)
    return reason


def experts_refusal(experts: nn.Module) -> str | None:
    """Why experts with the weights of some (`is_experts`) cannot be served, or None if they can.

    They are tried in small, with weights of their own: what is asked is what their code does.
    """
    reason = _activation_refusal(experts)
    if reason is not None:
        return reason
    try:
        return _small_probe_refusal(experts)
    except Exception as error:  # whatever another library's code raises
        return f"its experts cannot be tried with hidden states, ids and weights ({type(error).__name__}: {error})"


@torch.no_grad()
def _small_probe_refusal(experts: Any) -> str | None:
    """Why tokens do not come out of experts as sums of gated SiLU, weighted as they are told, or None."""
    (count, hidden, inner), activation = experts_sizes(experts), activation_of(experts)
    sizes = {"num": (count, _SMALL_EXPERTS), "inter": (inner, _SMALL_INNER), "hidden": (hidden, _SMALL_HIDDEN)}
    tried = copy.copy(experts)
    tried.__dict__ = dict(experts.__dict__)
    for word, (size, small) in sizes.items():  # in the names of attributes that hold them
        tried.__dict__.update({name: small for name, value in vars(experts).items() if word in name and value == size})
    dtype = experts.gate_up_proj.dtype
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    with torch.device("cpu"):
        gate_up = (random(_SMALL_EXPERTS, 2 * _SMALL_INNER, _SMALL_HIDDEN) / _SMALL_HIDDEN**0.5).to(dtype)
        down = (random(_SMALL_EXPERTS, _SMALL_HIDDEN, _SMALL_INNER) / _SMALL_INNER**0.5).to(dtype)
        weights, biases = {"gate_up_proj": gate_up, "down_proj": down}, None
        if has_biases(experts):
            biases = random(_SMALL_EXPERTS, 2 * _SMALL_INNER).to(dtype), random(_SMALL_EXPERTS, _SMALL_HIDDEN).to(dtype)
            weights = {name: weight.mT.contiguous() for name, weight in weights.items()}
            weights |= {"gate_up_proj_bias": biases[0], "down_proj_bias": biases[1]}
        tried._parameters = {name: nn.Parameter(weight) for name, weight in weights.items()}
        x, ids = random(2, _SMALL_HIDDEN).to(dtype), torch.tensor([[0, 2], [3, 0], [1, 3], [2, 1]])
        x, shares = torch.cat((x, -x)), torch.tensor([[0.7, 0.3], [1.0, 0.5], [0.2, 0.1], [0.6, 0.4]])
        for magnitude in (each for each in _MAGNITUDES if dtype != torch.float16 or each <= _FP16_MAGNITUDE):
            inputs = x * magnitude
            found = tried(inputs, ids, shares.to(dtype))
            wanted = _routed(gate_up, down, inputs, shares.to(dtype), ids, biases, activation)
            off = (found.reshape(x.shape).float() - wanted).norm(dim=1) > _PROBE_TOLERANCE * wanted.norm(dim=1)
            if bool(off.any()):
                meant = _said_of(activation)
                return f"for gates and ups of about {magnitude:.3g} its experts compute something else than {meant}"
    return None


def _router_refusal(block: nn.Module) -> str | None:
    """Why the router does not choose experts by hidden states alone."""
    asked = inspect.signature(block.get_submodule("gate").forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [each.name for each in asked if each.default is inspect.Parameter.empty and each.kind in kinds]
    if len(wanted) == 1:
        return None
    gate = type(block.get_submodule("gate")).__name__
    return f"its router {gate} takes {', '.join(wanted) or 'nothing'}, want one that takes hidden states alone"


def _activation_refusal(experts: nn.Module) -> str | None:
    """Why the experts' own gated activation, where it is a function of its own, is not the one of `activation_of`."""
    apply: Any = getattr(experts, "_apply_gate", None)
    if apply is None or has_biases(experts):  # whose activation is tried with the rest
        return None
    sizes = torch.tensor(_MAGNITUDES, dtype=torch.float32, device="cpu")
    values = torch.cat((-sizes.flip(0), sizes))
    gate, up = values.repeat_interleave(len(values)), values.repeat(len(values))
    try:
        with torch.device("cpu"):  # also while a skeleton is made on the meta device
            found = apply(torch.cat((gate, up))[None])[0].float()
    except Exception as error:  # whatever another library's code raises
        return f"its experts' gated activation cannot be tried ({type(error).__name__}: {error})"
    activation = activation_of(experts) or Swiglu()
    wanted = activation.reference(gate, up)
    off = (
        ~torch.isclose(found, wanted, rtol=_GATE_TOLERANCE, atol=1e-6)
        if found.shape == wanted.shape
        else torch.ones_like(gate)
    )
    if not bool(off.any()):
        return None
    first = int(off.int().argmax())
    result = f"{found[first].item():.6g}" if found.shape == wanted.shape else f"shape {list(found.shape)}"
    return (
        f"its experts' gated activation gives {result} for gate {gate[first].item():g} and up {up[first].item():g}, "
        f"want {_said_of(activation)} = {wanted[first].item():.6g} (a clamp, or another activation)"
    )


def _said_of(activation: ActivationFunction | None) -> str:
    return "silu(gate) * up" if activation is None or activation.number else activation.name


def _is_silu(function: object) -> bool:
    with torch.device("cpu"):  # also while a skeleton is made on the meta device
        sizes = torch.tensor((*range(5), 30.0, 500.0, 1e4), dtype=torch.float32)
        values = torch.cat((-sizes, sizes))
        return callable(function) and torch.allclose(torch.as_tensor(function(values)), functional.silu(values))


@torch.no_grad()
def _probe_refusal(block: nn.Module) -> str | None:
    """Why tokens do not come out of the block as they would of a `QuantizedMoE`, or None."""
    experts: Any = block.experts
    w = experts.gate_up_proj
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBE_TOKENS, w.shape[2], generator=generator, dtype=torch.float32, device="cpu")
    x = x.to(w.device, w.dtype)
    x = torch.cat((x, -x))
    training = block.training
    block.eval()
    try:
        size = max(functional.linear(x, w[e]).abs().max().item() for e in range(min(len(w), 8)))
        for magnitude in (size, _BLOCK_MAGNITUDE):
            inputs = x * (magnitude / size) if size else x
            found, router = block(inputs[None].clone()), cast("nn.Module", block.gate)(inputs)
            if not _agree(block, inputs, found, router):
                return (
                    f"for gates and ups up to {magnitude:.3g} it computes something else than its experts with "
                    f"{_said_of(activation_of(experts))}, weighted by what its router says, plus its shared expert"
                )
    except Exception as error:  # whatever another library's code raises
        return f"its forward cannot be tried with hidden states alone ({type(error).__name__}: {error})"
    finally:
        block.train(training)
    return None


def _agree(block: nn.Module, x: torch.Tensor, found: Any, router: Any) -> bool:
    """Whether what the block and its router made of x is what a `QuantizedMoE` would make of it, token by token."""
    experts: Any = block.experts
    shapes_fit = isinstance(found, torch.Tensor) and found.numel() == x.numel()
    if not (shapes_fit and isinstance(router, tuple) and len(router) == 3 and router[1].shape == router[2].shape):
        return False
    y = _routed(experts.gate_up_proj, experts.down_proj, x, *router[1:], activation=activation_of(experts))
    shared = next(iter(shared_of(block).keys() & {*SHARED_NAMES}), None)
    wanted = (y if shared is None else with_shared(block, shared, x, y)).float()
    off = (found.reshape(x.shape).float() - wanted).norm(dim=1) > _PROBE_TOLERANCE * wanted.norm(dim=1)
    if not bool(wanted.isfinite().all()):
        return _has_bad_weights(block)  # the weights are to blame, which quantising says by name
    return not bool(off.any())


def _routed(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: ActivationFunction | None = None,
) -> torch.Tensor:
    """fp32 [tokens, hidden]: what experts of those weights make of x, by the router's shares and ids."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for token, (own, chosen) in enumerate(zip(shares.tolist(), ids.tolist(), strict=True)):
        for share, e in zip(own, chosen, strict=True):
            pairs = functional.linear(x[token], gate_up[e], None if biases is None else biases[0][e]).float()
            halves = pairs.chunk(2) if biases is None else (pairs[::2], pairs[1::2])
            hidden = (activation or Swiglu()).reference(*halves)
            own = functional.linear(hidden.to(x.dtype), down[e], None if biases is None else biases[1][e])
            y[token] += share * own.float()
    return y


def _has_bad_weights(block: nn.Module) -> bool:
    return not all(bool(expert.isfinite().all()) for w in block.get_submodule("experts").parameters() for expert in w)
