"""The serial mainloop: scores, softmax, then both halves of P V concurrently.

The first warpgroup computes the scores, the softmax and the left half of the output, the second warpgroup the right
half. FlashMLA's FP8 kernel (DeepSeek 2025) divides the work in the same way.
"""

from __future__ import annotations

import cutlass.cute as cute

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.softmax import rescale
from cute_kernels.mla.combine.epilogue import Epilogue
from cute_kernels.mla.config import CONSUMER_THREADS, MlaConfig
from cute_kernels.mla.mainloops.blocks import BlockLoop
from cute_kernels.mla.mainloops.pipeline import NextQueries, TilePipeline
from cute_kernels.mla.mainloops.products import HALF_ACC, Products, Rows, Scoring
from cute_kernels.mla.mainloops.weights import WEIGHTS_FREE, WEIGHTS_READY, WholeWeights


class Serial:
    """The serial mainloop; see the module's docstring."""

    def __init__(self, config: MlaConfig):
        self.pipeline = TilePipeline(config)
        self.products = Products(config, self.pipeline)
        self.weights = WholeWeights(config, self.products)
        self.next_queries = NextQueries(config)
        self.epilogue = Epilogue(config, self.weights)

    def scoring(self, memory, softmax_scale, warp, lane) -> Scoring:
        """Returns the first warpgroup's state before a work tile's first block."""
        scale = softmax_scale * ptx.LOG2_E
        return Scoring(Rows.make(), scale)

    @cute.jit
    def score_block(self, kept: Scoring, work, work_tiles, memory, stage, phase, block, warp, lane):
        """Scores a block and adds the left half of P V, in the first warpgroup. In the last block it starts loading the
        next work tile's queries."""
        rows = kept.rows
        self.products.score(rows.scores, memory, stage, phase)
        wgmma_tiles.wait()
        self.next_queries.ask(block + 1 == work.end, work, work_tiles, memory, warp)
        factors = self.weights.weigh(rows, work, memory, stage, block, kept.scale, warp, lane)
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        self.weights.publish(rows.packed, memory.weight_pointer.toint(), warp, lane)
        self.weights.row_values.publish(factors, memory, warp, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.weights.hand_over()
        rescale(rows.acc, factors, HALF_ACC)
        self.products.add_values(rows.acc, self.products.weight_fragment(rows.packed), memory, stage, 0)
        wgmma_tiles.commit()
        wgmma_tiles.wait()
        self.pipeline.release(memory, stage, lane)

    def score_blocks(self, kept: Scoring, work, work_tiles, memory, warp, lane, stage, phase):
        """Processes a work tile's blocks in the first warpgroup. Returns the next (stage, phase)."""
        return BlockLoop(self).scores(kept, work, work_tiles, memory, warp, lane, stage, phase)

    def value_operands(self, memory, warp, lane):
        """Returns the operands of `value_block` besides accumulators: the weights in shared memory."""
        return self.products.weight_tile(memory)

    @cute.jit
    def value_block(self, acc, weights, memory, warp, lane, stage, phase):
        """Adds the right half of P V of a block in the second warpgroup."""
        self.pipeline.await_tile(memory, stage, phase)
        cute.arch.barrier(barrier_id=WEIGHTS_READY[0], number_of_threads=CONSUMER_THREADS)
        rescale(acc, self.weights.row_values.load(memory, warp, lane), HALF_ACC)
        self.products.add_values(acc, weights, memory, stage, 1)
        wgmma_tiles.commit()
        wgmma_tiles.wait()
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        self.pipeline.release(memory, stage, lane)
