"""Blocks of which each CTA of a cluster of two stores every other tile, and publishes the others early.

A CTA that has multiplied its part of K publishes the accumulators of half of its tiles to the other CTA, and waits for
those of its own. Here each k block begins with the tiles that the other CTA stores. Those of the last k block are on
their way while the CTA's own tiles are multiplied. For that the tiles of a stage are loaded in the same order, one of
each warpgroup after the other, on barriers of their own. The products of the last k block begin when its first tiles
have come.

Three policies take part, each a value: `OrderedLoads` (load), `TileByTile` (mainloop) and `EarlyReduction`. What they
share is the order of the tiles and their barriers: `TileOrder`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.ring import advance
from cute_kernels.gemm.wgmma.cluster_reduction import Partials
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS
from cute_kernels.gemm.wgmma.epilogue import Store, TileEpilogue
from cute_kernels.gemm.wgmma.limbs import LimbProducts, LimbReader
from cute_kernels.gemm.wgmma.loads import first_group
from cute_kernels.gemm.wgmma.memory import TileMemory, init_barriers
from cute_kernels.gemm.wgmma.places import Places, corner_of
from cute_kernels.gemm.wgmma.reading import StageReader
from cute_kernels.gemm.wgmma.resident_config import EARLY_CLUSTER, ResidentConfig
from cute_kernels.gemm.wgmma.resident_loads import tile_begins, tile_bytes_of
from cute_kernels.gemm.wgmma.resident_mainloop import at


class TileOrder:
    """In which order a warpgroup takes its tiles, which depends on the CTA, and on which barriers they come."""

    def __init__(self, config: ResidentConfig):
        self.config = config

    @property
    def published(self) -> int:
        """How many of a warpgroup's tiles the other CTA stores. They are its first ones."""
        return self.config.n_tiles // EARLY_CLUSTER

    def place(self, i: int, rank) -> Any:
        """Of the tiles of a warpgroup, as they lie in the block, the one that CTA ``rank`` takes ``i``-th."""
        parity = 1 - rank if i < self.published else rank
        return EARLY_CLUSTER * (i % self.published) + parity

    def barrier(self, memory: TileMemory, stage, i: int):
        """Of a stage, for the ``i``-th tile of each warpgroup; those of the first are where other kernels have theirs,
        the others behind all barriers."""
        if i == 0:
            return memory.full + stage
        assert memory.tile_barriers is not None  # `ResidentLimbs.more_barriers` has them
        return memory.tile_barriers + (i - 1) * self.config.num_stages + stage

    def in_order(self, begins, rank: int) -> list[list[tuple[int, Any]]]:
        """[number of a warpgroup's tile][those of them that there are] (place in the block, where it begins)."""
        groups, tiles = range(self.config.warpgroups), self.config.n_tiles
        places = [[group * tiles + self.place(i, rank) for group in groups] for i in range(tiles)]
        return [[(place, begins[place]) for place in some if place < len(begins)] for some in places]


