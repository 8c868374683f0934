"""Few rows in one launch: every CTA has a part of a row, and all of them add the parts up.

What a second launch costs is that the first one has to end, CTAs of another program to come, and that program to come
out of a cold cache. Here the launch is a cooperative one: all CTAs are there at once, so each may wait for the others.
A CTA leaves its part in memory, tells all CTAs with the same heads, and takes some of their heads, which its gathering
warps add up: they have nothing else to do by then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.lanes import lane_max, lane_sum
from cute_kernels.device.ring import advance
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.mla.combine import outcome_of
from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, NUM_STAGES, V_HEAD_DIM, WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.gather import GROUP_TOKENS, Crossing, GatherLane, await_barriers
from cute_kernels.mla.items import PartCursor
from cute_kernels.mla.line import ALL_LANES
from cute_kernels.mla.multiply import MULTIPLYING_THREADS, Rows
from cute_kernels.mla.numbers16 import of_name
from cute_kernels.mla.output import WARP_ROWS, exists_sink, scale_of
from cute_kernels.mla.softmax import LOWEST
from cute_kernels.mla.stepped import WEIGHTS_FREE, Stepped
from cute_kernels.mla.work import stamp
from cute_kernels.sm90 import EMPTY_WORD, WARP_THREADS

TILES_FREE = 6  # named barrier of the gathering warps
WRITTEN = 0  # a flag's value when a part is there; EMPTY_WORD otherwise
ROW_LANES = 4  # that have a row's sums
LANE_BYTES = 16
HALF = V_HEAD_DIM // 2  # columns of a warpgroup
COLUMNS = V_HEAD_DIM // WARP_THREADS  # of a lane that adds up: 8 of each half
# A part's half of a row: fp16 values, then fp32 numbers: the row's maximum and total (left half alone), and what the
# values are to be multiplied with. 8 rows side by side lie in different banks.
HALF_BYTES, ROW_BYTES = HALF * 2, HALF * 2 + LANE_BYTES


@dataclass(frozen=True)
class Parts:
    """Where the parts of a CTA's row and block of heads lie; run-time values.

    Heads are dealt to ``readers`` CTAs, ``each`` side by side. For each of them, memory has of every part the left half
    of its heads, then the right half.
    """

    words: Any  # addresses: of all parts
    flags: Any  # ... of a flag for every reader and part
    part: Any  # the CTA's own
    count: Any
    each: Any  # heads, a power of 2 from 4 to 16
    readers: Any

    @staticmethod
    def of(items) -> Parts:
        count = items.shape.num_parts
        each = cutlass.select_(count >= 16, Int32(4), cutlass.select_(count >= 8, Int32(8), Int32(16)))
        readers = cutlass.select_(count >= 16, Int32(16), cutlass.select_(count >= 8, Int32(8), Int32(4)))
        group = items.row * items.counts.head_blocks.value + items.head_block
        words = items.states.words + Int64(group * count) * (BLOCK_HEADS * 2 * ROW_BYTES)
        flags = items.states.flags + Int64(group * count * readers) * 8
        return Parts(words, flags, items.start, count, each, readers)

    @property
    def half_bytes(self):
        """Of a half of a part of a reader's heads."""
        return self.each * ROW_BYTES

    def place(self, reader, part, half):
        """Address of a half of a part of a reader's heads."""
        return self.words + Int64((reader * self.count + part) * 2 + half) * self.half_bytes

    def flag(self, reader, part, half):
        """Address of the flag that says that it is there."""
        return self.flags + Int64((reader * self.count + part) * 2 + half) * 4


