"""Few rows in one launch: every CTA has a part of a row, and all of them add the parts up.

What a second launch costs is that the first one has to end, CTAs of another program to come, and that program to come
out of a cold cache. Here the launch is a cooperative one: all CTAs are there at once, so each may wait for the others.
A CTA leaves its part in memory, tells all CTAs with the same heads, and takes some of their heads, which its gathering
warps add up: they have nothing else to do by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.lanes import lane_max, lane_sum
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import BLOCK_HEADS, NUM_STAGES, PARTIALS, V_HEAD_DIM, WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.config import BLOCK_TOKENS
from cute_kernels.mla.line import ALL_LANES
from cute_kernels.mla.multiply import MULTIPLYING_THREADS, Rows
from cute_kernels.mla.numbers16 import of_name
from cute_kernels.mla.output import exists_sink
from cute_kernels.mla.softmax import LOWEST
from cute_kernels.mla.stepped import WEIGHTS_FREE, Stepped
from cute_kernels.mla.work import partial_stats, partial_values
from cute_kernels.sm90 import EMPTY_WORD, WARP_THREADS

PART_WRITTEN, TILES_FREE = 6, 7  # named barriers: of both multiplying warpgroups, of the gathering one
WRITTEN = 0  # a flag's value when a part is there; EMPTY_WORD otherwise
LANE_BYTES = 16
HALF_BYTES = V_HEAD_DIM  # of a part's half of a row, fp16


def flag_place(items, reader, writer):
    """Address of the flag by which the ``writer``-th part of some heads is announced to the ``reader``-th."""
    group = items.row * items.counts.head_blocks.value + items.head_block
    parts = items.shape.num_parts
    return items.states.flags + Int64((group * parts + reader) * parts + writer) * 4


class SteppedParts(Stepped):
    """The order in steps, of one part a CTA."""

    @cute.jit
    def first(self, items, results, memory, softmax_scale, warp, lane):
        work = items.work(items.row, items.start, items.left)
        scale = ptx.pinned(softmax_scale * ptx.LOG2_E)
        places = ptx.pinned(self.weight_place(memory, warp, lane))
        self.await_queries(memory, Int32(0))
        stage, phase = Int32(0), Int32(0)
        for turn in cutlass.range(Int32(1 if self.config.rehearse < 2 else 0), 2, 1, unroll=1):
            rows = Rows.make()
            factors = cute.make_rmem_tensor(2, Float32)  # by which a block shrinks earlier sums
            for block in cutlass.range(cutlass.select_(turn == 1, work.begin, work.end), work.end, 1, unroll=1):
                self.first_block(rows, factors, work, items, memory, places, stage, phase, block, scale, warp, lane)
                stage, phase = advance(stage, phase, NUM_STAGES)
            if turn == 1:
                cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
            self.end_rows(rows, scale)
            self.writer.finish_part(work, results, rows.maxima, rows.totals, warp, lane, turn)
            self.writer.write_scaled(work, results, rows.sums, warp, lane, 0, turn)
        cute.arch.barrier(barrier_id=PART_WRITTEN, number_of_threads=MULTIPLYING_THREADS)
        if warp == 0:
            if lane < work.shape.num_parts:
                numbers.store_released(flag_place(items, lane, items.start), Uint32(WRITTEN))

    @cute.jit
    def second(self, items, results, memory, softmax_scale, warp, lane):
        work = items.work(items.row, items.start, items.left)
        weights = wgmma_tiles.tile(memory.weight_pointer, BLOCK_HEADS, BLOCK_TOKENS, self.numbers.type)
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        stage, phase = Int32(0), Int32(0)
        for turn in cutlass.range(Int32(1 if self.config.rehearse < 1 else 0), 2, 1, unroll=1):
            sums = Rows.make().sums
            for _ in cutlass.range(cutlass.select_(turn == 1, work.begin, work.end), work.end, 1, unroll=1):
                self.second_block(sums, weights, memory, warp, lane, stage, phase)
                stage, phase = advance(stage, phase, NUM_STAGES)
            self.writer.write_scaled(work, results, sums, warp, lane, 1, turn)
        cute.arch.barrier_arrive(barrier_id=PART_WRITTEN, number_of_threads=MULTIPLYING_THREADS)

    def ask_next_queries(self, wanted, work, items, memory, warp) -> None:
        """There is no next share."""


@dataclass(frozen=True)
class Job:
    """The heads that a CTA adds up; run-time values.

    query_row: of the first. count: of heads, may be 0. values, stats: addresses of their parts, one after the other.
    """

    query_row: Any
    first_head: Any
    count: Any
    values: Any
    stats: Any


class Adding:
    """The gathering warps behind their last tile."""

    def __init__(self, config: MlaConfig, gatherer):
        self.config = config
        self.gatherer = gatherer
        self.form = PARTIALS[config.partials]
        self.numbers = of_name(config.layout.dtype)

    @cute.jit
    def run(self, items, results, memory, stage, phase, warp, lane):
        """Waits for all parts of the CTA's heads and writes their results."""
        job = self.job(items, results)
        parts = items.shape.num_parts
        stats = memory.tiles + job.count * parts * self.form.row_bytes
        for turn in cutlass.range(2, unroll=1):
            heads = cutlass.select_(turn == 1, job.count, Int32(WARPGROUP_WARPS))
            if turn == 1:
                self.gatherer.finish(memory, stage, phase)
                cute.arch.mbarrier_wait(memory.queries_full, 0)
                cute.arch.barrier(barrier_id=TILES_FREE, number_of_threads=WARPGROUP_WARPS * WARP_THREADS)
                if warp == 0:
                    self.await_parts(items, lane)
                    self.load(job, parts, stats, memory, lane)
                if job.count > 0:
                    cute.arch.mbarrier_wait(memory.queries_full, 1)
            for head in cutlass.range(warp, heads, WARPGROUP_WARPS, unroll=1):
                self.add(job, results, memory.tiles, stats, head, parts, turn, lane)

    def job(self, items, results) -> Job:
        shape = items.shape
        each, _ = items.counts.cuts.divide(Uint32(shape.num_parts + (BLOCK_HEADS - 1)))
        first_head = items.head_block * BLOCK_HEADS
        first = items.start * Int32(each)
        heads = cutlass.min(shape.num_heads - first_head, Int32(BLOCK_HEADS))
        count = cutlass.max(cutlass.min(heads - first, Int32(each)), Int32(0))
        query_row = items.row * shape.num_heads + first_head + first
        values = partial_values(results, shape, query_row, 0, self.form)
        return Job(query_row, first_head + first, count, values, partial_stats(results, shape, query_row, 0, self.form))

    @cute.jit
    def await_parts(self, items, lane):
        """Waits until all parts are written; puts the flags back."""
        parts = items.shape.num_parts
        flag = flag_place(items, items.start, cutlass.min(lane, parts - 1))
        missing = Int32(1)
        while missing != 0:
            word = numbers.load_acquired(flag)
            missing = Int32(cute.arch.vote_any_sync(word == Uint32(EMPTY_WORD)))
        if lane < parts:
            ptx.store_global(flag, [Uint32(EMPTY_WORD)])

    @cute.jit
    def load(self, job, parts, stats, memory, lane):
        """Asks for all parts of the heads in shared memory, where tiles were."""
        # Parts were written by other means than they are read by.
        cute.arch.fence_proxy("async.global")
        cute.arch.sync_warp()
        if (lane == 0) & (job.count > 0):
            number = job.count * parts
            total = number * (self.form.row_bytes + self.form.stats_bytes)
            cute.arch.mbarrier_arrive_and_expect_tx(memory.queries_full, total)
            barrier = memory.queries_full.toint()
            ptx.bulk_copy_to_shared(stats, job.stats, number * self.form.stats_bytes, barrier)
            ptx.bulk_copy_to_shared(memory.tiles, job.values, number * self.form.row_bytes, barrier)

    @cute.jit
    def add(self, job, results, values, stats, head, parts, wanted, lane):
        """Adds up a head, 8 columns of each half a lane, and writes it if wanted is not 0."""
        exists = lane < parts
        number = head * parts
        known = ptx.load_shared_vector(stats + (number + cutlass.min(lane, parts - 1)) * self.form.stats_bytes, 0, 4)
        own_maximum, own_total, *units = (word.bitcast(Float32) for word in known)
        own_maximum = cutlass.select_(exists, own_maximum, Float32(LOWEST))
        own_total = cutlass.select_(exists, own_total, Float32(0.0))
        maximum = lane_max(own_maximum, ALL_LANES)
        weight = ptx.exp2(own_maximum - maximum)
        total = lane_sum(weight * own_total, ALL_LANES)
        # A part without keys has zeros.
        weights = [cutlass.select_(own_total > 0.0, weight * unit, Float32(0.0)) for unit in units]
        sums = cute.make_rmem_tensor(16, Float32)
        sums.fill(0.0)
        place = values + number * self.form.row_bytes + lane * LANE_BYTES
        for part in cutlass.range(parts, unroll=4):
            for half in cutlass.range_constexpr(2):
                worth = cute.arch.shuffle_sync(weights[half], part)
                words = ptx.load_shared_vector(place + part * self.form.row_bytes, half * HALF_BYTES, 4)
                for i in cutlass.range_constexpr(4):
                    j = 8 * half + 2 * i
                    sums[j] = ptx.fma(ptx.half2_low_to_float(words[i]), worth, sums[j])
                    sums[j + 1] = ptx.fma(ptx.half2_high_to_float(words[i]), worth, sums[j + 1])
        self.write(job, results, head, sums, maximum, total, wanted, lane)

    @cute.jit
    def write(self, job, results, head, sums, maximum, total, wanted, lane):
        """A head's results, its log-sum-exp, and the greatest score if it is asked for."""
        denominator = total
        if exists_sink(results):
            if wanted != 0:
                place = results.sinks + Int64(job.first_head + head) * 4
                sink = ptx.load_global_words(place, 0, 1)[0].bitcast(Float32)
                denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -maximum))
        exists = total != 0.0
        lse = cutlass.select_(exists, (maximum + ptx.log2(total)) * ptx.LN_2, Float32(math.inf))
        top = cutlass.select_(exists, maximum * ptx.LN_2, Float32(-math.inf))
        factor = cutlass.select_(exists, ptx.reciprocal(denominator), Float32(0.0))
        query_row = job.query_row + head
        place = results.out + Int64(query_row) * (V_HEAD_DIM * 2) + lane * LANE_BYTES
        words = [self.numbers.pack(sums[i] * factor, sums[i + 1] * factor) for i in range(0, 16, 2)]
        if wanted != 0:
            ptx.store_global(place, words[:4])
            ptx.store_global(place, words[4:], offset=HALF_BYTES)
            if lane == 0:
                ptx.store_global(results.lse + Int64(query_row) * 4, [lse])
                if results.max_logits != 0:
                    ptx.store_global(results.max_logits + Int64(query_row) * 4, [top])
