"""Exchanges results between CTAs. A result has arrived when its word is no longer EMPTY.

A word is a pair of bf16 results, and needs no fence. With a counter of stored work tiles instead, each increment would
need a fence. The fence would take 4 us, since it waits for the memory behind all loads of weights.

There are two sets of words, and launches use them in turn. A launch resets the set of the previous launch, which has
ended by then, to EMPTY. Four integers lie in front of the sets: a counter of work tiles drawn, a counter of CTAs that
have finished, which set the previous launch used, and how many words of that set it used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.exchange import EMPTY_WORD, Poll, Published, reset
from cute_kernels.gemm.layer.config import SET_WORDS
from cute_kernels.gemm.layer.memory import Sizes

TICKETS, LEFT, TURN, SETS = 0, 128, 256, 384  # bytes


@dataclass(frozen=True)
class Exchange:
    """The two sets of words in one launch.

    Attributes:
        turn: 0 or 1, the set that this launch uses.
        used: number of words of the other set that are not EMPTY.
        address, other: addresses of the set that this launch uses, and of the other set.
    """

    turn: Int32
    used: Int32
    address: Int64
    other: Int64


def exchange_of(sizes: Sizes) -> Exchange:
    """Returns the exchange of a launch. The previous launch must have ended."""
    word, used = (Int32(one) for one in ptx.load_relaxed(sizes.exchange + TURN, 2))
    turn = (word + 1) & 1
    first = sizes.exchange + SETS
    used = cutlass.select_(used == Int32(EMPTY_WORD - 2**32), Int32(0), used)
    return Exchange(turn, used, first + Int64(turn) * (4 * SET_WORDS), first + Int64(turn ^ 1) * (4 * SET_WORDS))


def draw(sizes: Sizes):
    """Draws the CTA's next work tile, and returns its index. The index is num_tiles or more if no tile is left. One
    lane calls it.
    """
    return ptx.atomic_add(sizes.exchange + TICKETS, Int32(1)) + 1


@cute.jit
def empty_other(sizes: Sizes, exchange: Exchange, lane):
    """Resets the other set to EMPTY. One warp of every CTA calls it."""
    first = Int32(cute.arch.block_idx()[0]) * 32 + lane
    for i in cutlass.range(first, exchange.used // 4, sizes.num_ctas * 32, unroll=1):
        reset(exchange.other + Int64(i) * 16)


@cute.jit
def leave(sizes: Sizes, exchange: Exchange):
    """Counts one more CTA that has stored all its tiles. One lane calls it. The last CTA resets the counter. For the
    next launch, it stores which set this launch used, and how many words of that set.
    """
    left = ptx.atomic_add(sizes.exchange + LEFT, Int32(1)) + 1
    if left == sizes.num_ctas - 1:
        reset(sizes.exchange + LEFT, 1)
        ptx.store_global(sizes.exchange + TURN, [Uint32(exchange.turn), Uint32(sizes.used)])


@cute.jit
def load_results(words, addresses: list[Any], there: list[Any], places: tuple[int, ...]):
    """Waits until the results that a warp needs are published, and loads a lane's vectors of four words into ``words``.

    Args:
        addresses: base addresses.
        places: byte offsets, at each of which the lane loads a vector from each base address.
        there: for each base address, whether the lane needs the vectors.

    All loads are issued at once.
    """
    sources = [
        Published(address, offset=place, wanted=wanted)
        for address, wanted in zip(addresses, there, strict=True)
        for place in places
    ]
    Poll(sources, together=True).load(words)


@cute.jit
def load_result(address):
    """Loads the word at each lane's address, once the words of all lanes of the warp have arrived."""
    words = cute.make_rmem_tensor(1, Uint32)
    Poll([Published(address, words=1)], together=True).load(words)
    return words[0]
