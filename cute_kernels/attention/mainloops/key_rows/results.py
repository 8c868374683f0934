"""Scales the accumulators of two warpgroups, and writes them as the result or a split's part of the result.

One thread per row computes what all threads need: the factor of each warpgroup's sums, and the row's destination.

If a work tile has two KV heads, each warpgroup has one head and writes the columns of both its MMAs. Otherwise both
warpgroups have one head, and half of the keys each. Then each warpgroup keeps one MMA's columns, and sends the other
MMA's columns to the other warpgroup. The sender's buffers of probabilities hold them meanwhile.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import ELEMENT_BYTES, MMA_WARPGROUPS, WARPGROUP_WARPS, has_head_scale
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.attention.mainloops.key_rows.codes import rows_of
from cute_kernels.attention.mainloops.key_rows.queries import sync_head
from cute_kernels.attention.mainloops.tile_queries import query_row
from cute_kernels.attention.mainloops.warpgroup_barriers import WARPGROUP_THREADS, sync_consumers
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_sum
from cute_kernels.device.loads import load_float
from cute_kernels.device.softmax import COLUMN_LANES, weights_of

PARTIAL_BYTES = 4  # bytes of a number in a split's partial result
NOWHERE = -1  # the number of a row that the request does not have


def sum_index(column: int, half: int) -> int:
    """Returns the index of a lane's accumulator of an MMA. column: 2 * block + c for column c (0 or 1) of the lane's
    two columns in a block of 8. half: the row half, 0 or 1."""
    return column // 2 * 4 + 2 * half + column % 2


class KeyRowsResults:
    """The writer of a work tile's results."""

    def __init__(self, config: ExtendConfig):
        self.config, self.rows = config, rows_of(config.formats[1])
        self.elements = of_name(config.q_dtype)
        self.columns = config.tile_rows // 4
        shape = config.key_rows
        assert shape is not None
        self.shape, self.heads = shape, config.tile_heads

    @cute.jit
    def write(self, shape, operands, features, work, memory, sums, place):
        """Writes the results of a work tile; no MMA may be in flight."""
        self.tell(memory, sums, place)
        sync_head(self.heads, place.group)
        row, first = place.warp * WARP_THREADS + place.lane, place.group
        if const_expr(self.heads == 1):
            row, first = row + place.group * WARPGROUP_THREADS, Int32(0)
        if row < self.config.tile_rows:
            self.finish_row(shape, operands, features, work, memory, row, first)
        # The head's products have read its probabilities, and all warps what was told.
        sync_head(self.heads, place.group)
        self.scale(memory, sums, place, first)
        if const_expr(self.heads == 2):
            self.store(shape, operands, memory, sums, place, first, (0, 1))
        else:
            for group in cutlass.range_constexpr(MMA_WARPGROUPS):
                if place.group == group:
                    self.send(memory, sums, place, 1 - group)
            sync_consumers()
            for group in cutlass.range_constexpr(MMA_WARPGROUPS):
                if place.group == group:
                    self.receive(memory, sums, place, group)
                    self.store(shape, operands, memory, sums, place, first, (group,))

    def tell(self, memory, sums, place) -> None:
        """Publishes the warp's totals, and the warpgroup's references, of all columns."""
        told = memory.told + place.group * self.shape.group_told_bytes + 8 * (place.lane % 4)
        row_bytes = 4 * self.config.tile_rows
        for block in range(self.columns // 2):
            pair = [lane_sum(sums.softmax.totals[2 * block + c], COLUMN_LANES) for c in range(2)]
            ptx.store_shared(told + place.warp * row_bytes, 32 * block, pair)
            pair = [sums.softmax.references[2 * block + c] for c in range(2)]
            ptx.store_shared(told, WARPGROUP_WARPS * row_bytes + 32 * block, pair)

    def hear(self, memory, row, first) -> tuple[list[Any], list[Any]]:
        """Loads the references and totals of a row, which `tell` has published. Returns (references, totals), each with
        one element for every warpgroup of the row's KV head. first: the head's first warpgroup.
        """
        references, totals = [], []
        for index in range(self.warpgroups):
            group = index if self.heads == 1 else first
            told = memory.told + group * self.shape.group_told_bytes + 4 * row
            numbers = [
                ptx.load_shared(told, 4 * self.config.tile_rows * i).bitcast(Float32)
                for i in range(WARPGROUP_WARPS + 1)
            ]
            references.append(numbers[WARPGROUP_WARPS])
            totals.append((numbers[0] + numbers[1]) + (numbers[2] + numbers[3]))
        return references, totals

    @property
    def warpgroups(self) -> int:
        """Number of warpgroups that share a KV head."""
        return MMA_WARPGROUPS // self.heads

    def factors(self, memory, first, index):
        """Returns the address of the rows' factors for the ``index``-th warpgroup of a KV head. first: the head's first
        warpgroup. Factors overwrite the head's queries, which no MMA reads any more."""
        queries = memory.queries if self.heads == 1 else memory.queries + first * self.shape.query_bytes
        return queries + index * (4 * self.config.tile_rows)

    def numbers(self, memory, first):
        """Returns the address of the rows' destinations: for each row, its index in the output or among the partial
        results, or NOWHERE if the row does not exist.
        """
        return self.factors(memory, first, self.warpgroups)

    @cute.jit
    def finish_row(self, shape, operands, features, work, memory, row: Int32, first: Int32):
        """Computes one row's factors and destination, and publishes them. Stores the row's log-sum-exp or, with splits,
        its weight: log2 of the split's sum of exponentials. first: the first warpgroup of the row's KV head.
        """
        config = self.config
        exists = work.first_row + row < work.num_rows
        number, _, head = query_row(shape, work, cutlass.select_(exists, work.first_row + row, work.first_row))
        references, totals = self.hear(memory, row, first)
        common, total, weights = references[0], totals[0], [Float32(1.0)]
        if const_expr(self.heads == 1):
            common, weights = weights_of(references)
            total = ptx.fma(totals[0], weights[0], totals[1] * weights[1])
        nothing = total == 0.0
        unit = Float32(config.units[1])
        if const_expr(has_head_scale(config.formats[1])):
            unit = unit * load_float(operands.v_scale + Int64(work.head) * operands.v_scale_stride * 4)
        denominator = total
        if shape.splits.value == 1:
            if const_expr(config.features.sinks):
                sink = load_float(features.sinks + Int64(head) * 4)
                denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -common))
            if exists & (operands.lse != 0):
                lse = (common + ptx.log2(total)) * ptx.LN_2
                ptx.store_global(operands.lse + Int64(number) * 4, [cutlass.select_(nothing, -Float32.inf, lse)])
        else:
            rows = shape.total_q * shape.num_q_heads
            number = rows * work.split + number
            if exists:
                weight = cutlass.select_(nothing, -Float32.inf, common + ptx.log2(total))
                averages = Int64(rows) * shape.splits.value * config.head_dim
                ptx.store_global(operands.partials + (averages + number) * 4, [weight])
        factor = cutlass.select_(nothing, Float32(0.0), ptx.reciprocal(denominator)) * unit
        for index in cutlass.range_constexpr(self.warpgroups):
            ptx.store_shared(self.factors(memory, first, index) + 4 * row, 0, [weights[index] * factor])
        ptx.store_shared(self.numbers(memory, first) + 4 * row, 0, [cutlass.select_(exists, number, Int32(NOWHERE))])

    def scale(self, memory, sums, place, first) -> None:
        """Multiplies all accumulators of a warpgroup by the factors of their rows."""
        factors = self.factors(memory, first, place.group - first) + 8 * (place.lane % 4)
        for block in range(self.columns // 2):
            pair = [word.bitcast(Float32) for word in ptx.load_shared_vector(factors, 32 * block, 2)]
            for index in (index for mma in range(2) for index in self.block_places(mma, block)):
                sums.values[index] = sums.values[index] * pair[index % 2]

    def send(self, memory, sums, place, mma: int) -> None:
        """Sends a warpgroup's accumulators of an MMA to the other warpgroup."""
        for block in range(self.columns // 2):
            own = [sums.values[index] for index in self.block_places(mma, block)]
            ptx.store_shared(self.area(memory, place, place.group), 16 * WARPGROUP_THREADS * block, own)

    def receive(self, memory, sums, place, mma: int) -> None:
        """Adds the accumulators that the other warpgroup has sent to this warpgroup's accumulators of an MMA."""
        for block in range(self.columns // 2):
            words = ptx.load_shared_vector(self.area(memory, place, 1 - place.group), 16 * WARPGROUP_THREADS * block, 4)
            for index, word in zip(self.block_places(mma, block), words, strict=True):
                sums.values[index] = sums.values[index] + word.bitcast(Float32)

    def area(self, memory, place, group):
        """Returns the address through which a thread of warpgroup ``group`` sends accumulators to the other warpgroup.
        It lies in the group's buffers of probabilities, 16 bytes for each thread and block of columns."""
        thread = place.warp * WARP_THREADS + place.lane
        return memory.probabilities + group * (2 * self.shape.probability_bytes) + 16 * thread

    def block_places(self, mma: int, block: int) -> list[int]:
        """Returns the indices of a block's four accumulators: [row half][column]."""
        return [2 * self.columns * mma + sum_index(2 * block + c, half) for half in range(2) for c in range(2)]

    @cute.jit
    def store(self, shape, operands, memory, sums, place, first, mmas: cutlass.Constexpr):
        """Writes the columns of the MMAs ``mmas`` of all rows, to the output or to a split's partial results."""
        if shape.splits.value == 1:
            self.write_rows(operands.out, ELEMENT_BYTES, memory, sums, place, first, mmas)
        else:
            self.write_rows(operands.partials, PARTIAL_BYTES, memory, sums, place, first, mmas)

    @cute.jit
    def write_rows(self, target: Int64, size: cutlass.Constexpr, memory, sums, place, first, mmas: cutlass.Constexpr):
        """Writes the columns of the MMAs ``mmas`` of all rows to address ``target``, as numbers of ``size`` bytes."""
        row_bytes = self.config.head_dim * size
        numbers = self.numbers(memory, first) + 8 * (place.lane % 4)
        starts = [target + Int64(self.rows.column(place.warp, place.lane, mma) * size) for mma in mmas]
        for block in cutlass.range_constexpr(self.columns // 2):
            found = ptx.load_shared_vector(numbers, 32 * block, 2)
            for c in cutlass.range_constexpr(2):
                number = Int32(found[c])
                if number != NOWHERE:
                    for i in cutlass.range_constexpr(len(mmas)):
                        places = self.block_places(mmas[i], block)
                        own = [sums.values[places[k]] for k in (c, 2 + c)]
                        address = starts[i] + Int64(number) * row_bytes
                        if const_expr(size == PARTIAL_BYTES):
                            ptx.store_global(address, own)
                        else:
                            ptx.store_global(address, [self.elements.pack(*own)])
