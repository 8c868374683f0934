"""The producer warps of a CTA: activations by TMA, codes, scales and zero points by bulk copies."""

from __future__ import annotations

from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.device import numbers, ptx
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import TMA_TILE_K, X_SCALE_ALIGNMENT
from cute_kernels.gemm.wgmma.places import Places, parts_of
from layouts.weights.hopper import TILE_BYTES

BIAS_STEP = 32  # output features whose biases a lane asks for: half a line, as they may begin anywhere
ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def product(a, b) -> Int64:
    """Returns a * b in 64 bits. a and b are 32-bit integers, not negative: an unsigned product takes one instruction, a
    signed product six.
    """
    return Int64(Uint32(a)) * Int64(Uint32(b))


def tma_tiles_layout(config: WgmmaConfig, rows: int, count: int):
    """Returns the swizzled layout [rows, TMA_TILE_K, count] of ``count`` consecutive TMA tiles."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, ELEMENTS[config.dtype])
    return cute.tile_to_shape(atom, (rows, TMA_TILE_K, count), order=(0, 1, 2))


class ActivationLoads(Protocol):
    """The loads of activations into pipeline stages, by one warp."""

    def copy(self, shape, memory, scheduler, copy_x, x_view) -> None: ...


class TmaLoads:
    """The loads of activations through the pipeline: TMA tiles by one producer warp.

    If an earlier launch has made the activations (`Mainloop.scaled_rows`), they are E4M3 codes or the limbs of
    `.limb_rows`. The scales of their rows are then loaded as well. TMA tiles of limbs lie in shared memory without
    gaps.
    """

    def __init__(self, config: WgmmaConfig, places: Places):
        self.config, self.places, self.scaled = config, places, config.mainloop.scaled_rows

    def layout(self):
        """Returns the layout [tile_m, TMA_TILE_K, TMA tiles of all stages], swizzled as wgmma takes its B operand."""
        config = self.config
        return tma_tiles_layout(config, config.tile_m, config.num_stages * config.mainloop.x_tma_tiles(config))

    def tma(self, x):
        """Returns (the TMA copy of a TMA tile of x, the view of x from which the copy reads)."""
        rows = self.config.part_m
        tma_tile = cute.slice_(tma_tiles_layout(self.config, rows, 1), (None, None, 0))
        multicast = self.config.multicast
        if const_expr(multicast > 1):
            operation = cpasync.CopyBulkTensorTileG2SMulticastOp()
            return cpasync.make_tiled_tma_atom(operation, x, tma_tile, (rows, TMA_TILE_K), num_multicast=multicast)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, tma_tile, (rows, TMA_TILE_K))

    @cute.jit
    def copy(self, shape, memory, scheduler, copy_x, x_view):
        """Loads the activations of every k block. One warp runs this method. A TMA tile has 64 inputs of the rows of
        one row part.

        Row parts without rows are not loaded: TMA would take time to write zeros for missing rows, or to load other
        experts' rows. With multicast, each CTA loads a slice of every TMA tile into all CTAs of its cluster. A stage is
        then empty when all these CTAs have released it, and full when all slices have arrived.
        """
        config = self.config
        if const_expr(self.scaled):
            # The launch before makes them. All else it has waited for itself, before it let this one begin.
            cute.arch.griddepcontrol_wait()
        tma_tiles, parts = config.mainloop.x_tma_tiles(config), config.row_parts
        targets = cute.group_modes(cute.local_tile(memory.x, (config.part_m, TMA_TILE_K), (None, 0, None)), 0, 2)
        pipeline = memory.pipeline
        here = pipeline.producer_state()
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            first_row, _ = self.places.rows_of(shape, work_tile)
            rows = cute.domain_offset((first_row, 0), x_view)
            places = cute.group_modes(cute.local_tile(rows, (config.part_m, TMA_TILE_K), (None, None)), 0, 2)
            rank = scheduler.rank if const_expr(config.multicast > 1) else 0
            target, source = cpasync.tma_partition(copy_x, rank, cute.make_layout(config.multicast), targets, places)
            present = parts_of(config, self.places, shape, work_tile)
            size = present * (config.x_stage_bytes // parts) + config.x_scale_stage_bytes
            for k_block in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
                pipeline.producer_acquire(here)
                barrier = pipeline.full_barrier(here)
                with cute.arch.elect_one():
                    pipeline.producer_expect(here, size)
                    if const_expr(config.x_scale_stage_bytes > 0):
                        self.copy_scales(shape, memory, work_tile, k_block, here)
                for part in cutlass.range_constexpr(parts):
                    if part < present:
                        for tma_tile in cutlass.range_constexpr(tma_tiles):
                            chosen = source[None, part, k_block * tma_tiles + tma_tile]
                            place = target[(None, *self.place(here.stage, part, tma_tile, present))]
                            if const_expr(config.multicast > 1):
                                everybody = cutlass.Int16((1 << config.multicast) - 1)
                                cute.copy(copy_x, chosen, place, tma_bar_ptr=barrier, mcast_mask=everybody)
                            else:
                                cute.copy(copy_x, chosen, place, tma_bar_ptr=barrier)
                here = pipeline.next(here)

    def place(self, stage, part: int, tma_tile: int, present) -> tuple[Any, Any]:
        """Returns where a TMA tile is stored: (row part, index among the TMA tiles of all stages). present: number of
        row parts that have rows. Both limbs of x form one operand, so the low limbs' parts follow the high limbs' parts
        without a gap.
        """
        tma_tiles, parts = self.config.mainloop.x_tma_tiles(self.config), self.config.row_parts
        if not self.config.limbs:
            return part, stage * tma_tiles + tma_tile
        number = tma_tile * present + part
        return number & (parts - 1), stage * tma_tiles + (number >> (parts.bit_length() - 1))

    def copy_scales(self, shape, memory, work_tile, k_block, here) -> None:
        """Starts loading the scales of a tile's rows of x. The address of the first scale is rounded down to a multiple
        of 16 bytes. One lane calls this method."""
        size = self.config.x_scale_stage_bytes
        first, _ = self.places.rows_of(shape, work_tile)
        ptx.bulk_copy_to_shared(
            memory.x_scales + here.stage * size,
            shape.x_scales + (Int64(k_block) * shape.x_scale_pitch + (first & -X_SCALE_ALIGNMENT)) * 4,
            Int32(size),
            memory.pipeline.full_address(here),
        )


class WeightLoads:
    """The loads of codes, scales and zero points through the pipeline: bulk copies by one producer warp.

    Args:
        asks_first: whether the first weights are loaded before other warps know that barriers are initialised.
    """

    def __init__(self, config: WgmmaConfig, places: Places, *, asks_first: bool):
        self.config, self.places, self.asks_first = config, places, asks_first

    def copy_first(self, operands, shape, memory, scheduler):
        """Starts loading the first k block of the first work tile. One lane calls this method."""
        work_tile = scheduler.work_tile(scheduler.first)
        here = memory.pipeline.producer_state()
        self.copy_k_block(operands, shape, memory, work_tile, work_tile.begin, here)

    @cute.jit
    def copy(self, operands, shape, memory, scheduler):
        """Loads codes, scales and zero points of every k block, except the one that `copy_first` has loaded. One warp
        runs this method."""
        pipeline, there = memory.pipeline, Int32(1 if self.asks_first else 0)
        here = pipeline.producer_state(there)
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            begin = work_tile.begin + there
            there = Int32(0)
            for k_block in cutlass.range(begin, work_tile.end, 1, unroll=1):
                pipeline.producer_acquire(here)
                with cute.arch.elect_one():
                    self.copy_k_block(operands, shape, memory, work_tile, k_block, here)
                here = pipeline.next(here)

    def copy_k_block(self, operands, shape, memory, work_tile, k_block, here):
        """Starts loading a k block of the work tile's block of output features. For each tile of 64 features it copies
        the codes, and the scales and zero points if there are any."""
        config, stage = self.config, here.stage
        address = memory.pipeline.producer_expect(here, config.weight_stage_bytes)
        tile_bytes = config.k_block_tiles * TILE_BYTES
        group_bytes = config.k_block_groups * config.format.group_scale_bytes
        zero_bytes = config.k_block_groups * config.format.group_zero_bytes
        for i in range(config.block_tiles):
            tile = self.places.weight_tile(shape, work_tile, i)
            ptx.bulk_copy_to_shared(
                memory.codes + stage * config.code_stage_bytes + i * tile_bytes,
                operands.codes + (product(tile, shape.k_blocks) + k_block) * tile_bytes,
                Int32(tile_bytes),
                address,
            )
            if config.group_size:
                group = product(tile, shape.scale_groups) + first_group(config, k_block)
                ptx.bulk_copy_to_shared(
                    memory.scales + stage * config.scale_stage_bytes + i * group_bytes,
                    operands.scales + group * config.format.group_scale_bytes,
                    Int32(group_bytes),
                    address,
                )
                if config.format.has_zeros:
                    ptx.bulk_copy_to_shared(
                        memory.zeros + stage * config.zero_stage_bytes + i * zero_bytes,
                        operands.zeros + group * config.format.group_zero_bytes,
                        Int32(zero_bytes),
                        address,
                    )


def prefetch_k_blocks(config: WgmmaConfig, places: Places, operands, shape, scheduler) -> None:
    """Prefetches the codes of the first `prefetched_k_blocks` k blocks of the first work tile into L2. One lane calls
    it.

    A prefetch needs no barrier, so it runs before barriers are initialised. The k blocks of a tile are contiguous, so
    one instruction prefetches all of them. Nothing is prefetched if the work tile may have fewer k blocks.
    """
    k_blocks = config.prefetched_k_blocks
    if not k_blocks:
        return
    work_tile, k_block_bytes = scheduler.work_tile(scheduler.first), config.k_block_tiles * TILE_BYTES
    inside = cutlass.select_(work_tile.begin + k_blocks <= shape.k_blocks, Int32(1), Int32(0))
    for i in range(config.block_tiles):
        first = product(places.weight_tile(shape, work_tile, i), shape.k_blocks) + work_tile.begin
        numbers.prefetch_bulk_if(inside, operands.codes + first * k_block_bytes, Int32(k_blocks * k_block_bytes))


def prefetch_biases(config: WgmmaConfig, places: Places, operands, shape, scheduler, lane) -> None:
    """Prefetches the biases of the first work tile into L2. One warp runs it; each lane prefetches half a cache line.
    Without the prefetch, consumers would wait for the memory when their accumulators are complete.
    """
    work_tile = scheduler.work_tile(scheduler.first)
    row = work_tile.block * config.block_rows + lane * BIAS_STEP
    there = (operands.bias != 0) & (lane < config.block_rows // BIAS_STEP) & (row < shape.n)
    address = operands.bias + Int64(places.bias_place(shape, work_tile, row)) * 2
    numbers.prefetch_line_if(cutlass.select_(there, Int32(1), Int32(0)), address)


def first_group(config: WgmmaConfig, k_block) -> Any:
    """Returns the index of the first group that a k block overlaps. If a group has several k blocks, the code shifts
    instead of dividing.
    """
    block_k, group_size = config.block_k, config.group_size
    if group_size <= block_k:
        return k_block * (block_k // group_size)
    return k_block >> ((group_size // block_k).bit_length() - 1)
