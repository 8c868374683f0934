"""Decides which mixtures of experts of other libraries mean what `QuantizedMoE` computes.

A block is checked in three ways, since none sees everything. They are: its parts and its router's options; the experts'
own gated activation over the whole range of numbers; and tokens of several sizes and both signs through the whole
block, which show what else its forward does.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cute_kernels.gemm.activations import ActivationFunction, Swiglu
from cute_kernels.gemm.experts.stored import DOWN, Stored, is_experts, known_experts

SHARED_NAMES = ("shared_experts", "shared_expert")  # an expert that takes all tokens
SHARED_GATE = "shared_expert_gate"  # what its result is multiplied with, after a sigmoid

_PROBE_TOKENS = 2
_PROBE_TOLERANCE = 0.05  # relative; what another meaning would change is far more, what rounding to bf16 does far less
_GATE_TOLERANCE = 1e-4  # relative, in fp32; a clamp after SiLU is off from one before it by 9e-4 at a limit of 7
_MAGNITUDES = (0.5, 4.0, 30.0, 500.0, 1e4)  # of the largest gate or up; published clamps are at 7 to 16
_SMALL_EXPERTS, _SMALL_INNER, _SMALL_HIDDEN = 4, 16, 32  # of experts that are tried in small
_BLOCK_MAGNITUDE = 60.0  # the one, beside that of random tokens, for whole blocks: theirs are large weights
_FP16_MAGNITUDE = 100.0  # its square, what the second product takes, is still a number in fp16


def is_moe_block(module: object) -> bool:
    """Whether it is a module with exactly the parts that `QuantizedMoE.from_block` makes a layer of."""
    if not isinstance(module, nn.Module):
        return False
    children = dict(module.named_children())
    known = known_experts(children.get("experts"))
    if known is None:
        return False
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    others = children.keys() - {known[0].router, "experts", *SHARED_NAMES, SHARED_GATE}
    return not own and not others and known[0].router in children and not children.keys() >= {*SHARED_NAMES}


def shared_of(block: nn.Module) -> dict[str, nn.Module]:
    """The block's shared expert and its gate by name, if it has them."""
    return {name: child for name, child in block.named_children() if name in (*SHARED_NAMES, SHARED_GATE)}


