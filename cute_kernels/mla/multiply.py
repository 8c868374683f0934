"""What the multiplying warpgroups do with tiles: shared memory, products, weights, waiting and giving back.

:mod:`.serial` puts it into an order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.lanes import in_pairs
from cute_kernels.mla import softmax
from cute_kernels.mla.config import (
    BLOCK_HEADS,
    BLOCK_TOKENS,
    FLAG_BYTES,
    MULTIPLYING_WARPS,
    V_HEAD_DIM,
    MlaConfig,
)
from cute_kernels.mla.gather import SLAB_BYTES
from cute_kernels.mla.layout import HALF_SLABS
from cute_kernels.mla.numbers16 import of_name
from cute_kernels.mla.output import Writer
from cute_kernels.sm90 import WARP_THREADS

HALF = V_HEAD_DIM // 2  # columns of the output that a warpgroup keeps
HALF_SUMS = HALF // 2  # of a thread
MULTIPLYING_THREADS = MULTIPLYING_WARPS * WARP_THREADS


@dataclass(frozen=True)
class Memory:
    """Shared memory of a CTA: addresses, pointers where tensors are made of them, barriers."""

    tile_pointer: Any
    tiles: Any
    query_pointer: Any
    queries: Any
    weight_pointer: Any
    row_values: Any  # a number a row, fp32 [64]
    flags: Any
    entries: Any  # of FP8 caches: indices or page numbers of the next blocks, int32 [blocks, 64]
    full: Any
    empty: Any
    queries_full: Any  # a barrier of one phase


@dataclass(frozen=True)
class Rows:
    """What a thread keeps of its two rows: registers that all blocks change."""

    sums: Any  # fp32 [128] of the output
    scores: Any  # fp32 [32], weights once they are made
    packed: Any  # weights, pairs of 16-bit numbers [16]
    maxima: Any  # fp32 [2]: of unscaled scores, among all that the row has seen
    totals: Any  # fp32 [2]: of weights
    factors: Any  # fp32 [2]: by which the last block has shrunk earlier sums

    @staticmethod
    def make() -> Rows:
        """Before the first token."""
        rows = Rows(
            wgmma_tiles.make_sums(HALF),
            wgmma_tiles.make_sums(BLOCK_TOKENS),
            cute.make_rmem_tensor(BLOCK_TOKENS // 4, Uint32),
            *(cute.make_rmem_tensor(2, Float32) for _ in range(3)),
        )
        rows.sums.fill(0.0)
        rows.maxima.fill(softmax.LOWEST)
        rows.totals.fill(0.0)
        return rows


class Multiplying:
    """The parts of an order."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.numbers = of_name(config.layout.dtype)
        self.writer = Writer(self.numbers)

    # -- products -----------------------------------------------------------------------------------------------------

    def score(self, scores, memory, stage, phase) -> None:
        """Issues scores = queries times the keys of a tile, which it waits for."""
        self.await_tile(memory, stage, phase)
        wgmma_tiles.begin()
        for first, count in self.config.layout.score_runs:
            columns = count * wgmma_tiles.SLAB_COLUMNS
            place = memory.tile_pointer + (stage * self.config.tile_bytes + first * SLAB_BYTES)
            keys = wgmma_tiles.tile(place, BLOCK_TOKENS, columns, self.numbers.type)
            place = memory.query_pointer + first * SLAB_BYTES
            queries = wgmma_tiles.tile(place, BLOCK_HEADS, columns, self.numbers.type)
            wgmma_tiles.multiply(scores, queries, keys, BLOCK_TOKENS, zero=first == 0)
        wgmma_tiles.commit()

    def add_values(self, sums, weights, memory, stage, half: int, steps: range) -> None:
        """Issues sums += weights times a half of the values of a tile, of some steps of 16 tokens; to be committed."""
        place = memory.tile_pointer + (stage * self.config.tile_bytes + half * HALF_SLABS * SLAB_BYTES)
        width = self.config.value_columns
        wgmma_tiles.begin()
        for part in range(HALF // width):
            slabs = place + part * (width // wgmma_tiles.SLAB_COLUMNS * SLAB_BYTES)
            values = wgmma_tiles.transposed_tile(slabs, BLOCK_TOKENS, width, self.numbers.type)
            own = wgmma_tiles.part_of_sums(sums, width, part)
            wgmma_tiles.multiply(own, weights, values, width, b_transposed=True, steps=steps)

    def weight_fragment(self, packed) -> cute.Tensor:
        """The packed weights, which are in the order of the scores' accumulators, as an A operand in registers."""
        layout = cute.make_layout(((2, 2, 2), 1, BLOCK_TOKENS // 16))
        return cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=self.numbers.type), layout)

    # -- softmax ------------------------------------------------------------------------------------------------------

    @cute.jit
    def mask(self, scores, flags, work, memory, stage, block, warp, lane):
        """Scores of a block's tokens that do not exist become -inf. flags: what :meth:`common_flags` gives."""
        if const_expr(self.config.tokens == "sparse"):
            if flags != softmax.ALL_FLAGS:
                softmax.mask(scores, self.load_flags(memory, stage), lane)
        else:
            softmax.mask_end(scores, work, block, warp, lane)

    def common_flags(self, memory, stage):
        """The flags that all of a block's eights of tokens have, where tokens are chosen."""
        if self.config.tokens == "sparse":
            return in_pairs(operator.and_, self.load_flags(memory, stage))
        return Uint32(0)

    def pack_step(self, rows: Rows, step: int) -> None:
        """Packs a thread's weights of the ``step``-th 16 tokens."""
        for i in softmax.step_scores(step)[::2]:
            rows.packed[i // 2] = self.numbers.pack(rows.scores[i], rows.scores[i + 1])

    def load_flags(self, memory, stage):
        place = memory.flags + stage * FLAG_BYTES
        return [*ptx.load_shared_vector(place, 0, 4), *ptx.load_shared_vector(place, 16, 4)]

    # -- what a warpgroup tells the other -----------------------------------------------------------------------------

    def weight_place(self, memory, warp, lane):
        """Where a lane's first piece of weights goes in the K-major tile [64 heads, 64 tokens]."""
        return memory.weight_pointer.toint() + wgmma_tiles.piece_offset(warp * 16 + lane % 16, lane // 16)

    def publish_weights(self, packed, place, step: int) -> None:
        """Stores a thread's weights of 16 tokens, two pieces of a row, whose places the swizzle gives by an xor."""
        words = [packed[4 * step + i] for i in range(4)]
        ptx.store_matrix_x4(place ^ (2 * wgmma_tiles.PIECE_BYTES * step), 0, words, transpose=False)

    def publish_rows(self, values, memory, warp, lane) -> None:
        """Stores a number for each of a thread's two rows, the same in all four lanes of a row.

        All lanes store: products may be under way, which a branch might hold up.
        """
        place = self.row_place(memory, warp, lane)
        ptx.store_shared(place, 0, [values[0]])
        ptx.store_shared(place, 32, [values[1]])

    def load_rows(self, memory, warp, lane) -> list[Float32]:
        """What the other warpgroup has stored for a thread's two rows."""
        place = self.row_place(memory, warp, lane)
        return [ptx.load_shared(place, offset).bitcast(Float32) for offset in (0, 32)]

    def row_place(self, memory, warp, lane):
        return memory.row_values + (warp * 16 + lane // 4) * 4

    # -- tiles --------------------------------------------------------------------------------------------------------

    def await_queries(self, memory) -> None:
        """Waits for the CTA's queries."""
        cute.arch.mbarrier_wait(memory.queries_full, 0)

    def await_tile(self, memory, stage, phase) -> None:
        """Waits for a tile."""
        cute.arch.mbarrier_wait(memory.full + stage, phase)
        if self.config.fence == "reader":
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def release(self, memory, stage, lane):
        """A warp is done with a tile."""
        cute.arch.sync_warp()
        barrier = memory.empty + stage
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
            if const_expr(self.config.crossover):
                other = 1 - cute.arch.block_idx_in_cluster()
                numbers.arrive_in_cluster(numbers.address_in(barrier.toint(), other))
