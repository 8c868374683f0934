"""Partial results that announce themselves: polled until none is missing, absent ones are 0, and words are reset."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.device.exchange import EMPTY_WORD, Poll, Published, publish, reset
from simulator import PlainThread, stand_in


class Memory(PlainThread):
    """Words of global memory, of which one appears at each load."""

    def __init__(self, late: dict[int, int]):
        super().__init__(arch={"vote_any_sync": bool})
        self.words: dict[int, int] = {}
        self.late, self.loads = list(late.items()), 0

    def load_relaxed(self, address: int, num_words: int, *, offset: int = 0) -> list[int]:
        self.loads += 1
        found = [self.words.get(address + offset + 4 * i, EMPTY_WORD) for i in range(num_words)]
        if self.late:
            place, word = self.late.pop(0)
            self.words[place] = word
        return found

    def load_relaxed_part(self, address: int, num_bytes: int) -> int:
        assert num_bytes == 4
        return self.load_relaxed(address, 1)[0]

    def store_global(self, address: int, values: list[int], *, offset: int = 0) -> None:
        self.words |= {address + offset + 4 * i: value for i, value in enumerate(values)}


@pytest.mark.parametrize("together", [False, True])
def test_words_are_loaded_until_none_is_missing(together: bool, run_on):
    memory = Memory({16: 1, 20: 2, 64: 5, 28: 4, 24: 3})
    run_on(memory)
    words: list[Any] = [None] * 7
    sources = [
        Published(stand_in(0), offset=16),
        Published(stand_in(64), words=1),
        Published(stand_in(4096), words=2, wanted=False),
    ]
    poll = Poll(sources, together=together)
    assert poll.num_words == 7
    poll.load(words)
    assert words == [1, 2, 3, 4, 5, 0, 0]
    assert memory.loads == 8  # of the two that are wanted, four times


def test_what_is_published_is_loaded_and_reset_for_the_next_launch(run_on):
    memory = Memory({})
    run_on(memory)
    publish(32, [7, 8, 9, 10], offset=16)
    words: list[Any] = [None] * 4
    Poll([Published(stand_in(48))]).load(words)
    assert words == [7, 8, 9, 10] and memory.loads == 1
    reset(32, offset=16)
    assert set(memory.words.values()) == {EMPTY_WORD}
