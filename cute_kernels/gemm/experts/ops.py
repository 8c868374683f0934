"""The calls of products and layers of experts, and their registered operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cute_kernels.formats.weights import WeightFormat, weight_format
from cute_kernels.gemm.activations import name_of, out_features
from cute_kernels.gemm.experts import call as calls
from cute_kernels.gemm.experts.call import GroupedCall, MoeCall
from cute_kernels.gemm.experts.plan import grouped_plan, moe_plan, without_assignments, without_places
from cute_kernels.gemm.experts.reference import fused_moe_reference, grouped_linear_reference
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.weight import check_presence
from cute_kernels.runtime.operator import Operator, is_direct, launcher, written

# -- grouped products --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _grouped_of(call: GroupedCall, work: Callable[..., torch.Tensor]) -> torch.Tensor:
    weight = call.weight
    result = work(
        call.x.detach().contiguous(), weight.codes, weight.scales, weight.zeros, call.expert_offsets, call.rows,
        call.bias, weight.format.key, *weight.shape, name_of(call.activation),
        call.result_dtype, call.batch_invariant, call.activations,
    )  # fmt: skip
    return result if call.out is None else written(call.out, result, call.expert_offsets)


launch_grouped = launcher(calls.grouped_key, calls.check_grouped_values, grouped_plan, without_places)
"""Computes `grouped` for tensors on a GPU."""


def grouped(call: GroupedCall) -> torch.Tensor:
    """Computes `cute_kernels.gemm.experts.grouped_linear`."""
    x, weight = call.x, call.weight
    if isinstance(weight, PackedExperts) and is_direct(x, weight.codes):
        return launch_grouped(call)
    return _grouped_of(calls.check_grouped(call), grouped_operator)


_OPTIONS = "activation", "out_dtype", "batch_invariant", "activations"  # the operator's last arguments


def _grouped_fields_on_cpu(x, codes, scales, zeros, expert_offsets, rows, bias, format, n, k, *options) -> torch.Tensor:
    calls.check_routing(expert_offsets, rows, x.shape[0])
    weight = PackedExperts(codes, scales, zeros, weight_format(format), (n, k), check_values=False)
    named = dict(zip(_OPTIONS, options, strict=False))
    return grouped_linear_reference(x, weight, expert_offsets, rows=rows, bias=bias, **named)


def _grouped_fields_on_cuda(
    x, codes, scales, zeros, expert_offsets, rows, bias, format, n, k, *options
) -> torch.Tensor:
    weight = experts_of(codes, scales, zeros, weight_format(format), (n, k))
    named = dict(zip(_OPTIONS, options, strict=False))
    return launch_grouped(GroupedCall(x, weight, expert_offsets, rows, bias, **named))


def _grouped_fields_on_meta(
    x, codes, scales, zeros, expert_offsets, rows, bias, format, n, k, activation, out_dtype, *_
) -> torch.Tensor:
    places = x.shape[0] if rows is None else rows.shape[0]
    return x.new_empty((places, out_features(n, activation)), dtype=out_dtype)


grouped_operator = Operator(
    "grouped_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor expert_offsets, Tensor? rows, "
    "Tensor? bias, str format, int n, int k, str? activation, ScalarType out_dtype, bool batch_invariant=False, "
    "str? activations=None) -> Tensor",
    cpu=_grouped_fields_on_cpu,
    cuda=_grouped_fields_on_cuda,
    meta=_grouped_fields_on_meta,
)


def experts_of(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, form: WeightFormat, shape: tuple[int, int]
) -> PackedExperts:
    """Makes `PackedExperts` from an operator's tensors. The operator's call has been checked, so only the presence of
    zeros is checked here."""
    check_presence(zeros, form)
    made = object.__new__(PackedExperts)
    made.__dict__.update(codes=codes, scales=scales, zeros=zeros, format=form, shape=shape)
    return made


# -- layers ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _moe_of(call: MoeCall, work: Callable[..., torch.Tensor]) -> torch.Tensor:
    tensors: list[Any] = [call.x.detach().contiguous()]
    for weight in (call.gate_up, call.down):
        tensors += [weight.codes, weight.scales, weight.zeros]
    tensors += [call.topk_ids.contiguous(), call.topk_weights.detach().float().contiguous()]
    numbers: list[Any] = [value for w in (call.gate_up, call.down) for value in (w.format.key, *w.shape)]
    more = name_of(call.activation), call.gate_up_bias, call.down_bias, call.activations
    result = work(*tensors, *numbers, call.result_dtype, call.batch_invariant, *more)
    return result if call.out is None else call.out.copy_(result)


launch_moe = launcher(calls.moe_key, calls.check_moe, moe_plan, without_assignments)
"""Computes `moe` for tensors on a GPU."""


def moe(call: MoeCall) -> torch.Tensor:
    """Computes `cute_kernels.fused_moe`."""
    x, gate_up = call.x, call.gate_up
    if isinstance(gate_up, PackedExperts) and is_direct(x, gate_up.codes):
        return launch_moe(call)
    return _moe_of(calls.check_moe(call), moe_operator)


def _moe_call_of(
    make, x, codes, scales, zeros, down_codes, down_scales, down_zeros, topk_ids, topk_weights,
    format, n, k, down_format, down_n, down_k, out_dtype, batch_invariant=False,
    activation="swiglu", gate_up_bias=None, down_bias=None, activations=None,
) -> MoeCall:  # fmt: skip
    """Returns the operator's arguments as a call. make: a function that returns `PackedExperts` for (codes, scales,
    zeros, format, (n, k))."""
    gate_up = make(codes, scales, zeros, weight_format(format), (n, k))
    down = make(down_codes, down_scales, down_zeros, weight_format(down_format), (down_n, down_k))
    options = activation, out_dtype, batch_invariant, None, gate_up_bias, down_bias, activations
    return MoeCall(x, gate_up, down, topk_weights, topk_ids, *options)


def _moe_fields_on_cpu(*fields: Any) -> torch.Tensor:
    named = _moe_call_of(partial(PackedExperts, check_values=False), *fields)._asdict()
    del named["out"]
    return fused_moe_reference(**named)


def _moe_fields_on_cuda(*fields: Any) -> torch.Tensor:
    return launch_moe(_moe_call_of(experts_of, *fields))


def _moe_fields_on_meta(*fields: Any) -> torch.Tensor:
    call = _moe_call_of(experts_of, *fields)
    return call.x.new_empty((call.x.shape[0], call.down.shape[0]), dtype=call.result_dtype)


moe_operator = Operator(
    "fused_moe(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor down_codes, Tensor down_scales, "
    "Tensor? down_zeros, Tensor topk_ids, Tensor topk_weights, str format, int n, int k, str down_format, int down_n, "
    "int down_k, ScalarType out_dtype, bool batch_invariant=False, str activation='swiglu', Tensor? gate_up_bias=None, "
    "Tensor? down_bias=None, str? activations=None) -> Tensor",
    cpu=_moe_fields_on_cpu,
    cuda=_moe_fields_on_cuda,
    meta=_moe_fields_on_meta,
)
