"""Digits of rows of x, made by the warps that multiply them, where the MMAs read them.

What :mod:`.digit_rows` leaves in memory, bit for bit, each CTA makes of what it needs of x, before the first weights
have come. Four lanes take 128 inputs of a row, two blocks of 16 each, so that no digit changes lanes and all of a
block's high digits are one vector, as are its low ones. Magnitudes are compared in packed pairs.

A unit's digits are one operand of `wgmma.multiply_bytes`: rows of 128 bytes, first the high digits of all tokens, then
the low ones, pieces of 16 bytes exchanged among eight rows as 128-byte swizzling has them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.linear.wgmma.config import DIGIT_GROUP, MMA_TOKENS, DigitRowsConfig
from cute_kernels.linear.wgmma.digit_rows import MAGIC, PIECE_BYTES, DigitRowsKernel
from cute_kernels.linear.wgmma.resident_config import ResidentConfig
from cute_kernels.sm90 import WARP_THREADS

GROUP_LANES = 4  # that have 128 inputs of a row
BLOCK = 16  # inputs whose digits are a piece of 16 bytes
LANE_BLOCKS = DIGIT_GROUP // BLOCK // GROUP_LANES
STEP_GROUPS = WARP_THREADS // GROUP_LANES
BLOCK_PIECES = 2  # of 16 bytes of x
GROUP_PIECES = DIGIT_GROUP // BLOCK * BLOCK_PIECES
STEP_WORDS = 4 * BLOCK_PIECES * LANE_BLOCKS
ROW_BYTES = DIGIT_GROUP  # of digits
MAGNITUDES = 0x7FFF7FFF
# Added before the digits are taken apart, so that the upper one is rounded; the lower one's first bit is turned by it.
HALF = 128
SIGNS = 0x80808080


class ResidentRows:
    """What the multiplying warps of a :class:`.resident_kernel.ResidentKernel` do with x."""

    def __init__(self, config: ResidentConfig):
        self.config = config
        self.digit_rows = DigitRowsKernel(DigitRowsConfig(config.dtype))

    @cute.jit
    def make(self, x: Int64, shape, memory, begin, end, tokens, warp, lane):
        """Digits and scales of units [begin, end) of every row.

        tokens: rows of the operand, a multiple of eight. Visible to MMAs after a barrier of all warps that make them.
        """
        octet_bits = self.octet_bits(end - begin)
        # All CTAs want the same of x at the same time: each begins with another row.
        cta, _, _ = cute.arch.block_idx()
        first_row = (cta * shape.m) >> 8
        count = shape.m << octet_bits
        words = cute.make_rmem_tensor(STEP_WORDS, Uint32)
        coming = cute.make_rmem_tensor(STEP_WORDS, Uint32)
        self.load(x, shape, begin, octet_bits, warp, lane, count, first_row, coming)
        for step in cutlass.range(warp, count, self.config.math_warps, unroll=1):
            for i in cutlass.range_constexpr(STEP_WORDS):
                words[i] = coming[i]
            self.load(x, shape, begin, octet_bits, step + self.config.math_warps, lane, count, first_row, coming)
            row, unit = self.place(octet_bits, step, lane, first_row, shape.m)
            scale, digits = self.split([words[i] for i in range(STEP_WORDS)])
            if begin + unit < end:
                self.store(memory, tokens, row, unit, lane, digits)
                if lane % GROUP_LANES == 0:
                    ptx.store_shared(memory.x_scales + (unit * tokens + row) * 4, 0, [scale])
        cute.arch.fence_proxy("async.shared", space="cta")

    def octet_bits(self, units) -> Any:
        """log2 of the steps of a row of so many units, rounded up: a division would take as long as a step."""
        most = max(self.config.boxes // STEP_GROUPS - 1, 1).bit_length()
        return sum((cutlass.select_(units > STEP_GROUPS << i, Int32(1), Int32(0)) for i in range(most)), Int32(0))

    def place(self, octet_bits, step, lane, first_row, rows) -> tuple[Any, Any]:
        """(row, unit of those there are) of a lane in a step of a warp."""
        row = step >> octet_bits
        unit = (step - (row << octet_bits)) * STEP_GROUPS + lane // GROUP_LANES
        row = row + first_row
        return cutlass.select_(row >= rows, row - rows, row), unit

    def block(self, lane, number: int):
        """A lane's ``number``-th block of 128 inputs; neighbouring groups' lanes store to different banks."""
        first = lane % GROUP_LANES
        return first + ((lane // GROUP_LANES + number) & 1) * GROUP_LANES

    def load(self, x, shape, begin, octet_bits, step, lane, count, first_row, words) -> None:
        """Asks for a lane's inputs of a step, packed pairs; zeros behind the end of a row and of all steps."""
        row, unit = self.place(octet_bits, step, lane, first_row, shape.m)
        row_pieces = shape.k // (PIECE_BYTES // 2)
        first = (begin + unit) * GROUP_PIECES
        start = x + (Int64(row) * row_pieces + first) * PIECE_BYTES
        there = cutlass.select_(step < count, row_pieces - first, Int32(0))
        for number in range(LANE_BLOCKS):
            block = self.block(lane, number)
            for half in range(BLOCK_PIECES):
                piece = block * BLOCK_PIECES + half
                inside = cutlass.select_(piece < there, Int32(1), Int32(0))
                loaded = numbers.load_global_if(inside, start + Int64(piece) * PIECE_BYTES, 0, 4)
                for i in range(4):
                    words[(number * BLOCK_PIECES + half) * 4 + i] = loaded[i]

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

    def store(self, memory, tokens, row, unit, lane, digits) -> None:
        """Puts a lane's digits of a row's unit where MMAs read them."""
        start = memory.x_address + (unit * 2 * tokens + row) * ROW_BYTES
        for number, words in enumerate(digits):
            piece = self.block(lane, number) ^ (row & (MMA_TOKENS - 1))
            address = start + piece * 16
            ptx.store_shared(address, 0, words[:4])
            ptx.store_shared(address + tokens * ROW_BYTES, 0, words[4:])
