"""Two warpgroups that take turns at the softmax, so that the tensor cores need not wait for it.

Blocks come in pairs. The first warpgroup has the scores and the softmax of the even block and the left half of the
output, the second those of the odd block and the right half; each hands its weights to the other:

    first:   scores 0 | softmax 0            | values 0, left            | values 1, left
    second:           | scores 1 | values 0, right, beside softmax 1     | values 1, right

The idea is FlashMLA's "seesaw" (DeepSeek 2025). There the second warpgroup adds the odd block first; here both add the
even block first, so that no weights change after they are published, and a tile is given back in one go, a product
of 512 clocks before the pair ends.

Weights take the place of their own tile's RoPE columns, which have been multiplied by then. The running maxima, by
which the weights of both are scaled, go from hand to hand with the weights.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.lanes import lane_sum
from cute_kernels.mla import softmax
from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, WARPGROUP_WARPS
from cute_kernels.mla.gather import SLAB_BYTES
from cute_kernels.mla.multiply import HALF_SLABS, HALF_SUMS, MULTIPLYING_THREADS, Multiplying, Rows
from cute_kernels.sm90 import WARP_THREADS

WEIGHT_SLAB = 2 * HALF_SLABS  # that of the RoPE columns
# Slots of a number a row: maxima of the first and of the second warpgroup, totals of the second; the first's is that
# of the final factors as well.
FIRST, SECOND, TOTALS = 0, 1, 2
# Named barriers of both warpgroups: weights and maxima (or final factors) of the first, of the second; totals of the
# second. Then one of each warpgroup alone.
FIRST_READY, SECOND_READY, TOTALS_READY, ALONE = 2, 3, 4, 5
READY = (FIRST_READY, SECOND_READY)


class Seesaw(Multiplying):
    """See the module. A pair's blocks lie in stages 0 and 1; ``side``: whose warpgroup's, 0 or 1."""

    @cute.jit
    def first(self, work, results, memory, softmax_scale, warp, lane):
        """The first warpgroup. warp: 0 to 3."""
        self.await_queries(memory)
        scale = softmax_scale * ptx.LOG2_E
        rows = Rows.make()
        phase = Int32(0)
        pairs_end = work.end - (work.end - work.begin) % 2
        for block in cutlass.range(work.begin, pairs_end, 2, unroll=1):
            self.add_even_left(rows, work, memory, phase, block, scale, warp, lane)
            cute.arch.barrier(barrier_id=SECOND_READY, number_of_threads=MULTIPLYING_THREADS)
            self.follow(rows, memory, SECOND, scale, warp, lane)
            self.add_values(rows.sums, self.weights(memory, 1), memory, 1, 0)
            wgmma_tiles.wait()
            self.release(memory, 1, lane, 0)
            phase = phase ^ 1
        if pairs_end < work.end:
            self.add_even_left(rows, work, memory, phase, pairs_end, scale, warp, lane)
        cute.arch.barrier(barrier_id=TOTALS_READY, number_of_threads=MULTIPLYING_THREADS)
        others = self.load_rows(memory, TOTALS, warp, lane)
        for row in cutlass.range_constexpr(2):
            rows.totals[row] = lane_sum(rows.totals[row], softmax.ROW_LANES) + others[row]
            rows.maxima[row] = rows.maxima[row] * scale
        factors = self.writer.finish_rows(work, results, rows.maxima, rows.totals, warp, lane)
        self.publish_rows(factors, memory, FIRST, warp, lane)
        cute.arch.barrier_arrive(barrier_id=FIRST_READY, number_of_threads=MULTIPLYING_THREADS)
        self.writer.write(work, results, rows.sums, factors, memory.queries, warp, lane, 0)

    @cute.jit
    def second(self, work, results, memory, softmax_scale, warp, lane):
        """The second warpgroup. warp: 0 to 3."""
        self.await_queries(memory)
        scale = softmax_scale * ptx.LOG2_E
        rows = Rows.make()
        phase = Int32(0)
        pairs_end = work.end - (work.end - work.begin) % 2
        for block in cutlass.range(work.begin, pairs_end, 2, unroll=1):
            self.score(rows.scores, memory, 1, phase)
            self.confirm(memory, 1, warp, lane)
            self.add_even_right(rows, memory, scale, warp, lane)
            wgmma_tiles.wait(1)  # for the scores
            factors = self.weigh(rows, work, memory, 1, block + 1, scale, warp, lane)
            self.publish(rows, memory, 1, phase, warp, lane)
            wgmma_tiles.wait()
            self.release_both(memory, 0, lane)
            softmax.rescale(rows.sums, factors, HALF_SUMS)
            self.add_values(rows.sums, self.weight_fragment(rows.packed), memory, 1, 1)
            wgmma_tiles.wait()
            self.release_both(memory, 1, lane)
            phase = phase ^ 1
        if pairs_end < work.end:
            self.add_even_right(rows, memory, scale, warp, lane)
            wgmma_tiles.wait()
            self.release_both(memory, 0, lane)
        for row in cutlass.range_constexpr(2):
            rows.totals[row] = lane_sum(rows.totals[row], softmax.ROW_LANES)
        self.publish_rows(rows.totals, memory, TOTALS, warp, lane)
        cute.arch.barrier_arrive(barrier_id=TOTALS_READY, number_of_threads=MULTIPLYING_THREADS)
        cute.arch.barrier(barrier_id=FIRST_READY, number_of_threads=MULTIPLYING_THREADS)
        factors = self.load_rows(memory, FIRST, warp, lane)
        self.writer.write(work, results, rows.sums, factors, memory.queries, warp, lane, 1)

    @cute.jit
    def add_even_left(self, rows: Rows, work, memory, phase, block, scale, warp, lane):
        """The first warpgroup's even block: scores, softmax, left half of the output; gives the left half back."""
        self.score(rows.scores, memory, 0, phase)
        self.confirm(memory, 0, warp, lane)
        wgmma_tiles.wait()
        factors = self.weigh(rows, work, memory, 0, block, scale, warp, lane)
        self.publish(rows, memory, 0, phase, warp, lane)
        softmax.rescale(rows.sums, factors, HALF_SUMS)
        self.add_values(rows.sums, self.weight_fragment(rows.packed), memory, 0, 0)
        wgmma_tiles.wait()
        self.release(memory, 0, lane, 0)

    @cute.jit
    def add_even_right(self, rows: Rows, memory, scale, warp, lane):
        """The second warpgroup's part of the even block, issued."""
        cute.arch.barrier(barrier_id=FIRST_READY, number_of_threads=MULTIPLYING_THREADS)
        self.follow(rows, memory, FIRST, scale, warp, lane)
        self.add_values(rows.sums, self.weights(memory, 0), memory, 0, 1)

    def weights(self, memory, stage: int) -> cute.Tensor:
        """Where a block's weights lie."""
        return wgmma_tiles.tile(self.weight_pointer(memory, stage), BLOCK_HEADS, BLOCK_TOKENS, self.numbers.type)

    def weight_pointer(self, memory, stage: int):
        return memory.tile_pointer + (stage * self.config.tile_bytes + WEIGHT_SLAB * SLAB_BYTES)

    @cute.jit
    def publish(self, rows: Rows, memory, side: cutlass.Constexpr, phase, warp, lane):
        """Hands the weights of a block and the maxima they are scaled by to the other warpgroup."""
        if const_expr(self.config.crossover):
            # What the weights replace is still read until the other CTA has it.
            cute.arch.mbarrier_wait(memory.received + side, phase)
        # A warp's scores are there before those of another, which may still read what the weights replace.
        cute.arch.barrier(barrier_id=ALONE + side, number_of_threads=WARPGROUP_WARPS * WARP_THREADS)
        self.publish_weights(rows.packed, self.weight_pointer(memory, side).toint(), warp, lane)
        self.publish_rows(rows.maxima, memory, side, warp, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=READY[side], number_of_threads=MULTIPLYING_THREADS)

    @cute.jit
    def follow(self, rows: Rows, memory, slot: cutlass.Constexpr, scale, warp, lane):
        """Takes over the maxima of the other warpgroup's block; scales sums and totals to them."""
        factors = softmax.follow_maxima(self.load_rows(memory, slot, warp, lane), rows.maxima, rows.totals, scale)
        softmax.rescale(rows.sums, factors, HALF_SUMS)

    def release_both(self, memory, stage: int, lane) -> None:
        """The second warpgroup's: of the right half, and of the weights, which are given back with the left half."""
        self.release(memory, stage, lane, 1)
        self.release(memory, stage, lane, 0)
