"""Tiles as work ranges of all CTAs, whose parts of K meet in global memory: `.ranges_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.division import Divisor
from cute_kernels.device.exchange import EMPTY_WORD
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.epilogue import Store, TileEpilogue
from cute_kernels.linear.wgmma.kernel import WgmmaKernel, launch_options
from cute_kernels.linear.wgmma.places import DensePlaces, Places, corner_of
from cute_kernels.linear.wgmma.ranges_config import RangeSplitK
from cute_kernels.linear.wgmma.reduction import VECTOR_STRIDE
from cute_kernels.linear.wgmma.register_mainloop import RegisterMainloop
from cute_kernels.linear.wgmma.tiles import TileSizes, WorkTile, dense_grid, dense_sizes
from cute_kernels.linear.work import Operands, operands_of


@dataclass(frozen=True)
class RangeSizes(TileSizes):
    """Sizes of a launch in ranges.

    A tile has `RangeSplitK.end` units more than k blocks, and the tiles' units are shared out.
    """

    units: Divisor  # of a tile
    base: Int32  # units of each CTA
    rest: Int32  # CTAs that have one more

    @staticmethod
    def of(config: WgmmaConfig, given) -> RangeSizes:
        """Of a launch's arguments, on the host."""
        assert isinstance(config.reduction, RangeSplitK)
        blocks = cute.ceil_div(given.num_tiles, config.block_tiles)
        units = given.k_blocks + config.reduction.end
        total = blocks * cute.ceil_div(given.x.shape[0], config.tile_m) * units
        base = total // given.num_ctas
        ranges = Divisor.of(units), base, total - base * given.num_ctas
        return RangeSizes(*dense_sizes(config, given), dense_grid(config, given), *ranges)

    def begin_of(self, cta) -> tuple[Any, Any]:
        """(tile, k block) that a CTA's range begins with, which is the end of the range before."""
        tile, unit = self.units.divide_int(cta * self.base + cutlass.min(cta, self.rest))
        is_behind = unit >= self.k_blocks
        next_tile = tile + cutlass.select_(is_behind, Int32(1), Int32(0))
        return next_tile, cutlass.select_(is_behind, Int32(0), unit)


@dataclass(frozen=True)
class RangeScheduler:
    """The work tiles of one CTA, from the last tile of its range to the first; run-time integers."""

    shape: RangeSizes
    cta: Int32
    first_tile: Int32
    first_k: Int32  # of the first tile
    last_tile: Int32
    last_end: Int32  # behind the last k block of the last tile

    @staticmethod
    def of(shape: RangeSizes, cta) -> RangeScheduler:
        first_tile, first_k = shape.begin_of(cta)
        tile, k_block = shape.begin_of(cta + 1)
        is_whole = k_block == 0
        last_tile = tile - cutlass.select_(is_whole, Int32(1), Int32(0))
        last_end = cutlass.select_(is_whole, shape.k_blocks, k_block)
        return RangeScheduler(shape, cta, first_tile, first_k, last_tile, last_end)

    @property
    def first(self):
        return Int32(0)

    @property
    def count(self):
        return self.last_tile - self.first_tile + 1

    @property
    def stride(self):
        return Int32(1)

    def work_tile(self, index) -> WorkTile:
        """``split`` is the CTA, ``number`` the tile's."""
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


