"""The order of a block in steps: scores, then weights of 16 tokens at a time behind the products of those before.

As soon as 16 tokens have weights, the left half's product with their values begins, and the next 16 tokens' are made
while it runs; the second warpgroup gets the weights in two parts. So the tensor cores rest only until the first 16
weights of a row are there. Where memory or gathering is what is waited for, :mod:`.mainloops.serial` is faster.
"""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.lanes import in_pairs
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, CONSUMER_THREADS, NUM_STAGES
from cute_kernels.mla.mainloops import softmax, softmax_steps
from cute_kernels.mla.mainloops.products import HALF_ACC, Products, Rows

WEIGHTS_READY, WEIGHTS_FREE = (2, 4), 3  # named barriers of both warpgroups; ready: of each part of a block's tokens
STEPS = BLOCK_TOKENS // softmax_steps.STEP_TOKENS
PART_STEPS = STEPS // len(WEIGHTS_READY)


class Stepped(Products):
    """See the module."""

    @cute.jit
    def score_tile(self, work, work_tiles, results, memory, softmax_scale, warp, lane, stage, phase):
        # What steps need is kept in registers: they are short, and to read and multiply constants takes as long.
        scale = ptx.pinned(softmax_scale * ptx.LOG2_E)
        places = ptx.pinned(self.weight_place(memory, warp, lane))
        rows = Rows.make()
        factors = cute.make_rmem_tensor(2, Float32)  # by which a block shrinks earlier accumulators
        if work.resumes:
            work_tiles.exchange.resume(work, rows.acc, (rows.maxima, rows.totals), warp, lane, 0)
        self.ask_next_queries(work.begin >= work.end, work, work_tiles, memory, warp)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.first_block(rows, factors, work, work_tiles, memory, places, stage, phase, block, scale, warp, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        self.end_first(rows, work, work_tiles, results, memory, scale, warp, lane)
        return stage, phase

    @cute.jit
    def first_block(self, rows, factors, work, work_tiles, memory, places, stage, phase, block, scale, warp, lane):
        """The first warpgroup's part in a block."""
        self.score(rows.scores, memory, stage, phase)
        flags = self.common_flags(memory, stage)
        wgmma_tiles.wait()
        self.ask_next_queries(block + 1 == work.end, work, work_tiles, memory, warp)
        self.mask(rows.scores, flags, work, memory, stage, block, warp, lane)
        softmax_steps.begin(rows, factors, scale, work.shape.slack, HALF_ACC)
        self.weigh_and_add(rows, factors, work, memory, places, stage, scale, warp, lane)
        softmax_steps.add_totals(rows, factors)
        wgmma_tiles.wait()
        self.release(memory, stage, lane)

    def hand_over_end(self) -> None:
        self.hand_over(0)

    @cute.jit
    def weigh_and_add(self, rows, factors, work, memory, places, stage, scale, warp, lane):
        """A block's weights, handed over in parts, and the left half's products with its values, which are under way
        then."""
        for step in cutlass.range_constexpr(STEPS):
            if const_expr(step > 0):
                # Slack is never negative. The compiler would make all weights before the second product, but not in
                # front of a branch.
                if work.shape.slack >= 0.0:
                    softmax_steps.weigh_step(rows.scores, rows.maxima, scale, step)
            self.pack_step(rows, step)
            self.add_values(rows.acc, self.weight_fragment(rows.packed), memory, stage, 0, range(step, step + 1))
            if const_expr(step == 0):
                cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
                self.publish_factors(factors, memory, warp, lane)
            self.publish_step(rows.packed, places, step)
            part, behind = divmod(step + 1, PART_STEPS)
            if const_expr(behind == 0):
                self.hand_over(part - 1)
        wgmma_tiles.commit()

    @cute.jit
    def value_tile(self, work, work_tiles, results, memory, warp, lane, stage, phase):
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        acc = Rows.make().acc
        if work.resumes:
            work_tiles.exchange.resume(work, acc, (), warp, lane, 1)
        weights = wgmma_tiles.tile(memory.weight_pointer, BLOCK_HEADS, BLOCK_TOKENS, self.numbers.type)
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.second_block(acc, weights, memory, warp, lane, stage, phase)
            stage, phase = advance(stage, phase, NUM_STAGES)
        self.end_second(acc, work, work_tiles, results, memory, warp, lane)
        return stage, phase

    @cute.jit
    def second_block(self, acc, weights, memory, warp, lane, stage, phase):
        """The second warpgroup's part in a block."""
        self.await_tile(memory, stage, phase)
        for part in cutlass.range_constexpr(len(WEIGHTS_READY)):
            self.await_weights(part)
            if const_expr(part == 0):
                softmax.rescale(acc, self.load_rows(memory, warp, lane), HALF_ACC)
            steps = range(part * PART_STEPS, (part + 1) * PART_STEPS)
            self.add_values(acc, weights, memory, stage, 1, steps)
        wgmma_tiles.commit()
        wgmma_tiles.wait()
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        self.release(memory, stage, lane)

    def await_end(self) -> None:
        self.await_weights(0)

    def pack_step(self, rows: Rows, step: int) -> None:
        """Packs a thread's weights of the ``step``-th 16 tokens."""
        for i in softmax_steps.step_scores(step)[::2]:
            rows.packed[i // 2] = self.numbers.pack(rows.scores[i], rows.scores[i + 1])

    # -- tokens that do not exist -------------------------------------------------------------------------------------

    @cute.jit
    def mask(self, scores, flags, work, memory, stage, block, warp, lane):
        """Scores of a block's tokens that do not exist become -inf. flags: what :meth:`common_flags` gives."""
        if const_expr(self.config.tokens == "sparse"):
            if flags != softmax.ALL_FLAGS:
                softmax.hide(scores, self.load_flags(memory, stage), lane)
        else:
            softmax.mask_end(scores, work, block, warp, lane)

    def common_flags(self, memory, stage):
        """The flags that all of a block's eights of tokens have, where tokens are chosen."""
        if self.config.tokens == "sparse":
            return in_pairs(operator.and_, self.load_flags(memory, stage))
        return Uint32(0)

    # -- what the first warpgroup tells the second --------------------------------------------------------------------

    def weight_place(self, memory, warp, lane):
        """Where a lane's first piece of weights goes in the K-major tile [64 heads, 64 tokens]."""
        return memory.weight_pointer.toint() + wgmma_tiles.piece_offset(warp * 16 + lane % 16, lane // 16)

    def publish_step(self, packed, place, step: int) -> None:
        """Stores a thread's weights of 16 tokens, two pieces of a row, whose places the swizzle gives by an xor."""
        words = [packed[4 * step + i] for i in range(4)]
        ptx.store_matrix_x4(place ^ (2 * wgmma_tiles.PIECE_BYTES * step), 0, words, transpose=False)

    def publish_factors(self, values, memory, warp, lane) -> None:
        """Stores a number for each of a thread's two rows, the same in all four lanes of a row.

        All lanes store: products may be under way, which a branch might hold up.
        """
        place = self.row_place(memory, warp, lane)
        ptx.store_shared(place, 0, [values[0]])
        ptx.store_shared(place, 32, [values[1]])

    def hand_over(self, part: int) -> None:
        """Lets the second warpgroup begin with what was published last: factors with part 0, weights with each."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_READY[part], number_of_threads=CONSUMER_THREADS)

    def await_weights(self, part: int) -> None:
        """Waits for a part of a block's weights, or for the factors of the end.

        The fence that makes stores visible to products is here, where there is time for it: in the first warpgroup it
        would hold up the next weights.
        """
        cute.arch.barrier(barrier_id=WEIGHTS_READY[part], number_of_threads=CONSUMER_THREADS)
        cute.arch.fence_proxy("async.shared", space="cta")
