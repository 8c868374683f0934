"""Blocks of which each CTA of a cluster of two stores every other tile, and whose other accumulators leave early.

A CTA that has multiplied its part of K sends the accumulators of half of its tiles to the other CTA, and waits for
those of its own. Here each k block begins with the tiles that the other CTA stores: what is sent of the last k block is
on its way while the CTA's own tiles are multiplied. For that the tiles of a stage come one of each warpgroup after the
other, in that
order, and on barriers of their own: products of the last k block begin when its first tiles are there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.ring import advance
from cute_kernels.linear.config import SCALE_BYTES
from cute_kernels.linear.wgmma.cluster_reduction import ClusterReduction
from cute_kernels.linear.wgmma.config import WARPGROUP_WARPS
from cute_kernels.linear.wgmma.epilogue import Store
from cute_kernels.linear.wgmma.resident_config import EARLY_CLUSTER, ResidentConfig
from cute_kernels.linear.wgmma.resident_kernel import ResidentKernel
from cute_kernels.linear.wgmma.resident_mainloop import ResidentLane, ResidentMainloop, ResidentWarps
from cute_kernels.sm90 import WARP_THREADS


class EarlyReduction(ClusterReduction):
    """The parts of K of such a block; a warpgroup takes its tiles in an order that depends on the CTA."""

    @property
    def published(self) -> int:
        """How many of a warpgroup's tiles the other CTA stores. They are its first ones."""
        return self.config.n_tiles // EARLY_CLUSTER

    def place(self, i: int, rank) -> Any:
        """Of the tiles of a warpgroup, as they lie in the block, the one that CTA ``rank`` takes ``i``-th."""
        parity = 1 - rank if i < self.published else rank
        return EARLY_CLUSTER * (i % self.published) + parity

    def exists(self, tile, i: int) -> Any:
        return tile < self.config.block_tiles

    @cute.jit
    def publish_first(self, memory, store, rank, first_tile, acc):
        """Sends the accumulators of all tiles that the other CTA stores."""
        for i in cutlass.range_constexpr(self.published):
            tile = first_tile + self.place(i, rank)
            if self.exists(tile, i):
                self.publish(memory, store, rank, tile, acc, i)

    @cute.jit
    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank):
        """Adds up and stores the CTA's own tiles; the others' have left."""
        for i in cutlass.range_constexpr(self.published, self.config.n_tiles):
            tile = first_tile + self.place(i, work_tile.split)
            if self.exists(tile, i):
                self.load_partials(memory, store, tile, acc, i)
                corner = self.corner(shape, work_tile, tile)
                self.epilogue.run(operands, shape, store, corner, acc, i * (self.config.tile_m // 2))


@dataclass(frozen=True)
class EarlyLane(ResidentLane):
    """As :class:`ResidentLane`, and when there is something to send."""

    end: Any  # of the CTA's part of K, k blocks


class EarlyWarps(ResidentWarps):
    """The part of a kernel that these k blocks are read by: see :class:`EarlyKernel`."""

    cluster_reduction: EarlyReduction

    if TYPE_CHECKING:
        tile_bytes: int

        def first_tile(self, group) -> Any:
            """See `WgmmaKernel.first_tile`."""

        def tile_barrier(self, memory, stage, i: int) -> Any:
            """Of a stage, for the ``i``-th tile of each warpgroup."""


class EarlyMainloop(ResidentMainloop):
    """What a consumer warpgroup does with the k blocks of a work tile."""

    kernel: EarlyWarps

    def multiply(self, acc, memory, work_tile, place, state, teller, tile_m: int):
        values = {field.name: getattr(place, field.name) for field in fields(place)}
        return super().multiply(acc, memory, work_tile, EarlyLane(**values, end=work_tile.end), state, teller, tile_m)

    @cute.jit
    def multiply_each(self, acc, memory, work_tile, start, place, stage, phase, teller, tile_m: int):
        """As `ResidentMainloop.multiply_each`."""
        x_place = self.x_scale_place(work_tile)
        for k_block in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
            here = self.at(memory, k_block - start, tile_m)
            is_last = k_block + 1 == place.end
            self.multiply_tiles(acc, here, stage, phase, place, x_place, tile_m, work_tile.split, is_last)
            cute.arch.sync_warp()
            self.kernel.release(memory, stage, teller)
            stage, phase = self.kernel.next_stage(stage, phase)
        return stage, phase

    def multiply_tiles(self, acc, memory, stage, phase, place, x_place, tile_m: int, rank, is_last):
        """Adds a k block's products, tile by tile as they come; sends what is ready of the last k block."""
        parts, count = self.kernel.cluster_reduction, self.config.n_tiles
        x, x_scales = self.descriptor(memory, stage), self.load_x_scales(memory, stage, x_place, tile_m)
        words, scales = self.wait_for_tile(memory, stage, phase, place, 0, rank)
        started, started_scales = [], []
        for i in range(count):
            operands, own_scales = self.operands(words, place.masks), scales
            if i + 1 < count:
                # Before these MMAs start: reads of shared memory wait in one queue with their operands.
                words, scales = self.wait_for_tile(memory, stage, phase, place, i + 1, rank)
            following = self.start(operands, x, tile_m)
            if i:
                self.add(acc, i - 1, self.join(wgmma.wait_for_dots(started, 1)), started_scales, x_scales)
            if i == parts.published:
                self.publish_last(acc, memory, place, rank, is_last)
            started, started_scales = following, own_scales
        self.add(acc, count - 1, self.join(wgmma.wait_for_dots(started, 0)), started_scales, x_scales)

    def wait_for_tile(self, memory, stage, phase, place, i: int, rank) -> tuple[Any, Any]:
        """Waits for the ``i``-th tile of each warpgroup, and loads a thread's codes and scales of its own."""
        cute.arch.mbarrier_wait(self.kernel.tile_barrier(memory, stage, i), phase)
        return self.load_tile(memory, stage, place, self.kernel.cluster_reduction.place(i, rank))

    def load_tile(self, memory, stage, place, number) -> tuple[Any, Any]:
        """A thread's codes, [chunk][word], and scales of the tile that lies ``number``-th among its warpgroup's."""
        config, tile_bytes = self.config, self.kernel.tile_bytes
        codes = memory.codes + stage * config.code_stage_bytes + place.code_offset + number * tile_bytes
        chunk_bytes = tile_bytes // config.k_block_tiles
        words = [ptx.load_shared_vector(codes, chunk * chunk_bytes, 4) for chunk in range(config.k_block_tiles)]
        return words, self.load_scales(memory, stage, place, number)

    @cute.jit
    def publish_last(self, acc, memory, place, rank, is_last):
        """Sends the accumulators of tiles that the other CTA stores, if those are the last."""
        group, warp = place.warp // WARPGROUP_WARPS, place.warp % WARPGROUP_WARPS
        first_tile = self.kernel.first_tile(group)
        store = Store(Int32(0), group, warp * WARP_THREADS + place.lane, warp, place.lane)
        if is_last:
            self.kernel.cluster_reduction.publish_first(memory, store, rank, first_tile, acc)


class EarlyKernel(ResidentKernel):
    """One compiled variant; a :class:`ResidentConfig` that ``publishes_early`` says which."""

    cluster_reduction: EarlyReduction

    def __init__(self, config: ResidentConfig):
        super().__init__(config)
        self.cluster_reduction = EarlyReduction(config, self.epilogue, self.corner)
        self.limbs = EarlyMainloop(self)

    def tile_barrier(self, memory, stage, i: int):
        """Of a stage, for the ``i``-th tile of each warpgroup; those of the first are where other kernels have theirs,
        the others behind all barriers."""
        return memory.full + stage if i == 0 else memory.x_barrier + (1 + (i - 1) * self.config.num_stages) + stage

    def init_barriers(self, memory) -> None:
        for i in range(1, self.config.n_tiles):
            for stage in range(self.config.num_stages):
                cute.arch.mbarrier_init(self.tile_barrier(memory, stage, i), self.config.stage_copies)
        super().init_barriers(memory)  # and the fence behind all of them

    # Which tiles come first depends on the CTA: two times the same, each with constants for places, where half of the
    # instructions up to the first copy would find them.

    @cute.jit
    def copy_first(self, operands, shape, memory, work_tile):
        if work_tile.split == 0:
            self.copy_k_block_in_order(operands, shape, memory, work_tile, 0)
        else:
            self.copy_k_block_in_order(operands, shape, memory, work_tile, 1)

    def copy_k_block_in_order(self, operands, shape, memory, work_tile, rank: int):
        """Asks for a work tile's first k block, in the order of CTA ``rank``."""
        begins = self.in_order(self.tile_begins(operands, shape, work_tile), rank)
        self.copy_stage(memory, Int32(0), work_tile.begin, begins)

    @cute.jit
    def copy_following(self, operands, shape, memory, scheduler, lane):
        """As `ResidentKernel.copy_following`."""
        if lane == 0:
            work_tile = scheduler.work_tile(scheduler.first)
            if work_tile.split == 0:
                self.copy_k_blocks_in_order(operands, shape, memory, work_tile, 0)
            else:
                self.copy_k_blocks_in_order(operands, shape, memory, work_tile, 1)

    @cute.jit
    def copy_k_blocks_in_order(self, operands, shape, memory, work_tile, rank: int):
        """Brings all k blocks of a work tile but the first, in the order of CTA ``rank``."""
        begins = self.in_order(self.tile_begins(operands, shape, work_tile), rank)
        stage, phase = Int32(1), Int32(1)
        for k_block in cutlass.range(work_tile.begin + 1, work_tile.end, 1, unroll=1):
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            self.copy_stage(memory, stage, k_block, begins)
            stage, phase = advance(stage, phase, self.config.num_stages)

    def in_order(self, begins, rank: int) -> list[list[tuple[int, Any]]]:
        """[number of a warpgroup's tile][those of them that there are] (place in the block, where it begins)."""
        groups, tiles = range(self.config.warpgroups), self.config.n_tiles
        places = [[group * tiles + self.cluster_reduction.place(i, rank) for group in groups] for i in range(tiles)]
        return [[(place, begins[place]) for place in some if place < len(begins)] for some in places]

    def copy_stage(self, memory, stage, k_block, begins) -> None:
        """Asks for a k block of tiles that `in_order` has: one of each warpgroup, then the next ones."""
        config, group = self.config, self.first_k_block_group(k_block)
        for i, tiles in enumerate(begins):
            barrier = self.tile_barrier(memory, stage, i)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(tiles) * (self.tile_bytes + SCALE_BYTES))
            address = Int32(barrier.toint())
            for place, (codes, scales) in tiles:
                target = memory.codes + stage * config.code_stage_bytes + place * self.tile_bytes
                ptx.bulk_copy_to_shared(target, codes + k_block * self.tile_bytes, Int32(self.tile_bytes), address)
                target = memory.scales + stage * config.scale_stage_bytes + place * SCALE_BYTES
                ptx.bulk_copy_to_shared(target, scales + group * SCALE_BYTES, Int32(SCALE_BYTES), address)
