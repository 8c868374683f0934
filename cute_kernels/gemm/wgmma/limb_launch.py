"""The launch that makes limbs of the rows of x, before a grouped product of limbs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cute_kernels.gemm.arguments import LIMB_ROWS
from cute_kernels.gemm.wgmma.compile import LimbRowsSpec
from cute_kernels.gemm.wgmma.config import LimbRowsConfig
from cute_kernels.gemm.wgmma.mainloops import (
    LIMB_GROUP,
    LIMB_TILE_M,
    X_SCALE_ALIGNMENT,
)
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import Blank, blank

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LimbRows:
    """Makes limbs of the rows of x at so many places.

    Attributes:
        function: the compiled kernel, by arguments' names.
        dtype: of x, "bf16" or "fp16".
        places: rows of the product.
        groups: of `LIMB_GROUP` inputs of the padded K.
    """

    function: Callable[..., Any]
    dtype: str
    places: int
    groups: int

    @cached_property
    def pitch(self) -> int:
        """Scales from a group to the next: a tile's come from a multiple of 16 bytes on, whatever rows it has."""
        return -(-self.places // X_SCALE_ALIGNMENT) * X_SCALE_ALIGNMENT + LIMB_TILE_M + X_SCALE_ALIGNMENT

    @cached_property
    def new_limbs(self) -> Blank:
        """Both limbs take the bytes of an element of x; the product has as many rows as what it is given."""
        return blank((self.places, self.groups * LIMB_GROUP), DTYPES[self.dtype])

    @cached_property
    def new_scales(self) -> Blank:
        return blank((self.groups, self.pitch), torch.float32)

    def make(self, x: torch.Tensor, end: int = 0, rows: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(limbs, their scales) on the current device, as `GroupedLimbKernel` takes them.

        x: [.., k], 16-byte aligned. end, rows: addresses, see :mod:`cute_kernels.gemm.arguments`.
        """
        limbs, scales = GPU.empty(*self.new_limbs), GPU.empty(*self.new_scales)
        self.function(
            x=x, end=end, rows=rows, out=limbs.data_ptr(), scales=scales.data_ptr(),
            places=self.places, groups=self.groups, pitch=self.pitch,
        )  # fmt: skip
        return limbs, scales


def limb_rows(dtype: str, places: int, groups: int, arch: str) -> LimbRows:
    """What makes limbs of so many rows of a dtype, "bf16" or "fp16"."""
    function = LIMB_ROWS.bound(load(LimbRowsSpec(LimbRowsConfig(dtype)), arch), {})
    return LimbRows(function, dtype, places, groups)
