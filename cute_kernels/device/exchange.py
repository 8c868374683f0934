"""Exchanges partial results between CTAs through global memory: publish, poll, reset.

Between launches every word of a workspace is `EMPTY_WORD`, a NaN that no arithmetic yields. A waiting thread polls its
words until none is `EMPTY_WORD` (as in NCCL's LL protocol). Neither a flag nor a fence is needed, since a word is the
result as soon as it is visible. The thread that has loaded a word resets it to `EMPTY_WORD`, for the next launch.
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
        address: a global address.
        offset: bytes from ``address`` to the first word.
        words: number of neighbouring words: 1, 2 or 4.
        wanted: whether to wait for the words; if false, they are 0. None: always wait.
    """

    address: Int64
    offset: int = 0
    words: int = VECTOR_WORDS
    wanted: object = None

    def load(self) -> list[Any]:
        """Loads the words once, as last written by any CTA. They may still be `EMPTY_WORD`."""
        if self.words == 1:
            return [ptx.load_relaxed_part(self.address + self.offset if self.offset else self.address, 4)]
        return ptx.load_relaxed(self.address, self.words, offset=self.offset)


def publish(address, values: Sequence[Any], offset: int = 0) -> None:
    """Stores 1, 2 or 4 words for threads that poll them. No word may be `EMPTY_WORD`."""
    ptx.store_global(address, values, offset=offset)


def reset(address, words: int = VECTOR_WORDS, offset: int = 0) -> None:
    """Writes `EMPTY_WORD` to words that the calling thread has loaded."""
    ptx.store_global(address, [Uint32(EMPTY_WORD)] * words, offset=offset)


def is_missing(words: Sequence[Any], missing=0) -> Any:
    """Returns 1 if any of the words is `EMPTY_WORD`; otherwise returns ``missing`` unchanged."""
    missing = Int32(missing)
    for word in words:
        missing = cutlass.select_(word == Uint32(EMPTY_WORD), Int32(1), missing)
    return missing


class Poll:
    """Waits for the words of several `Published`. A poll loads all words at once, and repeats this until no word is
    missing.

    Args:
        sources: the words to wait for; `load` returns words in this order.
        together: whether a warp's lanes wait for one another, and so stay converged.
    """

    def __init__(self, sources: Sequence[Published], *, together: bool = False):
        self.sources, self.together = tuple(sources), together

    @property
    def num_words(self) -> int:
        """Number of words that all sources have together."""
        return sum(source.words for source in self.sources)

    @cute.jit
    def load(self, words):
        """Waits for all words and leaves them in ``words``, a tensor of at least `num_words` Uint32 registers."""
        missing = Int32(1)
        while missing != 0:
            for number in cutlass.range_constexpr(len(self.sources)):
                self.load_source(words, number)
            missing = is_missing([words[i] for i in range(self.num_words)])
            if const_expr(self.together):
                missing = cutlass.select_(cute.arch.vote_any_sync(missing != 0), Int32(1), Int32(0))

    @cute.jit
    def load_source(self, words, number: cutlass.Constexpr):
        """Loads the words of the source with index ``number`` once."""
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
