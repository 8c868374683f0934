"""Products around a deferred norm as registered operators, for graphs in which the number of rows is not known.

    rows, x, squares = weight_only_linear_norm(...)           the product before the norm
    y = weight_only_linear_of_normed(x, squares, rows, ...)   the product after it

For some numbers of rows, the norm is deferred to the second product. Then x is rows times the norm's weight, and
squares has sums of squares of rows. For other numbers of rows, x is the normed rows, and squares is not read. Each
operator gets the formats and shapes of both products, so both decide alike whether the norm is deferred.
"""

from __future__ import annotations

import torch

from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm import ops
from cute_kernels.gemm.activations import out_features
from cute_kernels.gemm.call import LinearCall
from cute_kernels.gemm.deferred import GivingCall, Side, give, no_launch_between, take
from cute_kernels.gemm.normed import DeferredParts, left_to_next
from cute_kernels.gemm.ops import of_plain, weight_of
from cute_kernels.gemm.wgmma.deferred_config import SQUARES_N
from cute_kernels.norm import rms_norm
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.operator import Operator


def _left(rows: torch.Tensor, norm: torch.Tensor, gives: Side, takes: Side) -> bool:
    """Whether the norm of ``rows`` is deferred to the product that follows."""
    index, on_gpu = rows.get_device(), rows.is_cuda or GPU.takes_cpu
    return on_gpu and norm.dtype == rows.dtype and no_launch_between(len(rows), gives, takes, rows.dtype, index)


def _parts_of(rows: torch.Tensor, norm: torch.Tensor) -> DeferredParts:
    """Computes, in torch, the parts of a deferred norm that a kernel of the first product stores."""
    values = rows.float()
    scaled = (values * norm.float()).to(rows.dtype)
    return DeferredParts(scaled, values.unflatten(1, (-1, SQUARES_N)).square().sum(-1))


# -- the product before the norm -----------------------------------------------------------------------------------


def give_plain(
    x, codes, scales, zeros, bias, residual, format, n, k, norm, eps, taker_format, taker_n
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the operator `giving`; `of_plain` calls it with detached tensors."""
    form = weight_format(format)
    gives, takes = Side(n, k, form), Side(taker_n, n, weight_format(taker_format))
    if not _left(residual, norm, gives, takes):
        rows = ops.linear(LinearCall(x, weight_of(codes, scales, zeros, form, (n, k)), bias, residual))
        squares = rows.new_empty((len(rows), n // SQUARES_N), dtype=torch.float32)
        return rows, rms_norm(rows, norm, eps=eps), squares
    found = give(GivingCall(x, weight_of(codes, scales, zeros, form, (n, k)), bias, residual, norm, eps, 0.0))
    parts = found.deferred or _parts_of(found.rows, norm)
    return found.rows, parts.scaled, parts.squares


def _give_meta(x, codes, scales, zeros, bias, residual, format, n, k, norm, eps, taker_format, taker_n):
    rows = x.new_empty((x.shape[0], n))
    return rows, torch.empty_like(rows), rows.new_empty((x.shape[0], n // SQUARES_N), dtype=torch.float32)


# -- the product after it -----------------------------------------------------------------------------------------


def take_plain(
    x, squares, rows, norm, eps, giver_format, giver_k, codes, scales, zeros, bias, format, n, k, activation
) -> torch.Tensor:
    """Computes the operator `taking`; `of_plain` calls it with detached tensors."""
    form = weight_format(format)
    gives, takes = Side(k, giver_k, weight_format(giver_format)), Side(n, k, form)
    if not _left(rows, norm, gives, takes):
        return ops.linear(LinearCall(x, weight_of(codes, scales, zeros, form, (n, k)), bias, activation=activation))
    normed = left_to_next(rows, norm, eps, 0.0, DeferredParts(x, squares))
    return take(LinearCall(normed, weight_of(codes, scales, zeros, form, (n, k)), bias, activation=activation))


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
"""The product before the norm: returns (rows [M, n], the next product's x [M, n], squares fp32 [M, n / 64])."""

taking = Operator(
    "weight_only_linear_of_normed(Tensor x, Tensor squares, Tensor rows, Tensor norm, float eps, str giver_format, "
    "int giver_k, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, str format, int n, int k, "
    "str? activation) -> Tensor",
    cpu=of_plain(take_plain),
    cuda=of_plain(take_plain),
    meta=_take_meta,
)
"""The product after the norm: takes the tensors that ``giving`` returned, and returns [M, n], or [M, n / 2] of a gated
activation."""
