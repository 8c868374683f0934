"""The kernel that sorts assignments by expert: a counting sort in one CTA, without atomics, whose order is always the
same.

Each warp takes consecutive assignments, 32 in a step. Lanes with the same expert find each other by match.sync. The
first of these lanes adds the count of such lanes to the warp's counter of the expert. Sums over warps and experts then
say where each warp's assignments to each expert begin. A second pass gives every assignment its place, after all
earlier assignments to the same expert.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.types import extents
from cute_kernels.gemm.experts.ranges.assignments import load_expert
from cute_kernels.gemm.experts.router.config import SORTING_WARPS, RouterConfig
from cute_kernels.gemm.experts.schedule import EXPERTS_PER_LANE, MAX_EXPERTS


class RoutingKernel:
    """The kernel that sorts assignments, as one :class:`RouterConfig` compiles it."""

    def __init__(self, config: RouterConfig):
        self.config = config

    def launch(self, given, stream):
        """Launches one CTA; ``given`` has the arguments `ROUTING` of :mod:`.arguments`."""
        tokens, topk = extents(given.topk_ids)
        sorted_as = given.offsets, given.rows, given.places
        self.kernel(ptx.address(given.topk_ids), *sorted_as, tokens * topk, topk, given.num_experts).launch(
            grid=(1, 1, 1), block=(self.config.num_threads, 1, 1), min_blocks_per_mp=1, use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self, ids: Int64, offsets: Int64, rows: Int64, places: Int64, count: Int32, topk: Int32, num_experts: Int32
    ):
        thread, id_words = cute.arch.thread_idx()[0], self.config.id_words
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = cutlass.utils.SmemAllocator()
        counts = smem.allocate(4 * MAX_EXPERTS * SORTING_WARPS, byte_alignment=16).toint()
        totals = smem.allocate(4 * MAX_EXPERTS, byte_alignment=16).toint()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        # Few assignments are those of few warps.
        num_warps = cutlass.min(cute.ceil_div(count, WARP_THREADS), SORTING_WARPS)
        run = cute.ceil_div(count, num_warps * WARP_THREADS) * WARP_THREADS
        begin, end = warp * run, cutlass.min((warp + 1) * run, count)
        mine = counts + warp * (4 * MAX_EXPERTS)
        for expert in cutlass.range(lane, num_experts, WARP_THREADS, unroll=1):
            ptx.store_shared(mine + expert * 4, 0, [Uint32(0)])
        cute.arch.sync_warp()
        for first in cutlass.range(begin, end, WARP_THREADS, unroll=1):
            expert = load_expert(ids, first + lane, end, id_words, num_experts)
            self.take(mine, expert, num_experts, lane)
        cute.arch.sync_threads()
        for expert in cutlass.range(thread, num_experts, SORTING_WARPS * WARP_THREADS, unroll=1):
            self.sum_warps(counts + expert * 4, totals + expert * 4, num_warps)
        cute.arch.sync_threads()
        if warp == 0:
            self.sum_experts(totals, offsets, num_experts, lane)
        cute.arch.sync_threads()
        for first in cutlass.range(begin, end, WARP_THREADS, unroll=1):
            index = first + lane
            expert = load_expert(ids, index, end, id_words, num_experts)
            rank = self.take(mine, expert, num_experts, lane)
            place = Int32(-1)
            if expert < num_experts:
                place = rank + Int32(ptx.load_shared(totals + expert * 4, 0))
                ptx.store_global(rows + Int64(place) * 4, [Uint32(index // topk)])
            if index < end:
                ptx.store_global(places + Int64(index) * 4, [Uint32(place)])

    @cute.jit
    def take(self, mine, expert, num_experts, lane):
        """Adds a step's assignments to the warp's counters. Returns, in each lane, how many earlier assignments go to
        the lane's expert.
        """
        peers = Uint32(cute.arch.match_sync(0xFFFFFFFF, expert))
        before = Int32(0)
        known = expert < num_experts
        if known:
            before = Int32(ptx.load_shared(mine + expert * 4, 0))
        cute.arch.sync_warp()
        rank = Int32(cute.arch.popc(peers & ((Uint32(1) << Uint32(lane)) - Uint32(1))))
        if known & (rank == 0):
            ptx.store_shared(mine + expert * 4, 0, [Uint32(before + Int32(cute.arch.popc(peers)))])
        cute.arch.sync_warp()
        return before + rank

    @cute.jit
    def sum_warps(self, counts, total, num_warps):
        """Replaces each warp's count of an expert by the sum of the counts of preceding warps. Stores the sum over all
        warps at address ``total``."""
        before = Int32(0)
        stride = 4 * MAX_EXPERTS
        for warp in cutlass.range(num_warps, unroll=4):
            count = Int32(ptx.load_shared(counts + warp * stride, 0))
            ptx.store_shared(counts + warp * stride, 0, [Uint32(before)])
            before = before + count
        ptx.store_shared(total, 0, [Uint32(before)])

    @cute.jit
    def sum_experts(self, totals, offsets, num_experts, lane):
        """Computes the first place of each expert from the totals. Runs in one warp, whose lanes have neighbouring
        experts."""
        expert = lane * EXPERTS_PER_LANE
        acc = cute.make_rmem_tensor(EXPERTS_PER_LANE + 1, Int32)
        acc[0] = Int32(0)
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            count = Int32(0)
            if expert + i < num_experts:
                count = Int32(ptx.load_shared(totals + (expert + i) * 4, 0))
            acc[i + 1] = acc[i] + count
        before = acc[EXPERTS_PER_LANE]
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(before, 1 << step, mask_and_clamp=0)
            before = before + cutlass.select_(lane >= (1 << step), other, Int32(0))
        before = before - acc[EXPERTS_PER_LANE]
        for i in cutlass.range_constexpr(EXPERTS_PER_LANE):
            if expert + i < num_experts:
                ptx.store_shared(totals + (expert + i) * 4, 0, [Uint32(before + acc[i])])
            if expert + i <= num_experts:
                ptx.store_global(offsets + Int64(expert + i) * 4, [Uint32(before + acc[i])])
        if (lane == WARP_THREADS - 1) & (num_experts == MAX_EXPERTS):
            ptx.store_global(offsets + Int64(num_experts) * 4, [Uint32(before + acc[EXPERTS_PER_LANE])])
