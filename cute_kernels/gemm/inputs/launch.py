"""Launches the kernel that prepares rows of x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cute_kernels.arguments import row_stride
from cute_kernels.gemm.arguments import INPUT_ROWS
from cute_kernels.gemm.inputs.config import VECTOR, parts_of, room_for
from cute_kernels.gemm.operands.fp8_config import INPUTS, RowsConfig
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of, is_supported
from cute_kernels.runtime.gpu import GPU, per_gpu
from cute_kernels.runtime.launch_arguments import by_name
from cute_kernels.runtime.memory import Blank, blank
from cute_kernels.runtime.plans import ALIGNMENT, MAX_PLANS


@dataclass(frozen=True)
class InputRows:
    """A launch that prepares rows for a product. It is kept for all calls with the same sizes and strides.

    Attributes:
        send: launches the compiled kernel; it takes tensors, and the addresses ``end`` and ``rows``, by name.
        new: shape [m, k] and dtype of the rows that the launch writes.
    """

    send: Callable[..., Any]
    new: Blank

    def make(
        self,
        x: torch.Tensor,
        perm: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
        end: int = 0,
        numbers: int = 0,
    ) -> torch.Tensor:
        """Returns x [..., k] as contiguous rows [m, k]. Each input is multiplied by its scale, and inputs are in the
        order of perm.

        end, numbers: the addresses ``end`` and ``rows`` of `INPUT_ROWS`, if rows are gathered.
        """
        rows = GPU.empty(*self.new)
        self.send(out=rows, x=x, end=end, rows=numbers, order=perm, factors=input_scale)
        return rows


def input_rows(
    x: torch.Tensor, stride: int | None, perm: torch.Tensor | None = None, input_scale: torch.Tensor | None = None
) -> InputRows | None:
    """Returns the launch that prepares the rows of a checked x on a GPU. Returns None if torch has to prepare the rows.

    stride: the result of `row_stride` for x. The launch needs evenly spaced rows of whole, aligned pieces of 16 bytes,
    and a GPU with such a kernel. Permuted rows have to fit in shared memory.
    """
    k, index, room = x.shape[-1], x.get_device(), 0 if perm is None else room_for(x.shape[-1])
    tensors = [tensor for tensor in (x, perm, input_scale) if tensor is not None]
    aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    if stride is None or room is None or k % VECTOR or stride % VECTOR or not aligned or not is_supported(index):
        return None
    return rows_of((x.numel() // k, k), stride, x.dtype, room, input_scale is not None, index=index)


@per_gpu
@lru_cache(maxsize=MAX_PLANS)
def rows_of(
    size: tuple[int, int], stride: int, dtype: torch.dtype, room: int = 0, scaled: bool = False, *, index: int
) -> InputRows:
    """Returns the launch that makes rows of ``size`` [m, k] from rows ``stride`` elements apart. room, scaled: as in
    `RowsConfig`."""
    fixed = {"stride": stride, "parts": parts_of(*size, GPU.num_sms(index), room)}
    spec = GemmSpec(RowsConfig(DTYPES[dtype], makes=INPUTS, room=room, scaled=scaled))
    send = INPUT_ROWS.bound(load(spec, arch_of(index)), fixed, by_name("x", "order", "factors"))
    return InputRows(send, blank(size, dtype))


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Returns 16-bit x [m, k] on a GPU if its rows are contiguous, else a contiguous copy.

    If possible, our own kernel makes the copy. The next launch can then begin before the copy ends (programmatic
    dependent launch), which it could not after a copy by torch.
    """
    if x.is_contiguous():
        return x
    rows = input_rows(x, row_stride(x))
    return x.contiguous() if rows is None else rows.make(x)
