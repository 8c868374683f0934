"""Decode attention of 32 queries of a KV head by warpgroups: products by wgmma, a softmax that four warps share.

What differs from :class:`cute_kernels.attention.mainloop.WarpMainloop`: the four warps of a warpgroup each score their
own slice of the tokens, write the probabilities to shared memory, and sum up the values of all four slices in a quarter
of the columns (:mod:`.readers.warpgroup`). So they have one softmax reference. They write probabilities as of the
reference they have; the barrier after which these are read also tells whether one of them was too large for it. Only
then is it raised, and are they written again: after the first tile hardly ever.

Two warpgroups take turns with their products, as FlashAttention-3's do (Shah et al. 2024): one's softmax is behind the
other's products. So a turn has all of a warpgroup's products at once, P V of the tile before and then the scores of the
next one, with the softmax of a whole tile between two turns.

Probabilities have two places in turn: a warp that writes tile i + 2's has met the others at the barrier of tile i + 1,
before which they have waited for the products of tile i's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.attention.barriers import (
    WARPGROUP_THREADS,
    any_of_warpgroup,
    await_turn,
    pass_turn,
    sync_consumers,
    sync_warpgroup,
)
from cute_kernels.attention.config import PAIR_BYTES
from cute_kernels.attention.mainloop import UnitTiles
from cute_kernels.attention.merge import Merger
from cute_kernels.attention.policies import BLOCK_QUERIES, EXCHANGE_BYTES, WARPGROUP_WARPS, WGMMA_QUERIES, WarpgroupMma
from cute_kernels.attention.readers.common import Warpgroup
from cute_kernels.attention.readers.warpgroup import ROW_HALVES
from cute_kernels.device import ptx, wgmma
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_max, lane_sum
from cute_kernels.device.pipeline import PipelineState
from cute_kernels.device.softmax import COLUMN_LANES, RESCALE_SLACK
from cute_kernels.device.types import RegisterTensor
from layouts.kv.tile import BLOCK_TOKENS, block_token

MAX_TOTAL = 2.0**36  # of a lane's probabilities of a tile, where the scales of V are too small to bound them
HALF_ROWS = ROW_HALVES // 2  # of a lane in one m64 tile of scores
CLEAR_BYTES = 16  # that a thread clears at once


@dataclass(frozen=True)
class Rows:
    """A lane's two rows of a tile of 64 scores.

    Attributes:
        first: of the four that the lane has in two tiles.
        s: register tensor [j, column] of what :meth:`WarpgroupMainloop.logit` makes logits of.
        lines: [j] what it takes for that.
        headers: [j] of the rows of V.
        sums: register tensor [2, column]: of the probabilities of all rows; of those times shifts of V, on top of what
            all tiles before have.
    """

    first: int
    s: RegisterTensor[Float32]
    lines: Sequence[tuple[Float32, Float32 | None]]
    headers: list[list[Uint32]]
    sums: RegisterTensor[Float32]


class WarpgroupMainloop:
    """The four warps of a warpgroup multiply together; for 32 queries of a KV head."""

    def __init__(self, unit: UnitTiles, merger: Merger):
        self.config, self.copier, self.logits = unit.config, unit.copier, unit.logits
        self.key_reader, self.value_reader = unit.key_reader, unit.value_reader
        self.unit, self.merger = unit, merger

    def place_queries(self, cta, keys):
        """Writes the queries' B operand, and finds the warp's place in its warpgroup."""
        config = self.config
        self.store_queries(cta, keys)
        keys.query_operand = wgmma.descriptor(cute.arch.make_warp_uniform(cta.queries))
        keys.query_sum_address = cta.queries + WarpgroupMma.sum_offset
        keys.centres = cta.queries + WarpgroupMma.centre_offset + 4 * WGMMA_QUERIES * cta.warp
        number = cta.warp // WARPGROUP_WARPS
        offset = cute.make_rmem_tensor(1, Int32)
        offset[0] = Int32(0)
        probabilities = cta.queries + WarpgroupMma.probability_offset + 2 * WarpgroupMma.probability_bytes * number
        exchange = cta.queries + WarpgroupMma.exchange_offset + EXCHANGE_BYTES * number
        keys.warpgroup = Warpgroup(number, cta.warp % WARPGROUP_WARPS, cta.lane, exchange, probabilities, offset)
        self.clear_probabilities(keys.warpgroup)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_consumers(config)

    @cute.jit
    def store_queries(self, cta, keys):
        if cta.roles.slice_index == 0:
            # All warps have made the same.
            self.key_reader.store_query(keys, cta.queries)

    @cute.jit
    def clear_probabilities(self, warpgroup):
        """Zeros for the first turn, in which there is no tile before."""
        size = WarpgroupMma.probability_bytes
        place = warpgroup.last_operand(size) + CLEAR_BYTES * (warpgroup.warp * WARP_THREADS + warpgroup.lane)
        for offset in cutlass.range_constexpr(0, size, CLEAR_BYTES * WARPGROUP_THREADS):
            ptx.store_shared_zero16(place, offset)

    @cute.jit
    def attend_tiles(self, cta, work, query, tile: PipelineState):
        """As `WarpMainloop` has it, but that the values of a tile are multiplied in the turn of the next one."""
        config = self.config
        state, token, stride = self.unit.begin(cta, work, query, self.place_queries)
        number = state.keys.warpgroup.number
        self.give_first_turn(number)
        before = tile  # where the last tile lies; no tile yet: one that has come, times probabilities of zero
        while token < work.length:
            # All consumer warps meet where rows are cleared: before the warpgroups take turns.
            self.unit.await_tile(cta, work, token, tile)
            await_turn(number)
            self.start_products(cta, state, before.stage)
            if token > work.first_token(config):
                self.unit.give_back(cta, before)
            masked = self.logits.is_masked(state.logits, token, config.tile_tokens)
            first_token = token + cta.roles.slice_index * config.slice_tokens
            self.attend(
                state, self.copier.stage_addresses(cta.tiles, tile.stage), 0, masked, first_token, token + stride
            )
            self.unit.recentre(state, tile)
            token = token + stride
            before = tile
            tile = cta.pipeline.next(tile)
        if token > work.first_token(config):
            self.start_products(cta, state, before.stage)
            self.value_reader.wait_for(state.values, [], 0)
        self.finish(cta, work, state)

    @cute.jit
    def give_first_turn(self, number):
        if number == 1:
            pass_turn(number)

    def start_products(self, cta, state, stage: Int32):
        """Starts adding P V of the last tile, which lies in ``stage``."""
        place = cute.arch.make_warp_uniform(state.keys.warpgroup.last_operand(WarpgroupMma.probability_bytes))
        address = self.copier.stage_addresses(cta.tiles, stage)[1]
        self.value_reader.start_products(state.values, address, wgmma.descriptor(place))

    @cute.jit
    def attend(self, state, addresses, block: int, masked, first_token: Int32, next_token: Int32):
        """Logits and online softmax of the 128 tokens of a warpgroup; arguments as of `WarpMainloop`.

        Passes the turn. When it returns, no products are running, and probabilities are where all warps see them.
        """
        keys, values = state.keys, state.values
        key_headers = self.key_reader.load_headers(keys, addresses[0])
        headers = self.value_reader.load_scales(values, addresses[1], 0)
        started = [self.key_reader.start_scores(keys, addresses[0], half) for half in range(2)]
        pass_turn(keys.warpgroup.number)
        sums = cute.make_rmem_tensor(2 * self.config.columns, Float32)
        totals = self.key_reader.load_query_sums(keys)
        halves = []
        for half in cutlass.range_constexpr(2):
            # The second half's dot products are made while the first one has its softmax.
            dots = self.value_reader.wait_for(values, started[half], 1 - half)
            first = HALF_ROWS * half
            own = slice(first, first + HALF_ROWS)
            s = cute.make_rmem_tensor(HALF_ROWS * self.config.columns, Float32)
            lines = self.place_scores(keys, s, dots, key_headers[own])
            tokens = [first_token + block_token(self.config.token_bits, keys.g, first + j) for j in range(HALF_ROWS)]
            self.logits.apply(state.logits, s, keys.score_scale, tokens, masked)
            rows = Rows(first, s, lines, headers[own], sums)
            halves.append((rows, self.write_probabilities(state, rows, totals)))
        self.share_probabilities(state, [rows for rows, _ in halves], halves[0][1] | halves[1][1])

    def place_scores(self, keys, s, sums, headers):
        """Writes what :meth:`logit` makes logits of into s [j][column]; the lines [j] that it takes.

        Where logits are scores and no more, scores are never computed, but their powers straight from dot products.
        """
        dots = self.key_reader.rows(sums)
        lines = self.key_reader.lines(keys, headers)
        if self.logits.transforms:
            dots, lines = self.key_reader.scaled(keys, dots, headers), [(Float32(1.0), None)] * HALF_ROWS
        for j, row in enumerate(dots):
            for column, value in enumerate(row):
                s[self.config.columns * j + column] = value
        return lines

    @cute.jit
    def share_probabilities(self, state, halves, exceeds):
        """Gives the warpgroup the warp's probabilities and adds them to its sums; may raise the softmax reference.

        exceeds: whether one of those that are written is too large.
        """
        columns, warpgroup = self.config.columns, state.keys.warpgroup
        cute.arch.fence_proxy("async.shared", space="cta")
        again = any_of_warpgroup(warpgroup.number, Int32(exceeds))
        while again != 0:  # once: as in `extend.key_rows`, a branch may make all other code slower
            self.raise_shared_maximum(state, halves)
            totals = self.key_reader.load_query_sums(state.keys)
            for rows in halves:
                self.write_probabilities(state, rows, totals, is_raised=True)
            cute.arch.fence_proxy("async.shared", space="cta")
            again = any_of_warpgroup(warpgroup.number, Int32(0))
        sums = halves[0].sums
        for column in cutlass.range_constexpr(columns):
            state.softmax.totals[column] = state.softmax.totals[column] + sums[column]
            state.values.shift_sums[column] = sums[columns + column]
        warpgroup.go_on(WarpgroupMma.probability_bytes)

    def write_probabilities(self, state, rows, totals, is_raised: bool = False):
        """Writes P * scale of V; into ``rows.sums`` those of P and of P * shift. Whether one is too large for fp16.

        totals: sums of the queries, by column. is_raised: whether the reference is no less than any logit: logits of
        2^30 are rounded by more than fp16 holds, which no other reference would help.
        """
        columns, sums = self.config.columns, rows.sums
        logits = [
            [self.logit(rows, totals, j, column, -state.softmax.references[column]) for column in range(columns)]
            for j in range(HALF_ROWS)
        ]
        if is_raised:  # a NaN stays one
            bounds = [-self.value_reader.log_scale(rows.headers, j) for j in range(HALF_ROWS)]
            pairs = zip(logits, bounds, strict=True)
            logits = [[cutlass.select_(x > bound, bound, x) for x in row] for row, bound in pairs]
        probabilities = [[ptx.exp2(x) for x in row] for row in logits]
        shifts = [self.value_reader.shift(header[0]) for header in rows.headers]
        address = state.keys.warpgroup.operand()
        largest = self.value_reader.store_probabilities(state.values, address, rows.first, probabilities, rows.headers)
        most = Float32(0.0)
        for column in range(columns):
            p = [row[column] for row in probabilities]
            shifted = state.values.shift_sums[column] if rows.first == 0 else sums[columns + column]
            sums[columns + column] = ptx.fma(p[1], shifts[1], ptx.fma(p[0], shifts[0], shifted))
            sums[column] = p[0] + p[1] if rows.first == 0 else sums[column] + (p[0] + p[1])
            if rows.first > 0:
                most = ptx.fmax(most, sums[column])
        product = ptx.fmax(ptx.half2_low_to_float(largest), ptx.half2_high_to_float(largest))
        return (product > 2.0**RESCALE_SLACK) | (most > MAX_TOTAL)

    def logit(self, rows, totals, j: int, column: int, start):
        """``start`` and a logit in powers of two; totals: sums of the queries, by column."""
        scale, shift = rows.lines[j]
        if shift is not None:
            start = ptx.fma(shift, totals[column], start)
        return ptx.fma(rows.s[self.config.columns * j + column], scale, start)

    def raise_shared_maximum(self, state, halves):
        """Takes the warpgroup's maxima as reference and rescales what was accumulated under the old ones."""
        columns, softmax, warpgroup = self.config.columns, state.softmax, state.keys.warpgroup
        places = [(rows, j) for rows in halves for j in range(HALF_ROWS)]
        log_scales = [self.value_reader.log_scale(rows.headers, j) for rows, j in places]
        totals = self.key_reader.load_query_sums(state.keys)
        maxima = []
        for column in range(columns):
            bounds = [
                self.logit(rows, totals, j, column, log_scale)
                for (rows, j), log_scale in zip(places, log_scales, strict=True)
            ]
            largest = ptx.fmax(ptx.fmax(bounds[0], bounds[1]), ptx.fmax(bounds[2], bounds[3]))
            maxima.append(lane_max(largest, COLUMN_LANES))
        told = self.tell(warpgroup, state.keys.t, maxima, 1)
        factors = [softmax.raise_to(column, *(words[0] for words in heard)) for column, heard in enumerate(told)]
        self.value_reader.rescale(state.values, factors)

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
        self.join(state)
        number = state.keys.warpgroup.number
        self.merger.finish(work, state, cta.results, cta.ring, cta.warp, cta.lane, number)

    def join(self, state):
        """The warpgroup's sums of P and of P * shift, in lanes of g = 0 alone: those of all g are added up later."""
        columns, values, softmax = self.config.columns, state.values, state.softmax
        own = []
        for column in range(columns):
            for value in (softmax.totals[column], values.shift_sums[column]):
                own.append(lane_sum(value, COLUMN_LANES))
        for column, heard in enumerate(self.tell(state.keys.warpgroup, state.keys.t, own, 2)):
            for index, target in enumerate((softmax.totals, values.shift_sums)):
                total = (heard[0][index] + heard[1][index]) + (heard[2][index] + heard[3][index])
                target[column] = cutlass.select_(state.keys.g == 0, total, Float32(0.0))


assert EXCHANGE_BYTES == WARPGROUP_WARPS * WGMMA_QUERIES * PAIR_BYTES and BLOCK_TOKENS == BLOCK_QUERIES * ROW_HALVES
