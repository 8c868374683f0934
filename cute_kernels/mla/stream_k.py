"""Stream-K: the blocks of all rows, one row after the other, are cut into equal work ranges, one for each team of CTAs.

A team has a CTA for each block of 64 heads; its CTAs process the same tokens together. A work range is the end of a
row, whole rows, and the beginning of another row, whatever the lengths of rows (Osama et al. 2023). If a row is cut, no
combine is needed. The team that has the end of the row computes that part first, and publishes its accumulators, maxima
and totals. The team that has the beginning computes its part last, and resumes from the published values instead of
zeros. So one launch is enough, no partial result is scaled, and the order of additions depends on lengths alone. Rows
of equal length stay whole if that costs less than cuts: some teams then have one row more than others.

Every launch ends, since the first CTAs have the last work ranges. So a CTA waits only for a CTA of a lower index, which
the hardware starts before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import EMPTY_WORD, WARP_THREADS
from cute_kernels.device.division import Divisor
from cute_kernels.device.lanes import lane_prefix, lane_sum, over_lanes
from cute_kernels.mla.config import (
    BLOCK_HEADS,
    CONSUMER_WARPS,
    STATE_BYTES,
    V_HEAD_DIM,
    WARPGROUP_WARPS,
)
from cute_kernels.mla.loads.locate import PagedLocator, PagedSource, SparseLocator, SparseSource, count_blocks

CUT_UNITS, CUT_SHARE = 2, 80  # what cuts cost a team: so many units, and a share of all
ALL_LANES = (1, 2, 4, 8, 16)
PUBLISHED = 0  # a flag's value when there is something to load; EMPTY_WORD otherwise
LANE_BYTES = 16
VECTOR_BYTES = WARP_THREADS * LANE_BYTES
ACC = V_HEAD_DIM // 4  # of a thread
WARP_HEADS = BLOCK_HEADS // WARPGROUP_WARPS


def units_of(blocks):
    """Returns the number of units of work of a row: one for each of its ``blocks`` blocks. An empty row has one unit,
    as its result has to be written.
    """
    return cutlass.max(blocks, Int32(1))


@dataclass(frozen=True)
class StreamK:
    """The work ranges of a launch; run-time values.

    Attributes:
        request_rows: number of rows of a request, all of one length.
        teams: the number of teams, as a `Divisor`.
    """

    locator: SparseLocator | PagedLocator
    source: SparseSource | PagedSource
    requests: Int32
    request_rows: Int32
    teams: Divisor

    @cute.jit
    def work_range(self, team, lane):
        """Returns (first row, first unit in that row, number of units) of a team's work range. All lanes of a warp call
        it together.

        A lane adds up the units of its share of the requests. Then it tests whether the work range begins in one of
        these requests. Loops are not unrolled: with a cold cache, instructions that run once take longer to fetch than
        to run.
        """
        per_lane = (self.requests + (WARP_THREADS - 1)) // WARP_THREADS
        own, longest = Int32(0), Int32(0)
        for i in cutlass.range(per_lane, unroll=1):
            of_row, of_request = self.request_units(lane * per_lane + i)
            own = own + of_request
            longest = cutlass.max(longest, of_row)
        before, total = lane_prefix(own, lane, Int32(0))
        longest = over_lanes(cutlass.max, longest, ALL_LANES)
        piece, pieces = self.pieces(total, longest)
        size, rest = (Int32(value) for value in self.teams.divide(Uint32(pieces)))
        slot = self.teams.value - 1 - team
        begin = (slot * size + cutlass.min(slot, rest)) * piece
        found, offset, each = Int32(0), Int32(0), Int32(0)  # other than 0 in the lane that finds the request
        for i in cutlass.range(per_lane, unroll=1):
            request = lane * per_lane + i
            of_row, of_request = self.request_units(request)
            inside = (begin >= before) & (begin < before + of_request)
            found = cutlass.select_(inside, request, found)
            offset = cutlass.select_(inside, begin - before, offset)
            each = cutlass.select_(inside, of_row, each)
            before = before + of_request
        found, offset, each = (lane_sum(value, ALL_LANES) for value in (found, offset, each))
        row = Int32(Uint32(offset) // Uint32(cutlass.max(each, Int32(1))))
        left = (size + cutlass.select_(slot < rest, Int32(1), Int32(0))) * piece
        return found * self.request_rows + row, offset - row * each, left

    def pieces(self, total, longest):
        """Returns (units of a piece, number of pieces). Work ranges consist of whole pieces. A piece is a row if all
        rows are equally long and cuts would cost more than they gain; otherwise it is a unit.
        """
        rows = self.requests * self.request_rows
        turns, _ = self.teams.divide(Uint32(rows + self.teams.value - 1))
        evenly, _ = self.teams.divide(Uint32(total))
        gain = Int32(turns) * longest - Int32(evenly)
        whole = (total == rows * longest) & (gain <= CUT_UNITS + Int32(evenly // CUT_SHARE))
        return cutlass.select_(whole, longest, Int32(1)), cutlass.select_(whole, rows, total)

    @cute.jit
    def request_units(self, request):
        """Returns (units of one row of a request, units of all its rows). The second number is 0 if there is no such
        request."""
        existing = cutlass.min(request, self.requests - 1)
        _, blocks = count_blocks(*self.locator.lengths(self.source, existing))
        each = units_of(blocks)
        return each, cutlass.select_(request < self.requests, each * self.request_rows, Int32(0))


@dataclass(frozen=True)
class PartialExchange:
    """The memory through which CTAs exchange partial results: addresses, and numbers of CTAs.

    Every warp exchanges by itself: a lane's registers go to the same lane of the same warp of another CTA, 16 bytes at
    a time. A flag is `EMPTY_WORD` between launches. The warp that has waited for a flag resets it.
    """

    words: Int64  # fp32 [CTAs, STATE_WORDS]
    flags: Int64  # int32 [CTAs, FLAG_WORDS]
    own: Int32
    following: Int32  # the CTA with the next work range and the same heads

    @cute.jit
    def publish(self, work, acc, stats, warp, lane, half: cutlass.Constexpr):
        """Publishes a thread's accumulators for the CTA that resumes the row. stats: the thread's maxima and totals,
        which are published as well; () without them."""
        if work.first_head + warp * WARP_HEADS < work.shape.num_heads:
            number = self.own * CONSUMER_WARPS + (half * WARPGROUP_WARPS + warp)
            place = self.words + Int64(number) * STATE_BYTES + lane * LANE_BYTES
            for i in cutlass.range_constexpr(ACC // 4):
                ptx.store_global(place, [acc[4 * i + j] for j in range(4)], offset=i * VECTOR_BYTES)
            if const_expr(len(stats) > 0):
                values = [numbers_of[i] for numbers_of in stats for i in range(2)]
                ptx.store_global(place, values, offset=ACC // 4 * VECTOR_BYTES)
            cute.arch.sync_warp()
            if lane == 0:
                numbers.store_released(self.flags + Int64(number) * 4, Uint32(PUBLISHED))

    @cute.jit
    def resume(self, work, acc, stats, warp, lane, half: cutlass.Constexpr):
        """Waits until the same warp of the following CTA has published, and loads the published values into ``acc`` and
        ``stats``.
        """
        if work.first_head + warp * WARP_HEADS < work.shape.num_heads:
            number = self.following * CONSUMER_WARPS + (half * WARPGROUP_WARPS + warp)
            flag = self.flags + Int64(number) * 4
            missing = Int32(1)
            while missing != 0:
                word = numbers.load_acquired(flag)
                missing = Int32(cute.arch.vote_any_sync(word == Uint32(EMPTY_WORD)))
            if lane == 0:
                ptx.store_global(flag, [Uint32(EMPTY_WORD)])
            place = self.words + Int64(number) * STATE_BYTES + lane * LANE_BYTES
            for i in cutlass.range_constexpr(ACC // 4):
                loaded = ptx.load_global_words(place, i * VECTOR_BYTES, 4, constant=False)
                for j in cutlass.range_constexpr(4):
                    acc[4 * i + j] = loaded[j].bitcast(Float32)
            if const_expr(len(stats) > 0):
                loaded = ptx.load_global_words(place, ACC // 4 * VECTOR_BYTES, 4, constant=False)
                for j in cutlass.range_constexpr(4):
                    stats[j // 2][j % 2] = loaded[j].bitcast(Float32)
