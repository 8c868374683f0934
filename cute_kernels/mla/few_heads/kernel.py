"""MLA decode for up to 32 heads a CTA: raw FP8 tokens in a ring, decoded on their way into mma.sync.

Shape of the work: 4 copying warps keep the ring full (:mod:`.copying`); 4 scoring warps make weights of scores
(:mod:`.scoring`); 8 adding warps have 64 columns of the output each (:mod:`.adding`). They go on at their own pace,
from stage to stage and from one buffer of weights to the other.

docs/design/mla_few_heads.md has the balance of clocks and bytes behind it.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.device import ptx
from cute_kernels.mla.few_heads.adding import Adder
from cute_kernels.mla.few_heads.config import (
    ADDING_REGISTERS,
    COMPUTING_WARPS,
    COPYING_REGISTERS,
    NUM_THREADS,
    SCORING_REGISTERS,
    SCORING_WARPS,
    FewHeadsConfig,
)
from cute_kernels.mla.few_heads.copying import Copier
from cute_kernels.mla.few_heads.joining import meet
from cute_kernels.mla.few_heads.memory import allocate, init_barriers
from cute_kernels.mla.few_heads.scoring import Scorer
from cute_kernels.mla.kernel import MlaKernel
from cute_kernels.mla.locate import count_blocks, make_locator
from cute_kernels.mla.work import Work


class FewHeadsKernel(MlaKernel):
    """One compiled variant; :class:`FewHeadsConfig` says which. Entries are those of :class:`MlaKernel`."""

    def __init__(self, config: FewHeadsConfig):
        self.config = config
        self.locator = make_locator(config.tokens)
        self.copier = Copier(config)
        self.scorer = Scorer(config)
        self.adder = Adder(config)

    @cute.jit
    def launch(self, q, source, results, flags, shape, num_ctas, softmax_scale, stream):
        """Both entries: the grid, a CTA for every share."""
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
        begin, end = Work.share(num_blocks, shape.num_parts, part)
        first_head = (index - row * head_blocks) * self.config.heads
        work = Work(shape, row, first_head, part, begin, end, length, main_blocks, extra_length)
        cute.arch.sync_threads()
        if warp >= COMPUTING_WARPS:
            cute.arch.setmaxregister_decrease(COPYING_REGISTERS)
            self.copier.run(work, source, memory, warp - COMPUTING_WARPS, lane)
            if const_expr(self.config.cluster > 1):
                meet()
                meet()
        elif warp >= SCORING_WARPS:
            cute.arch.setmaxregister_increase(ADDING_REGISTERS)
            self.adder.run(q, work, results, memory, warp - SCORING_WARPS, lane)
        else:
            cute.arch.setmaxregister_increase(SCORING_REGISTERS)
            self.scorer.run(work, results, memory, softmax_scale, warp, lane)
