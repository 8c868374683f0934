"""Exchanges partial results between CTAs through global memory: publish, poll, reset.

A partial result announces itself. Every word of a workspace is `EMPTY_WORD` between launches, a NaN that no arithmetic
yields, and a waiting thread polls until none is left (the idea is that of NCCL's LL protocol). No flag or fence is
needed: a word that is visible is the result. The thread that has loaded a word resets it to `EMPTY_WORD`, for the next
launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.cuda import EMPTY_WORD

VECTOR_WORDS = 4

__all__ = ["EMPTY_WORD", "Poll", "Published", "is_missing", "publish", "reset"]


@dataclass(frozen=True)
class Published:
    """Words that another CTA publishes.

    Attributes:
        address: where the first lies in global memory. offset: bytes after it.
        words: 1, 2 or 4 neighbouring ones.
        wanted: a condition; where it does not hold nothing is waited for, and the words are 0. None: always.
    """

    address: Int64
    offset: int = 0
    words: int = VECTOR_WORDS
    wanted: object = None

    def load(self) -> list[Any]:
        """Loads the words as some CTA has last written them."""
        if self.words == 1:
            return [ptx.load_relaxed_part(self.address + self.offset if self.offset else self.address, 4)]
        return ptx.load_relaxed(self.address, self.words, offset=self.offset)


def publish(address, values: Sequence[Any], offset: int = 0) -> None:
    """Stores 1, 2 or 4 words for threads that poll them; none of them is `EMPTY_WORD`."""
    ptx.store_global(address, values, offset=offset)


def reset(address, words: int = VECTOR_WORDS, offset: int = 0) -> None:
    """Writes `EMPTY_WORD` to words that the same thread has loaded."""
    ptx.store_global(address, [Uint32(EMPTY_WORD)] * words, offset=offset)


def is_missing(words: Sequence[Any], missing=0) -> Any:
    """Returns 1 if one of some words has not been published, else ``missing``."""
    missing = Int32(missing)
    for word in words:
        missing = cutlass.select_(word == Uint32(EMPTY_WORD), Int32(1), missing)
    return missing


class Poll:
    """Waits for words of several `Published`, loading all at once, again and again until none is missing.

    Args:
        sources: in the order in which `load` leaves their words.
        together: whether a warp's lanes wait for one another, and so stay converged.
    """

    def __init__(self, sources: Sequence[Published], *, together: bool = False):
        self.sources, self.together = tuple(sources), together

    @property
    def num_words(self) -> int:
        """Words of all sources."""
        return sum(source.words for source in self.sources)

    @cute.jit
    def load(self, words):
        """Loads all words into a tensor of registers, at least `num_words` of Uint32."""
        missing = Int32(1)
        while missing != 0:
            for number in cutlass.range_constexpr(len(self.sources)):
                self.load_source(words, number)
            missing = is_missing([words[i] for i in range(self.num_words)])
            if const_expr(self.together):
                missing = cutlass.select_(cute.arch.vote_any_sync(missing != 0), Int32(1), Int32(0))

    @cute.jit
    def load_source(self, words, number: cutlass.Constexpr):
        """Loads the words of one source."""
        source = self.sources[number]
        first = sum(before.words for before in self.sources[:number])
        if const_expr(source.wanted is None):
            loaded = source.load()
            for i in cutlass.range_constexpr(source.words):
                words[first + i] = loaded[i]
        else:
            if source.wanted:
                loaded = source.load()
                for i in cutlass.range_constexpr(source.words):
                    words[first + i] = loaded[i]
            else:
                for i in cutlass.range_constexpr(source.words):
                    words[first + i] = Uint32(0)