class OrderedLoads:
    """The tiles of a stage one of each warpgroup after the other: see `.resident_loads.ResidentWeights`.

    Which tiles come first depends on the CTA: two times the same code, each with constants for places, where half of
    the instructions up to the first copy would find them.
    """

    def __init__(self, config: ResidentConfig, places: Places, order: TileOrder):
        self.config, self.places, self.order = config, places, order

    def init_barriers(self, memory: TileMemory) -> None:
        for i in range(1, self.config.n_tiles):
            for stage in range(self.config.num_stages):
                cute.arch.mbarrier_init(self.order.barrier(memory, stage, i), self.config.stage_copies)
        init_barriers(self.config, memory)  # and the fence behind all of them

    @cute.jit
    def copy_first(self, operands, shape, memory, work_tile):
        """See `ResidentWeights`."""
        if work_tile.split == 0:
            self.copy_first_of(operands, shape, memory, work_tile, 0)
        else:
            self.copy_first_of(operands, shape, memory, work_tile, 1)

    def copy_first_of(self, operands, shape, memory, work_tile, rank: int):
        """Asks for the first k block in the order of CTA ``rank``."""
        begins = self.order.in_order(tile_begins(self.config, self.places, operands, shape, work_tile), rank)
        self.copy_stage(memory, Int32(0), work_tile.begin, begins)

    @cute.jit
    def copy_following(self, operands, shape, memory, scheduler, lane):
        """See `ResidentWeights`."""
        if lane == 0:
            work_tile = scheduler.work_tile(scheduler.first)
            if work_tile.split == 0:
                self.copy_following_of(operands, shape, memory, work_tile, 0)
            else:
                self.copy_following_of(operands, shape, memory, work_tile, 1)

    @cute.jit
    def copy_following_of(self, operands, shape, memory, work_tile, rank: int):
        """Loads all k blocks but the first in the order of CTA ``rank``."""
        begins = self.order.in_order(tile_begins(self.config, self.places, operands, shape, work_tile), rank)
        stage, phase = Int32(1), Int32(1)
        for k_block in cutlass.range(work_tile.begin + 1, work_tile.end, 1, unroll=1):
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            self.copy_stage(memory, stage, k_block, begins)
            stage, phase = advance(stage, phase, self.config.num_stages)

    def copy_stage(self, memory, stage, k_block, begins) -> None:
        """Asks for a k block of tiles that `TileOrder.in_order` has: one of each warpgroup, then the next ones."""
        config, group, tile_bytes = self.config, first_group(self.config, k_block), tile_bytes_of(self.config)
        scale_bytes = config.format.group_scale_bytes
        for i, tiles in enumerate(begins):
            barrier = self.order.barrier(memory, stage, i)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(tiles) * (tile_bytes + scale_bytes))
            address = Int32(barrier.toint())
            for place, (codes, scales) in tiles:
                target = memory.codes + stage * config.code_stage_bytes + place * tile_bytes
                ptx.bulk_copy_to_shared(target, codes + k_block * tile_bytes, Int32(tile_bytes), address)
                target = memory.scales + stage * config.scale_stage_bytes + place * scale_bytes
                ptx.bulk_copy_to_shared(target, scales + group * scale_bytes, Int32(scale_bytes), address)


