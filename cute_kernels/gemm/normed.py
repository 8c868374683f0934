"""`NormedRows`, rows together with the RMSNorm that the next product applies to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.compiler import is_compiling

from cute_kernels.arguments import check_dtype, check_tensors, check_wanted, row_stride
from cute_kernels.gemm.call import check_norm_numbers, norm_wanted
from cute_kernels.norm import rms_norm
from cute_kernels.norm.call import DTYPES
from cute_kernels.norm.config import MAX_COLUMNS
from cute_kernels.norm.config import VECTOR as NORM_VECTOR
from cute_kernels.runtime.plans import ALIGNMENT


@dataclass(frozen=True)
class RowNorm:
    """The arguments of an RMSNorm of x's rows before a product.

    Attributes:
        weight: [k].
        eps, offset: as in `cute_kernels.rms_norm`.
    """

    weight: torch.Tensor
    eps: float
    offset: float

    def of(
        self, x: torch.Tensor, order: torch.Tensor | None = None, input_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the norm of x's rows by a separate launch. If the norm's kernel does not support x's strides or
        alignment, x is copied first.

        order, input_scale: as in `cute_kernels.rms_norm`.
        """
        x = x.detach()
        if not _is_normable(x):
            x = x.clone(memory_format=torch.contiguous_format)
        with torch.no_grad():  # a weight may be a parameter
            return rms_norm(
                x, self.weight, eps=self.eps, weight_offset=self.offset, order=order, input_scale=input_scale
            )


def _is_normable(x: torch.Tensor) -> bool:
    """Whether the norm's kernel can read rows without a copy. Rows then have one stride, and each row begins on 16
    bytes."""
    if not x.numel():
        return True
    stride = row_stride(x)
    if stride is None or not 0 <= stride < 2**31 or stride * x.element_size() % ALIGNMENT:
        return False
    has_no_address = is_compiling() or type(x) is not torch.Tensor or x.is_meta
    return has_no_address or x.data_ptr() % ALIGNMENT == 0


@dataclass(frozen=True, eq=False)
class DeferredParts:
    """The data from which the next product completes a norm.

    Attributes:
        scaled: bf16 [M, n], rows times the norm's weight.
        squares: fp32 [M, n / 64]: sums of squares, each over 64 columns of a row.
    """

    scaled: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True, eq=False)
class NormedRows:
    """Rows, with the RMSNorm that the next product applies to them. `quantized_linear_norm` returns them, and
    `quantized_linear` takes them as x.

    Attributes:
        rows: bf16 or fp16 [..., n], a model's residual stream before the norm. Any strides; n is a multiple of 8, at
            most 16384. Do not write to it before the products that read the norm are computed.
        norm: [n], the norm's weight, in the dtype of rows or fp32.
        norm_eps: a number that is added to the mean square.
        norm_offset: a number that is added to the norm's weight.
        deferred: the `DeferredParts` that the preceding product stored together with the rows. None if the norm needs a
            launch of its own. This field is not an argument of the constructor, so `dataclasses.replace` drops it.

    Raises:
        TypeError, ValueError: a field is not as above; the message names it, what came and what is wanted.
    """

    rows: torch.Tensor
    norm: torch.Tensor
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    deferred: DeferredParts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_rows(self.rows, self.norm, self.norm_eps, self.norm_offset)

    def normed(self) -> torch.Tensor:
        """Computes the normed rows, [..., n] in their dtype, by `rms_norm`, for consumers other than
        `quantized_linear`."""
        return RowNorm(self.norm, self.norm_eps, self.norm_offset).of(self.rows)


def check_rows(rows: torch.Tensor, norm: torch.Tensor, eps: object, offset: object) -> None:
    """Raises TypeError or ValueError unless `rms_norm` takes these rows, norm, eps and offset."""
    check_tensors(rows=rows)
    check_dtype("rows", rows, *DTYPES)
    n = rows.shape[-1] if rows.dim() else 0
    if not n or n % NORM_VECTOR or n > MAX_COLUMNS:
        want = f"[..., n] with n a multiple of {NORM_VECTOR} up to {MAX_COLUMNS}"
        raise ValueError(f"rows: got shape {list(rows.shape)}, want {want}")
    check_wanted([norm_wanted(norm, rows)])
    check_norm_numbers(eps, offset)


def left_to_next(
    rows: torch.Tensor, norm: torch.Tensor, eps: float, offset: float, parts: DeferredParts | None
) -> NormedRows:
    """Makes the `NormedRows` of a checked call. parts: the `DeferredParts` of the norm, or None. Fields are not checked
    again, since every layer of a step calls this.
    """
    made = object.__new__(NormedRows)
    values = {"rows": rows, "norm": norm, "norm_eps": eps, "norm_offset": offset, "deferred": parts}
    made.__dict__.update(values)
    return made
