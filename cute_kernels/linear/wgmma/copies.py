"""What the producer warps of a CTA do: activations by TMA, codes, scales and zero points by bulk copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.device import numbers, ptx
from cute_kernels.device.ring import advance
from cute_kernels.linear.config import SCALE_BYTES, ZERO_BYTES
from cute_kernels.linear.wgmma.config import TMA_TILE_K, WgmmaConfig
from cute_kernels.linear.wgmma.tiles import parts_with
from layouts.weights.hopper import TILE_BYTES

ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def product(a, b) -> Int64:
    """a * b in 64 bits, of 32-bit numbers that are not negative: one instruction, where signs would take six."""
    return Int64(Uint32(a)) * Int64(Uint32(b))


class ProducerWarps:
    """The part of a kernel that fills its pipeline; ``config`` is its configuration."""

    if TYPE_CHECKING:
        config: WgmmaConfig
        asks_first: bool

    def x_layout(self):
        """[tokens, BOX_K, TMA tiles of all stages], swizzled as wgmma wants its B operand."""
        config = self.config
        return self.tma_tiles_layout(config.tile_m, config.num_stages * config.block_k // TMA_TILE_K)

    def tma_tile_copy(self, x):
        """What brings a TMA tile of x, and x as TMA tiles are taken from it."""
        rows = self.config.part_m
        tma_tile = cute.slice_(self.tma_tiles_layout(rows, 1), (None, None, 0))
        multicast = self.config.multicast
        if const_expr(multicast > 1):
            operation = cpasync.CopyBulkTensorTileG2SMulticastOp()
            return cpasync.make_tiled_tma_atom(operation, x, tma_tile, (rows, TMA_TILE_K), num_multicast=multicast)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, tma_tile, (rows, TMA_TILE_K))

    def tma_tiles_layout(self, rows: int, count: int):
        """[rows, BOX_K, count], swizzled; one TMA tile behind the other."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, ELEMENTS[self.config.dtype])
        return cute.tile_to_shape(atom, (rows, TMA_TILE_K, count), order=(0, 1, 2))

    @cute.jit
    def copy_activations(self, shape, memory, scheduler, copy_x, x_view):
        """Brings the activations of every k block, a TMA tile of 64 inputs of a part of a tile's rows at a time; one
        warp.

        Parts without rows are left out: rows that x does not have would cost TMA the time of writing zeros, rows of
        somebody else that of bringing them. CTAs that share activations by TMA multicast bring a slice of each TMA
        tile, to all of them: a stage is free for that when all of them have given it back, and has come when all slices
            have.
        """
        config = self.config
        self.wait_for_activations()
        tma_tiles, parts = config.block_k // TMA_TILE_K, config.row_parts
        targets = cute.group_modes(cute.local_tile(memory.x, (config.part_m, TMA_TILE_K), (None, 0, None)), 0, 2)
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            first_row, _ = self.rows_of(shape, work_tile)
            rows = cute.domain_offset((first_row, 0), x_view)
            places = cute.group_modes(cute.local_tile(rows, (config.part_m, TMA_TILE_K), (None, None)), 0, 2)
            rank = scheduler.rank if const_expr(config.multicast > 1) else 0
            target, source = cpasync.tma_partition(copy_x, rank, cute.make_layout(config.multicast), targets, places)
            present = self.parts_of(shape, work_tile)
            size = present * (config.x_stage_bytes // parts) + config.x_scale_stage_bytes
            for k_block in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                barrier = memory.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
                    self.copy_beside(shape, memory, work_tile, k_block, stage)
                for part in cutlass.range_constexpr(parts):
                    if part < present:
                        for tma_tile in cutlass.range_constexpr(tma_tiles):
                            chosen = source[None, part, k_block * tma_tiles + tma_tile]
                            place = target[(None, *self.tma_tile_place(stage, part, tma_tile, present))]
                            if const_expr(config.multicast > 1):
                                everybody = cutlass.Int16((1 << config.multicast) - 1)
                                cute.copy(copy_x, chosen, place, tma_bar_ptr=barrier, mcast_mask=everybody)
                            else:
                                cute.copy(copy_x, chosen, place, tma_bar_ptr=barrier)
                stage, phase = advance(stage, phase, config.num_stages)

    def wait_for_activations(self) -> None:
        """Before any is asked for: here they are there when the launch begins."""

    def tma_tile_place(self, stage, part: int, tma_tile: int, present) -> tuple[Any, Any]:
        """(part, TMA tile of the pipeline) where a part's TMA tile lies, of a tile of which ``present`` parts have
        rows."""
        return part, stage * (self.config.block_k // TMA_TILE_K) + tma_tile

    def copy_beside(self, shape, memory, work_tile, k_block, stage) -> None:
        """Asks for what a stage has of x besides its TMA tiles, ``x_scale_stage_bytes``; one lane. Here nothing."""

    def rows_of(self, shape, work_tile) -> tuple[Any, Any]:
        """The first row of x of a work tile, and what is behind the last that its tile may have."""
        first = work_tile.m_tile * self.config.tile_m
        if const_expr(self.config.cuts_rows):
            part = self.config.part_m
            first = first + work_tile.split * part
            return first, cutlass.min(shape.m, cutlass.select_(work_tile.splits > 1, first + part, shape.m))
        return first, shape.m

    def x_scale_shift(self, work_tile):
        """How many scales of x lie between the last multiple of 16 bytes and a work tile's first one."""
        return Int32(0)

    def parts_of(self, shape, work_tile):
        """How many parts of a work tile's tile have rows."""
        first, end = self.rows_of(shape, work_tile)
        return parts_with(self.config, end - first)

    def prefetch_k_blocks(self, operands, shape, scheduler) -> None:
        """Asks for the codes of the first work tile's first k blocks into L2, where a configuration says so; one lane.

        It needs no barrier, so it is asked before there are any, and a tile's k blocks are one run of bytes: one
        instruction for what the pipeline asks for in several rounds of its loop. Where the
        run would end behind the tile's nothing is asked.
        """
        k_blocks = self.config.prefetched_k_blocks
        if not k_blocks:
            return
        work_tile, k_block_bytes = scheduler.work_tile(scheduler.first), self.config.k_block_tiles * TILE_BYTES
        inside = cutlass.select_(work_tile.begin + k_blocks <= shape.k_blocks, Int32(1), Int32(0))
        for i in range(self.config.block_tiles):
            first = product(self.weight_tile(shape, work_tile, i), shape.k_blocks) + work_tile.begin
            numbers.prefetch_bulk_if(inside, operands.codes + first * k_block_bytes, Int32(k_blocks * k_block_bytes))

    def copy_first_k_block(self, operands, shape, memory, scheduler):
        """Asks for the first k block of the first work tile; one lane."""
        work_tile = scheduler.work_tile(scheduler.first)
        self.copy_k_block(operands, shape, memory, work_tile, work_tile.begin, Int32(0))

    @cute.jit
    def copy_weights(self, operands, shape, memory, scheduler):
        """Brings codes, scales and zero points of every k block that `copy_first_k_block` has not asked for; one
        warp."""
        config = self.config
        there = Int32(1 if self.asks_first else 0)
        stage, phase = there, Int32(1)
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            begin = work_tile.begin + there
            there = Int32(0)
            for k_block in cutlass.range(begin, work_tile.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                with cute.arch.elect_one():
                    self.copy_k_block(operands, shape, memory, work_tile, k_block, stage)
                stage, phase = advance(stage, phase, config.num_stages)

    def copy_k_block(self, operands, shape, memory, work_tile, k_block, stage):
        """Asks for a k block of a block: of each tile a run of codes, one of scales, one of zero points."""
        config = self.config
        barrier = memory.full + stage
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.weight_stage_bytes)
        address = Int32(barrier.toint())
        tile_bytes = config.k_block_tiles * TILE_BYTES
        group_bytes = config.k_block_groups * SCALE_BYTES
        zero_bytes = config.k_block_groups * ZERO_BYTES
        for i in range(config.block_tiles):
            tile = self.weight_tile(shape, work_tile, i)
            ptx.bulk_copy_to_shared(
                memory.codes + stage * config.code_stage_bytes + i * tile_bytes,
                operands.codes + (product(tile, shape.k_blocks) + k_block) * tile_bytes,
                Int32(tile_bytes),
                address,
            )
            if config.group_size:
                group = product(tile, shape.scale_groups) + self.first_k_block_group(k_block)
                ptx.bulk_copy_to_shared(
                    memory.scales + stage * config.scale_stage_bytes + i * group_bytes,
                    operands.scales + group * SCALE_BYTES,
                    Int32(group_bytes),
                    address,
                )
                if config.zero_point:
                    ptx.bulk_copy_to_shared(
                        memory.zeros + stage * config.zero_stage_bytes + i * zero_bytes,
                        operands.zeros + group * ZERO_BYTES,
                        Int32(zero_bytes),
                        address,
                    )

    def first_k_block_group(self, k_block):
        """The first group that a k block has a part of; a shift where it is one of several k blocks."""
        block_k, group_size = self.config.block_k, self.config.group_size
        if group_size <= block_k:
            return k_block * (block_k // group_size)
        return k_block >> ((group_size // block_k).bit_length() - 1)

    def weight_tile(self, shape, work_tile, index):
        """Number, in the blob, of the ``index``-th tile of a work tile's block of output features."""
        # Of the last block, tiles behind the last one are that one again.
        return cutlass.min(work_tile.block * self.config.block_tiles + index, shape.num_tiles - 1)