def with_shared(module: nn.Module, shared: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Adds the shared expert's result for x to y."""
    z = module.get_submodule(shared)(x)
    if hasattr(module, SHARED_GATE):
        z = torch.sigmoid(module.get_submodule(SHARED_GATE)(x)) * z
    return y + z


def refusal(block: nn.Module) -> str | None:
    """Returns why a block with the parts of one (`is_moe_block`), or experts (`is_experts`), cannot be served, or None.

    For a block on the meta device, small copies of its experts are tried, and its router is judged by its options.
    """
    if is_experts(block):
        return experts_refusal(block)
    known = known_experts(block.get_submodule("experts"))
    assert known is not None
    reason = _router_refusal(block.get_submodule(known[0].router)) or experts_refusal(block.get_submodule("experts"))
    if reason is None and not any(tensor.is_meta for tensor in block.parameters()):
        reason = _probe_refusal(block, *known)
    return reason


def experts_refusal(experts: nn.Module) -> str | None:
    """Returns why experts with known weights (`is_experts`) are not supported, or None if they are.

    Small copies with weights of their own are tried: the question is what their code does.
    """
    known = known_experts(experts)
    if known is None:
        return "its weights or its activation are not known"
    reason = _activation_refusal(experts, *known)
    if reason is not None:
        return reason
    try:
        return _small_probe_refusal(experts, *known)
    except Exception as error:  # whatever another library's code raises
        return f"its experts cannot be tried with hidden states, ids and weights ({type(error).__name__}: {error})"


@torch.no_grad()
def _small_probe_refusal(experts: Any, kind: Stored, activation: ActivationFunction) -> str | None:
    """Returns why the experts' results for tokens are not their weighted sums, or None."""
    small, dtype = (_SMALL_EXPERTS, _SMALL_HIDDEN, _SMALL_INNER), experts.get_parameter(DOWN).dtype
    tried = copy.copy(experts)
    tried.__dict__ = dict(experts.__dict__)
    for word, size, own in zip(("num", "hidden", "inter"), kind.sizes(experts), small, strict=True):
        # in the names of attributes that hold them
        tried.__dict__.update({name: own for name, value in vars(experts).items() if word in name and value == size})
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    with torch.device("cpu"):
        made: dict[str, torch.Tensor] = {}
        for name, shape in kind.shapes(*small).items():
            inputs = shape[1 if kind.transposed else 2] if len(shape) == 3 else 1
            made[name] = (random(*shape) / inputs**0.5).to(dtype)
        tried._parameters = {name: nn.Parameter(weight) for name, weight in made.items()}
        x, ids = random(2, _SMALL_HIDDEN).to(dtype), torch.tensor([[0, 2], [3, 0], [1, 3], [2, 1]])
        x, shares = torch.cat((x, -x)), torch.tensor([[0.7, 0.3], [1.0, 0.5], [0.2, 0.1], [0.6, 0.4]])
        for magnitude in (each for each in _MAGNITUDES if dtype != torch.float16 or each <= _FP16_MAGNITUDE):
            inputs = x * magnitude
            found = _called(tried, kind, inputs, ids, shares.to(dtype))
            wanted = _routed(tried, kind, activation, inputs, shares.to(dtype), ids)
            off = (found.reshape(x.shape).float() - wanted).norm(dim=1) > _PROBE_TOLERANCE * wanted.norm(dim=1)
            if bool(off.any()):
                meant = _said_of(activation)
                return f"for gates and ups of about {magnitude:.3g} its experts compute something else than {meant}"
    return None


def _called(experts: Any, kind: Stored, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The experts' results [tokens, hidden], called as their block calls them."""
    if not kind.scales_inputs:
        return experts(x, ids, shares)
    scores = shares.new_zeros(len(x), _SMALL_EXPERTS).scatter(1, ids, shares)
    rows = x * scores.T[..., None]
    return experts(rows.flatten(0, 1)).reshape(rows.shape).sum(0)


def _router_refusal(router: nn.Module) -> str | None:
    """Returns why the router depends on more than hidden states, or None."""
    asked = inspect.signature(router.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    wanted = [each.name for each in asked if each.default is inspect.Parameter.empty and each.kind in kinds]
    if len(wanted) == 1:
        return None
    kind, names = type(router).__name__, ", ".join(wanted) or "nothing"
    return f"its router {kind} takes {names}, want one that takes hidden states alone"


def _activation_refusal(experts: nn.Module, kind: Stored, activation: ActivationFunction) -> str | None:
    """Returns why the experts' own gated activation, if it is a separate function, is not the one that they name, or
    None."""
    apply: Any = getattr(experts, "_apply_gate", None)
    if apply is None or kind.biased or not kind.gated:  # whose activation is tried with the rest
        return None
    sizes = torch.tensor(_MAGNITUDES, dtype=torch.float32, device="cpu")
    values = torch.cat((-sizes.flip(0), sizes))
    gate, up = values.repeat_interleave(len(values)), values.repeat(len(values))
    try:
        with torch.device("cpu"):  # also while a skeleton is made on the meta device
            found = apply(torch.cat((gate, up))[None])[0].float()
    except Exception as error:  # whatever another library's code raises
        return f"its experts' gated activation cannot be tried ({type(error).__name__}: {error})"
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


def _said_of(activation: ActivationFunction) -> str:
    return "silu(gate) * up" if activation == Swiglu() else activation.name


@torch.no_grad()
def _probe_refusal(block: nn.Module, kind: Stored, activation: ActivationFunction) -> str | None:
    """Returns why the block's results for tokens differ from those of a `QuantizedMoE`, or None."""
    w = kind.weights(block.get_submodule("experts")).first
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
            if not _agree(block, kind, activation, inputs, block(inputs[None].clone())):
                return (
                    f"for gates and ups up to {magnitude:.3g} it computes something else than its experts with "
                    f"{_said_of(activation)}, weighted by what its router says, plus its shared expert"
                )
    except Exception as error:  # whatever another library's code raises
        return f"its forward cannot be tried with hidden states alone ({type(error).__name__}: {error})"
    finally:
        block.train(training)
    return None


def _agree(block: nn.Module, kind: Stored, activation: ActivationFunction, x: torch.Tensor, found: Any) -> bool:
    """Whether the results of the block and its router for x are those of a `QuantizedMoE`, token by token."""
    router: Any = block.get_submodule(kind.router)
    chosen = router(x)
    if kind.scales_inputs:
        found, scores = found[0], chosen[0]
        chosen = scores, *scores.topk(router.top_k)
    shapes_fit = isinstance(found, torch.Tensor) and found.numel() == x.numel()
    if not (shapes_fit and isinstance(chosen, tuple) and len(chosen) == 3 and chosen[1].shape == chosen[2].shape):
        return False
    y = _routed(block.get_submodule("experts"), kind, activation, x, *chosen[1:])
    shared = next(iter(shared_of(block).keys() & {*SHARED_NAMES}), None)
    wanted = (y if shared is None else with_shared(block, shared, x, y)).float()
    off = (found.reshape(x.shape).float() - wanted).norm(dim=1) > _PROBE_TOLERANCE * wanted.norm(dim=1)
    if not bool(wanted.isfinite().all()):
        return _has_bad_weights(block)  # the weights are to blame, which quantising says by name
    return not bool(off.any())


def _routed(
    experts: nn.Module,
    kind: Stored,
    activation: ActivationFunction,
    x: torch.Tensor,
    shares: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """Returns fp32 [tokens, hidden]: the experts' results for x, by the router's weights and ids."""
    first, second, biases = kind.weights(experts)
    y = torch.zeros_like(x, dtype=torch.float32)
    for token, (own, chosen) in enumerate(zip(shares.tolist(), ids.tolist(), strict=True)):
        for share, e in zip(own, chosen, strict=True):
            row, factor = (x[token] * share, 1.0) if kind.scales_inputs else (x[token], share)
            sums = functional.linear(row, first[e], None if biases is None else biases[0][e]).float()
            hidden = activation.reference(*kind.operands(sums)).to(x.dtype)
            y[token] += factor * functional.linear(hidden, second[e], None if biases is None else biases[1][e]).float()
    return y


def _has_bad_weights(block: nn.Module) -> bool:
    return not all(bool(expert.isfinite().all()) for w in block.get_submodule("experts").parameters() for expert in w)