class CrossingParts(Crossing):
    """The warps that gather a part. The second multiplying warpgroup has nothing to do until the first weights are there:
    it gathers the second block, while those that gather are at the first one."""

    @cute.jit
    def run(self, items, source, memory, warp, lane, helps: cutlass.Constexpr):
        """Fills a tile for every block, or, if ``helps`` is 1, for the second one alone."""
        stamp(self.config, items, 2 , Int32(7 * helps), warp, lane)
        first_row = self.first_row(warp)
        place = GatherLane.of(first_row, lane)
        link = self.link(memory, first_row)
        memory = replace(memory, entries=memory.entries + helps * (self.config.entry_bytes // 2))
        words = cute.make_rmem_tensor(4 * self.num_loads, Uint32)
        scales = cute.make_rmem_tensor(self.scale_words, Uint32)
        cursor = PartCursor.before(items, helps, self.config.helped)
        self.entries.start(cursor, source, memory, first_row, lane)
        stamp(self.config, items, 2, Int32(1 + 14 * helps), warp, lane)
        token = self.entries.token(source, memory, Int32(0), first_row, place.row)
        for i in cutlass.range_constexpr(self.num_loads):
            self.load_piece(words, token, place, i)
        self.load_scales(scales, token)
        held = token.valid
        await_barriers(self.config)
        number, block = Int32(0), Int32(helps)
        while number < cursor.found:
            stage, phase = ring_place(block)
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            following, row = self.step(number, 1, place)
            token = self.entries.token(source, memory, following, first_row, row)
            self.publish_flags(memory, link, stage, place.row // GROUP_TOKENS, held, lane)
            self.write_group(words, scales, token, self.tile(memory, link, stage, 0), place)
            held = token.valid
            self.announce_tile(memory, stage, warp, lane)
            stamp(self.config, items, 2, 2 + block, warp, lane)
            self.entries.step(cursor, source, memory, number, first_row, lane)
            number = number + 1
            if const_expr(self.config.helped):
                block = block + cutlass.select_(block == 0, Int32(2), Int32(1))
            else:
                block = block + 1


def ring_place(block) -> tuple[Any, Any]:
    """(stage, phase of its giving back) of a part's ``block``-th tile."""
    return block % NUM_STAGES, (block // NUM_STAGES + 1) % 2


class SteppedParts(Stepped):
    """The order in steps, of one part a CTA."""

    @cute.jit
    def first(self, items, results, memory, softmax_scale, warp, lane):
        work = items.work(items.row, items.start, items.left)
        scale = ptx.pinned(softmax_scale * ptx.LOG2_E)
        places = ptx.pinned(self.weight_place(memory, warp, lane))
        rows = Rows.make()
        factors = cute.make_rmem_tensor(2, Float32)  # by which a block shrinks earlier sums
        stamp(self.config, items, 0, Int32(1), warp, lane)
        self.await_queries(memory, Int32(0))
        stamp(self.config, items, 0, Int32(2), warp, lane)
        stage, phase = Int32(0), Int32(0)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.first_block(rows, factors, work, items, memory, places, stage, phase, block, scale, warp, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        stamp(self.config, items, 0, Int32(11), warp, lane)
        self.end_rows(rows, scale)
        stats = [(rows.maxima[i], rows.totals[i]) for i in range(2)]
        self.leave(items, rows.sums, stats, memory, warp, lane, 0)

    @cute.jit
    def second(self, items, results, memory, softmax_scale, warp, lane):
        work = items.work(items.row, items.start, items.left)
        weights = wgmma_tiles.tile(memory.weight_pointer, BLOCK_HEADS, BLOCK_TOKENS, self.numbers.type)
        sums = Rows.make().sums
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        stage, phase = Int32(0), Int32(0)
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.second_block(sums, weights, memory, warp, lane, stage, phase)
            stage, phase = advance(stage, phase, NUM_STAGES)
        # The part goes where the queries are.
        self.await_queries(memory, Int32(0))
        stamp(self.config, items, 1, Int32(11), warp, lane)
        self.leave(items, sums, (), memory, warp, lane, 1)

    @cute.jit
    def ask_next_queries(self, wanted, work, items, memory, warp) -> None:
        """There is no next share."""
        if const_expr(self.config.stamps):
            stamp(self.config, items, 0, cutlass.select_(wanted, Int32(4), Int32(3)), warp, cute.arch.lane_idx())

    @cute.jit
    def leave(self, items, sums, stats, memory, warp, lane, half: cutlass.Constexpr):
        """Leaves a warp's half of its rows for the CTAs that add them up, by way of shared memory where the queries
        were. stats: (maximum, total) of a thread's rows, or ()."""
        parts = Parts.of(items)
        rows = memory.queries + (half * WARPGROUP_WARPS + warp) * (WARP_ROWS * ROW_BYTES)
        scales = [scale_of(sums, below) for below in range(2)]
        stage_values(sums, [scale for scale, _ in scales], rows + row_place(lane))
        if lane % ROW_LANES == 0:
            for below in cutlass.range_constexpr(2):
                behind = rows + (lane // ROW_LANES + 8 * below) * ROW_BYTES
                unit = scales[below][1]
                values = [*stats[below], unit, unit] if const_expr(half == 0) else [unit]
                ptx.store_shared(behind, HALF_BYTES, values)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        size = parts.each * ROW_BYTES
        readers = parts.readers // WARPGROUP_WARPS  # of a warp's rows
        if lane < readers:
            reader = warp * readers + lane
            numbers.copy_to_global(parts.place(reader, parts.part, half), rows + lane * size, size)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
            stamp(self.config, items, half, Int32(13), warp, lane)
            numbers.store_released(parts.flag(reader, parts.part, half), Uint32(WRITTEN))
            stamp(self.config, items, half, Int32(14), warp, lane)


def row_place(lane):
    """Bytes from a warp's rows to where a lane's matrix of :func:`stage_values` begins."""
    return lane % WARP_ROWS * ROW_BYTES + lane // WARP_ROWS * LANE_BYTES


def stage_values(sums, scales, place) -> None:
    """Stores a warp's 16 rows as scaled fp16, a row every `ROW_BYTES`. place: of `row_place`."""
    for i in range(0, HALF // 2, 8):
        # Twice 8 columns of 16 rows.
        order = [(i + 4 * further + 2 * below, scales[below]) for further in range(2) for below in range(2)]
        words = [ptx.pack_f16x2(sums[j] * scale, sums[j + 1] * scale) for j, scale in order]
        ptx.store_matrix_x4(place, sum_place(i)[1] * 2, words, transpose=False)


class Adding:
    """The gathering warps behind their last tile."""

    def __init__(self, config: MlaConfig, gatherer):
        self.config = config
        self.gatherer = gatherer
        self.numbers = of_name(config.layout.dtype)

    @cute.jit
    def run(self, items, results, memory, warp, lane):
        """Waits for all parts of the CTA's heads and writes their results.

        All of it is done once before for nothing, so that the program is there when it is wanted.
        """
        parts = Parts.of(items)
        first = items.head_block * BLOCK_HEADS + parts.part * parts.each
        heads = cutlass.min(items.shape.num_heads - first, parts.each)
        heads = cutlass.select_(parts.part < parts.readers, heads, Int32(0))
        for turn in cutlass.range(2, unroll=1):
            stamp(self.config, items, 2, Int32(8) + turn, warp, lane)
            if turn == 1:
                work = items.work(items.row, items.start, items.left)
                self.gatherer.finish(memory, *ring_place(work.end - work.begin))
                cute.arch.mbarrier_wait(memory.queries_full, 0)
                if parts.part < parts.readers:
                    if (warp == 0) & (lane == 0):
                        total = parts.count * 2 * parts.half_bytes
                        cute.arch.mbarrier_arrive_and_expect_tx(memory.queries_full, total)
                    cute.arch.barrier(barrier_id=TILES_FREE, number_of_threads=WARPGROUP_WARPS * WARP_THREADS)
                    stamp(self.config, items, 2, Int32(10), warp, lane)
                    self.fetch(parts, memory, warp, lane)
                    stamp(self.config, items, 2, Int32(11), warp, lane)
                    cute.arch.mbarrier_wait(memory.queries_full, 1)
                stamp(self.config, items, 2, Int32(12), warp, lane)
            end = cutlass.select_(turn == 1, heads, Int32(WARPGROUP_WARPS))
            for head in cutlass.range(warp, end, WARPGROUP_WARPS, unroll=1):
                self.add(items, parts, results, memory.tiles, head, first + head, turn, lane)
        stamp(self.config, items, 2, Int32(13), warp, lane)

    @cute.jit
    def fetch(self, parts, memory, warp, lane):
        """Asks for halves of parts of the CTA's heads in shared memory, where tiles were, as they come; a warp for every
        fourth of them. Puts their flags back."""
        number = lane * WARPGROUP_WARPS + warp
        pending = cutlass.select_(number < 2 * parts.count, Int32(1), Int32(0))
        number = number * pending
        flag = parts.flag(parts.part, 0, number)
        missing = Int32(1)
        while missing != 0:
            word = numbers.load_acquired(flag)
            if (pending != 0) & (word != Uint32(EMPTY_WORD)):
                # It was written by other means than it is read by.
                cute.arch.fence_proxy("async.global")
                ptx.store_global(flag, [Uint32(EMPTY_WORD)])
                target = memory.tiles + number * parts.half_bytes
                source = parts.place(parts.part, 0, number)
                ptx.bulk_copy_to_shared(target, source, parts.half_bytes, memory.queries_full.toint())
                pending = Int32(0)
            missing = Int32(cute.arch.vote_any_sync(pending != 0))

    @cute.jit
    def add(self, items, parts, results, values, head, row_head, wanted, lane):
        """Adds up the ``head``-th head of the CTA, 8 columns of each half a lane; writes it if wanted is not 0."""
        stride = 2 * parts.half_bytes
        left = values + head * ROW_BYTES
        right = left + parts.half_bytes
        own = cutlass.min(lane, parts.count - 1) * stride
        maximum, total, unit, _ = (
            word.bitcast(Float32) for word in ptx.load_shared_vector(left + own, HALF_BYTES, 4)
        )
        units = unit, ptx.load_shared(right + own, HALF_BYTES).bitcast(Float32)
        exists = lane < parts.count
        maximum = cutlass.select_(exists, maximum, Float32(LOWEST))
        total = cutlass.select_(exists, total, Float32(0.0))
        top = lane_max(maximum, ALL_LANES)
        weight = ptx.exp2(maximum - top)
        sum_of_weights = lane_sum(weight * total, ALL_LANES)
        # A part without keys has zeros.
        weights = [cutlass.select_(total > 0.0, weight * unit, Float32(0.0)) for unit in units]
        sums = cute.make_rmem_tensor(COLUMNS, Float32)
        sums.fill(0.0)
        for part in cutlass.range(parts.count, unroll=4):
            for half in cutlass.range_constexpr(2):
                worth = cute.arch.shuffle_sync(weights[half], part)
                place = (left if half == 0 else right) + part * stride + lane * LANE_BYTES
                words = ptx.load_shared_vector(place, 0, 4)
                for i in cutlass.range_constexpr(4):
                    j = 8 * half + 2 * i
                    sums[j] = ptx.fma(ptx.half2_low_to_float(words[i]), worth, sums[j])
                    sums[j + 1] = ptx.fma(ptx.half2_high_to_float(words[i]), worth, sums[j + 1])
        self.write(items, results, row_head, sums, top, sum_of_weights, wanted, lane)

    @cute.jit
    def write(self, items, results, row_head, sums, maximum, total, wanted, lane):
        """A head's results, its log-sum-exp, and the greatest score if it is asked for."""
        denominator = total
        if exists_sink(results):
            if wanted != 0:
                sink = ptx.load_global_words(results.sinks + Int64(row_head) * 4, 0, 1)[0].bitcast(Float32)
                denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -maximum))
        words, lse, top = outcome_of(sums, COLUMNS, maximum, total, denominator, self.numbers)
        query_row = items.row * items.shape.num_heads + row_head
        place = results.out + Int64(query_row) * (V_HEAD_DIM * 2) + lane * LANE_BYTES
        if wanted != 0:
            ptx.store_global(place, words[:4])
            ptx.store_global(place, words[4:], offset=HALF_BYTES)
            if lane == 0:
                ptx.store_global(results.lse + Int64(query_row) * 4, [lse])
                if results.max_logits != 0:
                    ptx.store_global(results.max_logits + Int64(query_row) * 4, [top])
