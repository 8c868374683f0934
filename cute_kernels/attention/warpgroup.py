"""Decode attention of 32 queries of a KV head by warpgroups: products by wgmma, a softmax that four warps share.

What differs from :class:`cute_kernels.attention.kernel.DecodeKernel`, whose loop over tiles this is: the four warps of
a warpgroup each score their own slice of the tokens, write the probabilities to shared memory, and sum up the values of
all four slices in a quarter of the columns (:mod:`.readers.warpgroup`). So they have one softmax reference. They write
probabilities as of the reference they have; the barrier after which these are read also tells whether one of them was
too large for it. Only then is it raised, and are they written again: after the first tile hardly ever.

Probabilities have two places in turn: a warp that writes tile i + 2's has met the others at the barrier of tile i + 1,
before which they were done with tile i's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.attention.barriers import any_of_warpgroup, await_turn, pass_turn, sync_attending, sync_warpgroup
from cute_kernels.attention.config import BLOCK_QUERIES, EXCHANGE_BYTES, PAIR_BYTES, WARPGROUP_WARPS, WGMMA_QUERIES
from cute_kernels.attention.kernel import RESCALE_SLACK, DecodeKernel
from cute_kernels.attention.merge import LOWEST
from cute_kernels.attention.readers.warpgroup import (
    LARGEST_FP16,
    ROW_HALVES,
    load_numbers,
    split_fp16,
    store_numbers,
)
from cute_kernels.device import ptx, wgmma
from cute_kernels.device.lanes import lane_max, lane_sum
from layouts.kv.tile import BLOCK_TOKENS, block_token

MAX_TOTAL = 2.0**36  # of a lane's probabilities of a tile, where the scales of V are too small to bound them
HALF_ROWS = ROW_HALVES // 2  # of a lane in one m64 tile of scores


@dataclass(frozen=True)
class Rows:
    """A lane's two rows of a tile of 64 scores.

    Attributes:
        first: of the four that the lane has in two tiles.
        s: register tensor [j, column] of what :meth:`WarpgroupKernel.logit` makes logits of.
        key_headers: [j] of the rows of K, words.
        headers: [j] of the rows of V.
        sums: register tensor [2, column], of all rows: of probabilities, and of those times shifts of V.
    """

    first: int
    s: Any
    key_headers: Any
    headers: Any
    sums: Any


@dataclass(frozen=True)
class Warpgroup:
    """A warp's place among those that it multiplies with; run-time values.

    Attributes:
        number: of the warpgroup.
        warp: of the warpgroup's.
        lane: of the warp's.
        exchange: shared address of what its warps tell each other.
        probabilities: shared address of two places for a tile's probabilities.
        turn: register tensor of one number, bytes from there to the place of the next tile's.
    """

    number: Any
    warp: Any
    lane: Any
    exchange: Any
    probabilities: Any
    turn: Any

    def operand(self):
        """Shared address of the next tile's probabilities."""
        return self.probabilities + self.turn[0]


