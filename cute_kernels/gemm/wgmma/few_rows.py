"""What kernels of one tile of rows of x, which comes in limbs, begin with.

With one tile of rows a work tile's number is that of its block, but for the part of K: of what `tiles.TileScheduler`
divides by only the parts are left. None of it is a division, of which each would take some 100 clocks before the first
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.tiles import TileSizes, WorkTile, dense_grid, dense_scheduler, dense_sizes
from cute_kernels.gemm.work import RECIPROCAL_BITS


@dataclass(frozen=True)
class FewRowsSizes(TileSizes):
    """Sizes of a launch of one tile of rows of x."""

    split_reciprocal: Int32  # 2**RECIPROCAL_BITS over splits, rounded up


@dataclass(frozen=True)
class FewRowsTileScheduler:
    """As `tiles.TileScheduler`, of one tile of rows of x, by CTAs that are in no cluster."""

    shape: FewRowsSizes
    first: Int32
    stride: Int32
    count: Int32

    def work_tile(self, index) -> WorkTile:
        shape = self.shape
        place = cutlass.max(index - shape.whole, 0)
        number = Int32((Int64(place) * shape.split_reciprocal) >> RECIPROCAL_BITS)
        cut = index >= shape.whole
        split = cutlass.select_(cut, place - number * shape.splits, Int32(0))
        begin = split * shape.split_k_blocks
        return WorkTile(
            block=cutlass.select_(cut, shape.whole + number, index),
            m_tile=Int32(0),
            begin=begin,
            end=cutlass.select_(cut, cutlass.min(begin + shape.split_k_blocks, shape.k_blocks), shape.k_blocks),
            split=split,
            splits=cutlass.select_(cut, shape.splits, Int32(1)),
            number=number,
        )


def few_rows_sizes(config: WgmmaConfig, given) -> Any:
    """The fields of a `FewRowsSizes`, of a launch's arguments."""
    reciprocal = ((Int64(1) << RECIPROCAL_BITS) + (given.splits - 1)) // given.splits
    return *dense_sizes(config, given), dense_grid(config, given), reciprocal


def few_rows_scheduler(config: WgmmaConfig, shape: Any, cta, num_ctas) -> Any:
    """The work tiles of a CTA of a product of one tile of rows of x."""
    if config.dsmem_reduction:
        return dense_scheduler(config, shape, cta, num_ctas)
    blocks = cute.ceil_div(shape.num_tiles, config.block_tiles)
    count = shape.whole + (blocks - shape.whole) * shape.splits
    return FewRowsTileScheduler(shape=shape, first=cta, stride=num_ctas, count=count)
