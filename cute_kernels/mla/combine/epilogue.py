"""The epilogue of a work tile. It stores results, or publishes accumulators for the CTA that continues the row."""

from __future__ import annotations

import cutlass.cute as cute

from cute_kernels.device.lanes import lane_sum
from cute_kernels.mla.combine.output import Writer
from cute_kernels.mla.config import PARTIALS, MlaConfig
from cute_kernels.mla.elements import of_name
from cute_kernels.mla.mainloops import softmax
from cute_kernels.mla.mainloops.weights import SteppedWeights, WholeWeights


class Epilogue:
    """The epilogue of a work tile in both consumer warpgroups, after its last block.

    weights: `WholeWeights` or `SteppedWeights`, by whose barriers the first warpgroup tells the second warpgroup that
    the work tile has ended.
    """

    def __init__(self, config: MlaConfig, weights: WholeWeights | SteppedWeights):
        self.weights = weights
        self.writer = Writer(of_name(config.layout.dtype), PARTIALS[config.partials])

    @cute.jit
    def end_scores(self, rows, work, work_tiles, results, memory, scale, warp, lane):
        """Ends a work tile in the first warpgroup. The caller ensures that the second warpgroup has read all published
        weights.
        """
        if work.publishes:
            self.weights.hand_over_end()
            work_tiles.exchange.publish(work, rows.acc, (rows.maxima, rows.totals), warp, lane, 0)
        else:
            end_rows(rows, scale)
            factors = self.writer.finish_rows(work, results, rows.maxima, rows.totals, warp, lane)
            self.weights.row_values.publish(factors, memory, warp, lane)
            self.weights.hand_over_end()
            self.writer.write(work, results, rows.acc, factors, warp, lane, 0)

    @cute.jit
    def end_values(self, acc, work, work_tiles, results, memory, warp, lane):
        """Ends a work tile in the second warpgroup."""
        self.weights.await_end()
        if work.publishes:
            work_tiles.exchange.publish(work, acc, (), warp, lane, 1)
        else:
            factors = self.weights.row_values.load(memory, warp, lane)
            self.writer.write(work, results, acc, factors, warp, lane, 1)


def end_rows(rows, scale) -> None:
    """Adds up totals over the four lanes of a row, and turns maxima into exponents of 2. Runs after the last block."""
    for row in range(2):
        rows.totals[row] = lane_sum(rows.totals[row], softmax.ROW_LANES)
        rows.maxima[row] = rows.maxima[row] * scale
