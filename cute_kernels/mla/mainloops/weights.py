"""The weights. The first consumer warpgroup computes them from scores, and passes them to the second warpgroup together
with the rows' factors.
"""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.lanes import in_pairs
from cute_kernels.mla.config import BLOCK_TOKENS, CONSUMER_THREADS, FLAG_BYTES, MlaConfig
from cute_kernels.mla.mainloops import softmax, softmax_steps
from cute_kernels.mla.mainloops.products import Products, Rows

WEIGHTS_READY, WEIGHTS_FREE = (2, 4), 3  # named barriers of both warpgroups; ready: of each part of a block's tokens
STEPS = BLOCK_TOKENS // softmax_steps.STEP_TOKENS
PART_STEPS = STEPS // len(WEIGHTS_READY)


class RowValues:
    """The exchange of one fp32 value for each row: the first warpgroup publishes it and the second loads it."""

    @cute.jit
    def publish(self, values, memory, warp, lane):
        """Stores a value for each of a thread's two rows. The four lanes of a row have the same value; one of them
        stores it.
        """
        if lane % 4 == 0:
            self.store(values, memory, warp, lane)

    def store(self, values, memory, warp, lane) -> None:
        """Stores values as :meth:`publish` does, but all four lanes of a row store. A branch that selected one lane
        might delay MMAs in flight.
        """
        place = self.place(memory, warp, lane)
        ptx.store_shared(place, 0, [values[0]])
        ptx.store_shared(place, 32, [values[1]])

    def load(self, memory, warp, lane) -> list[Float32]:
        """Loads the values that the other warpgroup has stored for a thread's two rows."""
        place = self.place(memory, warp, lane)
        return [ptx.load_shared(place, offset).bitcast(Float32) for offset in (0, 32)]

    def place(self, memory, warp, lane):
        return memory.row_values + (warp * 16 + lane // 4) * 4


def load_flags(memory, stage):
    """Loads the flags that say which of a block's tokens exist: one word for every 8 tokens, a bit each."""
    place = memory.flags + stage * FLAG_BYTES
    return [*ptx.load_shared_vector(place, 0, 4), *ptx.load_shared_vector(place, 16, 4)]


class WholeWeights:
    """Hands over all of a block's weights at once, for :mod:`.mainloops.serial`."""

    def __init__(self, config: MlaConfig, products: Products):
        self.config, self.elements = config, products.elements
        self.row_values = RowValues()

    @cute.jit
    def weigh(self, rows: Rows, work, memory, stage, block, scale, warp, lane):
        """Computes the packed weights of a block's tokens. Returns the factors that rescale earlier accumulators."""
        if const_expr(self.config.tokens == "sparse"):
            softmax.mask(rows.scores, load_flags(memory, stage), lane)
        else:
            softmax.mask_end(rows.scores, work, block, warp, lane)
        factors = softmax.raise_maxima(rows.scores, rows.maxima, scale, work.shape.slack)
        softmax.exponentiate(rows.scores, rows.maxima, rows.totals, factors, scale, rows.packed, self.elements.pack)
        return factors

    def publish(self, packed, tile, warp, lane) -> None:
        """Stores a thread's weights in the K-major tile [64 heads, 64 tokens] that the other warpgroup multiplies with.
        tile: the tile's address."""
        row = warp * 16 + lane // 4
        for i in range(0, softmax.NUM_SCORES, 2):
            below, column = wgmma_tiles.sum_place(i)
            place = wgmma_tiles.piece_offset(row, column // 8) + below * wgmma_tiles.ROW_BYTES + lane % 4 * 4
            ptx.store_shared(tile + place, 0, [packed[i // 2]])

    def hand_over(self) -> None:
        """Lets the second warpgroup read the weights and factors that were published last."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_READY[0], number_of_threads=CONSUMER_THREADS)

    def hand_over_end(self) -> None:
        """Lets the second warpgroup end a work tile, with the factors that were published last."""
        self.hand_over()

    def await_end(self) -> None:
        """Waits in the second warpgroup until it may end a work tile. Without this wait, the second warpgroup could
        begin the next work tile, and announce that the memory of weights is free before the first warpgroup has ended
        this work tile."""
        cute.arch.barrier(barrier_id=WEIGHTS_READY[0], number_of_threads=CONSUMER_THREADS)


class SteppedWeights:
    """Makes a block's weights 16 tokens at a time, and hands them over in two parts.

    fenced: whether the second warpgroup's MMAs read weights from shared memory, which requires a fence. The second
    warpgroup issues the fence, since it would delay the next weights in the first warpgroup.
    """

    def __init__(self, config: MlaConfig, products: Products, fenced: bool):
        self.config, self.products, self.fenced = config, products, fenced
        self.elements = products.elements
        self.row_values = RowValues()

    @cute.jit
    def weigh_and_add(self, rows, factors, work, memory, places, stage, scale, warp, lane):
        """Computes a block's weights, hands them over in two parts, and issues and commits the left half of P V."""
        for step in cutlass.range_constexpr(STEPS):
            if const_expr(step > 0):
                # Slack is never negative. The compiler would make all weights before the second product, but not in
                # front of a branch.
                if work.shape.slack >= 0.0:
                    softmax_steps.weigh_step(rows.scores, rows.maxima, scale, step)
            self.pack_step(rows, step)
            fragment = self.products.weight_fragment(rows.packed)
            self.products.add_values(rows.acc, fragment, memory, stage, 0, range(step, step + 1))
            if const_expr(step == 0):
                cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
                self.row_values.store(factors, memory, warp, lane)
            self.publish_step(rows.packed, places, step)
            part, behind = divmod(step + 1, PART_STEPS)
            if const_expr(behind == 0):
                self.hand_over(part - 1)
        wgmma_tiles.commit()

    def pack_step(self, rows: Rows, step: int) -> None:
        """Packs a thread's weights of the ``step``-th 16 tokens."""
        for i in softmax_steps.step_scores(step)[::2]:
            rows.packed[i // 2] = self.elements.pack(rows.scores[i], rows.scores[i + 1])

    # -- tokens that do not exist -------------------------------------------------------------------------------------

    @cute.jit
    def mask(self, scores, flags, work, memory, stage, block, warp, lane):
        """Sets to -inf the scores of a block's tokens that do not exist. flags: as :meth:`common_flags` returns
        them."""
        if const_expr(self.config.tokens == "sparse"):
            if flags != softmax.ALL_FLAGS:
                softmax.hide(scores, load_flags(memory, stage), lane)
        else:
            softmax.mask_end(scores, work, block, warp, lane)

    def common_flags(self, memory, stage):
        """Returns the bitwise "and" of the flags of all groups of 8 tokens of a block. If tokens are not chosen by
        indices, returns 0.
        """
        if self.config.tokens == "sparse":
            return in_pairs(operator.and_, load_flags(memory, stage))
        return Uint32(0)

    # -- what the first warpgroup tells the second --------------------------------------------------------------------

    def place(self, memory, warp, lane):
        """Returns the address of a lane's first piece of weights in the K-major tile [64 heads, 64 tokens]."""
        return memory.weight_pointer.toint() + wgmma_tiles.piece_offset(warp * 16 + lane % 16, lane // 16)

    def publish_step(self, packed, place, step: int) -> None:
        """Stores a thread's weights of 16 tokens. place: from :meth:`place`. Under the swizzle, the address of each
        step is ``place`` xor a constant."""
        words = [packed[4 * step + i] for i in range(4)]
        ptx.store_matrix_x4(place ^ (2 * wgmma_tiles.PIECE_BYTES * step), 0, words, transpose=False)

    def hand_over(self, part: int) -> None:
        """Lets the second warpgroup read a published part of the weights. With part 0, it may also read the rows'
        factors."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_READY[part], number_of_threads=CONSUMER_THREADS)

    def hand_over_end(self) -> None:
        """Lets the second warpgroup end a work tile, with the factors that were published last."""
        self.hand_over(0)

    def await_part(self, part: int) -> None:
        """Waits, in the second warpgroup, until a part is handed over. `hand_over_end` also ends a wait for part 0."""
        cute.arch.barrier(barrier_id=WEIGHTS_READY[part], number_of_threads=CONSUMER_THREADS)
        if self.fenced:
            cute.arch.fence_proxy("async.shared", space="cta")

    def await_end(self) -> None:
        """Waits, in the second warpgroup, until it may end a work tile."""
        self.await_part(0)
