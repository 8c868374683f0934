"""MLA decode for up to 32 heads a CTA: shared memory holds raw FP8 tokens, which are decoded into operands of mma.sync.

4 producer warps fill the pipeline stages (:mod:`.few_heads.producer`). 4 score warps compute scores and weights
(:mod:`.few_heads.score_loop`). 8 value warps compute 64 columns of the output each (:mod:`.few_heads.value_loop`). Only
the mbarriers below synchronise the warps. The pipeline stages are used one after the other, and so are two buffers of
weights.

    mbarrier   one for each         arrivals                                                  who waits
    full       pipeline stage       33 of each producer warp: its lanes' copies, and flags    score and value warps
    empty      pipeline stage       12: a lane of each score and value warp                   producer warps
    weighed    buffer of weights    4: a lane of each score warp                              value warps
    added      buffer of weights    8: a lane of each value warp                              score warps

docs/design/mla_few_heads.md derives this design from counts of clocks and bytes.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.device import ptx
from cute_kernels.mla.few_heads.cluster_combine import cluster_sync
from cute_kernels.mla.few_heads.config import (
    CONSUMER_WARPS,
    NUM_THREADS,
    PRODUCER_REGISTERS,
    SCORE_REGISTERS,
    SCORE_WARPS,
    VALUE_REGISTERS,
    FewHeadsConfig,
)
from cute_kernels.mla.few_heads.producer import Producer
from cute_kernels.mla.few_heads.score_loop import ScoreLoop
from cute_kernels.mla.few_heads.shared_memory import allocate, init_barriers
from cute_kernels.mla.few_heads.value_loop import ValueLoop
from cute_kernels.mla.loads.locate import count_blocks, make_locator
from cute_kernels.mla.work import WorkTile


class FewHeadsKernel:
    """One compiled variant of MLA decode for few heads, as :class:`FewHeadsConfig` describes it.
    :class:`.entry.DecodeEntry` is its host side.
    """

    def __init__(self, config: FewHeadsConfig):
        self.config = config
        self.locator = make_locator(config.tokens)
        self.producer = Producer(config)
        self.scores = ScoreLoop(config)
        self.values = ValueLoop(config)

    @cute.jit
    def launch(self, q, source, results, flags, shape, num_ctas, softmax_scale, stream):
        """Launches a CTA for every work tile, of paged or of sparse decode."""
        head_blocks = (shape.num_heads + self.config.heads - 1) // self.config.heads
        self.kernel(ptx.address(q), source, results, shape, head_blocks, softmax_scale).launch(
            grid=(shape.rows * head_blocks, shape.num_parts, 1),
            block=(NUM_THREADS, 1, 1),
            cluster=(1, self.config.cluster, 1) if self.config.cluster > 1 else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, q: Int64, source, results, shape, head_blocks: Int32, softmax_scale: Float32):
        index, part, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = allocate(self.config)
        # The launch that adds up the parts waits for this one's end; its CTAs find room only as this one's leave.
        cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            if lane == 0:
                init_barriers(self.config, memory)
        row = index // head_blocks
        length, extra_length = self.locator.lengths(source, row // shape.request_rows)
        main_blocks, num_blocks = count_blocks(length, extra_length)
        begin, end = WorkTile.share(num_blocks, shape.num_parts, part)
        first_head = (index - row * head_blocks) * self.config.heads
        work = WorkTile(shape, row, first_head, part, begin, end, length, main_blocks, extra_length)
        cute.arch.sync_threads()
        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self.producer.run(work, source, memory, warp - CONSUMER_WARPS, lane)
            if const_expr(self.config.cluster > 1):
                cluster_sync()
                cluster_sync()
        elif warp >= SCORE_WARPS:
            cute.arch.setmaxregister_increase(VALUE_REGISTERS)
            self.values.run(q, work, results, memory, warp - SCORE_WARPS, lane)
        else:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            self.scores.run(work, results, memory, softmax_scale, warp, lane)
