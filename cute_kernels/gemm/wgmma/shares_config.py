"""Tiles whose parts of K are added up by all CTAs that have one, each a share of the rows. No GPU types here.

Where the CTA of the last part adds up all others', `.results.WorkspaceSplitK`, it reads as many tiles as there are
other parts, a batch after the other: with four parts of 128 rows by 128 features some 7 us at the end of a launch of
50. Here each reads as much as one tile has, all of it at once, and stores its share of the results.

The CTAs of a tile wait for one another: neighbours, no more than `PARTS` has (docs/design/forward_progress.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.results import Reduction, one_of

if TYPE_CHECKING:
    from cute_kernels.gemm.wgmma.config import WgmmaConfig

PARTS = (2, 3, 4, 6, 8)
SHARE_STEP = 16  # rows that a share is a multiple of: what stmatrix turns around at a time


@dataclass(frozen=True)
class SharedSplitK(Reduction):
    """Parts of K meet in global memory, each CTA adding up and storing its share of the rows: `.shares`.

    Attributes:
        parts: of a tile that is cut.
    """

    parts: int = 4

    @property
    def name(self) -> str:
        return f"_shares{self.parts}"

    def problem(self, config: WgmmaConfig) -> str | None:
        if reason := one_of(self.parts, PARTS, "parts"):
            return reason
        if config.n_tiles > 1 or config.row_parts > 1 or config.tile_m % (SHARE_STEP * self.parts):
            return f"{self.parts} shares want one tile a warpgroup, and {SHARE_STEP} rows each"
        return None


@dataclass(frozen=True)
class SharesWgmma(RegisterWgmma):
    """As `RegisterWgmma`, with `SharedSplitK`."""

    reductions: ClassVar[tuple[type[Reduction], ...]] = (SharedSplitK,)
    multicasts: ClassVar[bool] = False
