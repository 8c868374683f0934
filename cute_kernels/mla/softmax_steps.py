"""The online softmax of :mod:`.softmax` in steps of 16 tokens, for :mod:`.stepped`."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.lanes import in_pairs, lane_max
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.mla.softmax import NUM_SCORES, ROW_LANES, row_of

STEP_TOKENS = 16  # k of a product
STEP_SCORES = STEP_TOKENS // 2


def step_scores(step: int) -> range:
    """Which of a thread's scores are those of the ``step``-th 16 tokens."""
    return range(STEP_SCORES * step, STEP_SCORES * (step + 1))


def mask(scores, flags, lane) -> None:
    """Scores of tokens that do not exist become -inf. flags: a word of 8 bits for every 8 tokens."""
    for i in range(NUM_SCORES):
        column = sum_place(i)[1]
        bit = Uint32(1 << column % 8) << Uint32(2 * (lane % 4))
        exists = (flags[column // 8] & bit) != 0
        scores[i] = cutlass.select_(exists, scores[i], -Float32.inf)


@cute.jit
def begin(rows, factors, scale, slack, count: cutlass.Constexpr):
    """Lets the running maxima of a thread's two rows follow its scores, rescales its ``count`` sums, and makes the
    weights of the first step.

    rows: registers, see :class:`.multiply.Rows`; maxima are of unscaled scores. factors: rmem fp32 [2], by which
    earlier sums shrink. scale: powers of 2 per unit of score. slack: by how many powers of 2 the maxima may fall
    behind, 0 where they themselves are asked for.

    Lanes compare their own scores with their rows' maxima: only if one of the warp is beyond the slack do the lanes of
    a row tell each other. The first weights are made meanwhile, by maxima that most likely stay.
    """
    factors.fill(1.0)
    first = cute.make_rmem_tensor(STEP_SCORES, Float32)
    exponentiate(first, rows.scores, rows.maxima, scale, 0)
    own = [in_pairs(ptx.fmax, [rows.scores[i] for i in range(NUM_SCORES) if row_of(i) == row]) for row in range(2)]
    beyond = [(own[row] - rows.maxima[row]) * scale > slack for row in range(2)]
    if cute.arch.vote_any_sync(beyond[0] | beyond[1]):
        for row in cutlass.range_constexpr(2):
            highest = lane_max(own[row], ROW_LANES)
            before = rows.maxima[row]
            maximum = cutlass.select_((highest - before) * scale > slack, highest, before)
            factors[row] = ptx.exp2((before - maximum) * scale)
            rows.maxima[row] = maximum
        for i in cutlass.range_constexpr(count):
            rows.sums[i] = rows.sums[i] * factors[row_of(i)]
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


def add_totals(rows, factors) -> None:
    """Adds a block's weights, which all scores have become, to the totals, of which the earlier ones shrink."""
    for row in range(2):
        total = in_pairs(operator.add, [rows.scores[i] for i in range(NUM_SCORES) if row_of(i) == row])
        rows.totals[row] = ptx.fma(rows.totals[row], factors[row], total)
