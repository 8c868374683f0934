"""`OnlineSoftmax`: references that follow the largest logits, and sums of powers of 2 relative to the references.

Logits are exponents of 2. For each query a thread keeps a *reference* r and a *total*, the sum of 2**(logit - r) over
its keys so far. A reference is raised only if the largest logit exceeds it by more than `RESCALE_SLACK`
(FlashAttention-4, Zadouri et al. 2026), so most blocks rescale nothing. The method that raises a reference returns a
factor of at most 1, by which all accumulators have to be multiplied.

All of attention's mainloops use this code. They differ in which threads share a reference (a warp, four lanes of a row,
a warpgroup), and in where they test whether to raise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.device import ptx
from cute_kernels.device.lanes import in_pairs
from cute_kernels.device.types import RegisterTensor
from cute_kernels.device.wgmma_tiles import sum_place

LOWEST = -1.0e38  # stands for -inf in references: differences of two of them are not NaN
RESCALE_SLACK = 8.0  # powers of 2
MIN_SCORE_SCALE = 2.0**-126  # of what scores are multiplied by: masked ones, -inf, must not meet 0
ROW_LANES = (1, 2)  # bits in which the numbers of the four lanes of a row of wgmma's accumulators differ
COLUMN_LANES = (4, 8, 16)  # the same of the eight lanes of a column of mma's accumulators


@dataclass(frozen=True)
class OnlineSoftmax:
    """A thread's softmax state of its queries: references and totals, rmem fp32 [count] each. Totals are over the
    thread's own keys."""

    references: RegisterTensor[Float32]
    totals: RegisterTensor[Float32]

    @staticmethod
    def make(count: int) -> OnlineSoftmax:
        """Makes the state of ``count`` queries, before their first key."""
        references, totals = (cute.make_rmem_tensor(count, Float32) for _ in range(2))
        references.fill(LOWEST)
        totals.fill(0.0)
        return OnlineSoftmax(references, totals)

    def exceeds(self, query: int, highest) -> Any:
        """Returns whether a query's reference has to be raised for the logit ``highest``."""
        return highest > self.references[query] + RESCALE_SLACK

    def raise_to(self, query: int, *highest) -> Any:
        """Raises the reference to the largest of the logits ``highest``, unless the reference is already greater.
        Rescales the total, and returns the factor by which the caller must rescale accumulators.
        """
        before = self.references[query]
        raised = ptx.fmax(in_pairs(ptx.fmax, highest), before)
        factor = ptx.exp2(before - raised)
        self.references[query] = raised
        self.totals[query] = self.totals[query] * factor
        return factor

    def follow(self, query: int, highest, headroom: float = 0.0) -> Any:
        """Sets a query's reference to ``highest`` - ``headroom`` if the logit ``highest`` exceeds the reference by more
        than `RESCALE_SLACK`. Returns the factor by which the caller must rescale accumulators. Pass the factor to
        :meth:`add`, which rescales the total.
        """
        before = self.references[query]
        reached = highest - headroom if headroom else highest
        reference = cutlass.select_(highest - before > RESCALE_SLACK, reached, before)
        self.references[query] = reference
        return ptx.exp2(before - reference)

    def add(self, query: int, factor, total) -> None:
        """Multiplies a query's total by ``factor``, then adds the sum ``total``."""
        self.totals[query] = ptx.fma(self.totals[query], factor, total)


def weights_of(references: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Combines the softmax references of several parts. Returns (the largest reference, factors). Each part's sums,
    times the part's factor, are relative to the largest reference.
    """
    common = references[0]
    for reference in references[1:]:
        common = ptx.fmax(common, reference)
    return common, [ptx.exp2(reference - common) for reference in references]


def row_of(index: int) -> int:
    """Returns the row, 0 or 1, of a thread's ``index``-th accumulator. In a 64-row product a thread has two rows."""
    return sum_place(index)[0] // 8


@cute.jit
def rescale(sums, factors, count: cutlass.Constexpr):
    """Multiplies a thread's ``count`` accumulators by the factors of its two rows. If all factors of a warp are 1, the
    warp skips the multiplications.
    """
    needed = cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0))
    if needed:
        for i in cutlass.range_constexpr(count):
            sums[i] = sums[i] * factors[row_of(i)]
