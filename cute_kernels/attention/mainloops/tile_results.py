"""Stores a work tile's accumulators: the result, or a split's part of the result."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import ELEMENT_BYTES, WARPGROUP_ROWS, has_head_scale
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.attention.mainloops.tile_queries import WARP_ROWS, query_row
from cute_kernels.device import ptx
from cute_kernels.device.lanes import lane_sum, transpose_quad
from cute_kernels.device.loads import load_float
from cute_kernels.device.softmax import ROW_LANES, row_of, weights_of
from cute_kernels.device.wgmma_tiles import sum_place


class ResultWriter:
    """The writer of a work tile's results, straight from registers."""

    def __init__(self, config: ExtendConfig):
        self.config = config
        self.elements = of_name(config.q_dtype)
        self.has_value_scale = has_head_scale(config.formats[1])

    @cute.jit
    def write(self, shape, operands, features, work, rows, sums, group, warp, lane):
        """Writes a warpgroup's rows to the output or, with several splits, to this split's partial results."""
        unit = Float32(self.config.units[1])
        if const_expr(self.has_value_scale):
            unit = unit * load_float(operands.v_scale + Int64(work.head) * operands.v_scale_stride * 4)
        for i in cutlass.range_constexpr(2):
            row = work.first_row + group * WARPGROUP_ROWS + warp * WARP_ROWS + lane // 4 + 8 * i
            exists = row < work.num_rows
            number, _, head = query_row(shape, work, cutlass.select_(exists, row, work.first_row))
            total = lane_sum(rows.online.totals[i], ROW_LANES)
            reference = rows.online.references[i]
            if const_expr(self.config.merges):
                self.write_row(operands, features, work, number, head, exists, reference, total, sums, unit, lane, i)
            else:
                if shape.splits.value == 1:
                    self.write_row(
                        operands, features, work, number, head, exists, reference, total, sums, unit, lane, i
                    )
                else:
                    self.write_part(shape, operands, work, number, exists, reference, total, sums, unit, lane, i)

    @cute.jit
    def write_row(
        self, operands, features, work, number, head, exists, reference, total, sums, unit, lane, i: cutlass.Constexpr
    ):
        """Writes a row of the output, and its log-sum-exp. Four lanes exchange words until each has 16 neighbouring
        bytes."""
        config = self.config
        more: Any = None
        if const_expr(config.merges):
            reference, total, own, more = self.merge(operands, work, number, reference, total, lane)
        denominator = total
        if const_expr(config.features.sinks):
            sink = load_float(features.sinks + Int64(head) * 4)
            denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -reference))
        nothing = total == 0.0
        factor = cutlass.select_(nothing, Float32(0.0), ptx.reciprocal(denominator))
        if const_expr(config.merges):
            more = [value * factor for value in more]
            factor = factor * own
        factor = factor * unit
        if operands.lse != 0:
            if exists & (lane % 4 == 0):
                lse = (reference + ptx.log2(total)) * ptx.LN_2
                lse = cutlass.select_(nothing, -Float32.inf, lse)
                ptx.store_global(operands.lse + Int64(number) * 4, [lse])
        first_column = self.first_column(work)
        address = operands.out + Int64(number) * (config.head_dim * ELEMENT_BYTES)
        address = address + Int64(lane % 4 * 16 + first_column * ELEMENT_BYTES)
        pairs = [j for j in range(0, config.value_dim // 2, 2) if row_of(j) == i]
        for first in cutlass.range_constexpr(0, len(pairs), 4):
            own = [(j, self.factors(operands, work, j, factor, lane)) for j in pairs[first : first + 4]]
            values = [sums[j + k] * factors[k] for j, factors in own for k in range(2)]
            if const_expr(config.merges):
                values = [a + b for a, b in zip(values, more[2 * first : 2 * first + 8], strict=True)]
            words = [self.elements.pack(values[k], values[k + 1]) for k in range(0, len(values), 2)]
            piece = transpose_quad([*words, *[Uint32(0)] * (4 - len(words))], lane)
            stored = exists
            if const_expr(len(words) < 4):
                stored = exists & (lane % 4 < len(words))
            if stored:
                ptx.store_global(address, piece, offset=first * 16)

    @cute.jit
    def write_part(
        self, shape, operands, work, number, exists, reference, total, sums, unit, lane, i: cutlass.Constexpr
    ):
        """Writes a split's partial result of a row in fp32: the weighted average of values, and log2 of the sum of
        weights. log2 is -inf if the row sees no key."""
        config = self.config
        num_rows = Int64(shape.total_q) * shape.num_q_heads
        place = num_rows * work.split + number
        nothing = total == 0.0
        factor = cutlass.select_(nothing, Float32(0.0), ptx.reciprocal(total)) * unit
        if exists & (lane % 4 == 0):
            weight = cutlass.select_(nothing, -Float32.inf, reference + ptx.log2(total))
            averages = num_rows * shape.splits.value * config.head_dim
            ptx.store_global(operands.partials + (averages + place) * 4, [weight])
        address = operands.partials + place * (config.head_dim * 4)
        address = address + Int64(lane % 4 * 8 + self.first_column(work) * 4)
        for j in cutlass.range_constexpr(0, config.value_dim // 2, 2):
            if const_expr(row_of(j) == i):
                if exists:
                    own = self.factors(operands, work, j, factor, lane)
                    ptx.store_global(address, [sums[j] * own[0], sums[j + 1] * own[1]], offset=j // 4 * 32)

    def first_column(self, work):
        """Returns the first output column of a work tile. If several work tiles share a row, each writes the row's
        log-sum-exp."""
        return work.value_part * self.config.value_dim if self.config.value_parts > 1 else 0

    def factors(self, operands, work, j: int, factor, lane) -> list[Any]:
        """Returns the factors of a thread's accumulators ``j`` and ``j`` + 1. A factor is the row's factor, times the
        scale of the accumulator's column if there is one."""
        if not self.config.channel_scales[1]:
            return [factor, factor]
        first = Int64(work.head) * operands.v_scale_stride + Int64(lane % 4 * 2 + self.first_column(work))
        scales = ptx.load_global_words(operands.v_scale + first * 4, 4 * sum_place(j)[1], 2)
        return [factor * scale.bitcast(Float32) for scale in scales]

    def merge(self, operands, work, number, reference, total, lane) -> tuple[Any, ...]:
        """Merges a row with another launch's result. Returns (common reference, total, factor of this launch's
        accumulators, the other launch's values times their weight). Values are in the order of the thread's columns.
        """
        other = load_float(operands.other_lse + Int64(number) * 4) * ptx.LOG2_E
        common, (own, weight) = weights_of([reference, other])
        address = operands.other_out + Int64(number) * (self.config.head_dim * ELEMENT_BYTES)
        address = address + Int64(lane % 4 * 4 + self.first_column(work) * ELEMENT_BYTES)
        offsets = range(0, self.config.value_dim * ELEMENT_BYTES, 16)
        words = [ptx.load_global_words(address, offset, 1, constant=False)[0] for offset in offsets]
        return (
            common,
            ptx.fma(total, own, weight),
            own,
            [half(word) * weight for word in words for half in self.elements.halves],
        )