class RangeReduction:
    """A CTA leaves the sums of a tile that ends behind its range, and stores others: `.reduction.TileReduction`.

    It leaves one part at most, so each has one place. `RangeMainloop` takes a part up.
    """

    def __init__(self, config: WgmmaConfig, epilogue: TileEpilogue, places: Places):
        self.config, self.epilogue, self.places = config, epilogue, places
        self.prepares = True
        self.given: tuple[Any, Any, Any] | None = None  # operands, shape and store of the work tile that is multiplied

    def begin(self) -> None:
        """Nothing."""

    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank) -> None:
        """Before the products of a work tile."""
        self.given = operands, shape, store
        self.prepare_store(operands, shape, store, work_tile, first_tile)

    @cute.jit
    def prepare_store(self, operands, shape, store, work_tile, first_tile):
        """Of what is stored here."""
        if work_tile.end == shape.k_blocks:
            corner = corner_of(self.config, self.places, shape, work_tile, first_tile)
            self.epilogue.prepare(operands, shape, store, corner, 0)

    @cute.jit
    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank):
        """See `TileReduction`."""
        if work_tile.end < shape.k_blocks:
            place = self.place(operands, store, work_tile.split)
            for i in cutlass.range_constexpr(self.config.thread_vectors):
                ptx.store_global(place, [acc[4 * i + j] for j in range(4)], offset=i * VECTOR_STRIDE)
        else:
            corner = corner_of(self.config, self.places, shape, work_tile, first_tile)
            self.epilogue.run(operands, shape, store, corner, acc, 0, 0)

    def end(self) -> None:
        """Waits for the store."""
        self.epilogue.finish()

    def place(self, operands, store: Store, cta):
        """Where a thread's first accumulators of the part that a CTA leaves are, in the order of the registers."""
        size = 4 * self.config.block_rows * self.config.tile_m
        own = store.warpgroup * (size // self.config.warpgroups) + store.tid * 16
        return operands.workspace + Int64(cta) * size + own

    @cute.jit
    def take(self, work_tile, acc):
        """Makes the accumulators those that the CTA before left of the tile, once they have come: all of them are
        asked for at once, and EMPTY is put back."""
        assert self.given is not None
        operands, _, store = self.given
        place = self.place(operands, store, work_tile.split - 1)
        vectors = self.config.thread_vectors
        missing = Int32(1)
        while missing != 0:
            missing = Int32(0)
            for i in cutlass.range_constexpr(vectors):
                loaded = ptx.load_relaxed(place, 4, offset=i * VECTOR_STRIDE)
                for j in cutlass.range_constexpr(4):
                    acc[4 * i + j] = loaded[j].bitcast(Float32)
                    missing = cutlass.select_(loaded[j] == Uint32(EMPTY_WORD), Int32(1), missing)
        for i in cutlass.range_constexpr(vectors):
            ptx.store_global(place, [Uint32(EMPTY_WORD)] * 4, offset=i * VECTOR_STRIDE)


class RangeMainloop:
    """A mainloop that goes on from the sums of the CTA before, where that has a tile's beginning.

    Parts are taken up before products and not behind them: ranges begin anywhere in a tile, so CTAs do so one after the
    other and not all at the launch's end, and EMPTY is put back while MMAs run.
    """

    def __init__(self, mainloop: RegisterMainloop, parts: RangeReduction):
        self.mainloop, self.parts = mainloop, parts
        self.count = mainloop.config.thread_acc

    def masks(self, shape, lane):
        return self.mainloop.masks(shape, lane)

    @cute.jit
    def multiply(self, acc, memory, work_tile, place, channel, state, teller, tile_m: int):
        """See `RegisterMainloop`."""
        if work_tile.begin > 0:
            if self.ends(work_tile):
                self.parts.take(work_tile, acc)
        return self.mainloop.multiply(acc, memory, work_tile, place, channel, state, teller, tile_m)

    @cute.jit
    def finish(self, acc, memory, work_tile, place, channel, last, teller):
        """Scales that hold for all of K wait for all of it."""
        finished = wgmma.wait_all([acc[i] for i in range(self.count)])
        for i in cutlass.range_constexpr(self.count):
            acc[i] = finished[i]
        self.mainloop.stages.release(memory, last, teller)
        if self.ends(work_tile):
            self.mainloop.channel.scale(acc, [acc[i] for i in range(self.count)], channel)

    def ends(self, work_tile):
        """Whether a work tile has its tile's last k block."""
        assert self.parts.given is not None
        _, shape, _ = self.parts.given
        return work_tile.end == shape.k_blocks


class RangesKernel:
    """One compiled variant of a dense product in work ranges."""

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.product = WgmmaKernel(config)
        consumers = self.product.consumers
        assert isinstance(consumers.mainloop, RegisterMainloop)
        consumers.reduction = RangeReduction(config, self.product.epilogue, DensePlaces(config))
        consumers.mainloop = RangeMainloop(consumers.mainloop, consumers.reduction)

    def launch(self, given, stream):
        """As `WgmmaKernel.launch`."""
        copy_x, x_view = self.product.activations.tma(given.x)
        shape = RangeSizes.of(self.config, given)
        operands = operands_of(Operands, given, x=Int64(0))
        options = launch_options(self.config, given.num_ctas, stream, use_pdl=True)
        self.kernel(operands, shape, copy_x, x_view).launch(**options)

    @cute.kernel
    def kernel(self, operands, shape, copy_x, x_view):
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        roles = self.product.roles
        memory = roles.allocate()
        scheduler = RangeScheduler.of(shape, cta)
        roles.begin(operands, shape, memory, scheduler, warp, lane)
        roles.take(operands, shape, memory, scheduler, copy_x, x_view, warp, lane)
