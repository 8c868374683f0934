"""Calls a weight-only linear layer, and registers its operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch

from cute_kernels.formats.weights import WeightFormat, weight_format
from cute_kernels.gemm import fp8, plan
from cute_kernels.gemm.activations import out_features
from cute_kernels.gemm.call import LinearCall, check, key_of
from cute_kernels.gemm.operands.fp8 import fp8_rows
from cute_kernels.gemm.operands.fp8_config import FP8
from cute_kernels.gemm.reference import linear_reference
from cute_kernels.gemm.weight import PackedWeight, WeightTensors
from cute_kernels.runtime.gpu import forgotten
from cute_kernels.runtime.operator import Operator, Plan, is_direct, launcher, new_call
from cute_kernels.runtime.plans import identity, keep

T = TypeVar("T", torch.Tensor, "torch.Tensor | None")
ResultT = TypeVar("ResultT")


def make_plan(call: LinearCall) -> Plan[[LinearCall], torch.Tensor] | None:
    """Returns the plan of a checked call, with products in 16 bits or in FP8; None for a call without rows."""
    return (plan if call.activations is None else fp8).make_plan(call)


launch = launcher(key_of, check, make_plan, plan.without_rows)
"""Computes `linear` for tensors on a GPU."""


def linear(call: LinearCall) -> torch.Tensor:
    """Computes `cute_kernels.quantized_linear` of a tensor."""
    if is_direct(call.x, call.weight.codes):
        return launch(call)
    check(call)
    work = operator if call.activations is None else partial(fp8_operator, scale=call.activation_scale)
    return plan.of_rows(call, work)


# -- the operators -----------------------------------------------------------------------------------------------------


def _of_fields(
    path, activations, x, codes, scales, zeros, bias, residual, format, n, k, activation, out_dtype,
    batch_invariant=False, scale=None,
) -> torch.Tensor:  # fmt: skip
    """Makes a call from an operator's arguments, and computes it by ``path``: :func:`launch` or `_reference`."""
    weight = weight_of(codes, scales, zeros, weight_format(format), (n, k))
    options = activation, out_dtype, batch_invariant, None, None, 1e-6, 0.0, activations, scale
    return path(new_call(LinearCall, (x, weight, bias, residual, *options)))


def _reference(call: LinearCall) -> torch.Tensor:
    assert isinstance(call.weight, WeightTensors)
    weight = PackedWeight(*call.weight[:5], check_values=False)
    x = call.x if call.activations is None else fp8_rows(call.x, weight.format, call.activation_scale)
    options = {name: getattr(call, name) for name in ("residual", "activation", "out_dtype", "batch_invariant")}
    return linear_reference(x, weight, call.bias, **options)


def _on_meta(x, codes, scales, zeros, bias, residual, format, n, k, activation, out_dtype, *_, **__):
    return x.new_empty((x.shape[0], out_features(n, activation)), dtype=out_dtype)


def _operator_of(name: str, activations: str | None, last: str) -> Operator:
    """Returns the operator of products with these ``activations``. last: schema of the operator's last arguments."""
    return Operator(
        f"{name}(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, Tensor? residual, str format, "
        f"int n, int k, str? activation, ScalarType out_dtype, {last}) -> Tensor",
        cpu=partial(_of_fields, _reference, activations),
        cuda=partial(_of_fields, launch, activations),
        meta=_on_meta,
    )


operator = _operator_of("weight_only_linear", None, "bool batch_invariant=False")
fp8_operator = _operator_of("fp8_linear", FP8, "bool batch_invariant, Tensor? scale=None")

_checked: dict[tuple[Hashable, ...], None] = {}
"""Keys of the tensors that `weight_of` has checked. An engine's layers pass the same tensors in each step."""
forgotten(_checked.clear)


def weight_of(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, form: WeightFormat, shape: tuple[int, int]
) -> WeightTensors:
    """Makes a weight of plain tensors, as operators take them.

    Raises:
        TypeError, ValueError: the tensors do not make a weight; the message names the field.
    """
    key = form.key, shape, identity(codes), identity(scales), None if zeros is None else identity(zeros)
    if key not in _checked:
        PackedWeight(codes, scales, zeros, form, shape, check_values=False)
        keep(_checked, key, None)
    return new_call(WeightTensors, (codes, scales, zeros, form, shape, None, None))


def plain(tensor: T) -> T:
    """Returns the tensor, detached if it is a parameter or requires a gradient. Calls with plain tensors launch
    directly, not through the operator."""
    if tensor is None or (type(tensor) is torch.Tensor and not tensor.requires_grad):
        return tensor
    return tensor.detach()


SCALARS = frozenset({int, float, str})  # of operators' arguments that are no tensors


def of_plain(work: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Returns a function that makes tensors `plain` and calls ``work`` without gradients. The returned function takes
    positional arguments."""

    def run(*given: Any) -> ResultT:
        with torch.no_grad():
            return work(*[one if type(one) in SCALARS else plain(one) for one in given])

    return run
