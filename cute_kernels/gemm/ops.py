"""Calls a weight-only linear layer, and registers its operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from cute_kernels.formats.weights import WeightFormat, weight_format
from cute_kernels.gemm.activations import name_of, out_features
from cute_kernels.gemm.call import LinearCall, check, key_of
from cute_kernels.gemm.normed import RowNorm
from cute_kernels.gemm.plan import make_plan, without_rows
from cute_kernels.gemm.reference import linear_reference, prepare_input
from cute_kernels.gemm.weight import PackedWeight, WeightTensors
from cute_kernels.runtime.gpu import forgotten
from cute_kernels.runtime.operator import Operator, is_direct, launcher
from cute_kernels.runtime.plans import identity, keep

T = TypeVar("T", torch.Tensor, "torch.Tensor | None")
ResultT = TypeVar("ResultT")


@torch.no_grad()
def of_rows(call: LinearCall, work: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Computes a checked call by ``work``, a function of prepared rows [m, k] and of the weight's fields."""
    x, weight, residual = call.x, call.weight, call.residual
    n, k = weight.shape
    rows = x if call.norm is None else RowNorm(call.norm, call.eps, call.offset).of(x)
    if not (weight.perm is weight.input_scale is None):
        rows = prepare_input(rows, weight.perm, weight.input_scale)
    rows = _rows(rows, k)
    rows = rows.detach() if rows.requires_grad else rows
    columns = out_features(n, call.activation)
    result = work(
        rows, weight.codes, weight.scales, weight.zeros, call.bias,
        None if residual is None else _rows(residual, columns), weight.format.key, n, k, name_of(call.activation),
        call.result_dtype, call.batch_invariant,
    )  # fmt: skip
    if x.dim() != 2:
        result = result.view(*x.shape[:-1], columns)
    return result if call.out is None else call.out.copy_(result)


def _rows(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Returns a tensor [..., columns] as a contiguous [rows, columns]; the tensor itself if it is that already."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, columns)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


launch = launcher(key_of, check, make_plan, without_rows)
"""`linear` of tensors on a GPU."""


def linear(call: LinearCall) -> torch.Tensor:
    """Computes `cute_kernels.quantized_linear` of a tensor."""
    return launch(call) if is_direct(call.x, call.weight.codes) else of_rows(check(call), operator)


# -- the operator ------------------------------------------------------------------------------------------------------


def _fields_on_cpu(
    x, codes, scales, zeros, bias, residual, format, n, k, activation, out_dtype, batch_invariant=False
) -> torch.Tensor:
    weight = PackedWeight(codes, scales, zeros, weight_format(format), (n, k), check_values=False)
    options = {"activation": activation, "out_dtype": out_dtype, "batch_invariant": batch_invariant}
    return linear_reference(x, weight, bias, residual=residual, **options)


def _fields_on_cuda(
    x, codes, scales, zeros, bias, residual, format, n, k, activation, out_dtype, batch_invariant=False
) -> torch.Tensor:
    weight = weight_of(codes, scales, zeros, weight_format(format), (n, k))
    return launch(LinearCall(x, weight, bias, residual, activation, out_dtype, batch_invariant))


def fields_on_meta(x, codes, scales, zeros, bias, residual, format, n, k, activation, out_dtype, *_, **__):
    """Returns an empty result of a product with these fields, in 16 bits or in FP8."""
    return x.new_empty((x.shape[0], out_features(n, activation)), dtype=out_dtype)


operator = Operator(
    "weight_only_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, Tensor? residual, "
    "str format, int n, int k, str? activation, ScalarType out_dtype, bool batch_invariant=False) -> Tensor",
    cpu=_fields_on_cpu,
    cuda=_fields_on_cuda,
    meta=fields_on_meta,
)


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
    return WeightTensors(codes, scales, zeros, form, shape)


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
