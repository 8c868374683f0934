"""Digits of rows of x, made by the warps that multiply them, where the MMAs read them.

What :mod:`.digit_rows` leaves in memory, bit for bit, each CTA makes of what it needs of x. TMA brings x into the
place of its digits, boxes of 64 inputs of eight rows: 128 inputs of a row are two rows of 128 bytes, and so are their
high and their low digits. Four lanes take 128 inputs of a row, two blocks of 16 each, so that no digit changes lanes
and all of a block's high digits are one vector, as are its low ones. Magnitudes are compared in packed pairs.

A unit's digits are one operand of `wgmma.multiply_bytes`: rows of 128 bytes, first the high digits of all tokens, then
the low ones, pieces of 16 bytes exchanged among eight rows as 128-byte swizzling has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.linear.wgmma.config import BOX_K, DIGIT_GROUP, MMA_TOKENS, DigitRowsConfig
from cute_kernels.linear.wgmma.digit_rows import MAGIC, DigitRowsKernel
from cute_kernels.linear.wgmma.resident_config import GROUP_BOX_BYTES, ResidentConfig
from cute_kernels.sm90 import WARP_THREADS

GROUP_LANES = 4  # that have 128 inputs of a row
STEP_ROWS = 2  # of a warp at a time,
STEP_UNITS = WARP_THREADS // GROUP_LANES // STEP_ROWS  # of so many groups
BLOCK = 16  # inputs whose digits are a piece of 16 bytes
LANE_BLOCKS = DIGIT_GROUP // BLOCK // GROUP_LANES
BLOCK_PIECES = 2  # of 16 bytes of x
PIECE_BYTES = 16
UNIT_BOXES = DIGIT_GROUP // BOX_K  # of eight rows
ROW_BYTES = DIGIT_GROUP  # of digits; and of x, of half of a group
MAGNITUDES = 0x7FFF7FFF
# Added before the digits are taken apart, so that the upper one is rounded; the lower one's first bit is turned by it.
HALF = 128
SIGNS = 0x80808080


@dataclass(frozen=True)
class Boxes:
    """What brings boxes of x: the copy, where they come from and go to, the barrier that counts their bytes."""

    copy: Any
    source: Any  # [box, eight rows, 64 inputs]
    target: Any  # [box, 0, place]
    barrier: Any


class ResidentRows:
    """What the multiplying warps of a :class:`.resident_kernel.ResidentKernel` do with x."""

    def __init__(self, config: ResidentConfig):
        self.config = config
        self.digit_rows = DigitRowsKernel(DigitRowsConfig(config.dtype))

    def boxes(self, memory, copy_x, x_view) -> Boxes:
        """Boxes of x, and where they may go."""
        shape = (MMA_TOKENS, BOX_K)
        targets = cute.group_modes(cute.local_tile(memory.x, shape, (None, 0, None)), 0, 2)
        places = cute.group_modes(cute.local_tile(x_view, shape, (None, None)), 0, 2)
        target, source = cpasync.tma_partition(copy_x, 0, cute.make_layout(1), targets, places)
        return Boxes(copy_x, source, target, memory.x_barrier)

    @cute.jit
    def bring(self, boxes: Boxes, first_place, begin, end, parts, warp):
        """Asks for x of units [begin, end), of so many parts of eight rows, into places from ``first_place`` on.

        Each of the multiplying warps asks for its share, and counts on the barrier.
        """
        count, warps = end - begin, self.config.math_warps
        own = (count - warp + (warps - 1)) // warps
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(boxes.barrier, own * parts * GROUP_BOX_BYTES)
        # All CTAs want the same of x at the same time: each begins with another unit.
        cta, _, _ = cute.arch.block_idx()
        shift = (cta * count) >> 8
        for number in cutlass.range(warp, count, warps, unroll=1):
            unit = number + shift
            unit = cutlass.select_(unit >= count, unit - count, unit)
            for half in cutlass.range_constexpr(UNIT_BOXES):
                for part in cutlass.range_constexpr(self.config.row_parts):
                    if part < parts:
                        place = first_place + (unit * UNIT_BOXES + half) * parts + part
                        source = boxes.source[None, part, (begin + unit) * UNIT_BOXES + half]
                        cute.copy(boxes.copy, source, boxes.target[(None, 0, place)], tma_bar_ptr=boxes.barrier)

    @cute.jit
    def make(self, x_address, x_scales, count, rows, tokens, warp, lane):
        """Digits and scales of so many units of the rows there are, in the place of x, which has come.

        tokens: rows of the operand, a multiple of eight. Visible to MMAs after a barrier of all warps that make them.
        """
        bits = self.step_bits(count)
        steps = ((rows + (STEP_ROWS - 1)) // STEP_ROWS) << bits
        for step in cutlass.range(warp, steps, self.config.math_warps, unroll=1):
            row, unit = self.place(bits, step, lane)
            start = x_address + (unit * 2 * tokens + row) * ROW_BYTES
            scale, digits = self.split(self.load(start, tokens, row, lane))
            cute.arch.sync_warp()  # until all lanes have their inputs
            if unit < count:
                self.store(start, tokens, row, lane, digits)
                if lane % GROUP_LANES == 0:
                    ptx.store_shared(x_scales + (unit * tokens + row) * 4, 0, [scale])
        cute.arch.fence_proxy("async.shared", space="cta")

    def step_bits(self, units) -> Any:
        """log2 of the steps of a row of so many units, rounded up: a division would take as long as a step."""
        most = max(self.config.boxes // STEP_UNITS - 1, 1).bit_length()
        return sum((cutlass.select_(units > STEP_UNITS << i, Int32(1), Int32(0)) for i in range(most)), Int32(0))

    def place(self, bits, step, lane) -> tuple[Any, Any]:
        """(row, unit) of a lane in a step of a warp. Two rows at a time, whose pieces are in different banks."""
        pair, group = step >> bits, lane // GROUP_LANES
        row = pair * STEP_ROWS + group % STEP_ROWS
        return row, (step - (pair << bits)) * STEP_UNITS + group // STEP_ROWS

    def half(self, lane, number: int):
        """Which half of a group a lane's ``number``-th block is in; neighbouring groups' lanes take different ones."""
        return (lane // GROUP_LANES + number) & 1

    def load(self, start, tokens, row, lane) -> list[Any]:
        """A lane's inputs of a step, packed pairs, block by block."""
        words = []
        for number in range(LANE_BLOCKS):
            line = start + self.half(lane, number) * tokens * ROW_BYTES
            for i in range(BLOCK_PIECES):
                piece = (lane % GROUP_LANES * BLOCK_PIECES + i) ^ (row & (MMA_TOKENS - 1))
                words += ptx.load_shared_vector(line + piece * PIECE_BYTES, 0, 4)
        return words

    def split(self, words) -> tuple[Any, list[list[Any]]]:
        """(bits of what a code's byte times a digit counts, [block] words of its high digits, then of its low ones)."""
        greater = self.greater
        packed = lanes.over_lanes(greater, lanes.in_pairs(greater, words), lanes.neighbours(GROUP_LANES))
        pair = [Int32(value.bitcast(Uint32)) for value in self.digit_rows.to_floats(packed & Uint32(MAGNITUDES))]
        factor, scale = self.digit_rows.scales_of(cutlass.max(*pair))
        return scale, [self.digits(words[8 * i : 8 * i + 8], factor) for i in range(LANE_BLOCKS)]

    def greater(self, a, b):
        """Of packed pairs the elements of greater magnitude, with any sign; NaN if there is one."""
        return numbers.greater_magnitude(a, b, dtype=self.config.dtype)

    def digits(self, words, factor) -> list[Any]:
        """High digits of 16 inputs, then low ones, four words each: the first and the second eight inputs in turn."""
        rounded = Uint32(MAGIC + HALF).bitcast(Float32)
        values = [half for word in words for half in self.digit_rows.to_floats(word)]
        fixed = [ptx.fma(value, factor, rounded).bitcast(Uint32) for value in values]
        # Each word: low digits of two inputs, then their high ones.
        pairs = [ptx.prmt(fixed[i], fixed[8 + i], Uint32(0x5140)) for i in range(8)]
        high = [ptx.prmt(pairs[i], pairs[i + 1], Uint32(0x7632)) for i in range(0, 8, 2)]
        low = [ptx.prmt(pairs[i], pairs[i + 1], Uint32(0x5410)) ^ Uint32(SIGNS) for i in range(0, 8, 2)]
        return high + low

    def store(self, start, tokens, row, lane, digits) -> None:
        """Puts a lane's digits of a row's unit where MMAs read them."""
        for number, words in enumerate(digits):
            block = lane % GROUP_LANES + self.half(lane, number) * GROUP_LANES
            address = start + (block ^ (row & (MMA_TOKENS - 1))) * PIECE_BYTES
            ptx.store_shared(address, 0, words[:4])
            ptx.store_shared(address + tokens * ROW_BYTES, 0, words[4:])
