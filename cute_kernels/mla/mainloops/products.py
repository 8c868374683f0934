"""What the consumer warpgroups do with tiles: shared memory, products, weights, waiting and giving back.

:mod:`.mainloops.serial`, :mod:`.mainloops.stepped` and :mod:`.mainloops.delayed_pv` put it into an order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.lanes import lane_sum
from cute_kernels.mla.combine.output import Writer
from cute_kernels.mla.config import (
    BLOCK_HEADS,
    BLOCK_TOKENS,
    FLAG_BYTES,
    PARTIALS,
    V_HEAD_DIM,
    WARPGROUP_WARPS,
    MlaConfig,
)
from cute_kernels.mla.elements import of_name
from cute_kernels.mla.layout import HALF_SLABS
from cute_kernels.mla.loads.gather import SLAB_BYTES
from cute_kernels.mla.loads.queries import QueryLoader
from cute_kernels.mla.mainloops import softmax
from cute_kernels.sm90 import WARP_THREADS

HALF = V_HEAD_DIM // 2  # columns of the output that a warpgroup keeps
HALF_ACC = HALF // 2  # of a thread
SCORE_THREADS = WARPGROUP_WARPS * WARP_THREADS
QUERIES_READ = 5  # named barrier of the first warpgroup


@dataclass(frozen=True)
class SharedMemory:
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
    queries_full: Any


@dataclass(frozen=True)
class Rows:
    """What a thread keeps of its two rows: registers that all blocks change."""

    acc: Any  # fp32 [128] of the output
    scores: Any  # fp32 [32]
    packed: Any  # weights, pairs of 16-bit numbers [16]
    maxima: Any  # fp32 [2]: of unscaled scores, among all that the row has seen
    totals: Any  # fp32 [2]: of weights

    @staticmethod
    def make() -> Rows:
        """Before the first token."""
        rows = Rows(
            wgmma_tiles.make_sums(HALF),
            wgmma_tiles.make_sums(BLOCK_TOKENS),
            cute.make_rmem_tensor(BLOCK_TOKENS // 4, Uint32),
            cute.make_rmem_tensor(2, Float32),
            cute.make_rmem_tensor(2, Float32),
        )
        rows.acc.fill(0.0)
        rows.maxima.fill(softmax.LOWEST)
        rows.totals.fill(0.0)
        return rows


class Products:
    """The parts of an order."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.numbers = of_name(config.layout.dtype)
        self.writer = Writer(self.numbers, PARTIALS[config.partials])
        self.loader = QueryLoader(config)

    # -- shares -------------------------------------------------------------------------------------------------------

    @cute.jit
    def first(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """The first warpgroup, over all shares of the CTA. warp: 0 to 3."""
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        row, start, left = work_tiles.row, work_tiles.start, work_tiles.left
        while left > 0:
            work = work_tiles.work(row, start, left)
            self.await_queries(memory, turn)
            ring = self.score_tile(work, work_tiles, results, memory, softmax_scale, warp, lane, stage, phase)
            stage, phase = ring
            turn = turn ^ 1
            row, start, left = row + 1, Int32(0), work.left

    @cute.jit
    def second(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """The second warpgroup, over all shares of the CTA. warp: 0 to 3."""
        stage, phase = Int32(0), Int32(0)
        row, start, left = work_tiles.row, work_tiles.start, work_tiles.left
        while left > 0:
            work = work_tiles.work(row, start, left)
            stage, phase = self.value_tile(work, work_tiles, results, memory, warp, lane, stage, phase)
            row, start, left = row + 1, Int32(0), work.left

    def score_tile(self, work, work_tiles, results, memory, softmax_scale, warp, lane, stage, phase):
        """The first warpgroup's part in a share, whose queries are there; the ring's next stage and phase.

        It asks for the next share's queries when it is done with this one's.
        """
        raise NotImplementedError

    def value_tile(self, work, work_tiles, results, memory, warp, lane, stage, phase):
        """The second warpgroup's part in a share; the ring's next stage and phase."""
        raise NotImplementedError

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

    def add_values(self, acc, weights, memory, stage, half: int, steps: range | None = None) -> None:
        """Issues accumulators += weights times a half of the values of a tile, to be committed.

        steps: which 16 of its tokens each; default all.
        """
        place = memory.tile_pointer + (stage * self.config.tile_bytes + half * HALF_SLABS * SLAB_BYTES)
        width = self.config.value_columns
        wgmma_tiles.begin()
        for part in range(HALF // width):
            slabs = place + part * (width // wgmma_tiles.SLAB_COLUMNS * SLAB_BYTES)
            values = wgmma_tiles.transposed_tile(slabs, BLOCK_TOKENS, width, self.numbers.type)
            own = wgmma_tiles.part_of_sums(acc, width, part)
            wgmma_tiles.multiply(own, weights, values, width, b_transposed=True, steps=steps)

    def weight_fragment(self, packed) -> cute.Tensor:
        """The packed weights, which are in the order of the scores' accumulators, as an A operand in registers."""
        layout = cute.make_layout(((2, 2, 2), 1, BLOCK_TOKENS // 16))
        return cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=self.numbers.type), layout)

    # -- softmax ------------------------------------------------------------------------------------------------------

    @cute.jit
    def weigh(self, rows: Rows, work, memory, stage, block, scale, warp, lane):
        """Weights of a block's tokens, packed, from their scores; the factors by which earlier accumulators shrink."""
        if const_expr(self.config.tokens == "sparse"):
            softmax.mask(rows.scores, self.load_flags(memory, stage), lane)
        else:
            softmax.mask_end(rows.scores, work, block, warp, lane)
        factors = softmax.raise_maxima(rows.scores, rows.maxima, scale, work.shape.slack)
        softmax.exponentiate(rows.scores, rows.maxima, rows.totals, factors, scale, rows.packed, self.numbers.pack)
        return factors

    @cute.jit
    def end_first(self, rows: Rows, work, work_tiles, results, memory, scale, warp, lane):
        """The first warpgroup behind a share's last block, when the second one has read all that was published."""
        if work.publishes:
            self.hand_over_end()
            work_tiles.exchange.publish(work, rows.acc, (rows.maxima, rows.totals), warp, lane, 0)
        else:
            self.end_rows(rows, scale)
            factors = self.writer.finish_rows(work, results, rows.maxima, rows.totals, warp, lane)
            self.publish_rows(factors, memory, warp, lane)
            self.hand_over_end()
            self.writer.write(work, results, rows.acc, factors, warp, lane, 0)

    @cute.jit
    def end_second(self, acc, work, work_tiles, results, memory, warp, lane):
        """The second warpgroup behind a share's last block."""
        self.await_end()
        if work.publishes:
            work_tiles.exchange.publish(work, acc, (), warp, lane, 1)
        else:
            factors = self.load_rows(memory, warp, lane)
            self.writer.write(work, results, acc, factors, warp, lane, 1)

    def hand_over_end(self) -> None:
        """Lets the second warpgroup end a share, if there is something to write by the factors published last."""
        raise NotImplementedError

    def await_end(self) -> None:
        """Waits until it may: before, it must not go on to the next share, where it says that weights are free."""
        raise NotImplementedError

    def end_rows(self, rows: Rows, scale) -> None:
        """Behind a share's last block: totals over the four lanes of a row, maxima in powers of 2."""
        for row in range(2):
            rows.totals[row] = lane_sum(rows.totals[row], softmax.ROW_LANES)
            rows.maxima[row] = rows.maxima[row] * scale

    def load_flags(self, memory, stage):
        place = memory.flags + stage * FLAG_BYTES
        return [*ptx.load_shared_vector(place, 0, 4), *ptx.load_shared_vector(place, 16, 4)]

    # -- what a warpgroup tells the other -----------------------------------------------------------------------------

    def publish_weights(self, packed, tile, warp, lane) -> None:
        """Stores a thread's weights as the K-major tile [64 heads, 64 tokens] of the other warpgroup."""
        row = warp * 16 + lane // 4
        for i in range(0, softmax.NUM_SCORES, 2):
            below, column = wgmma_tiles.sum_place(i)
            place = wgmma_tiles.piece_offset(row, column // 8) + below * wgmma_tiles.ROW_BYTES + lane % 4 * 4
            ptx.store_shared(tile + place, 0, [packed[i // 2]])

    @cute.jit
    def publish_rows(self, values, memory, warp, lane):
        """Stores a number for each of a thread's two rows, the same in all four lanes of a row."""
        if lane % 4 == 0:
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

    def await_queries(self, memory, phase) -> None:
        """Waits for a share's queries."""
        cute.arch.mbarrier_wait(memory.queries_full, phase)

    @cute.jit
    def ask_next_queries(self, wanted, work, work_tiles, memory, warp):
        """Asks for the queries of the next share, if there is one, as soon as the other warps of the warpgroup have
        done with this one's as well."""
        if wanted:
            cute.arch.barrier(barrier_id=QUERIES_READ, number_of_threads=SCORE_THREADS)
            if (warp == 0) & (work.left > 0):
                self.loader.ask(work_tiles.queries, memory, work.row + 1, work_tiles.head_block)

    def await_tile(self, memory, stage, phase) -> None:
        """Waits for a tile, or, by the number of its barriers, a part of one."""
        cute.arch.mbarrier_wait(memory.full + stage, phase)
        if self.config.fence == "reader":
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def release(self, memory, stage, lane):
        """A warp is done with a tile, or with a part of one."""
        cute.arch.sync_warp()
        barrier = memory.empty + stage
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
            if const_expr(self.config.crossover):
                other = 1 - cute.arch.block_idx_in_cluster()
                numbers.arrive_in_cluster(numbers.address_in(barrier.toint(), other))
