"""The order of a block: scores, then weights of 16 tokens at a time behind the products of those before.

The first warpgroup has the scores, the softmax and the left half of the output, the second the right half. The division
is that of FlashMLA's FP8 kernel (DeepSeek 2025). As soon as 16 tokens have weights, the left half's product with their
values begins, and the next 16 tokens' are made while it runs; the second warpgroup gets the weights in two parts. So
the tensor cores rest only until the first 16 weights of a row are there.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.lanes import lane_sum
from cute_kernels.device.ring import advance
from cute_kernels.mla import softmax
from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, NUM_STAGES
from cute_kernels.mla.multiply import HALF_SUMS, MULTIPLYING_THREADS, Multiplying, Rows

WEIGHTS_READY, WEIGHTS_FREE = (2, 4), 3  # named barriers of both warpgroups; ready: of each part of a block's tokens
STEPS = BLOCK_TOKENS // softmax.STEP_TOKENS
PART_STEPS = STEPS // len(WEIGHTS_READY)


class Serial(Multiplying):
    """See the module."""

    @cute.jit
    def first(self, work, results, memory, softmax_scale, warp, lane):
        """The first warpgroup. warp: 0 to 3."""
        self.await_queries(memory)
        # What steps need is kept in registers: they are short, and to read and multiply constants takes as long.
        scale = ptx.pinned(softmax_scale * ptx.LOG2_E)
        places = ptx.pinned(self.weight_place(memory, warp, lane))
        rows = Rows.make()
        stage, phase = Int32(0), Int32(0)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.score(rows.scores, memory, stage, phase)
            flags = self.common_flags(memory, stage)
            wgmma_tiles.wait()
            self.mask(rows.scores, flags, work, memory, stage, block, warp, lane)
            softmax.begin(rows, scale, work.shape.slack, HALF_SUMS)
            self.weigh_and_add(rows, work, memory, places, stage, scale, warp, lane)
            softmax.add_totals(rows)
            wgmma_tiles.wait()
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
    def weigh_and_add(self, rows, work, memory, places, stage, scale, warp, lane):
        """A block's weights, handed over in parts, and the left half's products with its values, which are under way
        then."""
        for step in cutlass.range_constexpr(STEPS):
            if const_expr(step > 0):
                # Slack is never negative. The compiler would make all weights before the second product, but not in
                # front of a branch.
                if work.shape.slack >= 0.0:
                    softmax.weigh_step(rows.scores, rows.maxima, scale, step)
            self.pack_step(rows, step)
            self.add_values(rows.sums, self.weight_fragment(rows.packed), memory, stage, 0, range(step, step + 1))
            if const_expr(step == 0):
                cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
                self.publish_rows(rows.factors, memory, warp, lane)
            self.publish_weights(rows.packed, places, step)
            part, behind = divmod(step + 1, PART_STEPS)
            if const_expr(behind == 0):
                self.hand_over(part - 1)
        wgmma_tiles.commit()

    def hand_over(self, part: int) -> None:
        """Lets the second warpgroup begin with what was published last: factors with part 0, weights with each."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_READY[part], number_of_threads=MULTIPLYING_THREADS)

    @cute.jit
    def second(self, work, results, memory, softmax_scale, warp, lane):
        """The second warpgroup. warp: 0 to 3."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        sums = Rows.make().sums
        weights = wgmma_tiles.tile(memory.weight_pointer, BLOCK_HEADS, BLOCK_TOKENS, self.numbers.type)
        stage, phase = Int32(0), Int32(0)
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.await_tile(memory, stage, phase)
            for part in cutlass.range_constexpr(len(WEIGHTS_READY)):
                self.await_weights(part)
                if const_expr(part == 0):
                    softmax.rescale(sums, self.load_rows(memory, warp, lane), HALF_SUMS)
                steps = range(part * PART_STEPS, (part + 1) * PART_STEPS)
                self.add_values(sums, weights, memory, stage, 1, steps)
            wgmma_tiles.commit()
            wgmma_tiles.wait()
            cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
            self.release(memory, stage, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        self.await_weights(0)
        factors = self.load_rows(memory, warp, lane)
        self.writer.write(work, results, sums, factors, memory.queries, warp, lane, 1)

    def await_weights(self, part: int) -> None:
        """Waits for a part of a block's weights, or for the factors of the end.

        The fence that makes stores visible to products is here, where there is time for it: in the first warpgroup it
        would hold up the next weights.
        """
        cute.arch.barrier(barrier_id=WEIGHTS_READY[part], number_of_threads=MULTIPLYING_THREADS)
        cute.arch.fence_proxy("async.shared", space="cta")
