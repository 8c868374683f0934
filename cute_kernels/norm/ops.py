"""The call of the norm kernels, and the registered operator."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import arguments
from cute_kernels.arguments import check_aligned, row_stride, shape_of
from cute_kernels.norm.arguments import norm_arguments
from cute_kernels.norm.call import DTYPES, VECTOR_BYTES, NormCall, check_call, check_device_values
from cute_kernels.norm.compile import NormSpec
from cute_kernels.norm.config import INPUTS, NormConfig, launch_shape
from cute_kernels.norm.reference import norm_reference
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.launch_arguments import by_name
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.operator import Operator, Plan, launcher, route
from cute_kernels.runtime.plans import key_function

Results = tuple[torch.Tensor, "torch.Tensor | None"]


def norm(call: NormCall) -> Any:
    """Computes a norm on the device where the tensors are. Returns y, or with a residual (y, sum)."""
    y, total = route(cuda=launch, cpu=_on_cpu, operator=_through_operator, **call.tensors)(call)
    return y if call.residual is None else (y, total)


@torch.no_grad()
def _through_operator(call: NormCall) -> Results:
    check_call(call)
    given = call.x, call.weight, call.bias, call.residual, call.kind, call.eps, call.weight_offset
    y, total = _operator(*given, call.order, call.input_scale)
    y = y if call.out is None else call.out.copy_(y)
    if call.residual_out is not None:
        total = call.residual_out.copy_(total)
    return y, total


def _on_cpu(call: NormCall) -> Results:
    check_call(call)
    check_device_values(call)
    y, total = norm_reference(call)
    if call.residual_out is not None and total is not None:
        total = call.residual_out.copy_(total)
    return (y if call.out is None else call.out.copy_(y)), total


# -- launches ----------------------------------------------------------------------------------------------------------


def _checked(call: NormCall) -> NormCall:
    check_call(call)
    if arguments.DEBUG:
        check_device_values(call)
    return call


def _may_meet(call: NormCall) -> bool:
    """Returns whether a given output shares its storage with another tensor of the call, so that they may overlap. Such
    calls are always checked, since a plan's key cannot say whether tensors overlap. An output that is the same tensor
    as x or residual does not count.
    """
    if call.out is None and call.residual_out is None:
        return False
    results = [t for t in (call.out, call.residual_out) if t is not None]
    storages = {t.untyped_storage().data_ptr() for t in results}
    if len(storages) < len(results):
        return True
    given = (call.x, call.residual, call.weight, call.bias, call.order, call.input_scale)
    others = [t for t in given if t is not None and t is not call.out and t is not call.residual_out]
    return any(t.untyped_storage().data_ptr() in storages for t in others)


def config_of(call: NormCall) -> NormConfig:
    """Returns the configuration of the kernel for a checked call."""
    return NormConfig(
        call.kind,
        DTYPES[call.x.dtype],
        *launch_shape(call.x.shape[-1]),
        has_residual=call.residual is not None,
        has_bias=call.bias is not None,
        weight_dtype="fp32" if call.weight.dtype == torch.float32 else "own",
        inputs=INPUTS[call.order is not None, call.input_scale is not None],
    )


def _make_plan(call: NormCall) -> Plan[[NormCall], Results]:
    for name, tensor in call.tensors.items():
        check_aligned(name, tensor, VECTOR_BYTES)
    x, n, index = call.x, call.x.shape[-1], call.x.get_device()
    fixed = {
        "x_stride": row_stride(x) or 0,
        "residual_stride": 0 if call.residual is None else row_stride(call.residual) or 0,
        "inverse_n": 1.0 / n,
        "eps": float(call.eps),
        "weight_offset": float(call.weight_offset),
    }
    config = config_of(call)
    declared, function = norm_arguments(config), load(NormSpec(config), arch_of(index)) if x.numel() else None
    inputs = ("order", "factors")
    tensors = by_name("x", "residual", "total", "weight", "bias", *(inputs if config.inputs else ()))
    send = None if function is None else declared.bound(function, fixed, tensors, ignored=inputs)
    new, flat = blank(tuple(shape_of(x)), x.dtype), (x.numel() // n, n)

    def launch(call: NormCall) -> Results:
        residual, total = call.residual, call.residual_out
        y = GPU.empty(*new) if call.out is None else call.out
        if residual is not None and total is None:
            total = GPU.empty(*new)
        if send is not None:
            send(
                out=y.view(flat), x=call.x, residual=residual, total=total, weight=call.weight, bias=call.bias,
                order=call.order, factors=call.input_scale,
            )  # fmt: skip
        return y, total

    return Plan(index, launch, (config,))


launch = launcher(key_function(NormCall), _checked, _make_plan, always=_may_meet)


# -- the operator ------------------------------------------------------------------------------------------------------


def _call_of(x, weight, bias, residual, kind, eps, weight_offset, order=None, input_scale=None) -> NormCall:
    return NormCall(kind, x, weight, bias, residual, eps, weight_offset, None, None, order, input_scale)


def _both(results: Results) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (y, sum), since the operator must return two tensors. Without a residual the sum is an empty tensor."""
    y, total = results
    return y, y.new_empty(0) if total is None else total


def _operator_on_cpu(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _both(_on_cpu(_call_of(*arguments)))


def _operator_on_cuda(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _both(launch(_call_of(*arguments)))


def _operator_on_meta(x, weight, bias, residual, kind, eps, weight_offset, order=None, input_scale=None):
    y = x.new_empty(x.shape)
    return y, x.new_empty(x.shape if residual is not None else 0)


_operator = Operator(
    "norm(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str kind, float eps, float weight_offset, "
    "Tensor? order=None, Tensor? input_scale=None) -> (Tensor, Tensor)",
    cpu=_operator_on_cpu,
    cuda=_operator_on_cuda,
    meta=_operator_on_meta,
)
