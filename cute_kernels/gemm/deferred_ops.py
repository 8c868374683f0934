"""Products around a deferred norm as registered operators, for graphs in which the number of rows is not known.

    rows, x, squares = weight_only_linear_norm(...)           the product before the norm
    y = weight_only_linear_of_normed(x, squares, rows, ...)   the product behind it

For some numbers of rows kernels leave the norm to the second product. x is then rows times the norm's weight, and
squares are sums of theirs. For others x is the normed rows, and squares are of no meaning. Both operators are told of
both products, so that they find the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from cute_kernels.formats.weights import WeightFormat, weight_format
from cute_kernels.gemm import ops
from cute_kernels.gemm.deferred import (
    DeferredParts,
    GivingCall,
    Side,
    TakingCall,
    give,
    left_to_next,
    no_launch_between,
    take,
)
from cute_kernels.gemm.reference import out_features
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma.deferred_config import SQUARES_N
from cute_kernels.norm import rms_norm
from cute_kernels.runtime.gpu import GPU, forgotten
from cute_kernels.runtime.operator import Operator
from cute_kernels.runtime.plans import identity, keep

T = TypeVar("T", torch.Tensor, "torch.Tensor | None")
ResultT = TypeVar("ResultT")


def _left(rows: torch.Tensor, norm: torch.Tensor, gives: Side, takes: Side) -> bool:
    """Whether the norm of these rows is left to the second product."""
    index, on_gpu = rows.get_device(), rows.is_cuda or GPU.takes_cpu
    return on_gpu and norm.dtype == rows.dtype and no_launch_between(len(rows), gives, takes, rows.dtype, index)


def plain(tensor: T) -> T:
    """A tensor that is no parameter, which goes straight to launches."""
    if tensor is None or (type(tensor) is torch.Tensor and not tensor.requires_grad):
        return tensor
    return tensor.detach()


SCALARS = frozenset({int, float, str})  # of operators' arguments that are no tensors


def of_plain(work: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """``work`` of any tensors and other arguments, by position."""

    def run(*given: Any) -> ResultT:
        with torch.no_grad():
            return work(*[one if type(one) in SCALARS else plain(one) for one in given])

    return run


_checked: dict[tuple[Hashable, ...], None] = {}
"""What decides whether tensors are those of a weight, of those that are: an engine's layers ask for it in each step."""
forgotten(_checked.clear)


def weight_of(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, form: WeightFormat, shape: tuple[int, int]
) -> PackedWeight:
    """A weight of plain tensors.

    Raises:
        TypeError, ValueError: they are not those of one; the message names the field.
    """
    key = form.key, shape, identity(codes), identity(scales), None if zeros is None else identity(zeros)
    if key not in _checked:
        PackedWeight(codes, scales, zeros, form, shape, check_values=False)
        keep(_checked, key, None)
    made = object.__new__(PackedWeight)
    fields = {"codes": codes, "scales": scales, "zeros": zeros, "format": form, "shape": shape}
    made.__dict__.update(fields, perm=None, input_scale=None)
    return made


def _parts_of(rows: torch.Tensor, norm: torch.Tensor) -> DeferredParts:
    """What a kernel leaves of a norm."""
    values = rows.float()
    scaled = (values * norm.float()).to(rows.dtype)
    return DeferredParts(scaled, values.unflatten(1, (-1, SQUARES_N)).square().sum(-1))


# -- the product before the norm -----------------------------------------------------------------------------------


def give_plain(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    format: str,
    n: int,
    k: int,
    norm: torch.Tensor,
    eps: float,
    taker_format: str,
    taker_n: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator, of `plain` tensors and without gradients."""
    form = weight_format(format)
    gives, takes = Side(n, k, form), Side(taker_n, n, weight_format(taker_format))
    if not _left(residual, norm, gives, takes):
        fields = codes, scales, zeros, None, None
        rows = ops.apply(x, *fields, format=form, shape=(n, k), bias=bias, residual=residual)
        squares = rows.new_empty((len(rows), n // SQUARES_N), dtype=torch.float32)
        return rows, rms_norm(rows, norm, eps=eps), squares
    found = give(GivingCall(x, weight_of(codes, scales, zeros, form, (n, k)), bias, residual, norm, eps, 0.0))
    parts = found.deferred or _parts_of(found.rows, norm)
    return found.rows, parts.scaled, parts.squares


def _give_meta(x, codes, scales, zeros, bias, residual, format, n, k, norm, eps, taker_format, taker_n):
    rows = x.new_empty((x.shape[0], n))
    return rows, torch.empty_like(rows), rows.new_empty((x.shape[0], n // SQUARES_N), dtype=torch.float32)


# -- the product behind it -----------------------------------------------------------------------------------------


def take_plain(
    x: torch.Tensor,
    squares: torch.Tensor,
    rows: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    giver_format: str,
    giver_k: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    format: str,
    n: int,
    k: int,
    activation: str | None,
) -> torch.Tensor:
    """The operator, of `plain` tensors and without gradients."""
    form = weight_format(format)
    gives, takes = Side(k, giver_k, weight_format(giver_format)), Side(n, k, form)
    if not _left(rows, norm, gives, takes):
        fields = codes, scales, zeros, None, None
        return ops.apply(x, *fields, format=form, shape=(n, k), bias=bias, activation=activation)
    normed = left_to_next(rows, norm, eps, 0.0, DeferredParts(x, squares))
    weight = weight_of(codes, scales, zeros, form, (n, k))
    return take(TakingCall(normed, weight, bias, None, activation, None, False, None))


def _take_meta(
    x, squares, rows, norm, eps, giver_format, giver_k, codes, scales, zeros, bias, format, n, k, activation
):
    return x.new_empty((x.shape[0], out_features(n, activation)))


giving = Operator(
    "weight_only_linear_norm(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, Tensor residual, "
    "str format, int n, int k, Tensor norm, float eps, str taker_format, int taker_n) -> (Tensor, Tensor, Tensor)",
    cpu=of_plain(give_plain),
    cuda=of_plain(give_plain),
    meta=_give_meta,
)
"""(rows [M, n] of a product with a residual, what the product behind their norm takes [M, n], fp32 [M, n / 64])."""

taking = Operator(
    "weight_only_linear_of_normed(Tensor x, Tensor squares, Tensor rows, Tensor norm, float eps, str giver_format, "
    "int giver_k, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, str format, int n, int k, "
    "str? activation) -> Tensor",
    cpu=of_plain(take_plain),
    cuda=of_plain(take_plain),
    meta=_take_meta,
)
"""The product of normed rows, [M, n] or half as many columns, of what ``giving`` returned."""
