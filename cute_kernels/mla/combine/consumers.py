"""The consumer warpgroups over the work tiles of a CTA, one after the other."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.mla.mainloops.delayed_pv import DelayedPV
from cute_kernels.mla.mainloops.serial import Serial
from cute_kernels.mla.mainloops.stepped import Stepped


class PersistentConsumers:
    """A CTA stays for all of its work tiles. mainloop: of the blocks of each."""

    def __init__(self, mainloop: Serial | Stepped | DelayedPV):
        self.mainloop = mainloop

    @cute.jit
    def scores(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """The first warpgroup: scores, softmax, left half of the output. warp: 0 to 3."""
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        row, start, left = work_tiles.row, work_tiles.start, work_tiles.left
        while left > 0:
            work = work_tiles.work(row, start, left)
            self.mainloop.pipeline.await_queries(memory, turn)
            following = self.mainloop.score_tile(
                work, work_tiles, results, memory, softmax_scale, warp, lane, stage, phase
            )
            stage, phase = following
            turn = turn ^ 1
            row, start, left = row + 1, Int32(0), work.left

    @cute.jit
    def values(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """The second warpgroup: right half of the output. warp: 0 to 3."""
        stage, phase = Int32(0), Int32(0)
        row, start, left = work_tiles.row, work_tiles.start, work_tiles.left
        while left > 0:
            work = work_tiles.work(row, start, left)
            stage, phase = self.mainloop.value_tile(work, work_tiles, results, memory, warp, lane, stage, phase)
            row, start, left = row + 1, Int32(0), work.left
