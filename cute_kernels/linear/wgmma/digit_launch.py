"""Launches of products whose activations come in digits: that which makes the digits, then the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cute_kernels.linear.wgmma.compile import DigitRowsSpec
from cute_kernels.linear.wgmma.config import DIGIT_GROUP, DIGIT_TOKENS, X_SCALE_ALIGNMENT, DigitRowsConfig
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.memory import Blank, blank, empty_strided

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class DigitRows:
    """Makes digits of the rows of x at so many places.

    Attributes:
        function: the compiled kernel.
        dtype: of x, "bf16" or "fp16".
        places: rows of the product.
        groups: of `DIGIT_GROUP` inputs of the padded K.
    """

    function: Callable[..., Any]
    dtype: str
    places: int
    groups: int

    @cached_property
    def pitch(self) -> int:
        """Scales from a group to the next: a tile's come from a multiple of 16 bytes on, whatever rows it has."""
        return -(-self.places // X_SCALE_ALIGNMENT) * X_SCALE_ALIGNMENT + DIGIT_TOKENS + X_SCALE_ALIGNMENT

    @cached_property
    def new_digits(self) -> Blank:
        """Both digits take the bytes of an element of x; the product has as many rows as what it is given."""
        return blank((self.places, self.groups * DIGIT_GROUP), DTYPES[self.dtype])

    @cached_property
    def new_scales(self) -> Blank:
        return blank((self.groups, self.pitch), torch.float32)

    def make(self, x: torch.Tensor, end: int = 0, rows: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(digits, their scales) on the current device, as `DigitWgmmaKernel.__call__` takes them.

        x: [.., k], 16-byte aligned. end, rows: addresses, see `DigitRowsKernel.__call__`.
        """
        digits, scales = empty_strided(*self.new_digits), empty_strided(*self.new_scales)
        self.function(x, end, rows, digits.data_ptr(), scales.data_ptr(), self.places, self.groups, self.pitch)
        return digits, scales


@dataclass(frozen=True)
class DigitProduct:
    """Both launches of a dense product, called as the one launch of others is."""

    rows: DigitRows
    function: Callable[..., Any]

    def __call__(
        self,
        x: torch.Tensor,
        codes: int,
        scales: int,
        _zeros: int,
        bias: int,
        residual: int,
        out: int,
        workspace: int,
        *numbers: int,
    ) -> None:
        digits, x_scales = self.rows.make(x)
        x_scales_at, pitch = x_scales.data_ptr(), self.rows.pitch
        self.function(digits, codes, scales, x_scales_at, bias, residual, out, workspace, *numbers, pitch)


def digit_rows(dtype: str, places: int, groups: int, arch: str) -> DigitRows:
    """What makes digits of so many rows of a dtype, "bf16" or "fp16"."""
    return DigitRows(load(DigitRowsSpec(DigitRowsConfig(dtype)), arch), dtype, places, groups)
