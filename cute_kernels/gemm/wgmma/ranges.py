"""Stream-K on the device: each CTA has a work range of k blocks of consecutive tiles, and partials are added through
global memory. See `.results.RangeSplitK`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device.division import Divisor
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.epilogue import Store
from cute_kernels.gemm.wgmma.reduction import StoringReduction, add_published, publish_acc
from cute_kernels.gemm.wgmma.results import RangeSplitK
from cute_kernels.gemm.wgmma.tiles import DenseRounds, OneByOne, TileSizes, WorkTile, dense_grid, dense_sizes


@dataclass(frozen=True)
class TileRangeSizes(TileSizes):
    """Sizes of a launch in work ranges.

    CTAs get equal numbers of units of work. A tile is one unit for each k block, and `RangeSplitK.end` units for
    storing its results.
    """

    units: Divisor  # of a tile
    base: Int32  # units of each CTA
    rest: Int32  # CTAs that have one more

    @staticmethod
    def of(config: WgmmaConfig, given) -> TileRangeSizes:
        """Computes the sizes from a launch's arguments, on the host."""
        assert isinstance(config.reduction, RangeSplitK)
        blocks = cute.ceil_div(given.num_tiles, config.block_tiles)
        units = given.k_blocks + config.reduction.end
        total = blocks * cute.ceil_div(given.x.shape[0], config.tile_m) * units
        base = total // given.num_ctas
        rest = total - base * given.num_ctas
        fields: Any = (*dense_sizes(config, given), dense_grid(config, given), Divisor.of(units), base, rest)
        return TileRangeSizes(*fields)

    def begin_of(self, cta) -> tuple[Any, Any]:
        """Returns (tile, k block) at which a CTA's range begins and the previous CTA's range ends."""
        tile, unit = self.units.divide_int(cta * self.base + cutlass.min(cta, self.rest))
        is_behind = unit >= self.k_blocks
        next_tile = tile + cutlass.select_(is_behind, Int32(1), Int32(0))
        return next_tile, cutlass.select_(is_behind, Int32(0), unit)


@dataclass(frozen=True)
class RangeScheduler(OneByOne):
    """The work tiles of one CTA, from the last tile of its range to the first; run-time integers."""

    shape: TileRangeSizes
    cta: Int32
    first_tile: Int32
    first_k: Int32  # of the first tile
    last_tile: Int32
    last_end: Int32  # after the last k block of the last tile

    @staticmethod
    def of(shape: TileRangeSizes, cta) -> RangeScheduler:
        first_tile, first_k = shape.begin_of(cta)
        tile, k_block = shape.begin_of(cta + 1)
        is_whole = k_block == 0
        last_tile = tile - cutlass.select_(is_whole, Int32(1), Int32(0))
        last_end = cutlass.select_(is_whole, shape.k_blocks, k_block)
        return RangeScheduler(shape, cta, first_tile, first_k, last_tile, last_end)

    @property
    def count(self):
        return self.last_tile - self.first_tile + 1

    def work_tile(self, index) -> WorkTile:
        """Returns the ``index``-th work tile. Its ``split`` is the index of the CTA; its ``number`` is the index of the
        tile.
        """
        tile = self.last_tile - index
        block, m_tile = self.shape.counted.place(tile)
        return WorkTile(
            block=block,
            m_tile=m_tile,
            begin=cutlass.select_(tile == self.first_tile, self.first_k, Int32(0)),
            end=cutlass.select_(tile == self.last_tile, self.last_end, self.shape.k_blocks),
            split=self.cta,
            splits=Int32(1),
            number=tile,
        )


class Ranges(DenseRounds):
    """The distribution of tiles in which each CTA has one work range; there are no rounds."""

    @staticmethod
    def sizes(config: WgmmaConfig, given) -> TileRangeSizes:
        return TileRangeSizes.of(config, given)

    @staticmethod
    def scheduler(config: WgmmaConfig, shape, cta, num_ctas) -> RangeScheduler:
        return RangeScheduler.of(shape, cta)


class RangeReduction(StoringReduction):
    """The reduction of work ranges, a `.reduction.TileReduction`. The CTA that computes a tile's last k block adds the
    partials of preceding CTAs, and stores the tile.

    Only the last tile of a range may end after the range, so a CTA publishes at most one partial. The workspace has one
    slot for each CTA.
    """

    rounds = Ranges

    @cute.jit
    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank):
        """Starts the store policy's loads if the CTA stores the work tile."""
        if work_tile.end == shape.k_blocks:
            self.prepare_tiles(operands, shape, store, work_tile, first_tile)

    @cute.jit
    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank):
        """Publishes the accumulators if the tile ends after the CTA's range. Otherwise adds the partials of preceding
        CTAs and stores the tile. See `TileReduction`."""
        if work_tile.end < shape.k_blocks:
            place = self.place(operands, store, work_tile.split)
            publish_acc(acc, place, self.config.thread_vectors)
        else:
            if work_tile.begin > 0:
                self.collect(operands, shape, store, work_tile, acc)
            self.store_tiles(operands, shape, store, work_tile, acc, first_tile)

    def place(self, operands, store: Store, cta):
        """Returns the address of a thread's first accumulators in a CTA's slot of the workspace. The slot stores
        accumulators in the order of registers.
        """
        size = 4 * self.config.block_rows * self.config.tile_m
        own = store.warpgroup * (size // self.config.warpgroups) + store.tid * 16
        return operands.workspace + Int64(cta) * size + own

    @cute.jit
    def collect(self, operands, shape, store: Store, work_tile, acc):
        """Adds the partials of a tile that preceding CTAs have published. The loop goes back from the CTA just before
        this one to the CTA in whose range the tile begins. No range is shorter than a tile, so the tile begins in the
        previous CTA's range, and the loop runs once.
        """
        other, more = work_tile.split - 1, Int32(1)
        while more != 0:
            add_published(acc, 0, self.place(operands, store, other), self.config.thread_vectors, 0)
            tile, k_block = shape.begin_of(other)
            began_before = (tile == work_tile.number) & (k_block > 0)
            more = cutlass.select_(began_before, Int32(1), Int32(0))
            other = other - 1
