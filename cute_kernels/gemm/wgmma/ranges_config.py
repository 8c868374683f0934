"""Tiles that are dealt out as work ranges (stream-K): each CTA has as many k blocks as any other. No GPU types here.

Whole tiles fill whole rounds of all CTAs, or else CTAs stand idle: 144 tiles on 132 SMs are two rounds. Here all k
blocks of all tiles are one line, of which each CTA has a range, as long as a tile at least. It begins with the last
tile of its range, whose accumulators it leaves in memory if the tile ends behind the range, then goes on to the tile
before, and so ends with the first one. If that began before the range, it adds what the CTA before left of it.

A CTA waits for the one before it alone, at its end, when all that others want of it is stored
(docs/design/forward_progress.md). With ranges of less than a tile some have a middle part, which they leave at their
end: others would wait for them, 4 us on an H200. So there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.results import Reduction

if TYPE_CHECKING:
    from cute_kernels.gemm.wgmma.config import WgmmaConfig


@dataclass(frozen=True)
class RangeSplitK(Reduction):
    """Parts of K of a tile meet in global memory, added up by the CTA that has its last k block: `.ranges`.

    Attributes:
        end: k blocks that take as long as a tile's results: no range ends among these, so that a CTA with more results
            has fewer k blocks.
    """

    end: int = 5

    @property
    def name(self) -> str:
        return f"_ranges{self.end}"

    def problem(self, config: WgmmaConfig) -> str | None:
        if self.end < 0:
            return f"end {self.end} is negative"
        if config.n_tiles > 1 or config.row_parts > 1 or config.one_m_tile:
            return "ranges want one tile a warpgroup, in one part"
        return None


@dataclass(frozen=True)
class RangesWgmma(RegisterWgmma):
    """As `RegisterWgmma`, with `RangeSplitK`."""

    reductions: ClassVar[tuple[type[Reduction], ...]] = (RangeSplitK,)
    multicasts: ClassVar[bool] = False
