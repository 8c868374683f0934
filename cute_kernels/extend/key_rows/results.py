"""From the sums of both warpgroups, each over half of the keys, to the result or to a split's part of it.

Each takes one of the two MMAs' columns and gives the other one's away, through the places of its probabilities.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_sum
from cute_kernels.extend.config import ExtendConfig
from cute_kernels.extend.elements import of_name
from cute_kernels.extend.key_rows.codes import rows_of
from cute_kernels.extend.key_rows.queries import sync_consumers
from cute_kernels.extend.multiply import FIRST_WARPGROUP, WARPGROUP_THREADS
from cute_kernels.extend.policies import ELEMENT_BYTES, MMA_WARPGROUPS, WARPGROUP_WARPS
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
        self.columns = config.tile_rows // 4
        shape = config.key_rows
        assert shape is not None
        self.shape = shape

    @cute.jit
    def write(self, shape, operands, features, work, memory, sums, place):
        """A work tile's. No products are running."""
        # Its warps' products have read the warpgroup's probabilities.
        cute.arch.barrier(barrier_id=FIRST_WARPGROUP + place.group, number_of_threads=WARPGROUP_THREADS)
        own = cute.make_rmem_tensor(2 * self.columns, Float32)
        first = place.group == 0
        thread = 4 * (place.warp * WARP_THREADS + place.lane)
        area = memory.probabilities + place.group * (2 * self.shape.probability_bytes) + thread
        for i in cutlass.range_constexpr(2 * self.columns):
            low, high = sums.values[i], sums.values[2 * self.columns + i]
            own[i] = cutlass.select_(first, low, high)
            ptx.store_shared(area, 4 * WARPGROUP_THREADS * i, [cutlass.select_(first, high, low)])
        self.tell(memory, sums, place)
        sync_consumers()
        other = memory.probabilities + (1 - place.group) * (2 * self.shape.probability_bytes) + thread
        for block in cutlass.range_constexpr(self.columns // 2):
            for c in cutlass.range_constexpr(2):
                common, total, values = self.merged(memory, place, own, other, block, c)
                row = work.first_row + 8 * block + 2 * (place.lane % 4) + c
                self.write_row(shape, operands, features, work, place, row, common, total, values)

    def merged(self, memory, place, own, other, block: int, c: int) -> tuple[Any, Any, list[Any]]:
        """(reference, total, two values) of both warpgroups together. other: address of the other one's sums."""
        first, (references, totals) = place.group == 0, self.hear(memory, place, block)
        mine, its = (cutlass.select_(first, references[i][c], references[1 - i][c]) for i in range(2))
        common = ptx.fmax(mine, its)
        weights = [ptx.exp2(mine - common), ptx.exp2(its - common)]
        mine, its = (cutlass.select_(first, totals[i][c], totals[1 - i][c]) for i in range(2))
        values = []
        for half in range(2):
            index = sum_index(2 * block + c, half)
            more = ptx.load_shared(other, 4 * WARPGROUP_THREADS * index).bitcast(Float32)
            values.append(ptx.fma(own[index], weights[0], more * weights[1]))
        return common, ptx.fma(mine, weights[0], its * weights[1]), values

    def tell(self, memory, sums, place) -> None:
        """The warp's totals, and its warpgroup's references, of all columns."""
        told = memory.told + place.group * self.shape.group_told_bytes + 8 * (place.lane % 4)
        row_bytes = 4 * self.config.tile_rows
        for block in range(self.columns // 2):
            pair = [lane_sum(sums.total[2 * block + c], (4, 8, 16)) for c in range(2)]
            ptx.store_shared(told + place.warp * row_bytes, 32 * block, pair)
            pair = [sums.maximum[2 * block + c] for c in range(2)]
            ptx.store_shared(told, WARPGROUP_WARPS * row_bytes + 32 * block, pair)

    def hear(self, memory, place, block: int) -> tuple[Any, Any]:
        """(references, totals) of both warpgroups, [warpgroup][c], of two columns."""
        row_bytes = 4 * self.config.tile_rows
        references, totals = [], []
        for group in range(MMA_WARPGROUPS):
            told = memory.told + 8 * (place.lane % 4)
            first = group * self.shape.group_told_bytes + 32 * block
            rows = [
                [word.bitcast(Float32) for word in ptx.load_shared_vector(told, first + row * row_bytes, 2)]
                for row in range(WARPGROUP_WARPS + 1)
            ]
            references.append(rows[WARPGROUP_WARPS])
            totals.append([(rows[0][c] + rows[1][c]) + (rows[2][c] + rows[3][c]) for c in range(2)])
        return references, totals

    @cute.jit
    def write_row(self, shape, operands, features, work, place, row: Int32, reference, total, values):
        """Two neighbouring columns of a row."""
        config = self.config
        exists = row < work.num_rows
        number, _, head = query_row(shape, work, cutlass.select_(exists, row, work.first_row))
        unit = Float32(config.units[1])
        if const_expr(config.formats[1].given_scale is not None):
            unit = unit * load_float(operands.v_scale + Int64(work.head) * operands.v_scale_stride * 4)
        nothing = total == 0.0
        d = self.rows.column(place.warp, place.lane, place.group)
        tells = exists & (place.group == 0) & (place.warp == 0) & (place.lane < 4)
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
                address = operands.out + Int64(number) * (config.head_dim * ELEMENT_BYTES) + Int64(d * ELEMENT_BYTES)
                ptx.store_global(address, [self.elements.pack(values[0] * factor, values[1] * factor)])
        else:
            factor = cutlass.select_(nothing, Float32(0.0), ptx.reciprocal(total)) * unit
            num_rows = Int64(shape.total_q) * shape.num_q_heads
            part = num_rows * work.split + number
            if tells:
                weight = cutlass.select_(nothing, -Float32.inf, reference + ptx.log2(total))
                averages = num_rows * shape.splits.value * config.head_dim
                ptx.store_global(operands.partials + (averages + part) * 4, [weight])
            if exists:
                address = operands.partials + part * (config.head_dim * 4) + Int64(d * 4)
                ptx.store_global(address, [values[0] * factor, values[1] * factor])
