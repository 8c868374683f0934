"""The online softmax over the accumulators of a 64 x 64 product: two rows a thread, four threads a row.

Accumulators are rescaled only when a weight would exceed 2**8 (FlashAttention-4, Zadouri et al. 2026), so most blocks
rescale nothing.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.lanes import in_pairs, lane_max
from cute_kernels.device.softmax import ROW_LANES, row_of
from cute_kernels.device.wgmma_tiles import sum_place
from cute_kernels.mla.config import BLOCK_TOKENS

LOWEST = -1.0e30  # stands for -inf in running maxima: scaled to powers of 2 it is still finite
NUM_SCORES = BLOCK_TOKENS // 2  # of a thread
ALL_FLAGS = 0xFF


def scores_of(scores, row: int) -> list[Float32]:
    """Returns a thread's scores in one of its two rows."""
    return [scores[i] for i in range(NUM_SCORES) if row_of(i) == row]


@cute.jit
def mask(scores, flags, lane):
    """Sets to -inf the scores of tokens that do not exist. flags: one word for every 8 tokens, a bit each."""
    everything = flags[0]
    for i in cutlass.range_constexpr(1, len(flags)):
        everything = everything & flags[i]
    if everything != ALL_FLAGS:
        hide(scores, flags, lane)


def hide(scores, flags, lane) -> None:
    """Does what :func:`mask` does, but without first testing whether all tokens exist."""
    for i in range(NUM_SCORES):
        column = sum_place(i)[1]
        bit = Uint32(1 << column % 8) << Uint32(2 * (lane % 4))
        exists = (flags[column // 8] & bit) != 0
        scores[i] = cutlass.select_(exists, scores[i], -Float32.inf)


@cute.jit
def mask_end(scores, work, block, warp, lane):
    """Sets to -inf the scores of tokens that a row does not see: tokens beyond the request's length, and in causal
    calls tokens after the row's query."""
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


def raise_maxima(scores, maxima, scale, slack) -> list[Float32]:
    """Raises the running maxima. Returns the factors that rescale earlier accumulators.

    Args:
        maxima: rmem fp32 [2], of unscaled scores.
        scale: the factor that turns scores into exponents of 2.
        slack: the largest exponent by which a score may exceed its row's maximum before the maximum is raised; 0 for
            exact maxima.
    """
    factors = []
    for row in range(2):
        highest = lane_max(in_pairs(ptx.fmax, scores_of(scores, row)), ROW_LANES)
        before = maxima[row]
        maximum = cutlass.select_((highest - before) * scale > slack, highest, before)
        factors.append(ptx.exp2((before - maximum) * scale))
        maxima[row] = maximum
    return factors


def exponentiate(scores, maxima, totals, factors, scale, weights, pack) -> None:
    """Computes the weights 2**((score - maximum) * scale), and packs pairs of weights by ``pack`` for the next MMA.
    Multiplies the totals by ``factors``, then adds the weights to the totals.
    """
    for row in range(2):
        shift = -maxima[row] * scale
        total = totals[row] * factors[row]
        for i in range(NUM_SCORES):
            if row_of(i) == row:
                scores[i] = ptx.exp2(ptx.fma(scores[i], scale, shift))
                total = total + scores[i]
        totals[row] = total
    for i in range(0, NUM_SCORES, 2):
        weights[i // 2] = pack(scores[i], scores[i + 1])
