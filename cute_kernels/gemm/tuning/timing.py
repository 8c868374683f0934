"""Times of calls that take turns, with a cold L2."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

FLUSH_BYTES = 256 << 20
SAMPLES, FEWEST_SAMPLES = 16, 5
MOST_US = 100_000  # of all samples together, beyond which there are fewer of them
HEAD_START_CYCLES = 1_000_000  # of the host: about half a millisecond
LAUNCH_PLACES = 4
SHIFT_ROUNDS = 8  # after which `shift_launches` has had each call at every place in four launches as often

Call = TypeVar("Call")


class ColdL2:
    """Evicts L2 by reading `num_bytes` of otherwise unused memory on the current stream."""

    def __init__(self, device: torch.device | str = "cuda", num_bytes: int = FLUSH_BYTES) -> None:
        self._buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)

    def __call__(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sum)


def shift_launches(turn: int) -> None:
    """Launches next to nothing, 0 to 3 times: to be called before each round of samples, with the round's number.

    With a cold L2 one launch in four takes 0.6 us longer than the others (measured on an H200: 3.4, 3.4, 3.1 and 4.05
    us for an empty one, by its number modulo 4). What a launch is made of lies in memory in fours, and what is read to
    make L2 cold drives it out. A flush before each call makes two launches of a sample, so that a call would meet the
    same one or two places in all of its samples. After turns 0, 1, 2 ... it meets each as often as the others in any
    eight of them, however many launches a round has.
    """
    for _ in range(turn % LAUNCH_PLACES):
        torch.cuda._sleep(0)


def order_of(calls: Sequence[Call], sample: int, samples: int) -> list[Call]:
    """In which order calls have their ``sample``-th of so many samples.

    In one order for all samples each call would follow the same other one, and under a power limit have the clock that
    this one leaves. Few samples, of long calls, have an order of their own each; else it changes when `shift_launches`
    has been round.
    """
    length = SHIFT_ROUNDS if samples >= 2 * SHIFT_ROUNDS else 1
    return random.Random(sample // length).sample(calls, len(calls))


class ColdTimer:
    """Medians over a few rounds in which each call has its turn, the order changing, after L2 has been made cold.

    L2 is made cold by reading, which leaves clean lines as a stack of layers does: lines that had been written would be
    written back while a call is timed. The GPU begins when the host is ahead of it, and flushing takes it longer than
    a launch takes the host, so that only the GPU's time is measured.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._flush = ColdL2(device)

    def __call__(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Microseconds of each call on the current stream, the launch's own latency included."""
        self._rounds(calls, 1)
        round_us = sum(map(sum, self._rounds(calls, 1)))
        samples = round(MOST_US / round_us)
        return list(map(statistics.median, self._rounds(calls, max(FEWEST_SAMPLES, min(SAMPLES, samples)))))

    def _rounds(self, calls: Sequence[Callable[[], object]], number: int) -> list[list[float]]:
        """Microseconds of each call in each round."""
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
        torch.cuda._sleep(HEAD_START_CYCLES)
        for turn in range(number):
            shift_launches(turn)
            for index in order_of(range(len(calls)), turn, number):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self._flush()
                start.record()
                calls[index]()
                stop.record()
                events[index].append((start, stop))
        torch.cuda.synchronize()
        return [[1e3 * a.elapsed_time(b) for a, b in pairs] for pairs in events]
