"""Few rows in one launch: every CTA has a part of a row, and all of them add the parts up.

What a second launch costs is that the first one has to end, CTAs of another program to come, and that program to come
out of a cold cache. Here the launch is a cooperative one: all CTAs are there at once, so each may wait for the others
(:mod:`.combine.cooperative`). With a part a CTA there is no line, no share after the first one and no result of a whole
row: with a cold cache, instructions that are not there do not have to come.

The producer warps add up, and go through that once for nothing, so that its program is there when it is wanted.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla.combine.cooperative import CooperativeCombine, PartPlaces, publish_part
from cute_kernels.mla.config import (
    BLOCK_HEADS,
    BLOCK_TOKENS,
    CONSUMER_THREADS,
    NUM_STAGES,
    WARPGROUP_WARPS,
    MlaConfig,
)
from cute_kernels.mla.loads.crossover import CrossoverLoad
from cute_kernels.mla.mainloops.products import Rows
from cute_kernels.mla.mainloops.stepped import WEIGHTS_FREE, Stepped


def ring_place(block) -> tuple[Any, Any]:
    """(stage, phase of its giving back) of a part's ``block``-th tile."""
    return block % NUM_STAGES, (block // NUM_STAGES + 1) % 2


class CooperativeCrossover(CrossoverLoad):
    """The warps that gather a part, and add up all parts of some heads behind their last tile."""

    def __init__(self, config: MlaConfig):
        super().__init__(config)
        self.combiner = CooperativeCombine(config)

    def finish(self, memory, stage, phase) -> None:
        """There is something to do before all tiles have been given back: see `add_up`."""

    @cute.jit
    def combine(self, work_tiles, results, memory, warp, lane):
        """Waits for all parts of the CTA's heads and writes their results."""
        parts, work = PartPlaces.of(work_tiles), work_tiles.work(work_tiles.row, work_tiles.start, work_tiles.left)
        heads = work_tiles.shape.num_heads - (work_tiles.head_block * BLOCK_HEADS + parts.part * parts.each)
        heads = cutlass.select_(parts.part < parts.readers, cutlass.min(heads, parts.each), Int32(0))
        for turn in cutlass.range(2, unroll=1):
            end = Int32(WARPGROUP_WARPS)
            if turn == 1:
                end = heads
                CrossoverLoad.finish(self, memory, *ring_place(work.end - work.begin))
                cute.arch.mbarrier_wait(memory.queries_full, 0)
                if parts.part < parts.readers:
                    self.combiner.fetch(parts, memory, warp, lane)
            for head in cutlass.range(warp, end, WARPGROUP_WARPS, unroll=1):
                self.combiner.add(work_tiles, parts, results, memory, head, turn, lane)


class CooperativeStepped(Stepped):
    """The order in steps, of one part."""

    @cute.jit
    def first(self, work_tiles, results, memory, softmax_scale, warp, lane):
        work = work_tiles.work(work_tiles.row, work_tiles.start, work_tiles.left)
        scale = ptx.pinned(softmax_scale * ptx.LOG2_E)
        places = ptx.pinned(self.weight_place(memory, warp, lane))
        rows = Rows.make()
        factors = cute.make_rmem_tensor(2, Float32)  # by which a block shrinks earlier accumulators
        self.await_queries(memory, Int32(0))
        stage, phase = Int32(0), Int32(0)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.first_block(rows, factors, work, work_tiles, memory, places, stage, phase, block, scale, warp, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        self.end_rows(rows, scale)
        publish_part(work_tiles, rows.acc, [(rows.maxima[i], rows.totals[i]) for i in range(2)], memory, warp, lane, 0)

    @cute.jit
    def second(self, work_tiles, results, memory, softmax_scale, warp, lane):
        work = work_tiles.work(work_tiles.row, work_tiles.start, work_tiles.left)
        weights = wgmma_tiles.tile(memory.weight_pointer, BLOCK_HEADS, BLOCK_TOKENS, self.numbers.type)
        acc = Rows.make().acc
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        stage, phase = Int32(0), Int32(0)
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.second_block(acc, weights, memory, warp, lane, stage, phase)
            stage, phase = advance(stage, phase, NUM_STAGES)
        # The part goes where the queries are; without a block nothing else has waited for them.
        self.await_queries(memory, Int32(0))
        publish_part(work_tiles, acc, (), memory, warp, lane, 1)

    def ask_next_queries(self, wanted, work, work_tiles, memory, warp) -> None:
        """There is no next share."""
