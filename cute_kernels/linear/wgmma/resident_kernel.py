"""Weight-only GEMM for few rows of x, whose limbs are made once and stay in shared memory: one launch.

A launch that makes limbs beforehand (:mod:`.limb_kernel`) takes a microsecond; making them as x comes through the
pipeline sets its pace. But nothing is to be done until the first weights have come, two microseconds after the start:
in that time the consumer warps turn all of x that the CTA needs into limbs (:mod:`.resident_rows`). The producer warp
waits for none of it.

Warpgroups may take k blocks in turn, so that one decodes while another waits for its MMAs; their accumulators are parts
of K like those of the other CTAs of a cluster, and go the same way (:mod:`.cluster_reduction`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.linear.config import SCALE_BYTES
from cute_kernels.linear.wgmma.copies import product
from cute_kernels.linear.wgmma.few_rows import FewRowsKernel, FewRowsShape
from cute_kernels.linear.wgmma.resident_config import ResidentConfig
from cute_kernels.linear.wgmma.resident_mainloop import ResidentLane, ResidentMainloop
from cute_kernels.linear.wgmma.resident_rows import K_BLOCK_TMA_TILES, ResidentRows
from cute_kernels.sm90 import WARP_THREADS
from layouts.weights.hopper import TILE_BYTES

CHUNK_BARRIER = 14  # of the consumer warps, between chunks of K
START_BARRIER = 15  # of the CTA, before the first stage is waited for


@dataclass(frozen=True)
class ResidentShape(FewRowsShape):
    """Sizes of a launch whose CTAs make limbs of x."""

    fits: Any  # whether there is room for those of all of x that a CTA needs


class ResidentKernel(FewRowsKernel):
    """One compiled variant; :class:`.resident_config.ResidentConfig` says which.

    Takes what :class:`.kernel.WgmmaKernel` does, of at most a tile of rows of x; zeros are not used.
    """

    config: ResidentConfig

    def __init__(self, config: ResidentConfig):
        super().__init__(config)
        self.limbs = ResidentMainloop(self)
        self.rows = ResidentRows(config)

    def make_shape(self, *sizes) -> ResidentShape:
        return ResidentShape(*sizes, fits=Int32(1))

    def x_address(self, x) -> Int64:
        return ptx.address(x)

    def x_layout(self):
        return self.tma_tiles_layout(self.config.tile_m, K_BLOCK_TMA_TILES * self.config.resident_k_blocks)

    def tma_tile_copy(self, x):
        return self.rows.k_block_copy(x, self.tma_tiles_layout(self.config.tile_m, K_BLOCK_TMA_TILES))

    @cute.kernel
    def kernel(self, operands, shape, copy_x, x_view):  # type: ignore[override]
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate()
        scheduler = self.tile_scheduler(shape, cta, num_ctas)
        # Of the kernel, since no dynamic condition can carry what describes copies.
        self.source = self.rows.source(operands, shape, memory, copy_x, x_view)
        if warp == config.consumer_warps:
            # All of a launch waits for the first weights: they are asked for before anybody else is told of barriers.
            if lane == 0:
                work_tile = scheduler.work_tile(scheduler.first)
                self.prefetch_k_blocks(operands, shape, scheduler)
                self.init_barriers(memory)
                self.copy_first(operands, shape, memory, work_tile)
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=config.num_threads)
            # For whoever sends parts. Barriers are all that was written, and have had their fence.
            cute.arch.cluster_arrive_relaxed()
            self.copy_following(operands, shape, memory, scheduler, lane)
        else:
            cute.arch.cluster_arrive_relaxed()
            fits = self.make_limbs(shape, memory, scheduler, warp, lane)
            cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=config.num_threads)
            self.multiply(operands, replace(shape, fits=fits), memory, scheduler, warp, lane)

    def copy_first(self, operands, shape, memory, work_tile):
        """Asks for a work tile's first k block; one lane."""
        self.copy_stage(memory, Int32(0), work_tile.begin, self.tile_begins(operands, shape, work_tile))

    def tile_begins(self, operands, shape, work_tile) -> list[tuple[Any, Any]]:
        """Where the codes and the scales of each of a work tile's tiles begin."""
        tile_codes, tile_scales = shape.k_blocks * self.tile_bytes, shape.scale_groups * SCALE_BYTES
        tiles = [self.weight_tile(shape, work_tile, i) for i in range(self.config.block_tiles)]
        return [
            (operands.codes + product(tile, tile_codes), operands.scales + product(tile, tile_scales)) for tile in tiles
        ]

    @cute.jit
    def copy_following(self, operands, shape, memory, scheduler, lane):
        """Brings the codes and scales of all k blocks but the first; all by one lane of the warp.

        What it computes is computed for the first one as well: carried here, it would not be known to be one lane's.
        """
        config = self.config
        if lane == 0:
            work_tile = scheduler.work_tile(scheduler.first)
            begins = self.tile_begins(operands, shape, work_tile)
            stage, phase = Int32(1), Int32(1)
            for k_block in cutlass.range(work_tile.begin + 1, work_tile.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                self.copy_stage(memory, stage, k_block, begins)
                stage, phase = advance(stage, phase, config.num_stages)

    @property
    def tile_bytes(self) -> int:
        """A tile's codes of a k block."""
        return self.config.k_block_tiles * TILE_BYTES

    def copy_stage(self, memory, stage, k_block, begins) -> None:
        """Asks for a k block of tiles that begin as `tile_begins` has it."""
        config, barrier = self.config, memory.full + stage
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.weight_stage_bytes)
        address = Int32(barrier.toint())
        group = self.first_k_block_group(k_block)
        for i, (codes, scales) in enumerate(begins):
            ptx.bulk_copy_to_shared(
                memory.codes + stage * config.code_stage_bytes + i * self.tile_bytes,
                codes + k_block * self.tile_bytes,
                Int32(self.tile_bytes),
                address,
            )
            ptx.bulk_copy_to_shared(
                memory.scales + stage * config.scale_stage_bytes + i * SCALE_BYTES,
                scales + group * SCALE_BYTES,
                Int32(SCALE_BYTES),
                address,
            )

    @cute.jit
    def make_limbs(self, shape, memory, scheduler, warp, lane):
        """Limbs of the CTA's part of K, if there is room for them. Returns whether there is."""
        work_tile = scheduler.work_tile(scheduler.first)
        begin, end = work_tile.begin, work_tile.end
        fits = cutlass.select_(end - begin <= self.config.resident_k_blocks, Int32(1), Int32(0))
        if const_expr(not self.config.loads):
            if warp == 0:
                if lane == 0:
                    cute.arch.mbarrier_init(memory.x_barrier, self.config.consumer_warps)
                    cute.arch.mbarrier_init_fence()
            self.meet()
        if fits != 0:
            if const_expr(not self.config.loads):
                self.rows.bring(self.source, Int32(0), begin, end, warp)
                cute.arch.mbarrier_wait(memory.x_barrier, 0)
            self.rows.make(self.source, memory, begin, end, warp, lane)
        return fits

    def bring_k_blocks(self, place: ResidentLane, first, begin, end):
        """Asks for x of some k blocks, as the ``first`` of those there is room for."""
        if const_expr(not self.config.loads):
            self.rows.bring(self.source, first, begin, end, place.warp)

    def make_k_blocks(self, place: ResidentLane, memory, begin, end, x_phase):
        """Limbs of some k blocks, once x has come."""
        if const_expr(not self.config.loads):
            cute.arch.mbarrier_wait(memory.x_barrier, x_phase)
        self.rows.make(self.source, memory, begin, end, place.warp, place.lane)

    def meet(self):
        """Waits for all consumer warps."""
        threads = self.config.consumer_warps * WARP_THREADS
        cute.arch.barrier(barrier_id=CHUNK_BARRIER, number_of_threads=threads)

    def lane_places(self, shape, warp, lane) -> ResidentLane:
        place = super().lane_places(shape, warp, lane)
        values = {field.name: getattr(place, field.name) for field in fields(place)}
        return ResidentLane(**values, warp=warp, lane=lane, fits=shape.fits)
