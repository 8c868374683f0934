"""What the copying warps of a CTA do: activations by TMA, codes, scales and zero points by bulk copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.device import numbers, ptx
from cute_kernels.device.ring import advance
from cute_kernels.linear.config import SCALE_BYTES, ZERO_BYTES
from cute_kernels.linear.wgmma.config import BOX_K, WgmmaConfig
from cute_kernels.linear.wgmma.tiles import parts_with
from layouts.weights.hopper import TILE_BYTES

ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def product(a, b) -> Int64:
    """a * b in 64 bits, of 32-bit numbers that are not negative: one instruction, where signs would take six."""
    return Int64(Uint32(a)) * Int64(Uint32(b))


class CopyingWarps:
    """The part of a kernel that fills its ring; ``config`` is its configuration."""

    if TYPE_CHECKING:
        config: WgmmaConfig
        asks_first: bool

    def x_layout(self):
        """[tokens, BOX_K, boxes of all stages], swizzled as wgmma wants its B operand."""
        config = self.config
        return self.boxes_layout(config.tokens, config.num_stages * config.unit_k // BOX_K)

    def box_copy(self, x):
        """What brings a box of x, and x as boxes are taken from it."""
        rows = self.config.part_tokens
        box = cute.slice_(self.boxes_layout(rows, 1), (None, None, 0))
        sharing = self.config.sharing
        if const_expr(sharing > 1):
            operation = cpasync.CopyBulkTensorTileG2SMulticastOp()
            return cpasync.make_tiled_tma_atom(operation, x, box, (rows, BOX_K), num_multicast=sharing)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, box, (rows, BOX_K))

    def boxes_layout(self, rows: int, count: int):
        """[rows, BOX_K, count], swizzled; one box behind the other."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, ELEMENTS[self.config.dtype])
        return cute.tile_to_shape(atom, (rows, BOX_K, count), order=(0, 1, 2))

    @cute.jit
    def copy_activations(self, shape, memory, items, copy_x, x_view):
        """Brings the activations of every unit, a box of 64 inputs of a part of a tile's rows at a time; one warp.

        Parts without rows are left out: rows that x does not have would cost TMA the time of writing zeros, rows of
        somebody else that of bringing them. CTAs that share activations bring a slice of each box, to all of them: a
        stage is free for that when all of them have given it back, and has come when all slices have.
        """
        config = self.config
        self.wait_for_activations()
        boxes, parts = config.unit_k // BOX_K, config.row_parts
        targets = cute.group_modes(cute.local_tile(memory.x, (config.part_tokens, BOX_K), (None, 0, None)), 0, 2)
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(items.first, items.count, items.stride, unroll=1):
            item = items.item(index)
            first_row, _ = self.rows_of(shape, item)
            rows = cute.domain_offset((first_row, 0), x_view)
            places = cute.group_modes(cute.local_tile(rows, (config.part_tokens, BOX_K), (None, None)), 0, 2)
            rank = items.rank if const_expr(config.sharing > 1) else 0
            target, source = cpasync.tma_partition(copy_x, rank, cute.make_layout(config.sharing), targets, places)
            present = self.parts_of(shape, item)
            size = present * (config.x_stage_bytes // parts) + config.x_scale_stage_bytes
            for unit in cutlass.range(item.begin, item.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                barrier = memory.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
                    self.copy_beside(shape, memory, item, unit, stage)
                for part in cutlass.range_constexpr(parts):
                    if part < present:
                        for box in cutlass.range_constexpr(boxes):
                            chosen = source[None, part, unit * boxes + box]
                            place = target[(None, *self.box_place(stage, part, box, present))]
                            if const_expr(config.sharing > 1):
                                everybody = cutlass.Int16((1 << config.sharing) - 1)
                                cute.copy(copy_x, chosen, place, tma_bar_ptr=barrier, mcast_mask=everybody)
                            else:
                                cute.copy(copy_x, chosen, place, tma_bar_ptr=barrier)
                stage, phase = advance(stage, phase, config.num_stages)

    def wait_for_activations(self) -> None:
        """Before any is asked for: here they are there when the launch begins."""

    def box_place(self, stage, part: int, box: int, present) -> tuple[Any, Any]:
        """(part, box of the ring) where a part's box lies, of a tile of which ``present`` parts have rows."""
        return part, stage * (self.config.unit_k // BOX_K) + box

    def copy_beside(self, shape, memory, item, unit, stage) -> None:
        """Asks for what a stage has of x besides its boxes, ``x_scale_stage_bytes``; one lane. Here nothing."""

    def rows_of(self, shape, item) -> tuple[Any, Any]:
        """The first row of x of an item, and what is behind the last that its tile may have."""
        first = item.token_tile * self.config.tokens
        if const_expr(self.config.cuts_rows):
            part = self.config.part_tokens
            first = first + item.split * part
            return first, cutlass.min(shape.m, cutlass.select_(item.splits > 1, first + part, shape.m))
        return first, shape.m

    def x_scale_shift(self, item):
        """How many scales of x lie between the last multiple of 16 bytes and an item's first one."""
        return Int32(0)

    def parts_of(self, shape, item):
        """How many parts of an item's tile have rows."""
        first, end = self.rows_of(shape, item)
        return parts_with(self.config, end - first)

    def prefetch_units(self, operands, shape, items) -> None:
        """Asks for the codes of the first item's first units into L2, where a configuration says so; one lane.

        It needs no barrier, so it is asked before there are any, and a tile's units are one run of bytes: one
        instruction for what the ring asks for in several rounds of its loop. Where the
        run would end behind the tile's nothing is asked.
        """
        units = self.config.prefetched_units
        if not units:
            return
        item, unit_bytes = items.item(items.first), self.config.unit_tiles * TILE_BYTES
        inside = cutlass.select_(item.begin + units <= shape.units, Int32(1), Int32(0))
        for i in range(self.config.block_tiles):
            first = product(self.weight_tile(shape, item, i), shape.units) + item.begin
            numbers.prefetch_bulk_if(inside, operands.codes + first * unit_bytes, Int32(units * unit_bytes))

    def copy_first_unit(self, operands, shape, memory, items):
        """Asks for the first unit of the first item; one lane."""
        item = items.item(items.first)
        self.copy_unit(operands, shape, memory, item, item.begin, Int32(0))

    @cute.jit
    def copy_weights(self, operands, shape, memory, items):
        """Brings codes, scales and zero points of every unit that `copy_first_unit` has not asked for; one warp."""
        config = self.config
        there = Int32(1 if self.asks_first else 0)
        stage, phase = there, Int32(1)
        for index in cutlass.range(items.first, items.count, items.stride, unroll=1):
            item = items.item(index)
            begin = item.begin + there
            there = Int32(0)
            for unit in cutlass.range(begin, item.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                with cute.arch.elect_one():
                    self.copy_unit(operands, shape, memory, item, unit, stage)
                stage, phase = advance(stage, phase, config.num_stages)

    def copy_unit(self, operands, shape, memory, item, unit, stage):
        """Asks for a unit of a block: of each tile a run of codes, one of scales, one of zero points."""
        config = self.config
        barrier = memory.full + stage
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.weight_stage_bytes)
        address = Int32(barrier.toint())
        tile_bytes = config.unit_tiles * TILE_BYTES
        group_bytes = config.unit_groups * SCALE_BYTES
        zero_bytes = config.unit_groups * ZERO_BYTES
        for i in range(config.block_tiles):
            tile = self.weight_tile(shape, item, i)
            ptx.bulk_copy_to_shared(
                memory.codes + stage * config.code_stage_bytes + i * tile_bytes,
                operands.codes + (product(tile, shape.units) + unit) * tile_bytes,
                Int32(tile_bytes),
                address,
            )
            if config.group_size:
                group = product(tile, shape.scale_groups) + self.first_unit_group(unit)
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

    def first_unit_group(self, unit):
        """The first group that a unit has a part of; a shift where it is one of several units."""
        unit_k, group_size = self.config.unit_k, self.config.group_size
        if group_size <= unit_k:
            return unit * (unit_k // group_size)
        return unit >> ((group_size // unit_k).bit_length() - 1)

    def weight_tile(self, shape, item, index):
        """Number, in the blob, of the ``index``-th tile of an item's block of output features."""
        # Of the last block, tiles behind the last one are that one again.
        return cutlass.min(item.block * self.config.block_tiles + index, shape.num_tiles - 1)
