"""Layers of experts as nn.Modules, made of the blocks of transformers models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import torch
from torch import nn
from torch.compiler import is_compiling

from cute_kernels.arguments import check_kind
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.activations import ActivationFunction, Swiglu, experts_activation
from cute_kernels.gemm.experts import blocks, ops
from cute_kernels.gemm.experts.call import MoeCall, check_experts, check_pair
from cute_kernels.gemm.experts.stored import WANTED, Known, is_experts, known_experts
from cute_kernels.gemm.gradient import differentiable
from cute_kernels.gemm.module import OfProducts, OfWeight, checked_bias, describe
from cute_kernels.gemm.packed_experts import PackedExperts, quantize_experts
from cute_kernels.gemm.weight import has_values

if TYPE_CHECKING:
    from typing_extensions import Self


class QuantizedExperts(OfWeight):
    """A module that holds the tensors of `PackedExperts`, and biases, as buffers.

    The state dict is that of `PackedExperts`, and "bias". Loaded weights may have other bits, another group size and
    other zero points. The number of experts, N and K must be the layer's. A loaded tensor is copied into the existing
    tensor if it fits, so that captured graphs use it.

    Args:
        weight: [E, N, K].
        bias: [E, N], or None; kept in the dtype of the activations.
    """

    tensor_names = (*PackedExperts.tensor_names, "bias")

    def __init__(self, weight: PackedExperts, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        check_experts("weight", weight)
        for name in weight.tensor_names:
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("bias", _checked_bias(bias, weight))
        self.weight_format, self.shape = weight.format, weight.shape
        self._weight: PackedExperts | None = None

    @property
    def weight(self) -> PackedExperts:
        """The weights, as an object that shares the layer's tensors.

        The object is kept between calls. While torch.compile traces, each access makes a new object, since
        torch.compile would guard a kept object and its sizes in every call.
        """
        weight, own = None if is_compiling() else self._weight, self._buffers
        if (
            weight is None
            or weight.codes is not own["codes"]
            or weight.scales is not own["scales"]
            or weight.zeros is not own["zeros"]
            or weight.format is not self.weight_format
        ):
            tensors: dict[str, Any] = {name: own[name] for name in PackedExperts.tensor_names}
            weight = PackedExperts(**tensors, format=self.weight_format, shape=self.shape, check_values=False)
            if not is_compiling():
                self._weight = weight  # kept, since to make and check it takes longer than to launch
        return weight

    def extra_repr(self) -> str:
        return (
            f"experts={len(self.codes)}, in_features={self.shape[1]}, out_features={self.shape[0]}, "
            f"{describe(self.weight_format)}, {self.scales.dtype}{', with zeros' if self.zeros is not None else ''}"
            f"{', with bias' if self.bias is not None else ''}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self._weight = None  # of tensors that may go now
        return super()._apply(fn, recurse)

    # -- state dicts -------------------------------------------------------------------------------------------------

    def _loaded(self, own: dict[str, torch.Tensor]) -> tuple[WeightFormat, dict[str, torch.Tensor | None]]:
        names = (*PackedExperts.tensor_names, "format")
        weight = PackedExperts.from_state_dict({name: own[name] for name in names if name in own})
        found, wanted = (len(weight), *weight.shape), (len(self.codes), *self.shape)
        if found != wanted:
            raise ValueError(f"format: got experts {list(found)}, want {list(wanted)}")
        if self.bias is None and "bias" in own:
            raise ValueError("bias: got biases of experts, want none: the layer has none")
        bias = _checked_bias(own.get("bias", self.bias), weight)
        return weight.format, {name: getattr(weight, name) for name in weight.tensor_names} | {"bias": bias}

    def _take(self, form: WeightFormat, tensors: dict[str, torch.Tensor | None], copy: bool) -> None:
        super()._take(form, tensors, copy)
        self._weight = None


Biases = tuple[torch.Tensor, torch.Tensor] | None


class OfExperts(OfProducts):
    """The base of layers of experts, which compute two products and may round activations to FP8."""

    activation: ActivationFunction = Swiglu()  # also of layers pickled before they had one

    def __init__(
        self,
        gate_up: PackedExperts,
        down: PackedExperts,
        biases: Biases = None,
        activation: str | ActivationFunction = "swiglu",
    ) -> None:
        super().__init__()
        check_experts("gate_up", gate_up)
        check_experts("down", down)
        self.activation = experts_activation(activation)
        check_pair(gate_up, down, self.activation)
        first, second = biases or (None, None)
        self.gate_up, self.down = QuantizedExperts(gate_up, first), QuantizedExperts(down, second)

    def _routed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Computes the layer's result [tokens, hidden], without a shared expert. weights, ids: [tokens, topk]."""
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            return differentiable(lambda x, weights: self._routed(x, ids, weights), _refuse_gradients, x, weights)
        modules: Any = self._modules  # nn.Module takes a detour to them as attributes
        gate_up, down = modules["gate_up"], modules["down"]
        options = self.activation, None, self.batch_invariant, None, gate_up.bias, down.bias, self._activations
        return ops.moe(MoeCall(x, gate_up.weight, down.weight, weights, ids, *options))

    @property
    def parts(self) -> tuple[QuantizedExperts, QuantizedExperts]:
        """The modules that hold the weights of the first and of the second product."""
        return self.gate_up, self.down


