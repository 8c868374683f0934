"""The plain order of a block: scores, softmax, then both halves of the output side by side.

The first warpgroup has the scores, the softmax and the left half of the output, the second the right half. The division
is that of FlashMLA's FP8 kernel (DeepSeek 2025).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, CONSUMER_THREADS, NUM_STAGES
from cute_kernels.mla.mainloops import softmax
from cute_kernels.mla.mainloops.products import HALF_ACC, Products, Rows

WEIGHTS_READY, WEIGHTS_FREE = 2, 3  # named barriers of both warpgroups


class Serial(Products):
    """See the module."""

    @cute.jit
    def score_tile(self, work, work_tiles, results, memory, softmax_scale, warp, lane, stage, phase):
        scale = softmax_scale * ptx.LOG2_E
        rows = Rows.make()
        if work.resumes:
            work_tiles.exchange.resume(work, rows.acc, (rows.maxima, rows.totals), warp, lane, 0)
        self.ask_next_queries(work.begin >= work.end, work, work_tiles, memory, warp)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.score(rows.scores, memory, stage, phase)
            wgmma_tiles.wait()
            self.ask_next_queries(block + 1 == work.end, work, work_tiles, memory, warp)
            factors = self.weigh(rows, work, memory, stage, block, scale, warp, lane)
            cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
            self.publish_weights(rows.packed, memory.weight_pointer.toint(), warp, lane)
            self.publish_rows(factors, memory, warp, lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.hand_over_weights()
            softmax.rescale(rows.acc, factors, HALF_ACC)
            self.add_values(rows.acc, self.weight_fragment(rows.packed), memory, stage, 0)
            wgmma_tiles.commit()
            wgmma_tiles.wait()
            self.release(memory, stage, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        self.end_first(rows, work, work_tiles, results, memory, scale, warp, lane)
        return stage, phase

    def hand_over_end(self) -> None:
        self.hand_over_weights()

    def hand_over_weights(self) -> None:
        """Lets the second warpgroup begin with the weights and factors that were published last."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_READY, number_of_threads=CONSUMER_THREADS)

    @cute.jit
    def value_tile(self, work, work_tiles, results, memory, warp, lane, stage, phase):
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        acc = Rows.make().acc
        if work.resumes:
            work_tiles.exchange.resume(work, acc, (), warp, lane, 1)
        weights = wgmma_tiles.tile(memory.weight_pointer, BLOCK_HEADS, BLOCK_TOKENS, self.numbers.type)
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.await_tile(memory, stage, phase)
            cute.arch.barrier(barrier_id=WEIGHTS_READY, number_of_threads=CONSUMER_THREADS)
            softmax.rescale(acc, self.load_rows(memory, warp, lane), HALF_ACC)
            self.add_values(acc, weights, memory, stage, 1)
            wgmma_tiles.commit()
            wgmma_tiles.wait()
            cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
            self.release(memory, stage, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        self.end_second(acc, work, work_tiles, results, memory, warp, lane)
        return stage, phase

    def await_end(self) -> None:
        cute.arch.barrier(barrier_id=WEIGHTS_READY, number_of_threads=CONSUMER_THREADS)
