"""Launches of products whose activations come in digits: that which makes the digits, then the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cute_kernels.linear.wgmma.compile import DigitBlocksSpec, DigitRowsSpec
from cute_kernels.linear.wgmma.config import (
    DIGIT_GROUP,
    DIGIT_TOKENS,
    ROW_DIGIT_BYTES,
    ROW_SCALE_BYTES,
    X_SCALE_ALIGNMENT,
    DigitBlocksConfig,
    DigitRowsConfig,
    WgmmaConfig,
)
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
    """Both launches of a dense product, called as the one launch of others is.

    Attributes:
        make: makes digits of x in blocks.
        function: the product.
        rows: of a block.
        groups: of `DIGIT_GROUP` inputs of the padded K.
    """

    make: Callable[..., Any]
    function: Callable[..., Any]
    rows: int
    groups: int

    @cached_property
    def new_blocks(self) -> Blank:
        """Both digits take the bytes of an element of x; scales, one for each row and group, lie behind all of them."""
        return blank((self.groups * self.rows * (ROW_DIGIT_BYTES + ROW_SCALE_BYTES),), torch.uint8)

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
        blocks = empty_strided(*self.new_blocks)
        digits = blocks.data_ptr()
        self.make(x, digits, self.rows, self.groups)
        self.function(x, codes, scales, digits, bias, residual, out, workspace, *numbers, self.rows)


def block_rows(config: WgmmaConfig, m: int) -> int:
    """Rows of x that are multiplied where there are ``m``: whole parts of the tile."""
    return config.loop_tokens(-(-m // config.part_tokens))


def digit_product(config: WgmmaConfig, function: Callable[..., Any], m: int, groups: int, arch: str) -> DigitProduct:
    """The dense product of ``m`` rows by a compiled kernel, with what makes its digits."""
    make = load(DigitBlocksSpec(DigitBlocksConfig(config.dtype)), arch)
    return DigitProduct(make, function, block_rows(config, m), groups)


def digit_rows(dtype: str, places: int, groups: int, arch: str) -> DigitRows:
    """What makes digits of so many rows of a dtype, "bf16" or "fp16"."""
    return DigitRows(load(DigitRowsSpec(DigitRowsConfig(dtype)), arch), dtype, places, groups)
