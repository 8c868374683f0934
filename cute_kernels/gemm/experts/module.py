"""Layers of experts as nn.Modules, made of the blocks of transformers models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.compiler import is_compiling

from cute_kernels.arguments import check_tensors
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.activations import ActivationFunction, Swiglu, experts_activation
from cute_kernels.gemm.experts import ops
from cute_kernels.gemm.experts.blocks import (
    SHARED_GATE,
    SHARED_NAMES,
    experts_refusal,
    is_moe_block,
    refusal,
    shared_of,
    with_shared,
)
from cute_kernels.gemm.experts.call import MoeCall, check_experts, check_pair
from cute_kernels.gemm.experts.stored import WANTED, is_experts, known_experts
from cute_kernels.gemm.gradient import differentiable
from cute_kernels.gemm.module import OfWeight, describe, products_in
from cute_kernels.gemm.operands.fp8_config import check_activations
from cute_kernels.gemm.packed_experts import PackedExperts, quantize_experts
from cute_kernels.gemm.weight import has_values
from cute_kernels.names import Activations


class QuantizedExperts(OfWeight):
    """The tensors of `PackedExperts` as buffers, whose state dict is theirs.

    Loading changes the number of bits, group size and zero points to those of what is loaded; the number of experts, N
    and K must be the layer's. Tensors are copied into existing ones where they fit, so that captured graphs see them.

    Args:
        weight: [E, N, K].
        bias: [E, N], or None; kept in the dtype of the activations.
    """

    bias: torch.Tensor | None
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
        """The weights; they share the layer's tensors.

        torch.compile sees new objects, which cost a compiled call nothing. For objects that are kept it would check
        each time whether they are the same, and what sizes their tensors have.
        """
        weight = None if is_compiling() else self._weight
        if weight is None or weight.codes is not self._buffers["codes"]:
            tensors: dict[str, Any] = {name: self._buffers[name] for name in PackedExperts.tensor_names}
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

    def _needed(self) -> list[str]:
        return [] if self.bias is None else ["bias"]

    def _take(self, form: WeightFormat, tensors: dict[str, torch.Tensor | None], copy: bool) -> None:
        super()._take(form, tensors, copy)
        self._weight = None


class OfExperts(nn.Module):
    """A layer of two products of experts, and the format that these round activations to."""

    gate_up: QuantizedExperts
    down: QuantizedExperts
    batch_invariant: bool = False
    activation: ActivationFunction = Swiglu()  # also of layers pickled before they had one
    _activations: Activations | None = None

    @property
    def activations(self) -> Activations | None:
        """The ``activations`` of `cute_kernels.fused_moe`: None, or "fp8", which may be set. A state dict does not have
        it."""
        return self._activations

    @activations.setter
    def activations(self, value: Activations | None) -> None:
        for part in (self.gate_up, self.down):
            check_activations(value, None, part.weight_format)
        self._activations = value

    @property
    def products(self) -> str:
        """The number format of its products, as reports say it."""
        return products_in(self._activations)


class QuantizedMoE(OfExperts):
    """A mixture of experts with gated SiLU and quantised weights. It is for inference: its backward pass is an error.

    The result is that of `cute_kernels.fused_moe` with the router's choice, plus that of the shared expert, if there is
    one. The latter is multiplied by sigmoid(shared_expert_gate(x)) if there is such a gate.

    Args:
        gate: the router: of x [tokens, hidden] it makes (logits, weights [tokens, topk], ids [tokens, topk]).
        gate_up, down: as `cute_kernels.fused_moe` takes them.
        shared: by the name of the submodule, "shared_experts" or "shared_expert", and "shared_expert_gate".
        activation: as of `cute_kernels.fused_moe`.

    Attributes:
        batch_invariant, activations: as of `cute_kernels.fused_moe`; False and None, and may be set. A state dict has
            neither.

    Raises:
        TypeError, ValueError: an argument is not as above, or the weights do not fit one another; the message names it.
    """

    gate: nn.Module

    def __init__(
        self,
        gate: nn.Module,
        gate_up: PackedExperts,
        down: PackedExperts,
        shared: dict[str, nn.Module] | None = None,
        activation: str | ActivationFunction = "swiglu",
    ) -> None:
        super().__init__()
        if not isinstance(gate, nn.Module):
            raise TypeError(f"gate: got {type(gate).__name__}, want an nn.Module")
        check_experts("gate_up", gate_up)
        check_experts("down", down)
        self.activation = experts_activation(activation)
        check_pair(gate_up, down, self.activation)
        self.gate = gate
        self.gate_up, self.down = QuantizedExperts(gate_up), QuantizedExperts(down)
        self._shared: str | None = None
        for name, module in _checked_shared(shared).items():
            self.add_module(name, module)
            if name in SHARED_NAMES:
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
    ) -> QuantizedMoE:
        """The layer with the weights of a block's experts quantised; other arguments as for `quantize_weight`.

        The block is one of transformers 5 such as MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock or DeepseekV3MoE: a
        router ``gate``, ``experts`` with ``gate_up_proj`` [E, 2 I, hidden], gates first, and ``down_proj``
        [E, hidden, I], and possibly shared experts. Its code, and tokens of several sizes through it, tell whether it
        means what this layer computes (:mod:`.blocks`). Router and shared experts become this layer's; they
        stay as and where they are.

        Raises:
            TypeError, ValueError: the block is not such a one, a weight has values that are not finite, or an argument
                is wrong; the message says which.
        """
        if not is_moe_block(block):
            raise TypeError(
                f"block: got {type(block).__name__}, want one with a router 'gate' and 'experts' that hold {WANTED}"
            )
        reason = refusal(block)
        if reason is not None:
            raise ValueError(f"block: got a {type(block).__name__} that is not served: {reason}")
        return cls._from_known_block(block, bits, group_size, zero_point, dtype, device=device, format=format)

    @classmethod
    def _from_known_block(
        cls,
        block: Any,
        bits: int,
        group_size: int | None,
        zero_point: bool,
        dtype: torch.dtype | None,
        *,
        device: torch.device | str | None,
        format: WeightFormat | str | None = None,
    ) -> QuantizedMoE:
        """Quantises as `from_block` does a block that is known to be supported."""
        gate_up, down, _, activation = _quantized(block.experts, bits, group_size, zero_point, dtype, device, format)
        return cls(block.gate, gate_up, down, shared_of(block), activation).train(block.training)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] of hidden_states [..., hidden], which are of the scales' dtype."""
        modules: Any = self._modules  # nn.Module takes a detour to them as attributes
        flat = hidden_states.dim() == 2
        x = hidden_states if flat else hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = modules["gate"](x)
        y = _routed(modules, x, ids, weights, self.batch_invariant, self.activation, self._activations)
        if self._shared is not None:
            y = with_shared(self, self._shared, x, y)
        return y if flat else y.view_as(hidden_states)


