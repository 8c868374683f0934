"""The stepped mainloop: scores, then the weights of 16 tokens at a time. The weights of each 16 tokens are computed
during the MMAs of the 16 tokens before.

As soon as 16 tokens have weights, the MMAs of the left half of their P V begin. Meanwhile the weights of the next 16
tokens are computed. The second warpgroup gets the weights in two parts. So the tensor cores are idle only until the
first 16 weights of a row exist. If memory or gathering is the bottleneck, :mod:`.mainloops.serial` is faster.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.softmax import rescale
from cute_kernels.mla.combine.epilogue import Epilogue
from cute_kernels.mla.config import CONSUMER_THREADS, MlaConfig
from cute_kernels.mla.mainloops import softmax_steps
from cute_kernels.mla.mainloops.blocks import BlockLoop
from cute_kernels.mla.mainloops.pipeline import NextQueries, NoNextQueries, TilePipeline
from cute_kernels.mla.mainloops.products import HALF_ACC, Products, Rows, Scoring
from cute_kernels.mla.mainloops.weights import PART_STEPS, WEIGHTS_FREE, WEIGHTS_READY, SteppedWeights


class Stepped:
    """The stepped mainloop. next_queries: `NextQueries`, or `NoNextQueries` if a CTA has one work tile."""

    def __init__(self, config: MlaConfig, next_queries: NextQueries | NoNextQueries | None = None):
        self.pipeline = TilePipeline(config)
        self.products = Products(config, self.pipeline)
        self.weights = SteppedWeights(config, self.products, fenced=True)
        self.next_queries = next_queries or NextQueries(config)
        self.epilogue = Epilogue(config, self.weights)

    def scoring(self, memory, softmax_scale, warp, lane) -> Scoring:
        """Returns the first warpgroup's state before a work tile's first block."""
        # What steps need is kept in registers: they are short, and to read and multiply constants takes as long.
        scale = ptx.pinned(softmax_scale * ptx.LOG2_E)
        places = ptx.pinned(self.weights.place(memory, warp, lane))
        return Scoring(Rows.make(), scale, cute.make_rmem_tensor(2, Float32), places)

    @cute.jit
    def score_block(self, kept: Scoring, work, work_tiles, memory, stage, phase, block, warp, lane):
        """Scores a block and adds the left half of P V, in the first warpgroup."""
        rows, factors, scale = kept.rows, kept.factors, kept.scale
        self.products.score(rows.scores, memory, stage, phase)
        flags = self.weights.common_flags(memory, stage)
        wgmma_tiles.wait()
        self.next_queries.ask(block + 1 == work.end, work, work_tiles, memory, warp)
        self.weights.mask(rows.scores, flags, work, memory, stage, block, warp, lane)
        softmax_steps.begin(rows, factors, scale, work.shape.slack, HALF_ACC)
        self.weights.weigh_and_add(rows, factors, work, memory, kept.places, stage, scale, warp, lane)
        softmax_steps.add_totals(rows, factors)
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
        for part in cutlass.range_constexpr(len(WEIGHTS_READY)):
            self.weights.await_part(part)
            if const_expr(part == 0):
                rescale(acc, self.weights.row_values.load(memory, warp, lane), HALF_ACC)
            steps = range(part * PART_STEPS, (part + 1) * PART_STEPS)
            self.products.add_values(acc, weights, memory, stage, 1, steps)
        wgmma_tiles.commit()
        wgmma_tiles.wait()
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        self.pipeline.release(memory, stage, lane)
