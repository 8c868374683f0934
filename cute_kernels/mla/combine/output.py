"""Writes a warpgroup's accumulators as output, or as the partial result of a part of a row."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.lanes import lane_max, transpose_quad
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.mla.config import V_HEAD_DIM, PartialForm
from cute_kernels.mla.elements import ElementType
from cute_kernels.mla.mainloops.softmax import ROW_LANES, row_of
from cute_kernels.mla.work import partial_stats, partial_values

HALF = V_HEAD_DIM // 2
WARP_ROWS = 16
UNIT_OFFSET = 8  # of a part's statistics
FP16_TOP = 14  # the power of 2 that the greatest fp16 of a half is not below
PIECE_PITCH = 64  # bytes from a lane's 16 bytes of a row to its next


class Writer:
    """The stores of the consumer warpgroups.

    Attributes:
        numbers: the element type of the output.
        partials: the form of partial results.
    """

    def __init__(self, numbers: ElementType, partials: PartialForm):
        self.numbers = numbers
        self.partials = partials

    @cute.jit
    def finish_rows(self, work, results, maxima, totals, warp, lane):
        """Writes the statistics of a thread's two rows. Returns the factors by which the caller multiplies
        accumulators.

        maxima (as exponents of 2), totals: rmem fp32 [2], the same in the four lanes of a row.
        """
        factors = []
        for i in cutlass.range_constexpr(2):
            head = warp * WARP_ROWS + lane // 4 + 8 * i
            exists = (head + work.first_head < work.shape.num_heads) & (lane % 4 == 0)
            query_row = work.query_row(head)
            factor = Float32(1.0)
            if work.shape.num_parts > 1:
                if exists:
                    place = partial_stats(results, work.shape, query_row, work.part, self.partials)
                    ptx.store_global(place, [maxima[i], totals[i]])
            else:
                factor = self.finish_row(results, maxima[i], totals[i], query_row, work.first_head + head, exists)
            factors.append(factor)
        return factors

    @cute.jit
    def finish_row(self, results, maximum, total, query_row, head, exists) -> Float32:
        """Writes a row's log-sum-exp, and its largest score if ``results`` has an address for it. Returns 1 / (sum of
        the row's weights and its sink's weight), or 0 for a row without tokens."""
        denominator = total
        if exists_sink(results):
            if exists:
                sink = ptx.load_global_words(results.sinks + Int64(head) * 4, 0, 1)[0].bitcast(Float32)
                denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -maximum))
        lse = (maximum + ptx.log2(total)) * ptx.LN_2
        top = maximum * ptx.LN_2
        factor = ptx.reciprocal(denominator)
        if total == 0.0:
            lse, top = Float32.inf, -Float32.inf
            factor = Float32(0.0)
        if exists:
            ptx.store_global(results.lse + Int64(query_row) * 4, [lse])
            if results.max_logits != 0:
                ptx.store_global(results.max_logits + Int64(query_row) * 4, [top])
        return cute.arch.shuffle_sync(factor, cute.arch.lane_idx() & 28)

    @cute.jit
    def write(self, work, results, acc, factors, warp, lane, half: cutlass.Constexpr):
        """Writes a warpgroup's half of the columns, as output or as a partial result."""
        if work.shape.num_parts > 1:
            if work.begin < work.end:
                if const_expr(self.partials.value_bytes == 4):
                    self.write_whole(work, results, acc, warp, lane, half)
                else:
                    self.write_scaled(work, results, acc, warp, lane, half)
        else:
            self.store(work, results, acc, factors, warp, lane, half)

    @cute.jit
    def store(self, work, results, acc, factors, warp, lane, half: cutlass.Constexpr):
        """Stores results directly from registers, since shared memory already holds the next work tile. The four lanes
        of a row exchange words until each lane has 16 neighbouring bytes. Together they write 64 bytes.
        """
        for below in cutlass.range_constexpr(2):
            head = warp * WARP_ROWS + lane // 4 + 8 * below
            place = self.place(results, work.query_row(head), lane, half)
            pieces = self.pieces(acc, factors[below], below, lane, self.numbers.pack)
            if work.first_head + head < work.shape.num_heads:
                for i in cutlass.range_constexpr(len(pieces)):
                    ptx.store_global(place + PIECE_PITCH * i, pieces[i])

    def place(self, results, query_row, lane, half: int):
        """Returns the address of a lane's first piece of an output row."""
        return results.out + piece_offset(lane, half) + Int64(query_row) * (V_HEAD_DIM * 2)

    def pieces(self, acc, factor, below: int, lane, pack) -> list[list[Any]]:
        """Multiplies a lane's accumulators of one row by ``factor`` and packs them. Returns pieces of 8 neighbouring
        columns. A lane has every fourth piece of its warpgroup's half. below: index, 0 or 1, of the row among the
        lane's two rows.
        """
        pairs = [i for i in range(0, HALF // 2, 2) if row_of(i) == below]
        words = [pack(acc[i] * factor, acc[i + 1] * factor) for i in pairs]
        return [transpose_quad(words[i : i + 4], lane) for i in range(0, len(words), 4)]

    @cute.jit
    def write_whole(self, work, results, acc, warp, lane, half: cutlass.Constexpr):
        """Writes a part's unnormalised values in fp32. The four lanes of a row write 32 bytes together."""
        for below in cutlass.range_constexpr(2):
            head = warp * WARP_ROWS + lane // 4 + 8 * below
            if work.first_head + head < work.shape.num_heads:
                place = partial_values(results, work.shape, work.query_row(head), work.part, self.partials)
                place = place + (half * HALF * 4 + lane % 4 * 8)
                for i in cutlass.range_constexpr(0, HALF // 2, 4):
                    first = i + 2 * below
                    ptx.store_global(place + sum_place(i)[1] * 4, [acc[first], acc[first + 1]])

    @cute.jit
    def write_scaled(self, work, results, acc, warp, lane, half: cutlass.Constexpr):
        """Writes a part's unnormalised values in fp16, with the columns in the same lanes as in :meth:`store`. Also
        writes the powers of 2 by which the combine multiplies these values.
        """
        scales = [scale_of(acc, below) for below in range(2)]
        for below in cutlass.range_constexpr(2):
            # Else the compiler begins with all columns at once, which there are no registers for.
            cute.arch.sync_warp()
            head = warp * WARP_ROWS + lane // 4 + 8 * below
            query_row = work.query_row(head)
            place = partial_values(results, work.shape, query_row, work.part, self.partials) + piece_offset(lane, half)
            stats = partial_stats(results, work.shape, query_row, work.part, self.partials)
            scale, unit = scales[below]
            pieces = self.pieces(acc, scale, below, lane, ptx.pack_f16x2)
            if work.first_head + head < work.shape.num_heads:
                for i in cutlass.range_constexpr(len(pieces)):
                    ptx.store_global(place + PIECE_PITCH * i, pieces[i])
                if lane % 4 == 0:
                    ptx.store_global(stats, [unit], offset=UNIT_OFFSET + 4 * half)


def piece_offset(lane, half: int):
    """Returns the bytes from a row's first element to a lane's first piece."""
    return half * HALF * 2 + lane % 4 * 16


def scale_of(acc, below: int) -> tuple[Float32, Float32]:
    """Returns the result of :func:`scale_of_some` for the warpgroup's half of a row. below: index, 0 or 1, of the row
    among a lane's two rows.
    """
    return scale_of_some([acc[i] for i in range(HALF // 2) if row_of(i) == below])


def scale_of_some(acc) -> tuple[Float32, Float32]:
    """Returns (scale, 1 / scale). The scale is a power of 2. It brings the largest magnitude of ``acc`` over the four
    lanes of a row to between 2**14 and 2**15."""
    tops: list[Any] = [Float32(0.0)] * 2
    for place, i in enumerate(range(len(acc))):
        tops[place % 2] = ptx.fmax(tops[place % 2], ptx.absolute(acc[i]))
    exponent = numbers.bits(lane_max(ptx.fmax(*tops), ROW_LANES)) >> 23
    exponent = cutlass.max(exponent, Uint32(FP16_TOP + 1))
    scale, unit = Uint32(254 + FP16_TOP) - exponent, exponent - FP16_TOP
    return numbers.from_bits(scale << 23), numbers.from_bits(unit << 23)


def exists_sink(results):
    """Returns whether there are sinks."""
    return results.sinks != 0
