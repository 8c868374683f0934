"""Scales rows of x as they become limbs: by a factor for each input, and by one for the row that makes its mean square
1.

A CTA that makes limbs itself has x in registers, so an input scale, or an RMSNorm, costs no launch of its own and no
way through memory. Rounded is where a launch before would round: limbs are those of its result. For a norm each CTA
adds up the squares of whole rows, though it may need a part of them: some kilobytes out of L2, while the first weights
are on their way. Factors are the weight's: they are asked for before the wait for the launch before (programmatic
dependent launch), as `cute_kernels.norm` does.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.device_operands import Operands
from cute_kernels.gemm.wgmma.limb_rows import RowLimbs
from cute_kernels.gemm.wgmma.mainloops import FACTOR_ROWS, NORMED

PIECE_BYTES = 16  # 8 inputs
IN_FLIGHT = 4  # pieces that a lane asks for at a time
SUM_BYTES = 4


@dataclass(frozen=True)
class Factors:
    """The factors of a launch. address: of [k], of x's dtype. eps, offset: bits of what a norm adds to a mean square,
    and to its factors."""

    address: Int64
    eps: Int32
    offset: Int32


@dataclass(frozen=True)
class FactoredOperands(Operands):
    """Addresses of a launch whose rows are scaled by factors."""

    factors: Factors


class RowFactors:
    """Factors of a configuration.

    Args:
        kind: `mainloops.SCALED` or `mainloops.NORMED`.
        warps: how many make limbs.
    """

    def __init__(self, kind: str, dtype: str, warps: int):
        self.kind, self.warps = kind, warps
        self.to_floats = RowLimbs(dtype).to_floats
        self.pack = ptx.pack_bf16x2 if dtype == "bf16" else ptx.pack_f16x2

    @cute.jit
    def add_squares(self, x, memory, warp, lane):
        """Adds up the squares of all rows, one sum for each warp that has a part of a row; visible after a barrier."""
        if const_expr(self.kind == NORMED):
            bits = self.row_bits(x)
            row, part, parts = warp & ((1 << bits) - 1), warp >> bits, Int32(self.warps) >> bits
            start = x.address + Int64(cutlass.min(row, x.rows - 1)) * (x.row_pieces * PIECE_BYTES)
            total = Float32(0.0)
            for first in cutlass.range(part * WARP_THREADS, x.row_pieces, parts * WARP_THREADS, unroll=IN_FLIGHT):
                inside = cutlass.select_(first + lane < x.row_pieces, Int32(1), Int32(0))
                # Not as constant memory: the launch before wrote x.
                address = start + Int64(first + lane) * PIECE_BYTES
                words = numbers.load_global_if(inside, address, 0, 4, constant=False)
                squares = [half * half for word in words for half in self.to_floats(word)]
                total = total + lanes.in_pairs(operator.add, squares)
            total = lanes.lane_sum(total, lanes.neighbours(WARP_THREADS))
            # All lanes have it, and store the same.
            ptx.store_shared(memory.row_sums + (row * self.warps + part) * SUM_BYTES, 0, [total])

    def row_bits(self, x):
        """log2 of the rows that warps are distributed to: the number of rows, rounded up to a power of two."""
        bits = FACTOR_ROWS.bit_length() - 1
        return sum((cutlass.select_(x.rows > 1 << i, Int32(1), Int32(0)) for i in range(bits)), Int32(0))

    def of_rows(self, x, memory, lane):
        """The factors of rows by a norm: a lane has that of the row of its number, modulo `FACTOR_ROWS`."""
        if self.kind != NORMED:
            return Float32(1.0)
        parts = Int32(self.warps) >> self.row_bits(x)
        at = memory.row_sums + cutlass.min(lane % FACTOR_ROWS, x.rows - 1) * (self.warps * SUM_BYTES)
        words = [word for i in range(0, self.warps, 4) for word in ptx.load_shared_vector(at, i * SUM_BYTES, 4)]
        sums = [cutlass.select_(parts > i, word.bitcast(Float32), Float32(0.0)) for i, word in enumerate(words)]
        mean = lanes.in_pairs(operator.add, sums) / Float32(x.row_pieces * (PIECE_BYTES // 2))
        return numbers.reciprocal_root(mean + Uint32(x.factors.eps).bitcast(Float32))

    def of_row(self, of_rows, row):
        """The number that `of_rows` has for a row."""
        return of_rows if self.kind != NORMED else cute.arch.shuffle_sync(of_rows, row % FACTOR_ROWS)

    def apply(self, x, words, factors, row_factor) -> list[Any]:
        """Multiplies packed pairs of inputs by their factors, rounded."""
        offset = Uint32(x.factors.offset).bitcast(Float32)
        found = []
        for word, factor in zip(words, factors, strict=True):
            pairs = zip(self.to_floats(word), self.to_floats(factor), strict=True)
            if self.kind == NORMED:
                found.append(self.pack(*(value * row_factor * (scale + offset) for value, scale in pairs)))
            else:
                found.append(self.pack(*(value * scale for value, scale in pairs)))
        return found
