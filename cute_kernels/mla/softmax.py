"""Online softmax over the accumulators of a 64 x 64 product: two rows a thread, four threads a row.

The maximum is allowed to fall behind by a factor of 2**8 before sums are rescaled (FlashAttention-4, Zadouri et al.
2026), so most blocks rescale nothing.
"""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.lanes import in_pairs, lane_max
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.mla.config import BLOCK_TOKENS

LOWEST = -1.0e30  # stands for -inf in running maxima: scaled to powers of 2 it is still finite
RESCALE_SLACK = 8.0  # powers of 2
ROW_LANES = (1, 2)  # bits in which the numbers of the four lanes of a row differ
NUM_SCORES = BLOCK_TOKENS // 2  # of a thread
STEP_TOKENS = 16  # k of a product
STEP_SCORES = STEP_TOKENS // 2
ALL_FLAGS = 0xFF


def row_of(index: int) -> int:
    """Which of a thread's two rows its ``index``-th accumulator belongs to."""
    return sum_place(index)[0] // 8


def mask(scores, flags, lane) -> None:
    """Scores of tokens that do not exist become -inf. flags: a word of 8 bits for every 8 tokens."""
    for i in range(NUM_SCORES):
        column = sum_place(i)[1]
        bit = Uint32(1 << column % 8) << Uint32(2 * (lane % 4))
        exists = (flags[column // 8] & bit) != 0
        scores[i] = cutlass.select_(exists, scores[i], -Float32.inf)


@cute.jit
def mask_end(scores, work, block, warp, lane):
    """Scores of tokens beyond what a row sees become -inf: its request's length, less where later queries see more."""
    shape = work.shape
    later = (shape.num_heads - 1 - work.first_head) // shape.query_heads  # queries after that of the first row
    first = block * BLOCK_TOKENS
    if first + BLOCK_TOKENS > work.length - shape.causal * later:
        for row in cutlass.range_constexpr(2):
            head = work.first_head + warp * 16 + lane // 4 + 8 * row
            behind = shape.causal * ((shape.num_heads - 1 - head) // shape.query_heads)
            end = work.length - cutlass.max(behind, Int32(0)) - first - 2 * (lane % 4)
            for i in cutlass.range_constexpr(NUM_SCORES):
                if const_expr(row_of(i) == row):
                    scores[i] = cutlass.select_(sum_place(i)[1] < end, scores[i], -Float32.inf)


def step_scores(step: int) -> range:
    """Which of a thread's scores are those of the ``step``-th 16 tokens."""
    return range(STEP_SCORES * step, STEP_SCORES * (step + 1))


@cute.jit
def begin(rows, scale, slack, count: cutlass.Constexpr):
    """Lets the running maxima of a thread's two rows follow its scores, rescales its ``count`` sums, and makes the
    weights of the first step.

    rows: registers, see :class:`.multiply.Rows`; maxima are of unscaled scores. scale: powers of 2 per unit of score.
    slack: by how many powers of 2 the maxima may fall behind, 0 where they themselves are asked for.

    Lanes compare their own scores with their rows' maxima: only if one of the warp is beyond the slack do the lanes of
    a row tell each other. The first weights are made meanwhile, by maxima that most likely stay.
    """
    rows.factors.fill(1.0)
    first = cute.make_rmem_tensor(STEP_SCORES, Float32)
    exponentiate(first, rows.scores, rows.maxima, scale, 0)
    own = [in_pairs(ptx.fmax, [rows.scores[i] for i in range(NUM_SCORES) if row_of(i) == row]) for row in range(2)]
    beyond = [(own[row] - rows.maxima[row]) * scale > slack for row in range(2)]
    if cute.arch.vote_any_sync(beyond[0] | beyond[1]):
        for row in cutlass.range_constexpr(2):
            highest = lane_max(own[row], ROW_LANES)
            before = rows.maxima[row]
            maximum = cutlass.select_((highest - before) * scale > slack, highest, before)
            rows.factors[row] = ptx.exp2((before - maximum) * scale)
            rows.maxima[row] = maximum
        for i in cutlass.range_constexpr(count):
            rows.sums[i] = rows.sums[i] * rows.factors[row_of(i)]
        exponentiate(first, rows.scores, rows.maxima, scale, 0)
    for i in cutlass.range_constexpr(STEP_SCORES):
        rows.scores[i] = first[i]


def weigh_step(scores, maxima, scale, step: int) -> None:
    """Scores of the ``step``-th 16 tokens become weights."""
    weights = [None] * STEP_SCORES
    exponentiate(weights, scores, maxima, scale, step)
    for i, weight in zip(step_scores(step), weights, strict=True):
        scores[i] = weight


def exponentiate(weights, scores, maxima, scale, step: int) -> None:
    """weights = 2**((score - maximum) * scale), of the ``step``-th 16 tokens."""
    shifts = [-maxima[row] * scale for row in range(2)]
    for place, i in enumerate(step_scores(step)):
        weights[place] = ptx.exp2(ptx.fma(scores[i], scale, shifts[row_of(i)]))


def add_totals(rows) -> None:
    """Adds a block's weights, which all scores have become, to the totals."""
    for row in range(2):
        total = in_pairs(operator.add, [rows.scores[i] for i in range(NUM_SCORES) if row_of(i) == row])
        rows.totals[row] = ptx.fma(rows.totals[row], rows.factors[row], total)


@cute.jit
def rescale(sums, factors, count: cutlass.Constexpr):
    """Multiplies a thread's ``count`` accumulators by its rows' factors, unless no lane of the warp has to."""
    needed = cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0))
    if needed:
        for i in cutlass.range_constexpr(count):
            sums[i] = sums[i] * factors[row_of(i)]