class EarlyReduction:
    """The parts of K of such a block: what the other CTA stores is published by the mainloop."""

    def __init__(self, config: ResidentConfig, epilogue: TileEpilogue, places: Places, order: TileOrder):
        self.config, self.epilogue, self.places, self.order = config, epilogue, places, order
        self.prepares = epilogue.dense
        self.partials = Partials(config)

    def begin(self) -> None:
        """Before anything is published all CTAs of the cluster have their barriers."""
        cute.arch.cluster_wait()

    def exists(self, tile) -> Any:
        """Whether a tile is one of the block; of an order that depends on the CTA, any of the last warpgroup's may
        not be."""
        return tile < self.config.block_tiles

    @cute.jit
    def publish(self, memory, store, rank, first_tile, acc):
        """Publishes the accumulators of all tiles that the other CTA stores."""
        for i in cutlass.range_constexpr(self.order.published):
            tile = first_tile + self.order.place(i, rank)
            if self.exists(tile):
                self.partials.publish(memory, store, rank, tile, acc, i)

    @cute.jit
    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank):
        """Of the CTA's own tiles."""
        for i in cutlass.range_constexpr(self.order.published, self.config.n_tiles):
            tile = first_tile + self.order.place(i, work_tile.split)
            if self.exists(tile):
                corner = corner_of(self.config, self.places, shape, work_tile, tile)
                self.epilogue.prepare(operands, shape, store, corner, i - self.order.published)

    @cute.jit
    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank):
        """Adds up and stores the CTA's own tiles; the others' have been published."""
        for i in cutlass.range_constexpr(self.order.published, self.config.n_tiles):
            tile = first_tile + self.order.place(i, work_tile.split)
            if self.exists(tile):
                self.partials.load(memory, store, tile, acc, i)
                corner = corner_of(self.config, self.places, shape, work_tile, tile)
                first, ordinal = i * (self.config.tile_m // 2), i - self.order.published
                self.epilogue.run(operands, shape, store, corner, acc, first, ordinal)

    def end(self) -> None:
        """Waits for the store."""
        self.epilogue.finish()


class TileByTile:
    """Multiplies the tiles of a k block in their order, as they come: see `.resident_mainloop.ChunkLoop`."""

    def __init__(self, config: ResidentConfig, stages: StageReader, order: TileOrder, reduction: EarlyReduction):
        self.config, self.stages, self.order, self.reduction = config, stages, order, reduction
        self.reader = LimbReader(config, stages, None, in_pairs=True)
        self.products = LimbProducts(config.n_tiles, config.tile_m, stages.decoder.steps)

    @cute.jit
    def multiply(self, acc, memory, work_tile, start, end, place, stage, phase, teller, tile_m: int):
        """See `ChunkLoop`."""
        x_place = self.reader.x_scale_place(work_tile)
        for k_block in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
            here = at(memory, k_block - start, tile_m)
            is_last = k_block + 1 == end
            self.multiply_tiles(acc, here, stage, phase, place, x_place, tile_m, work_tile.split, is_last)
            cute.arch.sync_warp()
            self.stages.release(memory, stage, teller)
            stage, phase = self.stages.next_stage(stage, phase)
        return stage, phase

    def multiply_tiles(self, acc, memory, stage, phase, place, x_place, tile_m: int, rank, is_last):
        """Adds a k block's products, tile by tile as they come; publishes what is ready of the last k block."""
        products, count = self.products, self.config.n_tiles
        x, x_scales = self.reader.descriptor(memory, stage), self.reader.load_x_scales(memory, stage, x_place, tile_m)
        words, scales = self.wait_for_tile(memory, stage, phase, place, 0, rank)
        started, started_scales = [], []
        for i in range(count):
            operands, own_scales = products.operands(words, place.masks), scales
            if i + 1 < count:
                # Before these MMAs start: reads of shared memory wait in one queue with their operands.
                words, scales = self.wait_for_tile(memory, stage, phase, place, i + 1, rank)
            following = products.start(operands, x, tile_m)
            if i:
                products.add(acc, i - 1, products.join(wgmma.wait_for_dots(started, 1)), started_scales, x_scales)
            if i == self.order.published:
                self.publish_last(acc, memory, place, rank, is_last)
            started, started_scales = following, own_scales
        products.add(acc, count - 1, products.join(wgmma.wait_for_dots(started, 0)), started_scales, x_scales)

    def wait_for_tile(self, memory, stage, phase, place, i: int, rank) -> tuple[Any, Any]:
        """Waits for the ``i``-th tile of each warpgroup, and loads a thread's codes and scales of its own."""
        cute.arch.mbarrier_wait(self.order.barrier(memory, stage, i), phase)
        return self.load_tile(memory, stage, place, self.order.place(i, rank))

    def load_tile(self, memory, stage, place, number) -> tuple[Any, Any]:
        """A thread's codes, [chunk][word], and scales of the tile that lies ``number``-th among its warpgroup's."""
        config, tile_bytes = self.config, tile_bytes_of(self.config)
        codes = memory.codes + stage * config.code_stage_bytes + place.code_offset + number * tile_bytes
        chunk_bytes = tile_bytes // config.k_block_tiles
        words = [ptx.load_shared_vector(codes, chunk * chunk_bytes, 4) for chunk in range(config.k_block_tiles)]
        return words, self.reader.load_scales(memory, stage, place, number)

    @cute.jit
    def publish_last(self, acc, memory, place, rank, is_last):
        """Publishes the accumulators of tiles that the other CTA stores, if those are the last."""
        group, warp = place.warp // WARPGROUP_WARPS, place.warp % WARPGROUP_WARPS
        first_tile = self.stages.first_tile(group)
        store = Store(Int32(0), group, warp * WARP_THREADS + place.lane, warp, place.lane)
        if is_last:
            self.reduction.publish(memory, store, rank, first_tile, acc)
