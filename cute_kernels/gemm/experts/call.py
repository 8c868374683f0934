"""Calls of layers of experts as objects: their checks, and the keys that decide their plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from cute_kernels import arguments
from cute_kernels.arguments import Wanted, check_apart, check_flag, check_wanted
from cute_kernels.gemm.activations import ActivationFunction, experts_activation, out_features
from cute_kernels.gemm.call import OUT, check_activation, check_out_dtype, out_wanted, result_dtype, rows_wanted
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS
from cute_kernels.gemm.operands.fp8_config import check_activations
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.runtime.plans import COPIED, key_function

ID_DTYPES = (torch.int32, torch.int64)
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_TOKENS = 65535  # of a layer: the second dimension of the grid that adds up


class GroupedCall(NamedTuple):
    """The arguments of `cute_kernels.gemm.experts.grouped_linear`."""

    x: torch.Tensor
    weight: PackedExperts
    expert_offsets: torch.Tensor
    rows: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: str | ActivationFunction | None = None
    out_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    out: torch.Tensor | None = None
    activations: str | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        return result_dtype(self.out_dtype, self.x, self.out)

    @property
    def places(self) -> int:
        return len(self.x if self.rows is None else self.rows)


grouped_key = key_function(GroupedCall, x=COPIED, out=OUT)
"""Returns the key of a call's plan, without checking the call."""


def check_grouped(call: GroupedCall) -> GroupedCall:
    """Raises TypeError or ValueError, which name the argument, unless the grouped product can be computed."""
    check_experts("weight", call.weight)
    check_activation(call.activation, call.weight.shape[0])
    check_out_dtype(call.out_dtype)
    check_activations(call.activations, None, call.weight.format, call.weight.shape[1])
    wanted = _grouped_wanted(call)
    check_wanted(wanted)
    check_flag("batch_invariant", call.batch_invariant)
    if call.out is not None:
        read = {"x": call.x, "expert_offsets": call.expert_offsets, "rows": call.rows, "bias": call.bias}
        check_apart("out", call.out, read)
    return call


def check_grouped_values(call: GroupedCall) -> GroupedCall:
    """Checks a call as `check_grouped` does and, if `cute_kernels.arguments.DEBUG` is set, also the values of offsets
    and rows."""
    checked = check_grouped(call)
    if arguments.DEBUG:
        check_routing(call.expert_offsets, call.rows, call.x.shape[0])
    return checked


def _grouped_wanted(call: GroupedCall) -> Iterator[Wanted]:
    x, weight, int32 = call.x, call.weight, (torch.int32,)
    yield rows_wanted(x, weight, "rows")
    yield Wanted("expert_offsets", call.expert_offsets, int32, (len(weight) + 1,), x.device, contiguous=True)
    if call.rows is not None:
        yield Wanted("rows", call.rows, int32, ("places",), x.device, contiguous=True)
    if call.bias is not None:
        yield Wanted("bias", call.bias, (x.dtype,), (len(weight), weight.shape[0]), x.device, contiguous=True)
    if call.out is not None:
        sizes = call.places, out_features(weight.shape[0], call.activation)
        yield out_wanted(call.out, call.out_dtype, sizes, x.device)


class MoeCall(NamedTuple):
    """The arguments of `cute_kernels.fused_moe`."""

    x: torch.Tensor
    gate_up: PackedExperts
    down: PackedExperts
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    activation: str | ActivationFunction = "swiglu"
    out_dtype: torch.dtype | None = None
    batch_invariant: bool = False
    out: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activations: str | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        return result_dtype(self.out_dtype, self.x, self.out)


moe_key = key_function(MoeCall, x=COPIED, topk_weights=COPIED, topk_ids=COPIED)
"""Returns the key of a call's plan, as `grouped_key` does."""

KEPT = "topk_weights", "topk_ids", "gate_up_bias", "down_bias"  # what a result of experts may not lie over


