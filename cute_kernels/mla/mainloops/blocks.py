"""The loop over the blocks of a work tile. A mainloop processes each block: `score_block`, `value_block`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_kernels.device.ring import advance
from cute_kernels.mla.config import NUM_STAGES


class BlockLoop:
    """The loop of a mainloop over blocks. mainloop: Serial or Stepped; DelayedPV for values alone, as it loops over
    scores itself."""

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
        """Runs the second warpgroup. Returns the next (stage, phase). operands: from the mainloop's
        `value_operands`."""
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.mainloop.value_block(acc, operands, memory, warp, lane, stage, phase)
            stage, phase = advance(stage, phase, NUM_STAGES)
        return stage, phase
