"""The serial mainloop: scores, softmax, then both halves of the output side by side.

The first warpgroup has the scores, the softmax and the left half of the output, the second the right half. The division
is that of FlashMLA's FP8 kernel (DeepSeek 2025).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla.combine.epilogue import Epilogue
from cute_kernels.mla.config import CONSUMER_THREADS, NUM_STAGES, MlaConfig
from cute_kernels.mla.mainloops import softmax
from cute_kernels.mla.mainloops.pipeline import NextQueries, TilePipeline
from cute_kernels.mla.mainloops.products import HALF_ACC, Products, Rows
from cute_kernels.mla.mainloops.weights import WEIGHTS_FREE, WEIGHTS_READY, WholeWeights


class Serial:
    """See the module."""

    def __init__(self, config: MlaConfig):
        self.pipeline = TilePipeline(config)
        self.products = Products(config, self.pipeline)
        self.weights = WholeWeights(config, self.products)
        self.next_queries = NextQueries(config)
        self.epilogue = Epilogue(config, self.weights)

    @cute.jit
    def score_tile(self, work, work_tiles, results, memory, softmax_scale, warp, lane, stage, phase):
        """The first warpgroup over the blocks of a work tile, whose queries are there; the next stage and phase.

        It asks for the next work tile's queries when it is done with this one's.
        """
        scale = softmax_scale * ptx.LOG2_E
        rows = Rows.make()
        if work.resumes:
            work_tiles.exchange.resume(work, rows.acc, (rows.maxima, rows.totals), warp, lane, 0)
        self.next_queries.ask(work.begin >= work.end, work, work_tiles, memory, warp)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.products.score(rows.scores, memory, stage, phase)
            wgmma_tiles.wait()
            self.next_queries.ask(block + 1 == work.end, work, work_tiles, memory, warp)
            factors = self.weights.weigh(rows, work, memory, stage, block, scale, warp, lane)
            cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
            self.weights.publish(rows.packed, memory.weight_pointer.toint(), warp, lane)
            self.weights.row_values.publish(factors, memory, warp, lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.weights.hand_over()
            softmax.rescale(rows.acc, factors, HALF_ACC)
            self.products.add_values(rows.acc, self.products.weight_fragment(rows.packed), memory, stage, 0)
            wgmma_tiles.commit()
            wgmma_tiles.wait()
            self.pipeline.release(memory, stage, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        self.epilogue.end_scores(rows, work, work_tiles, results, memory, scale, warp, lane)
        return stage, phase

    @cute.jit
    def value_tile(self, work, work_tiles, results, memory, warp, lane, stage, phase):
        """The second warpgroup over the blocks of a work tile; the next stage and phase."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        acc = Rows.make().acc
        if work.resumes:
            work_tiles.exchange.resume(work, acc, (), warp, lane, 1)
        weights = self.products.weight_tile(memory)
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.pipeline.await_tile(memory, stage, phase)
            cute.arch.barrier(barrier_id=WEIGHTS_READY[0], number_of_threads=CONSUMER_THREADS)
            softmax.rescale(acc, self.weights.row_values.load(memory, warp, lane), HALF_ACC)
            self.products.add_values(acc, weights, memory, stage, 1)
            wgmma_tiles.commit()
            wgmma_tiles.wait()
            cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
            self.pipeline.release(memory, stage, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        self.epilogue.end_values(acc, work, work_tiles, results, memory, warp, lane)
        return stage, phase
