"""Tiles of decoded weights whose k blocks are long. No GPU types here.

A CTA with one warpgroup has nobody who decodes while it waits: for a stage, its codes and its scales, some 90 clocks in
each k block. Twice as many inputs a k block are half of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.results import Dsmem, Reduction

LONG_BLOCK_K = 256


@dataclass(frozen=True)
class LongWgmma(RegisterWgmma):
    """As `RegisterWgmma`, of k blocks of `LONG_BLOCK_K` inputs."""

    group_steps: int = 4
    reductions: ClassVar[tuple[type[Reduction], ...]] = (Dsmem,)
    multicasts: ClassVar[bool] = False
    block_k_sizes: ClassVar[tuple[int, ...]] = (LONG_BLOCK_K,)
