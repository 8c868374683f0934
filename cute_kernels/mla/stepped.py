"""As :mod:`.serial`, with the weights of a block made 16 tokens at a time behind the products of those before."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.lanes import lane_sum
from cute_kernels.device.ring import advance
from cute_kernels.mla import softmax
from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, NUM_STAGES
from cute_kernels.mla.gather import make_gatherer
from cute_kernels.mla.multiply import HALF_SUMS, MULTIPLYING_THREADS, Multiplying, Rows

WEIGHTS_READY, WEIGHTS_FREE = (2, 4), 3  # named barriers of both warpgroups
STEPS = BLOCK_TOKENS // softmax.STEP_TOKENS


class Stepped(Multiplying):
    """See the module."""

    def __init__(self, config):
        super().__init__(config)
        self.gatherer: Any = make_gatherer(config)

    @cute.jit
    def first(self, work, results, memory, softmax_scale, warp, lane):
        """The first warpgroup. warp: 0 to 3."""
        self.await_queries(memory)
        scale = softmax_scale * ptx.LOG2_E
        rows = Rows.make()
        factors = cute.make_rmem_tensor(2, Float32)
        early = cute.make_rmem_tensor(softmax.STEP_SCORES, Float32)
        stage, phase = Int32(0), Int32(0)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.stamp(results, block, 0, 0, warp, lane)
            if const_expr(self.config.stamps):
                self.await_tile(memory, stage, phase)
            self.stamp(results, block, 0, 1, warp, lane)
            self.score(rows.scores, memory, stage, phase)
            wgmma_tiles.wait()
            self.stamp(results, block, 0, 2, warp, lane)
            self.mask(rows.scores, work, memory, stage, block, warp, lane)
            if const_expr(self.config.early):
                softmax.raise_early(
                    rows.scores, rows.maxima, rows.sums, factors, early, scale, work.shape.slack, HALF_SUMS
                )
            elif const_expr(self.config.vote):
                softmax.raise_and_rescale(
                    rows.scores, rows.maxima, rows.sums, factors, scale, work.shape.slack, HALF_SUMS
                )
            else:
                new = softmax.raise_maxima(rows.scores, rows.maxima, scale, work.shape.slack)
                factors[0], factors[1] = new[0], new[1]
                softmax.rescale(rows.sums, factors, HALF_SUMS)
            self.stamp(results, block, 0, 3, warp, lane)
            self.weigh_and_add(results, block, rows, factors, work, memory, stage, scale, warp, lane)
            softmax.add_totals(rows.scores, rows.totals, factors)
            wgmma_tiles.wait()
            self.stamp(results, block, 0, 7, warp, lane)
            self.release(memory, stage, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        for row in cutlass.range_constexpr(2):
            rows.totals[row] = lane_sum(rows.totals[row], softmax.ROW_LANES)
            rows.maxima[row] = rows.maxima[row] * scale
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        factors = self.writer.finish_rows(work, results, rows.maxima, rows.totals, warp, lane)
        self.publish_rows(factors, memory, warp, lane)
        self.hand_over(0)
        self.writer.write(work, results, rows.sums, factors, memory.queries, warp, lane, 0)

    @cute.jit
    def weigh_and_add(self, results, block, rows, factors, work, memory, stage, scale, warp, lane):
        """Weights of a block, step by step, behind the products of the steps before; products are under way then."""
        each = const_expr(STEPS // self.config.steps)
        published = const_expr(STEPS // self.config.handovers)
        for first in cutlass.range_constexpr(0, STEPS, each):
            if const_expr(self.config.ordered and first > 0):
                if work.shape.slack >= 0.0:
                    self.weigh_steps(rows, scale, range(first, first + each))
            else:
                self.weigh_steps(rows, scale, range(first, first + each))
            self.add_steps(rows.sums, self.weight_fragment(rows.packed), memory, stage, 0, range(first, first + each))
            if const_expr(first == 0):
                self.stamp(results, block, 0, 4, warp, lane)
                cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
                self.publish_all_rows(factors, memory, warp, lane)
            for step in cutlass.range_constexpr(first, first + each):
                self.publish_step(rows.packed, memory.weight_pointer.toint(), warp, lane, step)
            done = const_expr(first + each - self.config.lag * each)
            if const_expr(0 < done < STEPS and done % published == 0):
                cute.arch.fence_proxy("async.shared", space="cta")
                self.hand_over(done // published - 1)
        wgmma_tiles.commit()
        self.stamp(results, block, 0, 5, warp, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.hand_over(self.config.handovers - 1)
        self.stamp(results, block, 0, 6, warp, lane)

    def weigh_steps(self, rows, scale, steps: range) -> None:
        for step in steps:
            softmax.exponentiate_step(rows.scores, rows.maxima, scale, rows.packed, self.numbers.pack, step, self.config.early and step == 0)

    def publish_all_rows(self, values, memory, warp, lane) -> None:
        """As :meth:`publish_rows`; every lane stores, as a branch behind products would hold them up."""
        place = self.row_place(memory, warp, lane)
        ptx.store_shared(place, 0, [values[0]])
        ptx.store_shared(place, 32, [values[1]])

    def hand_over(self, part: int) -> None:
        """Lets the second warpgroup begin with the weights and factors that were published last."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_READY[part], number_of_threads=MULTIPLYING_THREADS)

    @cute.jit
    def second(self, work, source, results, memory, softmax_scale, warp, lane):
        """The second warpgroup. warp: 0 to 3."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        sums = Rows.make().sums
        weights = wgmma_tiles.tile(memory.weight_pointer, BLOCK_HEADS, BLOCK_TOKENS, self.numbers.type)
        each = STEPS // self.config.handovers
        stage, phase = Int32(0), Int32(0)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.stamp(results, block, 1, 0, warp, lane)
            self.await_tile(memory, stage, phase)
            self.stamp(results, block, 1, 1, warp, lane)
            if const_expr(self.config.helper):
                first_row = self.gatherer.first_row(warp)
                self.gatherer.entries.prefetch_ahead(work, source, memory, block, first_row, lane)
            for part in cutlass.range_constexpr(self.config.handovers):
                cute.arch.barrier(barrier_id=WEIGHTS_READY[part], number_of_threads=MULTIPLYING_THREADS)
                if const_expr(part == 0):
                    self.stamp(results, block, 1, 2, warp, lane)
                    softmax.rescale(sums, self.load_rows(memory, warp, lane), HALF_SUMS)
                self.add_steps(sums, weights, memory, stage, 1, range(part * each, (part + 1) * each))
            wgmma_tiles.commit()
            self.stamp(results, block, 1, 3, warp, lane)
            wgmma_tiles.wait()
            self.stamp(results, block, 1, 4, warp, lane)
            cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
            self.release(memory, stage, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        cute.arch.barrier(barrier_id=WEIGHTS_READY[0], number_of_threads=MULTIPLYING_THREADS)
        factors = self.load_rows(memory, warp, lane)
        self.writer.write(work, results, sums, factors, memory.queries, warp, lane, 1)
