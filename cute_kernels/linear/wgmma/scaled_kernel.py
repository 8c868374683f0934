"""`.kernel.WgmmaKernel` of rows of x that meet factors in shared memory: `.scaled_config`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import ptx
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.device.ring import advance, advance_by
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.kernel import TileRoles, WgmmaKernel, launch_options
from cute_kernels.linear.wgmma.loads import TmaLoads, WeightLoads, prefetch_biases
from cute_kernels.linear.wgmma.mainloops import TMA_TILE_K
from cute_kernels.linear.wgmma.places import DensePlaces, Places, parts_of
from cute_kernels.linear.wgmma.row_factors import FactoredOperands, Factors
from cute_kernels.linear.wgmma.scaled_config import FACTOR_BYTES, PAIRS, ScaledWgmma
from cute_kernels.linear.wgmma.tiles import TileSizes, dense_grid, dense_sizes
from cute_kernels.linear.work import operands_of

ROW_BYTES = 2 * TMA_TILE_K  # of a TMA tile
PIECE_BYTES = 16
LANE_ROWS = 4  # of a warp's access, eight lanes each
IN_FLIGHT = 8  # pieces of a lane


class FactorLoads(TmaLoads):
    """Activations by TMA, and the factors of their inputs, to barriers of their own."""

    @cute.jit
    def copy(self, operands, shape, memory, scheduler, copy_x, x_view):
        """As of `TmaLoads`; CTAs multicast nothing."""
        config = self.config
        tma_tiles, parts = config.block_k // TMA_TILE_K, config.row_parts
        targets = cute.group_modes(cute.local_tile(memory.x, (config.part_m, TMA_TILE_K), (None, 0, None)), 0, 2)
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            first_row, _ = self.places.rows_of(shape, work_tile)
            rows = cute.domain_offset((first_row, 0), x_view)
            places = cute.group_modes(cute.local_tile(rows, (config.part_m, TMA_TILE_K), (None, None)), 0, 2)
            target, source = cpasync.tma_partition(copy_x, 0, cute.make_layout(1), targets, places)
            present = parts_of(config, self.places, shape, work_tile)
            size = present * (config.x_stage_bytes // parts) + config.x_scale_stage_bytes
            for k_block in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                barrier = memory.x_barrier + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
                    self.copy_factors(operands, memory, k_block, stage, barrier)
                for part in cutlass.range_constexpr(parts):
                    if part < present:
                        for tma_tile in cutlass.range_constexpr(tma_tiles):
                            chosen = source[None, part, k_block * tma_tiles + tma_tile]
                            place = target[(None, *self.place(stage, part, tma_tile, present))]
                            cute.copy(copy_x, chosen, place, tma_bar_ptr=barrier)
                stage, phase = advance(stage, phase, config.num_stages)

    def copy_factors(self, operands, memory, k_block, stage, barrier) -> None:
        """Asks for the factors of a k block, all of whose inputs x has; one lane."""
        size = self.config.x_scale_stage_bytes
        ptx.bulk_copy_to_shared(
            memory.x_scales + stage * size,
            operands.factors.address + Int64(k_block) * size,
            Int32(size),
            Int32(barrier.toint()),
        )


class RowScaling:
    """What the scaling warps do: they take the stages in turn, since a fence costs a warp more than its products.

    Eight lanes have a row of 64 inputs, the same ones of every fourth row: their factors are loaded once a k block.
    """

    def __init__(self, config: WgmmaConfig[ScaledWgmma], places: Places):
        self.config, self.places, self.math = config, places, HopperMath(config.dtype)

    @cute.jit
    def scale(self, shape, memory, scheduler, number, lane):
        """One warp. number: of its TMA tile in a stage, and of its pair."""
        config = self.config
        half, pair = number % 2, number // 2
        chunk, row = lane % 8, lane // 8
        # Where a row's pieces lie is the piece's number XOR the row's: one of two places for every fourth row.
        tile = memory.x_address + half * config.tma_tile_bytes
        even = tile + row * ROW_BYTES + (chunk ^ row) * PIECE_BYTES
        odd = tile + (row + LANE_ROWS) * ROW_BYTES + (chunk ^ (row + LANE_ROWS)) * PIECE_BYTES
        factors = memory.x_scales + half * (TMA_TILE_K * FACTOR_BYTES) + chunk * PIECE_BYTES
        stage, phase, ahead = Int32(pair), Int32(0), Int32(pair)
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            present = parts_of(config, self.places, shape, work_tile)
            left = Int32(work_tile.end - work_tile.begin)
            while ahead < left:
                cute.arch.mbarrier_wait(memory.x_barrier + stage, phase)
                if const_expr(config.mainloop.probe not in (1, 2)):
                    self.scale_stage(even, odd, factors, stage, present)
                if const_expr(config.mainloop.probe not in (2, 3)):
                    cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(memory.full + stage)
                stage, phase = advance_by(PAIRS, stage, phase, config.num_stages)
                ahead = ahead + PAIRS
            ahead = ahead - left

    @cute.jit
    def scale_stage(self, even, odd, factors, stage, present):
        """A lane's pieces of a TMA tile, of the parts that have rows."""
        config = self.config
        at = stage * config.x_stage_bytes
        words = ptx.load_shared_vector(factors + stage * config.x_scale_stage_bytes, 0, 4)
        for part in cutlass.range_constexpr(config.row_parts):
            first = part * config.part_m
            if const_expr(config.row_parts == 1):
                self.scale_rows(even + at, odd + at, first, words)
            elif part < present:
                self.scale_rows(even + at, odd + at, first, words)

    def scale_rows(self, even, odd, first: int, factors) -> None:
        """A lane's pieces of the rows of a part, ``IN_FLIGHT`` at a time."""
        rows = range(first, first + self.config.part_m, LANE_ROWS)
        for start in range(0, len(rows), IN_FLIGHT):
            # The second of two accesses begins four rows further than the first: its address says so already.
            places = [
                ((even, odd)[row // LANE_ROWS % 2], row // (2 * LANE_ROWS) * (2 * LANE_ROWS) * ROW_BYTES)
                for row in rows[start : start + IN_FLIGHT]
            ]
            found = [ptx.load_shared_vector(address, offset, 4) for address, offset in places]
            for (address, offset), words in zip(places, found, strict=True):
                scaled = [self.math.multiply(word, factor) for word, factor in zip(words, factors, strict=True)]
                ptx.store_shared(address, offset, scaled)


class ScaledRoles(TileRoles):
    """Roles of which two warps scale."""

    activations: FactorLoads

    def __init__(self, scaling: RowScaling, *parts: Any):
        super().__init__(*parts, dense=True, waits=True)
        self.scaling = scaling

    @cute.jit
    def take(self, operands, shape, memory, scheduler, copy_x, x_view, warp, lane):
        config = self.config
        if warp == self.weight_warp:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            self.weights.copy(operands, shape, memory, scheduler)
        elif warp >= config.consumer_warps:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if warp == config.consumer_warps:
                self.activations.copy(operands, shape, memory, scheduler, copy_x, x_view)
            else:
                if warp == self.weight_warp + 1:
                    prefetch_biases(config, self.places, operands, shape, scheduler, lane)
                self.scaling.scale(shape, memory, scheduler, warp - (self.weight_warp + 1), lane)
        else:
            cute.arch.setmaxregister_increase(config.consumer_registers)
            self.consumers.multiply(operands, shape, memory, scheduler, self.consumers.lane(shape, warp, lane))


class ScaledWgmmaKernel(WgmmaKernel):
    """One compiled variant."""

    def __init__(self, config: WgmmaConfig[ScaledWgmma]):
        super().__init__(config)
        places = DensePlaces(config)
        self.activations = FactorLoads(config, places)
        weights = WeightLoads(config, places, asks_first=config.one_m_tile)
        scaling = RowScaling(config, places)
        self.roles = ScaledRoles(scaling, config, places, weights, self.activations, self.consumers)

    def launch(self, given, stream):
        """``given`` has the arguments `FACTORED_TILES` of :mod:`cute_kernels.linear.arguments`."""
        config = self.config
        copy_x, x_view = self.activations.tma(given.x)
        shape = TileSizes(*dense_sizes(config, given), grid=dense_grid(config, given))
        factors = Factors(given.factors, given.eps, given.offset)
        operands = operands_of(FactoredOperands, given, x=Int64(0), factors=factors)
        if const_expr(config.store.by_tma):
            operands = self.epilogue.tma_store.operands(operands, shape.m, given.n)
        self.kernel(operands, shape, copy_x, x_view).launch(
            **launch_options(config, given.num_ctas, stream, use_pdl=True)
        )
