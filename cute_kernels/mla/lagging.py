"""The order of a block with the right half's products a block behind, for tiles that come in two parts.

Between a block's scores and its first weights the tensor cores would rest: there the second warpgroup adds the right
half of the values of the block before. It has that block's weights in registers by then, so that the next ones can be
stored.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla import softmax, softmax_steps
from cute_kernels.mla.boxes import part_slabs
from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, NUM_STAGES, V_HEAD_DIM
from cute_kernels.mla.gather import SLAB_BYTES
from cute_kernels.mla.layout import VALUE_SLABS
from cute_kernels.mla.multiply import HALF_SUMS, MULTIPLYING_THREADS, Rows
from cute_kernels.mla.softmax import NUM_SCORES
from cute_kernels.mla.stepped import PART_STEPS, WEIGHTS_FREE, WEIGHTS_READY, Stepped

LOOSE = 6  # named barrier: the right half of the block before may be added
SLAB_STEPS = wgmma_tiles.SLAB_COLUMNS // 16
SLAB_WORDS = 4 * SLAB_STEPS  # of a lane's fragment of 64 rows


class Lagging(Stepped):
    """See the module."""

    @cute.jit
    def first_share(self, work, items, index, results, memory, softmax_scale, warp, lane, stage, phase):
        scale = ptx.pinned(softmax_scale * ptx.LOG2_E)
        places = ptx.pinned(self.weight_place(memory, warp, lane))
        rows = Rows.make()
        factors = cute.make_rmem_tensor(2, Float32)
        held = self.hold_queries(memory, warp, lane)
        self.ask_next_queries(work.begin >= work.end, items, index, memory, warp)
        if work.begin < work.end:
            self.score_first(rows, held, memory, stage, phase)
            self.ask_next_queries(work.begin + 1 == work.end, items, index, memory, warp)
        for block in cutlass.range(work.begin, work.end - 1, 1, unroll=1):
            self.weigh_block(rows, factors, work, memory, places, stage, block, scale, warp, lane)
            following = advance(stage, phase, NUM_STAGES)
            self.score_next(rows, held, memory, stage, *following, lane)
            self.ask_next_queries(block + 2 == work.end, items, index, memory, warp)
            stage, phase = following
        if work.begin < work.end:
            self.weigh_block(rows, factors, work, memory, places, stage, work.end - 1, scale, warp, lane)
            self.let_loose()
            wgmma_tiles.wait()
            self.release(memory, 2 * stage, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        self.end_rows(rows, scale)
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        ends = self.writer.finish_rows(work, results, rows.maxima, rows.totals, warp, lane)
        self.publish_factors(ends, memory, warp, lane)
        self.hand_over(0)
        self.writer.write(work, results, rows.sums, ends, warp, lane, 0)
        return stage, phase

    @cute.jit
    def weigh_block(self, rows, factors, work, memory, places, stage, block, scale, warp, lane):
        """From a block's scores to its left half's products, which are under way then."""
        self.mask(rows.scores, Uint32(0), work, memory, stage, block, warp, lane)
        softmax_steps.begin(rows, factors, scale, work.shape.slack, HALF_SUMS)
        self.weigh_and_add(rows, factors, work, memory, places, stage, scale, warp, lane)
        softmax_steps.add_totals(rows, factors)

    @cute.jit
    def second_share(self, work, results, memory, warp, lane, stage, phase):
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        sums = Rows.make().sums
        packed = cute.make_rmem_tensor(BLOCK_TOKENS // 4, Uint32)
        places = ptx.pinned(self.weight_place(memory, warp, lane))
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            for part in cutlass.range_constexpr(len(WEIGHTS_READY)):
                self.await_weights(part)
                if const_expr(part == 0):
                    factors = self.load_rows(memory, warp, lane)
                self.load_weights(packed, places, range(part * PART_STEPS, (part + 1) * PART_STEPS))
            softmax.rescale(sums, factors, HALF_SUMS)
            self.await_tile(memory, 2 * stage + 1, phase)
            cute.arch.barrier(barrier_id=LOOSE, number_of_threads=MULTIPLYING_THREADS)
            self.add_values(sums, self.weight_fragment(packed), memory, stage, 1)
            wgmma_tiles.commit()
            cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
            wgmma_tiles.wait()
            self.release(memory, 2 * stage + 1, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        self.await_weights(0)
        ends = self.load_rows(memory, warp, lane)
        self.writer.write(work, results, sums, ends, warp, lane, 1)
        return stage, phase

    # -- scores -------------------------------------------------------------------------------------------------------

    def slabs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The slabs of a key in the order in which scores are made of them, by parts of a tile: those behind the value
        first."""
        first = part_slabs(self.config.layout.num_slabs, 0)
        return tuple(sorted(first, key=lambda slab: (slab < VALUE_SLABS, slab))), part_slabs(0, 1)

    def score_first(self, rows, held, memory, stage, phase) -> None:
        """A share's first scores."""
        fresh = wgmma_tiles.make_sums(BLOCK_TOKENS)
        self.score_head(fresh, held, memory, stage, phase)
        self.score_rest(fresh, held, memory, stage, phase)
        self.finish_scores(rows, fresh, False)

    def score_next(self, rows, held, memory, stage, next_stage, next_phase, lane) -> None:
        """The next block's scores."""
        fresh = wgmma_tiles.make_sums(BLOCK_TOKENS)
        if self.config.head > 0:
            self.score_head(fresh, held, memory, next_stage, next_phase)
            wgmma_tiles.commit()
            wgmma_tiles.wait(1)
            self.release(memory, 2 * stage, lane)
        else:
            wgmma_tiles.wait()
            self.release(memory, 2 * stage, lane)
            self.score_head(fresh, held, memory, next_stage, next_phase)
        self.score_rest(fresh, held, memory, next_stage, next_phase)
        self.finish_scores(rows, fresh, True)

    def score_head(self, scores, held, memory, stage, phase) -> None:
        """Issues the first of a block's scores' products."""
        self.await_tile(memory, 2 * stage, phase)
        wgmma_tiles.begin()
        for slab in self.slabs()[0][: self.config.head]:
            self.score_slab(scores, held, memory, stage, slab)

    def score_rest(self, scores, held, memory, stage, phase) -> None:
        """Issues the other products of a block's scores; the last ones are a group of their own."""
        left, right = self.slabs()
        wgmma_tiles.begin()
        for slab in left[self.config.head :]:
            self.score_slab(scores, held, memory, stage, slab)
        self.await_tile(memory, 2 * stage + 1, phase)
        for slab in right[:-1]:
            self.score_slab(scores, held, memory, stage, slab)
        behind = SLAB_STEPS - self.config.tail
        if behind:
            self.score_slab(scores, held, memory, stage, right[-1], range(behind))
        wgmma_tiles.commit()
        if self.config.tail:
            self.score_slab(scores, held, memory, stage, right[-1], range(behind, SLAB_STEPS))
            wgmma_tiles.commit()

    def finish_scores(self, rows, fresh, loose: bool) -> None:
        """Waits for scores; loose: lets the second warpgroup go on shortly before."""
        if loose:
            wgmma_tiles.wait(1 if self.config.tail else 0)
            self.let_loose()
        wgmma_tiles.wait()
        # Through the wait, so that no copy of what a product still writes stands before it.
        for i, value in enumerate(wgmma.wait_all([fresh[i] for i in range(NUM_SCORES)])):
            rows.scores[i] = value

    def score_slab(self, scores, held, memory, stage, slab: int, steps: range | None = None) -> None:
        """Issues scores += queries times keys, of 64 columns."""
        order = self.slabs()[0]
        columns = wgmma_tiles.SLAB_COLUMNS
        place = memory.tile_pointer + (stage * self.config.tile_bytes + slab * SLAB_BYTES)
        keys = wgmma_tiles.tile(place, BLOCK_TOKENS, columns, self.numbers.type)
        if slab in order[: self.config.held]:
            queries = held[order.index(slab)]
        else:
            place = memory.query_pointer + slab * SLAB_BYTES
            queries = wgmma_tiles.tile(place, BLOCK_HEADS, columns, self.numbers.type)
        wgmma_tiles.multiply(scores, queries, keys, BLOCK_TOKENS, zero=slab == order[0], steps=steps)

    def hold_queries(self, memory, warp, lane) -> list:
        """The first slabs of the queries as A operands in registers."""
        held = []
        for slab in self.slabs()[0][: self.config.held]:
            words = cute.make_rmem_tensor(SLAB_WORDS, Uint32)
            place = memory.queries + slab * SLAB_BYTES + wgmma_tiles.piece_offset(warp * 16 + lane % 16, lane // 16)
            self.load_fragment(words, place, range(SLAB_STEPS))
            held.append(self.weight_fragment(words))
        return held

    # -- what a warpgroup tells the other -----------------------------------------------------------------------------

    def load_fragment(self, words, place, steps: range) -> None:
        """A lane's words of an A operand [64, 64], of 16 columns each; place: of its first piece."""
        for step in steps:
            loaded = ptx.load_matrix_x4(place ^ (2 * wgmma_tiles.PIECE_BYTES * step), 0, transpose=False)
            for i in range(4):
                words[4 * step + i] = loaded[i]

    def load_weights(self, packed, places, steps: range) -> None:
        self.load_fragment(packed, places, steps)

    def let_loose(self) -> None:
        """Lets the second warpgroup add the right half of the block before."""
        cute.arch.barrier_arrive(barrier_id=LOOSE, number_of_threads=MULTIPLYING_THREADS)

    def await_weights(self, part: int) -> None:
        """Waits for a part of a block's weights, or for the factors of the end. They go through registers: no fence."""
        cute.arch.barrier(barrier_id=WEIGHTS_READY[part], number_of_threads=MULTIPLYING_THREADS)

    @cute.jit
    def release(self, memory, place, lane):
        """A warp is done with a part of a tile."""
        cute.arch.sync_warp()
        barrier = memory.empty + place
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
            if const_expr(self.config.cluster > 1):
                other = 1 - cute.arch.block_idx_in_cluster()
                numbers.arrive_in_cluster(numbers.address_in(barrier.toint(), other))
