"""The loop over the blocks of a work tile. For each block it calls a mainloop's `score_block` or `value_block`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_kernels.device.ring import advance
from cute_kernels.mla.config import NUM_STAGES


class BlockLoop:
    """The loop over blocks, in both consumer warpgroups. mainloop: `Serial` or `Stepped`. `DelayedPV` uses it for
    values only, as it has its own loop over scores.
    """

    def __init__(self, mainloop) -> None:
        self.mainloop = mainloop

    @cute.jit
    def scores(self, kept, work, work_tiles, memory, warp, lane, stage, phase):
        """Runs the first warpgroup. Returns the next (stage, phase). kept: `products.Scoring`."""
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.mainloop.score_block(kept, work, work_tiles, memory, stage, phase, block, warp, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        return stage, phase

    @cute.jit
    def values(self, acc, operands, work, memory, warp, lane, stage, phase):
        """Runs the second warpgroup. Returns the next (stage, phase). operands: the result of the mainloop's
        `value_operands`.
        """
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.mainloop.value_block(acc, operands, memory, warp, lane, stage, phase)
            stage, phase = advance(stage, phase, NUM_STAGES)
        return stage, phase
