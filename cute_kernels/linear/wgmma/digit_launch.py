"""Launches of products whose activations come in digits: that which makes the digits, then the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.linear.wgmma.compile import DigitRowsSpec
from cute_kernels.linear.wgmma.config import DIGIT_GROUP, DIGIT_TOKENS, X_SCALE_ALIGNMENT, DigitRowsConfig
from cute_kernels.runtime.cache import load

ROW_SCALES = DIGIT_GROUP // 2  # scales of a group that take the bytes of one of its rows


@dataclass(frozen=True)
class DigitRows:
    """Makes digits of the rows of x at so many places.

    Attributes:
        function: the compiled kernel.
        places: rows of the product.
        groups: of `DIGIT_GROUP` inputs of the padded K.
    """

    function: Callable[..., Any]
    places: int
    groups: int

    @property
    def pitch(self) -> int:
        """Scales from a group to the next: a tile's come from a multiple of 16 bytes on, whatever rows it has."""
        return -(-self.places // X_SCALE_ALIGNMENT) * X_SCALE_ALIGNMENT + DIGIT_TOKENS + X_SCALE_ALIGNMENT

    def make(self, x: torch.Tensor, end: int = 0, rows: int = 0) -> tuple[torch.Tensor, int]:
        """(digits, address of their scales), in one piece of memory, as `DigitWgmmaKernel.__call__` takes them.

        x: [.., k], 16-byte aligned, k a multiple of 8. end, rows: addresses, see `DigitRowsKernel.__call__`.
        """
        pitch, row_bytes = self.pitch, 2 * self.groups * DIGIT_GROUP
        # Digits take the bytes of x; all groups' scales lie behind the last place's.
        size = (self.places + -(-pitch // ROW_SCALES), self.groups * DIGIT_GROUP)
        memory = torch.empty(size, dtype=x.dtype, device=x.device)
        digits = memory.data_ptr()
        scales = digits + self.places * row_bytes
        self.function(x, end, rows, digits, scales, self.places, self.groups, pitch)
        return memory[: self.places], scales  # the product has as many rows as what it is given


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
        self.function(
            digits, codes, scales, x_scales, bias, residual, out, workspace, *numbers, self.rows.pitch
        )  # fmt: skip


def digit_rows(dtype: str, places: int, groups: int, arch: str) -> DigitRows:
    """What makes digits of so many rows of a dtype, "bf16" or "fp16"."""
    return DigitRows(load(DigitRowsSpec(DigitRowsConfig(dtype)), arch), places, groups)
