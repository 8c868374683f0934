"""The consumer warpgroups, which process the work tiles of a CTA one after the other."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.mla.config import CONSUMER_THREADS
from cute_kernels.mla.mainloops.blocks import BlockLoop
from cute_kernels.mla.mainloops.delayed_pv import DelayedPV
from cute_kernels.mla.mainloops.products import Rows
from cute_kernels.mla.mainloops.serial import Serial
from cute_kernels.mla.mainloops.stepped import Stepped
from cute_kernels.mla.mainloops.weights import WEIGHTS_FREE


class PersistentConsumers:
    """The consumer warpgroups of a CTA that processes several work tiles, one after the other. mainloop: processes the
    blocks of a work tile.
    """

    def __init__(self, mainloop: Serial | Stepped | DelayedPV):
        self.mainloop, self.blocks = mainloop, BlockLoop(mainloop)

    @cute.jit
    def scores(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """Runs the first warpgroup, which computes scores, softmax and the left half of the output. warp: 0 to 3."""
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        row, start, left = work_tiles.row, work_tiles.start, work_tiles.left
        while left > 0:
            work = work_tiles.work(row, start, left)
            self.mainloop.pipeline.await_queries(memory, turn)
            following = self.score_tile(work, work_tiles, results, memory, softmax_scale, warp, lane, stage, phase)
            stage, phase = following
            turn = turn ^ 1
            row, start, left = row + 1, Int32(0), work.left

    @cute.jit
    def score_tile(self, work, work_tiles, results, memory, softmax_scale, warp, lane, stage, phase):
        """Processes a work tile in the first warpgroup. Returns (stage, phase) of the next block.

        The work tile's queries have been loaded. Once they are read, loading the next work tile's queries starts.
        """
        kept = self.mainloop.scoring(memory, softmax_scale, warp, lane)
        rows = kept.rows
        if work.resumes:
            work_tiles.exchange.resume(work, rows.acc, (rows.maxima, rows.totals), warp, lane, 0)
        self.mainloop.next_queries.ask(work.begin >= work.end, work, work_tiles, memory, warp)
        stage, phase = self.mainloop.score_blocks(kept, work, work_tiles, memory, warp, lane, stage, phase)
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        self.mainloop.epilogue.end_scores(rows, work, work_tiles, results, memory, kept.scale, warp, lane)
        return stage, phase

    @cute.jit
    def values(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """Runs the second warpgroup, which computes the right half of the output. warp: 0 to 3."""
        stage, phase = Int32(0), Int32(0)
        row, start, left = work_tiles.row, work_tiles.start, work_tiles.left
        while left > 0:
            work = work_tiles.work(row, start, left)
            stage, phase = self.value_tile(work, work_tiles, results, memory, warp, lane, stage, phase)
            row, start, left = row + 1, Int32(0), work.left

    @cute.jit
    def value_tile(self, work, work_tiles, results, memory, warp, lane, stage, phase):
        """Processes a work tile in the second warpgroup. Returns (stage, phase) of the next block."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        acc = Rows.make().acc
        if work.resumes:
            work_tiles.exchange.resume(work, acc, (), warp, lane, 1)
        operands = self.mainloop.value_operands(memory, warp, lane)
        stage, phase = self.blocks.values(acc, operands, work, memory, warp, lane, stage, phase)
        self.mainloop.epilogue.end_values(acc, work, work_tiles, results, memory, warp, lane)
        return stage, phase