class QuantizedRoutedExperts(OfExperts):
    """The experts of a block that keeps its own forward: its router, its scaling, its shared experts.

    It is for experts in blocks that `QuantizedMoE.from_block` does not take, such as MiniMax-M2's, and for experts with
    biases, as gpt-oss has.

    Args:
        gate_up, down: as `cute_kernels.fused_moe` takes them.
        biases: None, or those of both, [E, 2 I] in turn as the rows of gate_up, and [E, hidden].
        activation: as of `cute_kernels.fused_moe`.

    Attributes:
        batch_invariant, activations: as of `QuantizedMoE`.
    """

    def __init__(
        self,
        gate_up: PackedExperts,
        down: PackedExperts,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        activation: str | ActivationFunction = "swiglu",
    ) -> None:
        super().__init__()
        check_experts("gate_up", gate_up)
        check_experts("down", down)
        self.activation = experts_activation(activation)
        check_pair(gate_up, down, self.activation)
        first, second = biases or (None, None)
        self.gate_up, self.down = QuantizedExperts(gate_up, first), QuantizedExperts(down, second)

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
        """The experts with their weights quantised; other arguments as for `quantize_weight`.

        ``experts`` is a module with ``gate_up_proj`` [E, 2 I, hidden], gates first, and ``down_proj`` [E, hidden, I],
        which is called with hidden states, ids and weights; or with biases, as gpt-oss has them, weights transposed and
        gates and ups in turn; or without gates, as Nemotron-H has them, ``up_proj`` [E, I, hidden] and ``down_proj``.

        Raises:
            TypeError, ValueError: as `QuantizedMoE.from_block`.
        """
        if not is_experts(experts):
            raise TypeError(f"experts: got {type(experts).__name__}, want {WANTED}")
        reason = experts_refusal(experts)
        if reason is not None:
            raise ValueError(f"experts: got {type(experts).__name__} that are not served: {reason}")
        parts = _quantized(experts, bits, group_size, zero_point, dtype, device, format)
        return cls(*parts).train(experts.training)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, hidden] of hidden_states [tokens, hidden], and of ids and weights [tokens, topk]."""
        options = self.batch_invariant, self.activation, self._activations
        return _routed(self._modules, hidden_states, top_k_index, top_k_weights, *options)


def _routed(
    modules: Any,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    invariant: bool,
    activation: ActivationFunction,
    activations: Activations | None,
) -> torch.Tensor:
    """[tokens, hidden] of a layer's experts"""
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        return differentiable(
            lambda x, weights: _routed(modules, x, ids, weights, invariant, activation, activations),
            _refuse_gradients,
            x,
            weights,
        )
    gate_up, down = modules["gate_up"], modules["down"]
    last = None, gate_up.bias, down.bias, activations
    return ops.moe(MoeCall(x, gate_up.weight, down.weight, weights, ids, activation, None, invariant, *last))


