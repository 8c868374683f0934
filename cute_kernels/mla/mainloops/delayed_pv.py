"""Delayed PV: the stepped mainloop, but the right half of P V is computed one block later. Tiles are loaded in two
parts.

Without the delay, the tensor cores would be idle between a block's scores and its first weights. With it, the second
warpgroup multiplies the right half of the block before during this time. It holds the weights of that block in
registers, as A operands, so shared memory is free for the next weights. The first warpgroup queues the next scores
after its own half. So the left part of a tile is released a block before the right part.

    tensor cores   scores b | right b - 1 | left b | scores b + 1 | right b | left b + 1 | ...
    first          waits    | softmax b            | waits        | softmax b + 1
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from cute_kernels.device import ptx, wgmma, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.device.softmax import rescale
from cute_kernels.mla.combine.epilogue import Epilogue
from cute_kernels.mla.config import BLOCK_HEADS, BLOCK_TOKENS, CONSUMER_THREADS, NUM_STAGES, MlaConfig
from cute_kernels.mla.loads.gather import SLAB_BYTES
from cute_kernels.mla.mainloops import softmax, softmax_steps
from cute_kernels.mla.mainloops.pipeline import NextQueries, TilePipeline
from cute_kernels.mla.mainloops.products import HALF_ACC, Products, Rows, Scoring
from cute_kernels.mla.mainloops.weights import PART_STEPS, WEIGHTS_FREE, WEIGHTS_READY, SteppedWeights

START_RIGHT = 6  # named barrier of both warpgroups: the right half of the block before may be added
LEFT, RIGHT = 0, 1  # parts of a tile
HEAD_SLABS = 1  # of the next scores, queued after the left half's products
TAIL_STEPS = 4  # of the last slab of scores: the right half's products are let loose before them
SLAB_STEPS = wgmma_tiles.SLAB_COLUMNS // 16


class DelayedPV:
    """The delayed PV mainloop; see the module's docstring."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.pipeline = TilePipeline(config)
        self.products = Products(config, self.pipeline)
        # No product reads the weights from shared memory, so there is no fence.
        self.weights = SteppedWeights(config, self.products, fenced=False)
        self.next_queries = NextQueries(config)
        self.epilogue = Epilogue(config, self.weights)

    def scoring(self, memory, softmax_scale, warp, lane) -> Scoring:
        """Returns the first warpgroup's state before a work tile's first block; loads the queries that stay in
        registers."""
        scale = ptx.pinned(softmax_scale * ptx.LOG2_E)
        places = ptx.pinned(self.weights.place(memory, warp, lane))
        rows, factors = Rows.make(), cute.make_rmem_tensor(2, Float32)
        return Scoring(rows, scale, factors, places, self.hold_queries(memory, warp, lane))

    @cute.jit
    def score_blocks(self, kept: Scoring, work, work_tiles, memory, warp, lane, stage, phase):
        """Processes a work tile's blocks in the first warpgroup. Returns the next (stage, phase). A block's scores
        begin while the P V of the block before still runs."""
        rows, held = kept.rows, kept.held
        if work.begin < work.end:
            self.score_first(rows, held, memory, stage, phase)
            self.next_queries.ask(work.begin + 1 == work.end, work, work_tiles, memory, warp)
        # The last block is apart: scores after a branch would be waited for before it ends.
        for block in cutlass.range(work.begin, work.end - 1, 1, unroll=1):
            self.weigh_block(kept, work, memory, stage, block, warp, lane)
            following = advance(stage, phase, NUM_STAGES)
            self.score_next(rows, held, memory, stage, *following, lane)
            self.next_queries.ask(block + 2 == work.end, work, work_tiles, memory, warp)
            stage, phase = following
        if work.begin < work.end:
            self.weigh_block(kept, work, memory, stage, work.end - 1, warp, lane)
            self.start_right_half()
            wgmma_tiles.wait()
            self.pipeline.release(memory, self.place(stage, LEFT), lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
        return stage, phase

    @cute.jit
    def weigh_block(self, kept: Scoring, work, memory, stage, block, warp, lane):
        """Computes weights from a block's scores and issues the left half of its P V."""
        rows, factors, scale = kept.rows, kept.factors, kept.scale
        flags = self.weights.common_flags(memory, stage)
        self.weights.mask(rows.scores, flags, work, memory, stage, block, warp, lane)
        softmax_steps.begin(rows, factors, scale, work.shape.slack, HALF_ACC)
        # Places of steps are an xor from the first: made anew for every block, they take no registers of the loop.
        self.weights.weigh_and_add(rows, factors, work, memory, ptx.pinned(kept.places), stage, scale, warp, lane)
        softmax_steps.add_totals(rows, factors)

    def value_operands(self, memory, warp, lane):
        """Returns the operands of `value_block`: (registers for weights, the lane's address of weights in shared
        memory)."""
        packed = cute.make_rmem_tensor(BLOCK_TOKENS // 4, Uint32)
        return packed, ptx.pinned(self.weights.place(memory, warp, lane))

    @cute.jit
    def value_block(self, acc, operands, memory, warp, lane, stage, phase):
        """Adds the right half of a block's P V in the second warpgroup, once the first warpgroup lets it start."""
        packed, places = operands
        for part in cutlass.range_constexpr(len(WEIGHTS_READY)):
            self.weights.await_part(part)
            if const_expr(part == 0):
                factors = self.weights.row_values.load(memory, warp, lane)
            self.load_fragment(packed, places, range(part * PART_STEPS, (part + 1) * PART_STEPS))
        rescale(acc, factors, HALF_ACC)
        self.pipeline.await_tile(memory, self.place(stage, RIGHT), phase)
        cute.arch.barrier(barrier_id=START_RIGHT, number_of_threads=CONSUMER_THREADS)
        self.products.add_values(acc, self.products.weight_fragment(packed), memory, stage, 1)
        wgmma_tiles.commit()
        # After the barrier, so that the first warpgroup does not come to it twice before this one.
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=CONSUMER_THREADS)
        wgmma_tiles.wait()
        self.pipeline.release(memory, self.place(stage, RIGHT), lane)

    # -- scores -------------------------------------------------------------------------------------------------------

    def score_first(self, rows, held, memory, stage, phase) -> None:
        """Computes a work tile's first scores."""
        scores = wgmma_tiles.make_sums(BLOCK_TOKENS)
        self.begin_scores(scores, held, memory, stage, phase)
        self.score_rest(scores, held, memory, stage, phase)
        self.finish_scores(rows, scores)

    def score_next(self, rows, held, memory, stage, next_stage, next_phase, lane) -> None:
        """Issues the next block's scores and waits for them. Before the wait it releases the left part of this block's
        tile and lets the second warpgroup start.

        Scores have registers of their own until they are complete: if other instructions accessed the accumulators of
        an MMA in flight, ptxas would insert a wait after every MMA.
        """
        scores = wgmma_tiles.make_sums(BLOCK_TOKENS)
        eager = self.config.tiles.eager
        if const_expr(not eager):
            self.begin_scores(scores, held, memory, next_stage, next_phase)
            wgmma_tiles.commit()
        wgmma_tiles.wait(0 if eager else 1)
        self.pipeline.release(memory, self.place(stage, LEFT), lane)
        if const_expr(eager):
            self.start_right_half()
            self.begin_scores(scores, held, memory, next_stage, next_phase)
        self.score_rest(scores, held, memory, next_stage, next_phase)
        wgmma_tiles.wait(1)
        if const_expr(not eager):
            self.start_right_half()
        self.finish_scores(rows, scores)

    def begin_scores(self, scores, held, memory, stage, phase) -> None:
        """Issues the first MMAs of a block's scores; the caller commits them."""
        self.pipeline.await_tile(memory, self.place(stage, LEFT), phase)
        wgmma_tiles.begin()
        for slab in self.config.layout.parts[LEFT][:HEAD_SLABS]:
            self.score_slab(scores, held, memory, stage, slab)

    def score_rest(self, scores, held, memory, stage, phase) -> None:
        """Issues the MMAs of a block's scores after those of `begin_scores`. The last few MMAs are a commit group of
        their own."""
        left, right = self.config.layout.parts
        wgmma_tiles.begin()
        for slab in left[HEAD_SLABS:]:
            self.score_slab(scores, held, memory, stage, slab)
        self.pipeline.await_tile(memory, self.place(stage, RIGHT), phase)
        for slab in right[:-1]:
            self.score_slab(scores, held, memory, stage, slab)
        if TAIL_STEPS < SLAB_STEPS:
            self.score_slab(scores, held, memory, stage, right[-1], range(SLAB_STEPS - TAIL_STEPS))
        wgmma_tiles.commit()
        self.score_slab(scores, held, memory, stage, right[-1], range(SLAB_STEPS - TAIL_STEPS, SLAB_STEPS))
        wgmma_tiles.commit()

    def finish_scores(self, rows, scores) -> None:
        """Waits for scores and copies them to ``rows``. The wait instruction has the registers as operands, since LLVM
        would otherwise copy them before the wait.
        """
        wgmma_tiles.wait()
        values = wgmma.wait_all([scores[i] for i in range(softmax.NUM_SCORES)])
        for i in range(softmax.NUM_SCORES):
            rows.scores[i] = values[i]

    def score_slab(self, scores, held, memory, stage, slab: int, steps: range | None = None) -> None:
        """Issues the MMAs of scores += queries times keys over the 64 columns of a slab."""
        steps = steps or range(SLAB_STEPS)
        place = memory.tile_pointer + (stage * self.config.tile_bytes + slab * SLAB_BYTES)
        keys = wgmma_tiles.tile(place, BLOCK_TOKENS, wgmma_tiles.SLAB_COLUMNS, self.products.elements.type)
        place = memory.query_pointer + slab * SLAB_BYTES
        queries = wgmma_tiles.tile(place, BLOCK_HEADS, wgmma_tiles.SLAB_COLUMNS, self.products.elements.type)
        number = len(self.held_steps(slab))
        first = slab == self.config.layout.parts[LEFT][0]
        for a, part in ((held.get(slab), steps[:number]), (queries, steps[number:])):
            if part:
                wgmma_tiles.multiply(scores, a, keys, BLOCK_TOKENS, zero=first, steps=part)

    def held_steps(self, slab: int) -> range:
        """Returns the steps of a slab (16 columns each) whose queries are in registers. The MMAs of these steps come
        first."""
        left = self.config.layout.parts[LEFT]
        count = self.config.held_steps
        before = left.index(slab) * SLAB_STEPS if slab in left else count
        return range(min(max(count - before, 0), SLAB_STEPS))

    def hold_queries(self, memory, warp, lane) -> dict:
        """Loads the queries that stay in registers, as A operands. Returns them by slab."""
        held, place = {}, wgmma_tiles.piece_offset(warp * 16 + lane % 16, lane // 16)
        for slab in self.config.layout.parts[LEFT]:
            steps = self.held_steps(slab)
            if steps:
                words = cute.make_rmem_tensor(4 * SLAB_STEPS, Uint32)
                self.load_fragment(words, memory.queries + slab * SLAB_BYTES + place, steps)
                held[slab] = self.products.weight_fragment(words)
        return held

    def load_fragment(self, words, place, steps: range) -> None:
        """Loads a lane's words of an A operand [64, 64], 16 columns a step. place: the address of the lane's first
        piece, see `SteppedWeights.place`."""
        for step in steps:
            loaded = ptx.load_matrix_x4(place ^ (2 * wgmma_tiles.PIECE_BYTES * step), 0, transpose=False)
            for i in range(4):
                words[4 * step + i] = loaded[i]

    # -- what a warpgroup tells others --------------------------------------------------------------------------------

    def start_right_half(self) -> None:
        """Lets the second warpgroup add the right half of its block."""
        cute.arch.barrier_arrive(barrier_id=START_RIGHT, number_of_threads=CONSUMER_THREADS)

    def place(self, stage, part: int):
        """Returns the index of a part's barrier among the parts of all stages, for `await_tile` and `release`."""
        return self.config.part_number(stage, part)
