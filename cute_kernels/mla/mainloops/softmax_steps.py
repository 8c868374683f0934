"""The online softmax of :mod:`.mainloops.softmax` in steps of 16 tokens, for the mainloops `stepped` and
`delayed_pv`."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.device import ptx
from cute_kernels.device.lanes import in_pairs, lane_max
from cute_kernels.mla.mainloops.softmax import ROW_LANES, row_of, scores_of

STEP_TOKENS = 16  # k of a product
STEP_SCORES = STEP_TOKENS // 2


def step_scores(step: int) -> range:
    """Returns the indices of a thread's scores in the ``step``-th 16 tokens."""
    return range(STEP_SCORES * step, STEP_SCORES * (step + 1))


@cute.jit
def begin(rows, factors, scale, slack, count: cutlass.Constexpr):
    """Raises the running maxima of a thread's two rows if necessary, rescales the thread's ``count`` accumulators, and
    computes the weights of the first step.

    Args:
        rows: registers, see :class:`.products.Rows`; maxima are of unscaled scores.
        factors: rmem fp32 [2], set to the factors that rescale earlier accumulators.
        scale: the factor that turns scores into exponents of 2.
        slack: the largest exponent by which a score may exceed its row's maximum before the maximum is raised; 0 for
            exact maxima.

    Each lane compares its scores with its rows' maxima. Only if a score of the warp exceeds the slack, the lanes of a
    row exchange their maxima. Meanwhile the first weights are computed with the old maxima, which rarely change.
    """
    factors.fill(1.0)
    first = cute.make_rmem_tensor(STEP_SCORES, Float32)
    exponentiate(first, rows.scores, rows.maxima, scale, 0)
    own = [in_pairs(ptx.fmax, scores_of(rows.scores, row)) for row in range(2)]
    beyond = [(own[row] - rows.maxima[row]) * scale > slack for row in range(2)]
    if cute.arch.vote_any_sync(beyond[0] | beyond[1]):
        for row in cutlass.range_constexpr(2):
            highest = lane_max(own[row], ROW_LANES)
            before = rows.maxima[row]
            maximum = cutlass.select_((highest - before) * scale > slack, highest, before)
            factors[row] = ptx.exp2((before - maximum) * scale)
            rows.maxima[row] = maximum
        for i in cutlass.range_constexpr(count):
            rows.acc[i] = rows.acc[i] * factors[row_of(i)]
        exponentiate(first, rows.scores, rows.maxima, scale, 0)
    for i in cutlass.range_constexpr(STEP_SCORES):
        rows.scores[i] = first[i]


def weigh_step(scores, maxima, scale, step: int) -> None:
    """Replaces scores of the ``step``-th 16 tokens by their weights."""
    weights = [None] * STEP_SCORES
    exponentiate(weights, scores, maxima, scale, step)
    for i, weight in zip(step_scores(step), weights, strict=True):
        scores[i] = weight


def exponentiate(weights, scores, maxima, scale, step: int) -> None:
    """Computes the weights 2**((score - maximum) * scale) of the ``step``-th 16 tokens."""
    shifts = [-maxima[row] * scale for row in range(2)]
    for place, i in enumerate(step_scores(step)):
        weights[place] = ptx.exp2(ptx.fma(scores[i], scale, shifts[row_of(i)]))


def add_totals(rows, factors) -> None:
    """Multiplies the totals by ``factors``, then adds a block's weights, which are stored in place of the scores."""
    for row in range(2):
        total = in_pairs(operator.add, scores_of(rows.scores, row))
        rows.totals[row] = ptx.fma(rows.totals[row], factors[row], total)