def _refuse_gradients(_: torch.Tensor) -> NoReturn:
    raise NotImplementedError("hidden_states: got some that want a gradient, which quantised experts have not")


def _quantized(
    experts: Any,
    bits: int,
    group_size: int | None,
    zero_point: bool,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    form: WeightFormat | str | None,
) -> tuple[PackedExperts, PackedExperts, tuple[torch.Tensor, torch.Tensor] | None, ActivationFunction]:
    """(gate_up with alternating gates and ups, down, both biases or None, the activation) of experts that are known."""
    known = known_experts(experts)
    assert known is not None
    (kind, activation), weights = known, (bits, group_size, zero_point, dtype)
    options: dict[str, Any] = {"device": device, "format": form}
    first, second, biases = kind.weights(experts)
    gate_up = quantize_experts(first, *weights, halves_in_turn=kind.gated and not kind.in_turn, **options)
    return gate_up, quantize_experts(second, *weights, **options), biases, activation


def _checked_bias(bias: torch.Tensor | None, weight: PackedExperts) -> torch.Tensor | None:
    """The biases on the weights' device, in the dtype of the activations; TypeError or ValueError if they do not
    fit."""
    if bias is None:
        return None
    check_tensors(bias=bias)
    wanted = [len(weight), weight.out_features]
    if list(bias.shape) != wanted or not bias.is_floating_point():
        raise ValueError(f"bias: got {bias.dtype} {list(bias.shape)}, want a floating {wanted}")
    kept = bias.detach().to(weight.device, weight.dtype).contiguous()
    if has_values(kept) and not bool(kept.isfinite().all()):
        raise ValueError(f"bias: got values that are not finite in {weight.dtype}, want finite ones")
    return kept


def _checked_shared(shared: object) -> dict[str, nn.Module]:
    """Raises TypeError or ValueError unless ``shared`` is None or modules by names, at most one of them an expert's."""
    if shared is not None and not isinstance(shared, dict):
        raise TypeError(f"shared: got {type(shared).__name__}, want None or a dict of modules")
    found = shared or {}
    for name, module in found.items():
        if name not in (*SHARED_NAMES, SHARED_GATE):
            raise ValueError(f"shared: got {name!r}, want {', '.join((*SHARED_NAMES, SHARED_GATE))}")
        if not isinstance(module, nn.Module):
            raise TypeError(f"shared: got {type(module).__name__} as {name}, want an nn.Module")
    if all(name in found for name in SHARED_NAMES):
        raise ValueError(f"shared: got both {' and '.join(SHARED_NAMES)}, want one of them")
    return found
