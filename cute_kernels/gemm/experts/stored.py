"""Finds out how other libraries' modules of experts store their weights, and which activation their attributes name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from cute_kernels.gemm.activations import ActivationFunction, ClampedSwiglu, Silu, Swiglu, registered

NAMES = GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"  # of the weights of both products
_LARGE = (30.0, 500.0, 1e4)  # numbers beyond published clamps, on which activations are compared


class ExpertWeights(NamedTuple):
    """The weights [E, N, K] of both products, possibly views, and the biases [E, N] of both, if there are any."""

    first: torch.Tensor
    second: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class Stored:
    """The names and the order of experts' weights in a module.

    Attributes:
        first: name of the first product's weight; `UP` for experts without a gate.
        transposed: whether weights are [E, K, N], not [E, N, K].
        in_turn: whether rows of gates and ups alternate. If not, all gate rows come before all up rows.
        biased: whether there are biases. Their names are those of the weights plus "_bias".
        scales_inputs: whether the router's weights scale the experts' inputs. The module's forward then takes the rows
            of all experts, sorted by expert, and the block's router is called "router", not "gate".
    """

    first: str = GATE_UP
    transposed: bool = False
    in_turn: bool = False
    biased: bool = False
    scales_inputs: bool = False

    @property
    def router(self) -> str:
        """The name of the router in the block around the experts."""
        return "router" if self.scales_inputs else "gate"

    @property
    def gated(self) -> bool:
        return self.first == GATE_UP

    def sizes(self, experts: nn.Module) -> tuple[int, int, int]:
        """Returns (experts, hidden, inner) of a module."""
        count, *sizes = experts.get_parameter(DOWN).shape
        hidden, inner = reversed(sizes) if self.transposed else sizes
        return count, hidden, inner

    def rows(self, inner: int) -> int:
        """Returns N of the first product."""
        return 2 * inner if self.gated else inner

    def shapes(self, count: int, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a module's parameters, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for name, n, k in ((self.first, self.rows(inner), hidden), (DOWN, hidden, inner)):
            found[name] = (count, k, n) if self.transposed else (count, n, k)
            if self.biased:
                found[f"{name}_bias"] = count, n
        return found

    def weights(self, experts: nn.Module) -> ExpertWeights:
        """Returns the weights of a module, with gates and ups in the module's order."""
        first, second = (experts.get_parameter(name).detach() for name in (self.first, DOWN))
        if self.transposed:
            first, second = first.mT, second.mT
        if not self.biased:
            return ExpertWeights(first, second, None)
        biases = experts.get_parameter(f"{self.first}_bias"), experts.get_parameter(f"{DOWN}_bias")
        return ExpertWeights(first, second, biases)


KINDS = (
    Stored(),
    Stored(transposed=True, in_turn=True, biased=True),
    Stored(UP),
    Stored(transposed=True, scales_inputs=True),
)
"""The supported ways to store experts, in this order: that of most models, of gpt-oss, of Nemotron-H and of Llama 4."""

WANTED = (
    "gate_up_proj [E, 2 I, hidden] and down_proj [E, hidden, I] with SiLU and nothing else, or up_proj [E, I, hidden] "
    "and down_proj with relu2, or gpt-oss's"
)


def stored_as(module: object) -> Stored | None:
    """Returns how a module stores experts' weights. Returns None if they are not stored as one of `KINDS`, or if the
    module also has other weights, buffers or submodules."""
    if not isinstance(module, nn.Module) or {name for name, _ in module.named_children()} - {"act_fn"}:
        return None
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    if any(True for _ in module.buffers()) or len(shapes.get(DOWN, ())) != 3:
        return None
    return next((kind for kind in KINDS if kind.shapes(*kind.sizes(module)) == shapes), None)


def is_experts(module: object) -> bool:
    """Returns whether ``module`` has exactly the weights that `QuantizedRoutedExperts.from_experts` takes."""
    known = known_experts(module)
    return known is not None and not known[0].scales_inputs


Known = tuple[Stored, ActivationFunction]


def known_experts(module: object) -> Known | None:
    """Returns (how a module stores experts' weights, the activation that its attributes name). Returns None if either
    is unknown.

    `.blocks.refusal` says whether the module's code computes gated products with this activation.
    """
    kind = stored_as(module)
    activation = None if kind is None else _activation_of(module, kind)
    return None if kind is None or activation is None else (kind, activation)


def _activation_of(experts: object, kind: Stored) -> ActivationFunction | None:
    """Returns the activation that the module's attributes name, or None.

    Experts without a gate may have any registered activation. A limit with an alpha means gpt-oss's clamped SwiGLU. A
    limit alone means the clamped SwiGLU of DeepSeek V4 and GLM 5.
    """
    alpha, limit = (_number_of(experts, (name, f"swiglu_{name}")) for name in ("alpha", "limit"))
    function = getattr(experts, "act_fn", None)
    if not kind.gated:
        return next((each for each in registered() if not each.gated and _is(function, each)), None)
    if limit is not None and alpha is not None:
        return ClampedSwiglu(alpha, limit)
    if kind.biased or not (_is(function, Silu()) or (function is None and limit is not None)):
        return None
    return Swiglu() if limit is None else ClampedSwiglu(1.0, limit, 0.0)


def _number_of(experts: object, names: tuple[str, ...]) -> float | None:
    """Returns the first of the attributes ``names`` that is a positive finite number, or None."""
    found = (getattr(experts, name, None) for name in names)
    return next((float(each) for each in found if isinstance(each, (int, float)) and 0 < each < math.inf), None)


def _is(function: object, activation: ActivationFunction) -> bool:
    with torch.device("cpu"):  # also while a skeleton is made on the meta device
        sizes = torch.tensor((*range(5), *_LARGE), dtype=torch.float32)
        values = torch.cat((-sizes, sizes))
        return callable(function) and torch.allclose(torch.as_tensor(function(values)), activation.reference(values))