class OfBlock(OfExperts):
    """The base of layers that replace a whole block: experts with their router and shared expert."""

    router_name: ClassVar[str] = "gate"

    def __init__(
        self,
        gate: nn.Module,
        gate_up: PackedExperts,
        down: PackedExperts,
        shared: dict[str, nn.Module] | None = None,
        activation: str | ActivationFunction = "swiglu",
    ) -> None:
        check_kind("gate", gate, nn.Module, "an nn.Module")
        super().__init__(gate_up, down, activation=activation)
        self.add_module(self.router_name, gate)
        self._shared: str | None = None
        for name, module in _checked_shared(shared).items():
            self.add_module(name, module)
            if name in blocks.SHARED_NAMES:
                self._shared = name

    @classmethod
    def from_block(
        cls,
        block: nn.Module,
        bits: int = 4,
        group_size: int | None = 128,
        zero_point: bool = False,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | str | None = None,
        format: WeightFormat | str | None = None,
    ) -> Self:
        """Returns the layer with the weights of a block's experts quantised; other arguments as for `quantize_weight`.

        The block's class is one of transformers 5, such as MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock or
        DeepseekV3MoE. The block has a router ``gate``, ``experts`` with ``gate_up_proj`` [E, 2 I, hidden], gates first,
        and ``down_proj`` [E, hidden, I], and possibly shared experts. The class decides whether a block computes the
        same as this layer (:mod:`.blocks`). Router and shared experts become submodules of this layer, without being
        copied, moved or quantised.

        Raises:
            TypeError, ValueError: the block is not supported, a weight has values that are not finite, or an argument
                is wrong; the message says which.
        """
        if not (blocks.is_moe_block(block) and cls.router_name in block._modules):
            raise TypeError(
                f"block: got {type(block).__name__}, want one with a router {cls.router_name!r} and 'experts' that "
                f"hold {WANTED}"
            )
        if (reason := blocks.refusal(block)) is not None:
            raise ValueError(f"block: got a {type(block).__name__} that is not served: {reason}")
        layer = quantized_experts(block, bits, group_size, zero_point, dtype, device=device, format=format)
        return cast("Self", layer)


class QuantizedMoE(OfBlock):
    """A mixture of experts with gated SiLU and quantised weights. It is for inference: its backward pass is an error.

    The result is that of `cute_kernels.fused_moe` with the router's ids and weights. If there is a shared expert, its
    result is added. A shared expert's gate multiplies this result by sigmoid(shared_expert_gate(x)).

    Args:
        gate: the router: for x [tokens, hidden] it returns (logits, weights [tokens, topk], ids [tokens, topk]).
        gate_up, down: as `cute_kernels.fused_moe` takes them.
        shared: submodules by name: "shared_experts" or "shared_expert", and "shared_expert_gate".
        activation: as in `cute_kernels.fused_moe`.

    Attributes:
        batch_invariant, activations: as in `cute_kernels.fused_moe`; by default False and None. Both may be set. A
            state dict has neither.

    Raises:
        TypeError, ValueError: an argument is not as above, or the weights do not fit one another; the message names it.
    """

    gate: nn.Module

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Computes the layer for hidden_states [..., hidden] in the scales' dtype; the result has the same shape."""
        modules: Any = self._modules
        flat = hidden_states.dim() == 2
        x = hidden_states if flat else hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = modules["gate"](x)
        y = self._routed(x, ids, weights)
        if self._shared is not None:
            y = blocks.with_shared(self, self._shared, x, y)
        return y if flat else y.view_as(hidden_states)