def check_moe(call: MoeCall) -> MoeCall:
    """Raises TypeError or ValueError, which name the argument, unless the layer can be computed."""
    gate_up, down = call.gate_up, call.down
    check_experts("gate_up", gate_up)
    check_experts("down", down)
    check_pair(gate_up, down, experts_activation(call.activation))
    check_out_dtype(call.out_dtype)
    for weight in (gate_up, down):
        check_activations(call.activations, None, weight.format, weight.shape[1])
    wanted = _moe_wanted(call)
    check_wanted(wanted)
    check_flag("batch_invariant", call.batch_invariant)
    if call.out is not None:  # x has been read when the last launch writes
        check_apart("out", call.out, {name: getattr(call, name) for name in KEPT})
    return call


def _moe_wanted(call: MoeCall) -> Iterator[Wanted]:
    x, gate_up, down = call.x, call.gate_up, call.down
    yield rows_wanted(x, gate_up, "rows")
    tokens = x.shape[0]
    if not is_compiling() and tokens > MAX_TOKENS:  # or an exported program would be for no more, wherever it runs
        raise ValueError(f"x: got {tokens} rows, want at most {MAX_TOKENS}")
    yield Wanted("topk_ids", call.topk_ids, ID_DTYPES, (tokens, "topk"), x.device)
    yield Wanted("topk_weights", call.topk_weights, WEIGHT_DTYPES, tuple(call.topk_ids.shape), x.device)
    for name, weight in (("gate_up_bias", gate_up), ("down_bias", down)):
        if (bias := getattr(call, name)) is not None:
            yield Wanted(name, bias, (x.dtype,), (len(weight), weight.out_features), x.device, contiguous=True)
    if call.out is not None:
        yield out_wanted(call.out, call.out_dtype, (tokens, down.out_features), x.device)


def check_experts(name: str, weight: object) -> None:
    if not isinstance(weight, PackedExperts):
        raise TypeError(f"{name}: got {type(weight).__name__}, want PackedExperts")
    if len(weight) > MAX_EXPERTS:
        raise ValueError(f"{name}: got {len(weight)} experts, want at most {MAX_EXPERTS}")


def check_routing(expert_offsets: torch.Tensor, rows: torch.Tensor | None, x_rows: int) -> None:
    """Raises ValueError unless ``expert_offsets`` holds existing places and ``rows`` existing rows of x. Waits for a
    GPU."""
    places = x_rows if rows is None else rows.shape[0]
    ends = expert_offsets.tolist()
    if ends[0] != 0 or ends[-1] > places or any(a > b for a, b in itertools.pairwise(ends)):
        raise ValueError(f"expert_offsets: got {ends}, want them to rise from 0 to at most {places}")
    if rows is not None and rows.numel() and not (0 <= int(rows.min()) and int(rows.max()) < x_rows):
        wanted = f"0 to {x_rows - 1}" if x_rows else "none, as x has no rows"
        raise ValueError(f"rows: got {int(rows.min())} to {int(rows.max())}, want {wanted}")


def check_pair(gate_up: PackedExperts, down: PackedExperts, activation: ActivationFunction) -> None:
    """Raises TypeError or ValueError unless ``gate_up`` and ``down`` are the products of one layer."""
    if len(down) != len(gate_up):
        raise ValueError(f"down: got {len(down)} experts, want {len(gate_up)}, as many as gate_up has")
    check_activation(activation, gate_up.out_features)
    if down.in_features != (wanted := out_features(gate_up.out_features, activation)):
        rows = f"{'half' if activation.gated else 'all'} of gate_up's rows, as activation is {activation.name!r}"
        raise ValueError(f"down: got shape {list(down.shape)}, want [.., {wanted}], {rows}")
    if down.dtype != gate_up.dtype:
        raise TypeError(f"down: got dtype {down.dtype}, want {gate_up.dtype}, that of gate_up")
    if down.device != gate_up.device:
        raise ValueError(f"down: got a weight on {down.device}, want it on {gate_up.device}, where gate_up is")
