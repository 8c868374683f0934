"""The score warps: each scores 16 tokens of a block. They share one softmax and make weights for every tile of the
values.

S^T = K Q^T: 16 tokens are the rows of an MMA, 8 heads its columns. So lane (g, t) has tokens g and g + 8 and heads 2t
and 2t + 1 of every block of 8 heads. The hardware converts codes to fp16 exactly. Each tile's products are added up
separately, then multiplied by the token's scale of that tile in fp32.

Every tile has weights of its own, which contain the tokens' scales: weight * scale / limit * 2**7. A tile's limit is a
power of 2 that is at least as large as every scale so far. Weights up to 2**8 then become at most 2**15, which fits
fp16. A weight of 1 loses bits only if its token's scale is less than 2**-21 of the tile's largest. Limits and running
maxima are raised only when they have to be (the lazily rescaled maximum: FlashAttention-4, Zadouri et al. 2026). For
each block, the four warps vote whether to raise them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.lanes import lane_max, lane_sum
from cute_kernels.device.ring import advance
from cute_kernels.device.types import RegisterTensor
from cute_kernels.mla.combine.output import exists_sink
from cute_kernels.mla.config import BLOCK_TOKENS
from cute_kernels.mla.few_heads.cluster_combine import ClusterCombine, cluster_sync
from cute_kernels.mla.few_heads.config import (
    CONSUMER_THREADS,
    FLAG_BYTES,
    LATENT_STEPS,
    MATRIX_BYTES,
    NUM_TILES,
    PARTIAL,
    ROPE_OFFSET,
    ROPE_STEPS,
    ROW_BYTES,
    SCALES_OFFSET,
    SCORE_THREADS,
    SCORE_WARPS,
    STAGE_BYTES,
    TILE_COLUMNS,
    WARP_TOKENS,
    WEIGHT_BUFFERS,
    FewHeadsConfig,
)
from cute_kernels.mla.few_heads.queries import Queries
from cute_kernels.mla.few_heads.shared_memory import EXCHANGING, QUERIES_READY, RAISING, RESULTS_READY, matrix_lane
from cute_kernels.mla.mainloops.softmax import LOWEST
from cute_kernels.mla.work import partial_stats

TOKEN_LANES = (4, 8, 16)  # bits in which the numbers of lanes with the same heads differ
LOAD_STEPS = 2  # that a load of codes is good for
TILE_LOADS = TILE_COLUMNS // 16 // LOAD_STEPS
ALL_TOKENS = (1 << WARP_TOKENS) - 1
WEIGHT_SLACK = 7  # bits of fp16 above the largest weight, 2**8
MIN_LIMIT, MAX_LIMIT = 2.0**-80, 2.0**126


@dataclass(frozen=True)
class State:
    """The registers of a lane for its columns: heads 8b + 2t and 8b + 2t + 1 of every block b. Maxima are exponents of
    2."""

    scales: RegisterTensor[Float32]  # powers of 2 per unit of score
    maxima: RegisterTensor[Float32]
    totals: RegisterTensor[Float32]  # over the lane's own tokens
    limits: RegisterTensor[Float32]  # [tile]


class ScoreLoop:
    """The score warps of one configuration; see the module's docstring."""

    def __init__(self, config: FewHeadsConfig):
        self.config = config
        self.queries = Queries(config)
        self.cluster_combine = ClusterCombine(config)
        self.columns = 2 * config.head_blocks

    @cute.jit
    def run(self, work, results, memory, softmax_scale, warp, lane):
        """Computes the weights of every block of the CTA's work tile, then the final factors of accumulators. warp: 0
        to 3."""
        cute.arch.barrier(barrier_id=QUERIES_READY, number_of_threads=CONSUMER_THREADS)
        state = self.make_state(memory, softmax_scale * ptx.LOG2_E, lane)
        scores = cute.make_rmem_tensor(2 * self.columns, Float32)
        stage, phase = Int32(0), Int32(0)
        buffer, turn = Int32(0), Int32(1)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            rows = memory.ring + stage * STAGE_BYTES + warp * (WARP_TOKENS * ROW_BYTES)
            scales = self.load_scales(rows, lane)
            found = self.scores(memory, rows, scales, lane)
            for i in cutlass.range_constexpr(2 * self.columns):
                scores[i] = found[i]
            self.mask(scores, work, memory, stage, block, warp, lane)
            cute.arch.mbarrier_wait(memory.added + buffer, turn)
            exceeds = self.exceeds(state, scores, scales, work.shape.slack)
            raising = numbers.barrier_any(exceeds, RAISING, SCORE_THREADS)
            if raising != 0:
                self.raise_references(state, scores, scales, memory, buffer, warp, lane)
            if (warp == 0) & (lane == 0):
                ptx.store_shared(memory.raised + buffer * 16, 0, [raising])
            self.store_weights(self.weights(state, scores), state, scales, memory, buffer, warp, lane)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(memory.weighed + buffer)
                cute.arch.mbarrier_arrive(memory.empty + stage)
            stage, phase = advance(stage, phase, self.config.stages)
            buffer, turn = advance(buffer, turn, WEIGHT_BUFFERS)
        self.finish(state, work, results, memory, warp, lane)

    def make_state(self, memory, scale, lane) -> State:
        scales, maxima, totals = (cute.make_rmem_tensor(self.columns, Float32) for _ in range(3))
        limits = cute.make_rmem_tensor(NUM_TILES, Float32)
        maxima.fill(LOWEST)
        totals.fill(0.0)
        limits.fill(MIN_LIMIT)
        for block in range(self.config.head_blocks):
            words = ptx.load_shared_vector(memory.query_scales + lane % 4 * 8, 32 * block, 2)
            for c in range(2):
                scales[2 * block + c] = words[c].bitcast(Float32) * scale
        return State(scales, maxima, totals, limits)

    # -- scores: [block of heads][token g or g + 8][head 2t or 2t + 1] -------------------------------------------------

    def load_scales(self, rows, lane) -> list[list[Any]]:
        """Loads the scales of a lane's two tokens, [token][tile of columns]."""
        address = rows + lane // 4 * ROW_BYTES
        loads = (ptx.load_shared_vector(address, half * 8 * ROW_BYTES + SCALES_OFFSET, NUM_TILES) for half in range(2))
        return [[word.bitcast(Float32) for word in words] for words in loads]

    def scores(self, memory, rows, scales, lane) -> list[Any]:
        """Returns a lane's scores of the warp's 16 tokens for all heads. rows: address of the first of these tokens."""
        address = rows + matrix_lane(lane)
        queries = self.queries.reading_place(memory, lane)
        blocks = range(self.config.head_blocks)
        totals = [[Float32(0.0)] * 4 for _ in blocks]
        for step in range(ROPE_STEPS):
            keys = ptx.load_matrix_x4(address, ROPE_OFFSET + 32 * step, transpose=False)
            operands = self.queries.operands(queries, LATENT_STEPS + step)
            totals = [ptx.mma_m16n8k16(totals[b], keys, operands[b], dtype="bf16") for b in blocks]
        for tile in range(NUM_TILES):
            # Two chains of products, so that one need not wait for the other's.
            dots = [[[Float32(0.0)] * 4 for _ in blocks] for _ in range(LOAD_STEPS)]
            for load in range(TILE_LOADS):
                words = ptx.load_matrix_x4(address, TILE_COLUMNS * tile + 32 * load, transpose=False)
                for half in range(LOAD_STEPS):
                    operands = self.queries.operands(queries, (tile * TILE_LOADS + load) * LOAD_STEPS + half)
                    keys = fragment(words[2 * half], words[2 * half + 1])
                    dots[half] = [ptx.mma_m16n8k16(dots[half][b], keys, operands[b], dtype="f16") for b in blocks]
            for b in blocks:
                for i in range(4):
                    totals[b][i] = ptx.fma(dots[0][b][i] + dots[1][b][i], scales[i // 2][tile], totals[b][i])
        return [value for total in totals for value in total]

    @cute.jit
    def mask(self, scores, work, memory, stage, block, warp, lane):
        """Sets scores of tokens that do not exist, or that a head's query does not see, to -inf."""
        if const_expr(self.config.tokens == "sparse"):
            flags = ptx.load_shared(memory.flags + stage * FLAG_BYTES + warp * 4, 0)
            if flags != ALL_TOKENS:
                for half in cutlass.range_constexpr(2):
                    exists = (flags >> Uint32(lane // 4 + 8 * half)) & 1
                    for i in cutlass.range_constexpr(2 * self.columns):
                        if const_expr(i // 2 % 2 == half):
                            scores[i] = cutlass.select_(exists != 0, scores[i], -Float32.inf)
        else:
            shape = work.shape
            later = (shape.num_heads - 1 - work.first_head) // shape.query_heads
            first = block * BLOCK_TOKENS
            if first + BLOCK_TOKENS > work.length - shape.causal * later:
                for column in cutlass.range_constexpr(self.columns):
                    head = work.first_head + (column // 2 * 8 + column % 2) + 2 * (lane % 4)
                    behind = shape.causal * ((shape.num_heads - 1 - head) // shape.query_heads)
                    end = work.length - cutlass.max(behind, Int32(0)) - first - warp * WARP_TOKENS - lane // 4
                    for half in cutlass.range_constexpr(2):
                        i = 4 * (column // 2) + 2 * half + column % 2
                        scores[i] = cutlass.select_(8 * half < end, scores[i], -Float32.inf)

    # -- softmax ------------------------------------------------------------------------------------------------------

    def exceeds(self, state: State, scores, scales, slack) -> Int32:
        """Returns 1 if a lane has a weight above 2**slack, or a token's scale that exceeds the tile's limit; else 0."""
        found = scales[0][0] > state.limits[0]
        for tile in range(NUM_TILES):
            for half in range(2):
                found = found | (scales[half][tile] > state.limits[tile])
        for i in range(2 * self.columns):
            column = column_of(i)
            found = found | (scores[i] * state.scales[column] > state.maxima[column] + slack)
        return cutlass.select_(found, Int32(1), Int32(0))

    @cute.jit
    def raise_references(self, state, scores, scales, memory, buffer, warp, lane):
        """Raises the running maxima and the tiles' limits to the largest of all four warps. Stores the factors that
        rescale earlier accumulators.
        """
        tiles = memory.exchange + SCORE_WARPS * self.config.head_bytes
        own = memory.exchange + warp * self.config.head_bytes + lane * 8
        highest = self.highest(state, scores)
        largest = [lane_max(ptx.fmax(scales[0][tile], scales[1][tile]), TOKEN_LANES) for tile in range(NUM_TILES)]
        if lane < 4:
            for block in cutlass.range_constexpr(self.config.head_blocks):
                ptx.store_shared(own, 32 * block, highest[2 * block : 2 * block + 2])
        if lane == 0:
            ptx.store_shared(tiles + warp * (4 * NUM_TILES), 0, largest)
        cute.arch.barrier(barrier_id=EXCHANGING, number_of_threads=SCORE_THREADS)
        shrink = self.follow(state, memory.exchange + lane % 4 * 8)
        ease = self.follow_limits(state, tiles)
        if (warp == 0) & (lane < 4):
            place = memory.factors + buffer * self.config.factor_bytes + lane * 8
            for tile in cutlass.range_constexpr(NUM_TILES):
                for block in cutlass.range_constexpr(self.config.head_blocks):
                    pair = [shrink[2 * block + c] * ease[tile] for c in range(2)]
                    ptx.store_shared(place, tile * self.config.head_bytes + 32 * block, pair)

    def highest(self, state: State, scores) -> list[Any]:
        """Returns the largest score of the warp's tokens for each column, as an exponent of 2."""
        found = []
        for column in range(self.columns):
            first = 4 * (column // 2) + column % 2
            found.append(lane_max(ptx.fmax(scores[first], scores[first + 2]) * state.scales[column], TOKEN_LANES))
        return found

    def follow(self, state: State, place) -> list[Any]:
        """Raises a lane's maxima to the largest that any warp has stored. Returns the factors that rescale earlier
        weights.
        """
        factors: list[Any] = []
        for block in range(self.config.head_blocks):
            pairs = [
                ptx.load_shared_vector(place, warp * self.config.head_bytes + 32 * block, 2)
                for warp in range(SCORE_WARPS)
            ]
            for c in range(2):
                column = 2 * block + c
                raised = state.maxima[column]
                for pair in pairs:
                    raised = ptx.fmax(raised, pair[c].bitcast(Float32))
                factor = ptx.exp2(state.maxima[column] - raised)
                state.maxima[column] = raised
                state.totals[column] = state.totals[column] * factor
                factors.append(factor)
        return factors

    def follow_limits(self, state: State, place) -> list[Any]:
        """Raises each tile's limit to a power of 2 that is at least as large as every scale that a warp has stored.
        Returns the factors that rescale earlier weights.
        """
        loads = [ptx.load_shared_vector(place, warp * (4 * NUM_TILES), NUM_TILES) for warp in range(SCORE_WARPS)]
        factors = []
        for tile in range(NUM_TILES):
            largest = Float32(MIN_LIMIT)
            for words in loads:
                largest = ptx.fmax(largest, words[tile].bitcast(Float32))
            raised = ptx.fmax(state.limits[tile], power_above(numbers.fmin(largest, Float32(MAX_LIMIT))))
            factors.append(state.limits[tile] * inverse_power(raised))
            state.limits[tile] = raised
        return factors

    def weights(self, state: State, scores) -> list[Any]:
        """Computes the weights 2**(score - maximum) in fp32, at most 2**8, and adds them to the totals."""
        found = []
        for i in range(2 * self.columns):
            column = column_of(i)
            weight = ptx.exp2(ptx.fma(scores[i], state.scales[column], -state.maxima[column]))
            state.totals[column] = state.totals[column] + weight
            found.append(weight)
        return found

    def store_weights(self, weights, state: State, scales, memory, buffer, warp, lane) -> None:
        """Stores the warp's softmax weights in shared memory as fp16, once for each tile of columns of V. They are
        multiplied by 2**`WEIGHT_SLACK` and by each token's scale in the tile, and divided by the tile's limit
        (`State.limits`), a power of two. One instruction stores two 8 x 16 matrices.
        """
        matrices = []
        for tile in range(NUM_TILES):
            unit = inverse_power(state.limits[tile]) * 2.0**WEIGHT_SLACK
            factors = [scales[half][tile] * unit for half in range(2)]
            for first in range(0, 2 * self.columns, 4):
                pairs = ([weights[first + 2 * half + c] * factors[half] for c in range(2)] for half in range(2))
                matrices.append([ptx.pack_f16x2(*pair) for pair in pairs])
        # Lane i gives the address of a token's 16 bytes: tokens i % 16 of the first matrix, then of the next.
        place = memory.weights + buffer * self.config.weight_bytes + warp * (WARP_TOKENS * 16)
        place = place + lane % 16 * 16 + lane // 16 * MATRIX_BYTES
        for i in range(0, len(matrices), 2):
            ptx.store_matrix_x4(place, i * MATRIX_BYTES, matrices[i] + matrices[i + 1], transpose=False)

    # -- the end ------------------------------------------------------------------------------------------------------

    @cute.jit
    def finish(self, state, work, results, memory, warp, lane):
        """Adds up the totals of lanes and warps, and stores the accumulators' final factors and the rows'
        statistics."""
        own = memory.exchange + warp * self.config.head_bytes + lane * 8
        maxima = memory.query_scales  # which no one needs any more
        totals = [lane_sum(state.totals[column], TOKEN_LANES) for column in range(self.columns)]
        # Somebody may still be reading the maxima of the last block.
        cute.arch.barrier(barrier_id=EXCHANGING, number_of_threads=SCORE_THREADS)
        if lane < 4:
            for block in cutlass.range_constexpr(self.config.head_blocks):
                ptx.store_shared(own, 32 * block, totals[2 * block : 2 * block + 2])
                if warp == 0:
                    pair = [state.maxima[2 * block + c] for c in range(2)]
                    ptx.store_shared(maxima + lane * 8, 32 * block, pair)
        cute.arch.barrier(barrier_id=EXCHANGING, number_of_threads=SCORE_THREADS)
        if const_expr(self.config.cluster > 1):
            if (warp == 0) & (lane < self.config.heads):
                self.cluster_combine.store_statistics(memory, lane, *self.statistics(memory, lane))
            cluster_sync()
        if (warp == 0) & (lane < self.config.heads):
            self.finish_head(state, work, results, memory, lane)
        cute.arch.barrier_arrive(barrier_id=RESULTS_READY, number_of_threads=CONSUMER_THREADS)
        if const_expr(self.config.cluster > 1):
            cluster_sync()

    @cute.jit
    def finish_head(self, state, work, results, memory, head):
        """Finishes one head: writes its statistics or its log-sum-exp, and stores the factors of its accumulators."""
        maximum, total = self.statistics(memory, head)
        factor = Float32(1.0)
        if work.first_head + head < work.shape.num_heads:
            query_row = work.query_row(head)
            if const_expr(self.config.cluster > 1):
                highest, whole = self.cluster_combine.whole(memory, head)
                factor = self.finish_row(results, highest, whole, query_row, work.first_head + head)
                factor = factor * ptx.exp2(maximum - highest)
            elif work.shape.num_parts > 1:
                ptx.store_global(partial_stats(results, work.shape, query_row, work.part, PARTIAL), [maximum, total])
            else:
                factor = self.finish_row(results, maximum, total, query_row, work.first_head + head)
        for tile in cutlass.range_constexpr(NUM_TILES):
            value = factor * (state.limits[tile] * 2.0**-WEIGHT_SLACK)
            ptx.store_shared(memory.results + head * 4, tile * self.config.head_bytes, [value])

    def statistics(self, memory, head) -> tuple[Any, Any]:
        """Returns (maximum, total) of a head over the CTA's tokens."""
        total = Float32(0.0)
        for warp in range(SCORE_WARPS):
            total = total + ptx.load_shared(memory.exchange + head * 4, warp * self.config.head_bytes).bitcast(Float32)
        return ptx.load_shared(memory.query_scales + head * 4, 0).bitcast(Float32), total

    @cute.jit
    def finish_row(self, results, maximum, total, query_row, head) -> Float32:
        """Writes a row's log-sum-exp, and its largest score if ``results`` has an address for it. Returns 1 / (sum of
        the row's weights and its sink's weight), or 0 for a row without tokens."""
        denominator = total
        if exists_sink(results):
            sink = ptx.load_global_words(results.sinks + Int64(head) * 4, 0, 1)[0].bitcast(Float32)
            denominator = total + ptx.exp2(ptx.fma(sink, Float32(ptx.LOG2_E), -maximum))
        lse = (maximum + ptx.log2(total)) * ptx.LN_2
        top = maximum * ptx.LN_2
        factor = ptx.reciprocal(denominator)
        if total == 0.0:
            lse, top = Float32.inf, -Float32.inf
            factor = Float32(0.0)
        ptx.store_global(results.lse + Int64(query_row) * 4, [lse])
        if results.max_logits != 0:
            ptx.store_global(results.max_logits + Int64(query_row) * 4, [top])
        return factor


def fragment(low, high) -> list[Any]:
    """Returns an A operand of 16 tokens and 16 columns. low: a word of four codes of token g. high: a word of four
    codes of token g + 8."""
    lows, highs = ([ptx.e4m3x2_low_to_f16x2(word), ptx.e4m3x2_high_to_f16x2(word)] for word in (low, high))
    return [lows[0], highs[0], lows[1], highs[1]]


def column_of(index: int) -> int:
    """Returns the index of the column, as in `State`, to which a lane's ``index``-th score belongs."""
    return index // 4 * 2 + index % 2


def power_above(x: Float32) -> Float32:
    """Returns the smallest power of 2 that is at least x. x: a positive normal number."""
    return numbers.from_bits((numbers.bits(x) + 0x7FFFFF) & 0xFF800000)


def inverse_power(x: Float32) -> Float32:
    """Returns 1 / x. x: a power of 2 between 2**-126 and 2**126."""
    return numbers.from_bits(Uint32(254 << 23) - numbers.bits(x))