class QuantizedInputScaledMoE(OfBlock):
    """Llama 4's mixture of experts. The router's weights scale the experts' inputs, and the layer also returns the
    router's logits. Each pair of a token and one of its experts has its own row, which is scaled before the first
    product. The submodule ``router`` returns (scores [tokens, experts], logits). A token's experts are those with the
    ``top_k`` largest scores.
    """

    router_name = "router"

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes (output [tokens, hidden], the router's logits [tokens, experts]) for hidden_states [..., hidden]."""
        modules: Any = self._modules
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = modules["router"](x)
        weights, ids = scores.topk(modules["router"].top_k, dim=-1)
        rows = (x[:, None] * weights[..., None]).flatten(0, 1)
        y = self._routed(rows, ids.view(-1, 1), torch.ones_like(weights).view(-1, 1))
        y = y if ids.shape[1] == 1 else y.view(*ids.shape, -1).sum(1)
        return y if self._shared is None else blocks.with_shared(self, self._shared, x, y), logits


class QuantizedRoutedExperts(OfExperts):
    """Quantised experts for a block that keeps its own forward, router, scaling and shared experts.

    It is for experts in blocks that `QuantizedMoE.from_block` does not support, such as MiniMax-M2's and Nemotron-H's,
    and for experts with biases, as gpt-oss has.

    Args:
        gate_up, down: as `cute_kernels.fused_moe` takes them.
        biases: None, or the biases of both products: [E, rows of gate_up], in the order of those rows, and [E, hidden].
        activation: as in `cute_kernels.fused_moe`.

    Attributes:
        batch_invariant, activations: as in `QuantizedMoE`.
    """

    @classmethod
    def from_experts(
        cls,
        experts: Any,
        bits: int = 4,
        group_size: int | None = 128,
        zero_point: bool = False,
        dtype: torch.dtype | None = None,
        *,
        device: torch.device | str | None = None,
        format: WeightFormat | str | None = None,
    ) -> QuantizedRoutedExperts:
        """Returns the layer of quantised experts; other arguments as for `quantize_weight`.

        ``experts`` is a module that is called with hidden states, ids and weights. Three kinds of modules are
        supported. Most modules have ``gate_up_proj`` [E, 2 I, hidden], gates first, and ``down_proj`` [E, hidden, I].
        Those of gpt-oss have biases, transposed weights, and alternating gates and ups. Those of Nemotron-H have no
        gates, but ``up_proj`` [E, I, hidden] and ``down_proj``.

        Raises:
            TypeError, ValueError: as `QuantizedMoE.from_block`.
        """
        if not is_experts(experts):
            raise TypeError(f"experts: got {type(experts).__name__}, want {WANTED}")
        if (reason := blocks.refusal(experts)) is not None:
            raise ValueError(f"experts: got {type(experts).__name__} that are not served: {reason}")
        layer = quantized_experts(experts, bits, group_size, zero_point, dtype, device=device, format=format)
        return cast("QuantizedRoutedExperts", layer)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes the experts' output [tokens, hidden] for hidden_states [tokens, hidden], with expert ids and weights
        [tokens, topk]."""
        return self._routed(hidden_states, top_k_index, top_k_weights)


def _refuse_gradients(_: torch.Tensor) -> NoReturn:
    raise NotImplementedError("hidden_states: got some that want a gradient, which quantised experts have not")


def quantized_experts(swapped: nn.Module, *weights: Any, **options: Any) -> OfExperts:
    """Returns the layer with quantised weights that replaces ``swapped``, a supported module of experts or a block
    around experts. weights, options: as in `quantize_experts`."""
    experts = getattr(swapped, "experts", swapped)
    known = known_experts(experts)
    assert known is not None
    kind, (first, second, biases) = known[0], known[0].weights(experts)
    gate_up = quantize_experts(first, *weights, halves_in_turn=kind.gated and not kind.in_turn, **options)
    return layer_for(swapped, known, gate_up, quantize_experts(second, *weights, **options), biases)


def layer_for(
    swapped: nn.Module, known: Known, gate_up: PackedExperts, down: PackedExperts, biases: Biases = None
) -> OfExperts:
    """Returns the layer with given weights that replaces ``swapped``, a module of experts or a block around experts."""
    kind, activation = known
    if "experts" not in swapped._modules:
        return QuantizedRoutedExperts(gate_up, down, biases, activation).train(swapped.training)
    made = QuantizedInputScaledMoE if kind.scales_inputs else QuantizedMoE
    router, shared = swapped.get_submodule(kind.router), blocks.shared_of(swapped)
    return made(router, gate_up, down, shared, activation).train(swapped.training)


def _checked_bias(bias: torch.Tensor | None, weight: PackedExperts) -> torch.Tensor | None:
    """Returns the biases on the weights' device, in the dtype of the activations. Raises TypeError or ValueError if
    they do not fit."""
    kept = checked_bias(bias, weight, len(weight), weight.out_features)
    if kept is not None and has_values(kept) and not bool(kept.isfinite().all()):
        raise ValueError(f"bias: got values that are not finite in {weight.dtype}, want finite ones")
    return None if kept is None else kept.detach()


def _checked_shared(shared: object) -> dict[str, nn.Module]:
    """Returns a dict of submodules by name, which is empty if ``shared`` is None. Raises TypeError or ValueError unless
    ``shared`` is a dict of modules with known names, with at most one shared expert."""
    if shared is not None and not isinstance(shared, dict):
        raise TypeError(f"shared: got {type(shared).__name__}, want None or a dict of modules")
    found = shared or {}
    for name, module in found.items():
        if name not in (*blocks.SHARED_NAMES, blocks.SHARED_GATE):
            raise ValueError(f"shared: got {name!r}, want {', '.join((*blocks.SHARED_NAMES, blocks.SHARED_GATE))}")
        if not isinstance(module, nn.Module):
            raise TypeError(f"shared: got {type(module).__name__} as {name}, want an nn.Module")
    if all(name in found for name in blocks.SHARED_NAMES):
        raise ValueError(f"shared: got both {' and '.join(blocks.SHARED_NAMES)}, want one of them")
    return found