class WarpgroupKernel(DecodeKernel):
    """One compiled variant of decode attention for 32 queries of a KV head."""

    def place_queries(self, cta, keys):
        """Writes the queries' B operand, and finds the warp's place in its warpgroup."""
        config = self.config
        self.store_queries(cta, keys)
        keys.query_operand = wgmma.descriptor(cute.arch.make_warp_uniform(cta.queries))
        keys.query_sum_address = cta.queries + config.sum_offset
        keys.centres = cta.queries + config.centre_offset + 4 * WGMMA_QUERIES * cta.warp
        keys.references = cta.queries + config.maximum_offset + 4 * WGMMA_QUERIES * cta.warp
        store_numbers(keys.t, keys.references, [Float32(-LARGEST_FP16)] * config.columns)
        keys.starts = cute.make_rmem_tensor(config.columns // 2, Uint32)
        number = cta.warp // WARPGROUP_WARPS
        turn = cute.make_rmem_tensor(1, Int32)
        turn[0] = Int32(0)
        probabilities = cta.queries + config.probability_offset + 2 * config.probability_bytes * number
        exchange = cta.queries + config.exchange_offset + EXCHANGE_BYTES * number
        keys.warpgroup = Warpgroup(number, cta.warp % WARPGROUP_WARPS, cta.lane, exchange, probabilities, turn)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_attending(config)
        self.key_reader.take_references(keys, not self.logits.transforms)
        self.give_first_turn(number)

    @cute.jit
    def give_first_turn(self, number):
        """The first warpgroup begins."""
        if number == 1:
            pass_turn(number)

    @cute.jit
    def store_queries(self, cta, keys):
        if cta.roles.slice_index == 0:
            # All warps have made the same.
            self.key_reader.store_query(keys, cta.queries)

    @cute.jit
    def attend(self, state, addresses, block: int, masked, first_token: Int32):
        """Logits, online softmax and P V of the 128 tokens of a warpgroup; arguments as the base class has them."""
        keys, values, number = state.keys, state.values, state.keys.warpgroup.number
        key_headers = self.key_reader.load_headers(keys, addresses[0])
        headers = self.value_reader.load_scales(values, addresses[1], 0)
        operands = self.key_reader.decode(keys, addresses[0])
        await_turn(number)
        dots = self.key_reader.start_scores(keys, operands)
        pass_turn(number)
        probabilities = wgmma.descriptor(cute.arch.make_warp_uniform(keys.warpgroup.operand()))
        sums = cute.make_rmem_tensor(2 * self.config.columns, Float32)
        halves = []
        for half in cutlass.range_constexpr(2):
            # The second half's dot products are made while the first one has its softmax.
            dots_now = wgmma.wait_for(dots[half], 1 - half)
            first = HALF_ROWS * half
            own = slice(first, first + HALF_ROWS)
            s = cute.make_rmem_tensor(HALF_ROWS * self.config.columns, Float32)
            self.place_scores(keys, s, dots_now, key_headers[own])
            tokens = [first_token + block_token(self.config.token_bits, keys.g, first + j) for j in range(HALF_ROWS)]
            self.logits.apply(state.logits, s, keys.score_scale, tokens, masked)
            rows = Rows(first, s, key_headers[own], headers[own], sums)
            halves.append((rows, self.write_probabilities(state, rows)))
        # Decoded before the warps meet: then they multiply at once and together.
        operands = self.value_reader.decode(values, addresses[1])
        self.share_probabilities(state, [rows for rows, _ in halves], halves[0][1] | halves[1][1])
        await_turn(number)
        self.value_reader.start_products(values, operands, probabilities)
        pass_turn(number)
        self.value_reader.wait(values)

    def place_scores(self, keys, s, sums, headers):
        """Writes what :meth:`logits_of` makes logits of into s [j][column].

        Where logits are scores and no more, scores are never computed, but their powers straight from dot products.
        """
        dots = self.key_reader.rows(sums)
        if self.logits.transforms:
            dots = self.key_reader.scaled(keys, dots, headers)
        for j, row in enumerate(dots):
            for column, value in enumerate(row):
                s[self.config.columns * j + column] = value

    @cute.jit
    def share_probabilities(self, state, halves, exceeds):
        """Gives the warpgroup the warp's probabilities and adds them to its sums; may raise the softmax reference.

        exceeds: whether one of those that are written is too large.
        """
        columns, warpgroup = self.config.columns, state.keys.warpgroup
        cute.arch.fence_proxy("async.shared", space="cta")
        again = any_of_warpgroup(warpgroup.number, Int32(exceeds))
        while again != 0:
            self.raise_shared_maximum(state, halves)
            exceeds = self.write_probabilities(state, halves[0]) | self.write_probabilities(state, halves[1])
            cute.arch.fence_proxy("async.shared", space="cta")
            again = any_of_warpgroup(warpgroup.number, Int32(exceeds))
        sums = halves[0].sums
        for column in cutlass.range_constexpr(columns):
            state.softmax.total[column] = state.softmax.total[column] + sums[column]
        self.value_reader.add_shifts(state.values, [sums[columns + column] for column in range(columns)])
        warpgroup.turn[0] = self.config.probability_bytes - warpgroup.turn[0]

    def write_probabilities(self, state, rows):
        """Writes P * scale of V; into ``rows.sums`` those of P and of P * shift. Whether one is too large for fp16."""
        columns, sums = self.config.columns, rows.sums
        starts = self.key_reader.starts(state.keys, rows.key_headers)
        probabilities = [[ptx.exp2(logit) for logit in row] for row in self.logits_of(state.keys, rows, starts)]
        shifts = [self.value_reader.shift(header[0]) for header in rows.headers]
        address = state.keys.warpgroup.operand()
        largest = self.value_reader.store_probabilities(state.values, address, rows.first, probabilities, rows.headers)
        most = Float32(0.0)
        for column in range(columns):
            p = [row[column] for row in probabilities]
            shifted = p[0] * shifts[0] if rows.first == 0 else ptx.fma(p[0], shifts[0], sums[columns + column])
            sums[columns + column] = ptx.fma(p[1], shifts[1], shifted)
            sums[column] = p[0] + p[1] if rows.first == 0 else sums[column] + (p[0] + p[1])
            if rows.first > 0:
                most = ptx.fmax(most, sums[column])
        product = ptx.fmax(ptx.half2_low_to_float(largest), ptx.half2_high_to_float(largest))
        return (product > 2.0**RESCALE_SLACK) | (most > MAX_TOTAL)

    def logits_of(self, keys, rows, starts):
        """Logits in powers of two on top of ``starts``, which have what shifts add to them: [j][column]."""
        columns, scales = range(self.config.columns), [Float32(1.0)] * HALF_ROWS
        if not self.logits.transforms:
            scales = self.key_reader.scales(keys, rows.key_headers)
        return [
            [ptx.fma(rows.s[len(columns) * j + column], scales[j], starts[j][column]) for column in columns]
            for j in range(HALF_ROWS)
        ]

    def raise_shared_maximum(self, state, halves):
        """Takes the warpgroup's maxima as reference and rescales what was accumulated under the old ones."""
        columns, keys, softmax = self.config.columns, state.keys, state.softmax
        maxima = [Float32(LOWEST)] * columns
        for rows in halves:
            log_scales = [self.value_reader.log_scale(rows.headers, j) for j in range(HALF_ROWS)]
            bounds = self.logits_of(keys, rows, self.bound_starts(keys, rows, log_scales))
            maxima = [ptx.fmax(old, ptx.fmax(*pair)) for old, *pair in zip(maxima, *bounds, strict=True)]
        maxima = [lane_max(largest, (4, 8, 16)) for largest in maxima]
        factors, references = [], load_numbers(keys.t, keys.references, columns)
        for column, heard in enumerate(self.tell(keys.warpgroup, keys.t, maxima, 1)):
            raised = references[column]
            for words in heard:
                raised = ptx.fmax(raised, words[0])
            # As the operands of products have it.
            high, low = split_fp16(raised)
            raised = high + low
            factor = ptx.exp2(references[column] - raised)
            references[column] = raised
            softmax.total[column] = softmax.total[column] * factor
            factors.append(factor)
        cute.arch.sync_warp()
        store_numbers(keys.t, keys.references, references)
        cute.arch.sync_warp()
        self.key_reader.take_references(keys, not self.logits.transforms)
        self.value_reader.rescale(state.values, factors)

    def bound_starts(self, keys, rows, log_scales):
        """What bounds of P * scale of V start from: [j][column]."""
        if self.logits.transforms:
            return [[log_scale] * self.config.columns for log_scale in log_scales]
        totals = [total * keys.score_scale for total in self.key_reader.load_query_sums(keys)]
        shifts = [ptx.half2_high_to_float(header) for header in rows.key_headers]
        return [
            [ptx.fma(shift, total, log_scale) for total in totals]
            for shift, log_scale in zip(shifts, log_scales, strict=True)
        ]

    def tell(self, warpgroup, t, values, count: int):
        """What all warps say of the lane's columns: [column][warp][count]; ``values`` [column * count], alike in g."""
        row_bytes = 4 * count
        rows = [row_bytes * (column // 2 * BLOCK_QUERIES + column % 2) for column in range(self.config.columns)]
        place = warpgroup.exchange + 2 * row_bytes * t
        own = place + row_bytes * WGMMA_QUERIES * warpgroup.warp
        for column, row in enumerate(rows):
            # Lanes of all g write the same: cheaper than to choose one.
            ptx.store_shared(own, row, values[count * column : count * (column + 1)])
        sync_warpgroup(warpgroup.number)
        return [
            [
                [
                    word.bitcast(Float32)
                    for word in ptx.load_shared_vector(place, row + row_bytes * WGMMA_QUERIES * warp, count)
                ]
                for warp in range(WARPGROUP_WARPS)
            ]
            for row in rows
        ]

    def finish(self, cta, work, state):
        """Adds up what the warps hold each for their own tokens, then merges warpgroups as others merge slices."""
        references = load_numbers(state.keys.t, state.keys.references, self.config.columns)
        for column, reference in enumerate(references):
            state.softmax.maximum[column] = reference
        self.join(state)
        number = state.keys.warpgroup.number
        self.merger.finish(work, state, cta.results, cta.ring, cta.warp, cta.lane, number)

    def join(self, state):
        """The warpgroup's sums of P and of P * shift, in lanes of g = 0 alone: those of all g are added up later."""
        columns, values, softmax = self.config.columns, state.values, state.softmax
        own = []
        for column in range(columns):
            for value in (softmax.total[column], values.shift_sums[column]):
                own.append(lane_sum(value, (4, 8, 16)))
        for column, heard in enumerate(self.tell(state.keys.warpgroup, state.keys.t, own, 2)):
            for index, target in enumerate((softmax.total, values.shift_sums)):
                total = (heard[0][index] + heard[1][index]) + (heard[2][index] + heard[3][index])
                target[column] = cutlass.select_(state.keys.g == 0, total, Float32(0.0))


assert EXCHANGE_BYTES == WARPGROUP_WARPS * WGMMA_QUERIES * PAIR_BYTES and BLOCK_TOKENS == BLOCK_QUERIES * ROW_HALVES
