"""Digits of rows of x, made by the warps that multiply them, where the MMAs read them.

What :mod:`.digit_rows` leaves in memory, bit for bit, each CTA makes of what it needs of x. TMA brings x into the
place of its digits, a unit at a time: 128 inputs of a row are two rows of 128 bytes, and so are their high and their
low digits. Of a few rows warps load x themselves, as missing rows would take TMA long to fill in. Four lanes take 128
inputs of a row, two blocks of 16 each, so that no digit changes lanes and all of a block's high digits are one vector,
as are its low ones. Magnitudes are compared in packed pairs.

A unit's digits are one operand of `wgmma.multiply_bytes`: rows of 128 bytes, first the high digits of all tokens, then
the low ones, pieces of 16 bytes exchanged among eight rows as 128-byte swizzling has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.linear.wgmma.config import BOX_K, DIGIT_GROUP, MMA_TOKENS, ROW_DIGIT_BYTES, DigitRowsConfig
from cute_kernels.linear.wgmma.digit_rows import MAGIC, DigitRowsKernel
from cute_kernels.sm90 import WARP_THREADS

GROUP_LANES = 4  # that have 128 inputs of a row
STEP_ROWS = 2  # of a warp at a time,
STEP_UNITS = WARP_THREADS // GROUP_LANES // STEP_ROWS  # of so many groups
BLOCK = 16  # inputs whose digits are a piece of 16 bytes
LANE_BLOCKS = DIGIT_GROUP // BLOCK // GROUP_LANES
BLOCK_PIECES = 2  # of 16 bytes of x
PIECE_BYTES = 16
PIECE_INPUTS = PIECE_BYTES // 2
PIECE_BITS = PIECE_INPUTS.bit_length() - 1
GROUP_PIECES = DIGIT_GROUP // PIECE_INPUTS
STEP_WORDS = LANE_BLOCKS * BLOCK_PIECES * PIECE_BYTES // 4
UNIT_BOXES = DIGIT_GROUP // BOX_K
ROW_BYTES = DIGIT_GROUP  # of digits; and of x, of half of a group
MAGNITUDES = 0x7FFF7FFF
# Added before the digits are taken apart, so that the upper one is rounded; the lower one's first bit is turned by it.
HALF = 128
SIGNS = 0x80808080


@dataclass(frozen=True)
class Source:
    """x, and what brings units of it."""

    address: Any
    rows: Any
    row_pieces: Any  # of 16 bytes
    copy: Any
    view: Any  # as boxes are taken from it: [rows, 64 inputs, K / 64]
    places: Any  # [a unit, number]
    barrier: Any  # that counts their bytes


class RowsRoom(Protocol):
    """What of a configuration says how digits are made; its fields are those of `ResidentConfig`."""

    @property
    def dtype(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def math_warps(self) -> int: ...
    @property
    def boxes(self) -> int: ...
    @property
    def loads(self) -> bool: ...


class ResidentRows:
    """What the multiplying warps of a :class:`.resident_kernel.ResidentKernel` do with x."""

    constant = True  # whether nobody writes x while the kernel runs

    def __init__(self, config: RowsRoom):
        self.config = config
        self.digit_rows = DigitRowsKernel(DigitRowsConfig(config.dtype))

    def source(self, operands, shape, memory, copy_x, x_view) -> Source:
        """x of a launch."""
        places = cute.group_modes(cute.local_tile(memory.x, self.unit, (0, 0, None)), 0, 3)
        return Source(operands.x, shape.m, shape.k >> PIECE_BITS, copy_x, x_view, places, memory.x_barrier)

    @property
    def unit(self) -> tuple[int, int, int]:
        """What TMA brings at a time: rows, inputs, blocks of inputs."""
        return self.config.tokens, BOX_K, UNIT_BOXES

    def unit_copy(self, x, layout) -> tuple[Any, Any]:
        """What brings a unit of x into boxes one behind the other, and x as units are taken from it.

        x: [m, k]; of rows that are no multiple of 64 inputs the rest is not brought. layout: of a unit there.
        """
        m, k = x.shape
        view = cute.make_tensor(x.iterator, cute.make_layout((m, BOX_K, k // BOX_K), stride=(k, 1, BOX_K)))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, layout, self.unit)

    @cute.jit
    def bring(self, x: Source, first_place, begin, end, warp):
        """Asks for x of units [begin, end), into places from ``first_place`` on.

        Each of the multiplying warps asks for its share, and counts on the barrier.
        """
        count, warps = end - begin, self.config.math_warps
        own = (count - warp + (warps - 1)) // warps
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(x.barrier, own * (ROW_DIGIT_BYTES * self.config.tokens))
        # All CTAs want the same of x at the same time: each begins with another unit.
        cta, _, _ = cute.arch.block_idx()
        shift = (cta * count) >> 8
        units = cute.domain_offset((0, 0, begin * UNIT_BOXES), x.view)
        units = cute.group_modes(cute.local_tile(units, self.unit, (0, 0, None)), 0, 3)
        target, source = cpasync.tma_partition(x.copy, 0, cute.make_layout(1), x.places, units)
        for number in cutlass.range(warp, count, warps, unroll=1):
            unit = number + shift
            unit = cutlass.select_(unit >= count, unit - count, unit)
            cute.copy(x.copy, source[None, unit], target[None, first_place + unit], tma_bar_ptr=x.barrier)

    @cute.jit
    def make(self, x: Source, memory, begin, end, warp, lane):
        """Digits and scales of units [begin, end), in the place of x, where it has come, or of x that is loaded.

        Visible to MMAs after a barrier of all warps that make them.
        """
        bits, tokens = self.step_bits(end - begin), self.config.tokens
        steps = ((x.rows + (STEP_ROWS - 1)) // STEP_ROWS) << bits
        words = cute.make_rmem_tensor(STEP_WORDS, Uint32)
        coming = cute.make_rmem_tensor(STEP_WORDS, Uint32)
        if const_expr(self.config.loads):
            self.keep(coming, self.load_global(x, begin, bits, steps, warp, lane))
        for step in cutlass.range(warp, steps, self.config.math_warps, unroll=1):
            row, unit = self.place(bits, step, lane)
            start = memory.x_address + (unit * 2 * tokens + row) * ROW_BYTES
            if const_expr(self.config.loads):
                self.keep(words, [coming[i] for i in range(STEP_WORDS)])
                following = step + self.config.math_warps
                self.keep(coming, self.load_global(x, begin, bits, steps, following, lane))
            else:
                self.keep(words, self.load(start, tokens, row, lane))
            scale, digits = self.split([words[i] for i in range(STEP_WORDS)])
            cute.arch.sync_warp()  # until all lanes have their inputs
            if begin + unit < end:
                self.store(start, tokens, row, lane, digits)
                if lane % GROUP_LANES == 0:
                    ptx.store_shared(memory.x_scales + (unit * tokens + row) * 4, 0, [scale])
        cute.arch.fence_proxy("async.shared", space="cta")

    @staticmethod
    def keep(registers, values) -> None:
        """Puts values into a tensor of registers."""
        for i, value in enumerate(values):
            registers[i] = value

    def load_global(self, x: Source, begin, bits, steps, step, lane) -> list[Any]:
        """As :meth:`load`, of x in memory; zeros behind its rows, the ends of rows and all steps."""
        row, unit = self.place(bits, step, lane)
        first = (begin + unit) * GROUP_PIECES
        start = x.address + (Int64(self.source_row(x, row)) * x.row_pieces + first) * PIECE_BYTES
        there = cutlass.select_((step < steps) & (row < x.rows), x.row_pieces - first, Int32(0))
        words = []
        for number in range(LANE_BLOCKS):
            block = lane % GROUP_LANES + self.half(lane, number) * GROUP_LANES
            for i in range(BLOCK_PIECES):
                piece = block * BLOCK_PIECES + i
                inside = cutlass.select_(piece < there, Int32(1), Int32(0))
                words += numbers.load_global_if(
                    inside, start + Int64(piece) * PIECE_BYTES, 0, 4, constant=self.constant
                )
        return words

    def source_row(self, x: Source, row) -> Any:
        """Which row of x is the ``row``-th of those whose digits are made; here the same."""
        return row

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
