"""Producers and consumers under a cooperative combine: every CTA has one part of a row, and the CTAs combine the parts.

The cooperative combine is for calls with few rows. A second launch would wait for the end of the first launch, start
other CTAs, and fetch their program from a cold cache. This launch is cooperative: all CTAs are resident at once, so
each may wait for the others (:mod:`.combine.cooperative`). A CTA has one work tile, so the program has no stream-K and
no next work tile. A short program is fetched faster from a cold cache.

The producer warps combine. They run the combine's code once without effect, so that the code is in the cache when it is
needed.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.mla.combine.cooperative import CooperativeCombine, PartPlaces, publish_part
from cute_kernels.mla.combine.epilogue import end_rows
from cute_kernels.mla.config import BLOCK_HEADS, CONSUMER_THREADS, NUM_STAGES, WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.loads.destination import drain
from cute_kernels.mla.mainloops.blocks import BlockLoop
from cute_kernels.mla.mainloops.products import Rows
from cute_kernels.mla.mainloops.stepped import Stepped
from cute_kernels.mla.mainloops.weights import WEIGHTS_FREE


def pipeline_place(block) -> tuple[Any, Any]:
    """Returns (stage, phase) for which a producer waits before it fills the ``block``-th tile of the part."""
    return block % NUM_STAGES, (block // NUM_STAGES + 1) % 2


class CombiningProducers:
    """The producer warps after their last tile: they add up all parts of the CTA's heads."""

    def __init__(self, config: MlaConfig):
        self.config, self.combine = config, CooperativeCombine(config)

    @cute.jit
    def run(self, work_tiles, results, memory, warp, lane):
        """Waits for all parts of the CTA's heads and writes their results."""
        parts, work = PartPlaces.of(work_tiles), work_tiles.work(work_tiles.row, work_tiles.start, work_tiles.left)
        heads = work_tiles.shape.num_heads - (work_tiles.head_block * BLOCK_HEADS + parts.part * parts.each)
        heads = cutlass.select_(parts.part < parts.readers, cutlass.min(heads, parts.each), Int32(0))
        for turn in cutlass.range(2, unroll=1):
            end = Int32(WARPGROUP_WARPS)
            if turn == 1:
                end = heads
                drain(self.config, memory, *pipeline_place(work.end - work.begin))
                cute.arch.mbarrier_wait(memory.queries_full, 0)
                if parts.part < parts.readers:
                    self.combine.fetch(parts, memory, warp, lane)
            for head in cutlass.range(warp, end, WARPGROUP_WARPS, unroll=1):
                self.combine.add(work_tiles, parts, results, memory, head, turn, lane)


class PartConsumers:
    """The consumer warpgroups: they process one part and publish it for the CTAs that combine. mainloop: processes the
    part's blocks."""

    def __init__(self, mainloop: Stepped):
        self.mainloop, self.blocks = mainloop, BlockLoop(mainloop)

    @cute.jit
    def scores(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """Runs the first warpgroup. warp: 0 to 3."""
        work = work_tiles.work(work_tiles.row, work_tiles.start, work_tiles.left)
        kept = self.mainloop.scoring(memory, softmax_scale, warp, lane)
        self.mainloop.pipeline.await_queries(memory, Int32(0))
        stage, phase = Int32(0), Int32(0)
        stage, phase = self.mainloop.score_blocks(kept, work, work_tiles, memory, warp, lane, stage, phase)
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        rows = kept.rows
        end_rows(rows, kept.scale)
        stats = [(rows.maxima[i], rows.totals[i]) for i in range(2)]
        publish_part(work_tiles, rows.acc, stats, memory, warp, lane, 0)

    @cute.jit
    def values(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """Runs the second warpgroup. warp: 0 to 3."""
        work = work_tiles.work(work_tiles.row, work_tiles.start, work_tiles.left)
        operands = self.mainloop.value_operands(memory, warp, lane)
        acc = Rows.make().acc
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        stage, phase = Int32(0), Int32(0)
        self.blocks.values(acc, operands, work, memory, warp, lane, stage, phase)
        # The part goes where the queries are; without a block nothing else has waited for them.
        self.mainloop.pipeline.await_queries(memory, Int32(0))
        publish_part(work_tiles, acc, (), memory, warp, lane, 1)
