"""Hadamard transforms of a team's row: butterflies in a lane's registers, then between lanes; or by tensor cores.

A transform of width w acts on blocks of w neighbouring columns, in natural (Sylvester) order: entry (i, j) of its
matrix is (-1)**popcount(i & j) / sqrt(w). It is its own inverse. Each bit of a column's number is one butterfly step:
in registers where a lane owns both columns, else one xor shuffle and one multiply-add per column.

Tensor cores take four steps at a time, those of two bits of a lane's number and of two of its registers. Operand A of
an m16n8k16 product wants just what lanes hold: lane 4 g + t four numbers of row g and four of row g + 8. Signs are
operand B, and results lie where the numbers lay. bf16 has 8 bits, so numbers and 1 / sqrt(w) are sums of two.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.device import numbers, ptx

QUAD = 4  # lanes that share a row of an MMA's operand, and numbers of a row that each of them holds
SIGNS, HIGH_SIGN = 0x80008000, 0x80000000  # of a packed pair
BF16_BITS = 8  # of a mantissa


@dataclass(frozen=True)
class Hadamard:
    """The transform of rows whose columns lie in lanes as :class:`cute_kernels.device.rows.Elements` has them.

    Args:
        width: columns of a block, a power of two; 1 changes nothing.
        head_dim, lanes, runs: columns of a row, lanes that share it, runs of columns of a lane; with a width beyond 1
            powers of two, all of them.
    """

    width: int
    head_dim: int
    lanes: int
    runs: int = 1

    @property
    def run_columns(self) -> int:
        """Neighbouring columns of a lane."""
        return self.head_dim // self.lanes // self.runs

    def apply(self, values, lane: Int32) -> None:
        """Transforms the lane's columns, fp32, in place; all lanes of the warp take part.

        Bit by bit from the lowest, then times 1 / sqrt(width): additions are those of
        :func:`cute_kernels.kv_cache.transforms.rotated`, in its order, so that fp32 results are the same.
        """
        if self.width == 1:
            return
        for bit in range(self.width.bit_length() - 1):
            self._step(values, 1 << bit, lane)
        for i in range(self.count):
            values[i] = numbers.multiply(values[i], Float32(1.0 / math.sqrt(self.width)))

    @property
    def count(self) -> int:
        """Columns of a lane."""
        return self.head_dim // self.lanes

    @property
    def multiplies(self) -> bool:
        """Whether tensor cores can take part: blocks are as wide as a quad's runs, and numbers fill whole operands."""
        return self.width >= QUAD * self.run_columns and self.run_columns % QUAD == 0 and self.count % (2 * QUAD) == 0

    def multiply(self, values, lane: Int32) -> None:
        """As `apply`, to within 2**-17 of a row's largest number, and in fewer instructions: for what is rounded to 16
        bits next. Infinities become NaN."""
        if not self.multiplies:
            self.apply(values, lane)
            return
        high, low = self._signed_roots(lane)
        for first in range(0, self.count, 2 * QUAD):
            self._multiply_rows(values, first, high, low)
        run = self.run_columns
        for bit in range(self.width.bit_length() - 1):
            if bit >= 2 and not run <= 1 << bit < QUAD * run:
                self._step(values, 1 << bit, lane)

    def _signed_roots(self, lane: Int32) -> tuple[Uint32, Uint32]:
        """A lane's part of operand B, as two bf16 pairs whose sum is it: 1 / sqrt(width) with the signs of the matrix
        for rows 4 t, 4 t + 1 and column 4 (g / 2) + g % 2, where lane = 4 g + t."""
        inner, outer = lane % QUAD, lane // QUAD
        both = inner & (outer // 2)
        signs = cutlass.select_(((both ^ (both // 2)) & 1) != 0, Uint32(SIGNS), Uint32(0))
        signs = signs ^ cutlass.select_((outer & 1) != 0, Uint32(HIGH_SIGN), Uint32(0))
        root = 1.0 / math.sqrt(self.width)
        nearest = _bf16(root)
        return Uint32(_pair(nearest)) ^ signs, Uint32(_pair(root - nearest)) ^ signs

    def _multiply_rows(self, values, first: int, high: Uint32, low: Uint32) -> None:
        """A quad's numbers from ``first`` on: four of one row of A, then four of the row 8 further down."""
        exact = self.width.bit_length() % 2  # 1 / sqrt(width) is a power of two
        places = [[first + row + column + i for i in range(2)] for column in (0, 2) for row in (0, QUAD)]
        large = [ptx.pack_bf16x2(*(values[i] for i in pair)) for pair in places]
        small = []
        for pair, word in zip(places, large, strict=True):
            parts = ptx.bf16x2_low_to_float(word), ptx.bf16x2_high_to_float(word)
            rest = (numbers.add(values[i], -part) for i, part in zip(pair, parts, strict=True))
            small.append(ptx.pack_bf16x2(*rest))
        found = []
        for half in range(2):
            sign = Uint32(SIGNS * half)
            sums = [Float32(0.0)] * 4
            sums = ptx.mma_m16n8k16(sums, large, (high, high ^ sign), dtype="bf16")
            sums = ptx.mma_m16n8k16(sums, small, (high, high ^ sign), dtype="bf16")
            if not exact:
                sums = ptx.mma_m16n8k16(sums, large, (low, low ^ sign), dtype="bf16")
            found.append(sums)
        for half, sums in enumerate(found):
            for row in range(2):
                for i in range(2):
                    values[first + QUAD * row + 2 * half + i] = sums[2 * row + i]

    def _step(self, values, step: int, lane: Int32) -> None:
        """The butterflies of columns that are ``step`` apart."""
        run, part = self.run_columns, self.head_dim // self.runs
        if step < run:
            self._within_lane(values, self.count, step)
        elif step < part:
            self._between_lanes(values, self.count, step // run, lane)
        else:
            self._within_lane(values, self.count, run * step // part)

    def _within_lane(self, values, count: int, distance: int) -> None:
        for i in range(count):
            if not i & distance:
                low, high = values[i], values[i + distance]
                values[i] = numbers.add(low, high)
                values[i + distance] = numbers.add(low, -high)

    def _between_lanes(self, values, count: int, distance: int, lane: Int32) -> None:
        sign = cutlass.select_((lane & distance) != 0, Float32(-1.0), Float32(1.0))
        for i in range(count):
            values[i] = ptx.fma(values[i], sign, cute.arch.shuffle_sync_bfly(values[i], offset=distance))


def _bf16(x: float) -> float:
    """The bf16 number nearest to x, above 0."""
    unit = 2.0 ** (math.floor(math.log2(x)) - BF16_BITS + 1)
    return round(x / unit) * unit


def _pair(x: float) -> int:
    """bf16 x twice in a word; x is rounded."""
    if x == 0:
        return 0
    bits = int.from_bytes(struct.pack(">f", math.copysign(_bf16(abs(x)), x))[:2], "big")
    return bits << 16 | bits
