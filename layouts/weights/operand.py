"""Proofs that ldmatrix delivers the fragments of narrow weights whose rows step S1 has permuted.

ldmatrix moves 16-bit elements: thread t gets the 32 bits at columns ``2 * (t % 4)`` of row ``t // 4``. In narrow
weights, those 32 bits hold 4 or 8 consecutive rows of K, but the MMA needs pairs of rows whose indices differ by 8.
Step S1 permutes rows offline, so that the two agree. What ldmatrix delivers and what the MMA needs are linear maps over
F2 from (thread, value) to (k, n). They agree if their matrices are equal.
"""

from __future__ import annotations

from layouts.algebra import Layout, as_modes, size
from layouts.bitlinear import BitMap, bits_of
from layouts.fragments import FRAGMENTS, Fragment, ldmatrix
from layouts.proofs import Proof, prove
from layouts.weights import fastertransformer

_MMA_COLUMNS = 8


def delivered(bits: int, rows: Layout) -> BitMap:
    """Returns the map from (thread, value) to n + 8 * k, the index of the element that ldmatrix delivers to that value.
    Weights are column-major, and their rows have been permuted.

    Args:
        bits: element width, 4 or 8.
        rows: layout from stored row to original row, over the 16 bytes of one ldmatrix row.
    """
    split = bits_of(16 // bits)
    one = ldmatrix(1).bit_map()
    threads, pair = one.columns[:5], one.columns[5:]
    inside = tuple(1 << i for i in range(split))
    widened = (*(c << split for c in threads), *inside, *(c << split for c in pair))
    stored = BitMap(widened, one.out_bits + split)
    original = BitMap.from_layout(rows).stacked(BitMap.identity(bits_of(_MMA_COLUMNS)))
    n_bits, k_bits = bits_of(_MMA_COLUMNS), bits_of(size(rows))
    n_first = BitMap.permutation([*range(n_bits, n_bits + k_bits), *range(n_bits)])
    return n_first @ original @ stored


def wanted(fragment: Fragment, k: int) -> BitMap:
    """Returns the map from (thread, value) to n + 8 * k, the index of the element that the MMAs need in that value.
    Consecutive MMAs process consecutive parts of K, ``k`` rows in all.
    """
    one = fragment.bit_map()
    steps = k // fragment.tile[1]
    further = tuple(1 << one.out_bits + i for i in range(bits_of(steps)))
    return BitMap(one.columns + further, one.out_bits + len(further))


def prove_row_permutation(bits: int, activation_bits: int = 16) -> Proof:
    """Proves that S1 followed by ldmatrix gives each thread exactly its B fragments of the following MMA steps.

    Raises:
        ProofError: a thread gets different elements.
    """
    fragment = FRAGMENTS["mma_b_m16n8k16" if activation_bits == 16 else "mma_b_m16n8k32"]
    order = fastertransformer.row_order(bits, activation_bits)
    got = delivered(bits, order)
    claim = f"S1 of {bits}-bit weights + ldmatrix = fragments of {fragment.name}"
    return prove(got == wanted(fragment, size(order)), claim, "matrix", 1 << got.in_bits)


def prove_volta_needs_none() -> Proof:
    """Proves that Volta needs no transform: each thread's B fragment is a run of neighbours in row-major weights.

    One aligned load of four neighbouring elements, whatever their width, fills the fragment of m8n8k4.

    Raises:
        ProofError: the elements of a thread's fragment are not neighbours.
    """
    fragment = FRAGMENTS["volta_b_row_m8n8k4"]
    threads, values = (as_modes(mode) for mode in fragment.modes())
    aligned = all(stride % 4 == 0 for _, stride in threads)
    claim = "a Volta B fragment is four aligned neighbours of row-major weights"
    return prove(values == ((4, 1),) and aligned, claim, "symbolic", size(fragment.layout))
