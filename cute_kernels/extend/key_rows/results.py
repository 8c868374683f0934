"""From the sums of all warpgroups, each over its own keys, to the result or to a split's part of it.

Each takes some blocks of 8 queries, and gives the others' away through the places of probabilities: in one round to the
next warpgroup, then to the one behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import in_pairs, lane_sum
from cute_kernels.extend.config import ELEMENT_BYTES, ExtendConfig
from cute_kernels.extend.elements import of_name
from cute_kernels.extend.key_rows.codes import rows_of
from cute_kernels.extend.key_rows.queries import sync_consumers
from cute_kernels.extend.multiply import WARPGROUP_THREADS
from cute_kernels.extend.queries import query_row
from cute_kernels.extend.softmax import load_float


def sum_index(column: int, half: int) -> int:
    """Which register of an MMA is that of a lane's column, 2 block + c, in its row half."""
    return column // 2 * 4 + 2 * half + column % 2


class KeyRowsResults:
    """What consumers do with a work tile's sums."""

    def __init__(self, config: ExtendConfig):
        self.config, self.rows = config, rows_of(config.formats[1])
        self.elements = of_name(config.q_dtype)
        self.columns, self.blocks = config.tile_rows // 4, config.tile_rows // 8
        shape = config.key_rows
        assert shape is not None
        self.shape, self.groups = shape, shape.warpgroups
        self.own_blocks = shape.own_blocks

    @cute.jit
    def write(self, shape, operands, features, work, memory, sums, place):
        """A work tile's. No products are running."""
        for block in cutlass.range_constexpr(self.blocks):
            memory.tell(place, block, [lane_sum(sums.total[2 * block + c], (4, 8, 16)) for c in range(2)])
        sync_consumers(self.config)
        self.weigh(memory, sums, place)
        for turn in cutlass.range_constexpr(1, self.groups):
            self.exchange(memory, sums, place, turn)
        for i in cutlass.range_constexpr(self.own_blocks):
            block = place.group * self.own_blocks + i
            if block < self.blocks:
                common, totals = self.merged(memory, place, block)
                for c in cutlass.range_constexpr(2):
                    row = work.first_row + 8 * block + 2 * (place.lane % 4) + c
                    values = self.of_block(sums, place.group, i, c)
                    self.write_row(shape, operands, features, work, place, row, common[c], totals[c], values)

    def weigh(self, memory, sums, place) -> None:
        """Sums as of the references that all warpgroups have in common."""
        for block in range(self.blocks):
            common, own = self.common(memory, place, block), memory.references(place, block)
            for c in range(2):
                weight = ptx.exp2(own[c] - common[c])
                for index in self.indices(2 * block + c):
                    sums.values[index] = sums.values[index] * weight

    def indices(self, column: int) -> list[int]:
        """Of a column's sums, of either MMA and row half."""
        return [2 * self.columns * mma + sum_index(column, half) for mma in range(2) for half in range(2)]

    def of_block(self, sums, group, i: int, c: int) -> list[Any]:
        """Four sums of a column of a warpgroup's i-th block; anything where it has fewer."""
        found: list[Any] = []
        for other in range(self.groups):
            block = min(other * self.own_blocks + i, self.blocks - 1)
            own = [sums.values[index] for index in self.indices(2 * block + c)]
            found = [cutlass.select_(group == other, x, y) for x, y in zip(own, found, strict=True)] if found else own
        return found

    def blocks_of(self, group: int) -> range:
        first = group * self.own_blocks
        return range(first, max(first, min(first + self.own_blocks, self.blocks)))

    @cute.jit
    def exchange(self, memory, sums, place, turn: cutlass.Constexpr):
        """Sends the sums of its blocks to the ``turn``-th warpgroup behind each, and adds up what comes."""
        for group in cutlass.range_constexpr(self.groups):
            if place.group == group:
                self.send(memory, sums, place, group, (group + turn) % self.groups)
        sync_consumers(self.config)
        for group in cutlass.range_constexpr(self.groups):
            if place.group == group:
                self.take(memory, sums, place, (group - turn) % self.groups, group)
        sync_consumers(self.config)

    def column_places(self, memory, place, source: int, target: int) -> list[tuple[Any, int, list[int]]]:
        """(address, bytes on, sums) of each column of a warpgroup's blocks, where another one leaves them for it."""
        start = memory.probabilities + source * self.shape.place_bytes + 16 * (place.warp * WARP_THREADS + place.lane)
        columns = [2 * block + c for block in self.blocks_of(target) for c in range(2)]
        return [(start, 16 * WARPGROUP_THREADS * i, self.indices(column)) for i, column in enumerate(columns)]

    def send(self, memory, sums, place, group: int, target: int) -> None:
        for address, offset, own in self.column_places(memory, place, group, target):
            ptx.store_shared(address, offset, [sums.values[index] for index in own])

    def take(self, memory, sums, place, source: int, group: int) -> None:
        for address, offset, own in self.column_places(memory, place, source, group):
            for index, word in zip(own, ptx.load_shared_vector(address, offset, 4), strict=True):
                sums.values[index] = sums.values[index] + word.bitcast(Float32)

    def common(self, memory, place, block) -> list[Any]:
        """References that all warpgroups have in common, of a lane's two queries of a block."""
        all_of_them = [memory.references(replace(place, group=group), block) for group in range(self.groups)]
        return [in_pairs(ptx.fmax, [own[c] for own in all_of_them]) for c in range(2)]

    def merged(self, memory, place, block) -> tuple[list[Any], list[Any]]:
        """(references, totals) of all warpgroups together, of a lane's two queries of a block."""
        common, totals = self.common(memory, place, block), [Float32(0.0)] * 2
        for group in range(self.groups):
            references = memory.references(replace(place, group=group), block)
            heard = memory.hear(group, place.lane, block)
            for c in range(2):
                own = (heard[0][c] + heard[1][c]) + (heard[2][c] + heard[3][c])
                totals[c] = ptx.fma(own, ptx.exp2(references[c] - common[c]), totals[c])
        return common, totals

    @cute.jit
    def write_row(self, shape, operands, features, work, place, row: Int32, reference, total, values):
        """Two neighbouring columns of either MMA, of a row. values: [MMA][row half]."""
        config = self.config
        exists = row < work.num_rows
        number, _, head = query_row(shape, work, cutlass.select_(exists, row, work.first_row))
        unit = Float32(config.units[1])
        if const_expr(config.formats[1].given_scale is not None):
            unit = unit * load_float(operands.v_scale + Int64(work.head) * operands.v_scale_stride * 4)
        nothing = total == 0.0
        columns = [self.rows.column(place.warp, place.lane, mma) for mma in range(2)]
        pairs = [values[0:2], values[2:4]]
        tells = exists & (place.warp == 0) & (place.lane < 4)
        if shape.splits.value == 1:
            denominator = total
            if const_expr(config.features.sinks):
                sink = load_float(features.sinks + Int64(head) * 4)
                denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -reference))
            factor = cutlass.select_(nothing, Float32(0.0), ptx.reciprocal(denominator)) * unit
            if tells & (operands.lse != 0):
                lse = (reference + ptx.log2(total)) * ptx.LN_2
                ptx.store_global(operands.lse + Int64(number) * 4, [cutlass.select_(nothing, -Float32.inf, lse)])
            if exists:
                address = operands.out + Int64(number) * (config.head_dim * ELEMENT_BYTES)
                for d, (low, high) in zip(columns, pairs, strict=True):
                    word = self.elements.pack(low * factor, high * factor)
                    ptx.store_global(address + Int64(d * ELEMENT_BYTES), [word])
        else:
            factor = cutlass.select_(nothing, Float32(0.0), ptx.reciprocal(total)) * unit
            num_rows = Int64(shape.total_q) * shape.num_q_heads
            part = num_rows * work.split + number
            if tells:
                weight = cutlass.select_(nothing, -Float32.inf, reference + ptx.log2(total))
                averages = num_rows * shape.splits.value * config.head_dim
                ptx.store_global(operands.partials + (averages + part) * 4, [weight])
            if exists:
                address = operands.partials + part * (config.head_dim * 4)
                for d, (low, high) in zip(columns, pairs, strict=True):
                    ptx.store_global(address + Int64(d * 4), [low * factor, high * factor])
