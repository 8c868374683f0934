"""GPU and host timing with a cold, clean L2.

What lies in L2 before a call decides small timings. Here L2 is made cold by *reading* a buffer much larger than it:
that leaves clean lines, as a stack of layers does. Overwriting a buffer instead would leave dirty lines whose
write-back then competes with the call under test.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

from cute_kernels.runtime.captures import nothing_collected

FLUSH_BYTES = 256 << 20
LAUNCH_PLACES = 4
SHIFT_ROUNDS = 8  # after which `shift_launches` has had each call at every place in four launches as often
CLOCKS_PER_US = 2000  # of the GPU, at most about
HEAD_START = 2.0  # of the host before the GPU, in times that it took to launch the same calls; events come on top
MAX_HEAD_START_US = 50_000  # calls that wait for the GPU would ask for any amount

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


@dataclass(frozen=True)
class Protocol:
    """How one number is obtained: `samples` event-timed calls after `warmup` untimed ones, each with a cold L2."""

    samples: int = 16
    warmup: int = 3


DEFAULT_PROTOCOL = Protocol()


@dataclass(frozen=True)
class Timing:
    """Microseconds over the samples of one call."""

    median_us: float
    min_us: float
    p90_us: float
    samples: int

    @staticmethod
    def of(samples_us: list[float]) -> Timing:
        ordered = sorted(samples_us)
        p90 = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
        return Timing(statistics.median(ordered), ordered[0], p90, len(ordered))

    def as_dict(self) -> dict[str, float]:
        return {key: round(value, 3) for key, value in asdict(self).items()}


def time_cold(call: Callable[[], object], flush: Callable[[], None], protocol: Protocol = DEFAULT_PROTOCOL) -> Timing:
    """Times `call` with CUDA events on the current stream, `flush` running before each call, outside the events."""
    return time_cold_in_turn({"": call}, flush, protocol)[""]


def _by_events(
    calls: Mapping[str, Callable[[], object]], flush: Callable[[], None], protocol: Protocol
) -> dict[str, Timing]:
    """As `time_cold`, for several calls by name, one sample of each after the other, the order changing.

    What slows a GPU down for a while, such as its power limit after some long products, then meets all of them alike:
    see `order_of`.

    All samples are queued behind a kernel that runs for as long as the host takes to do so. Thus an event pair encloses
    GPU work and the launch's own latency, never the host: a flush of some 60 us alone would not hide every call.

    The samples of each call fall evenly on every place in four launches, whose latencies differ: `shift_launches`.
    """
    for call in calls.values():
        for _ in range(protocol.warmup):
            flush()
            call()
    round_us = _host_us_of_a_round(calls, flush)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    head_start_us = min(HEAD_START * round_us * protocol.samples, MAX_HEAD_START_US)
    torch.cuda._sleep(int(CLOCKS_PER_US * head_start_us))
    flush()
    for sample in range(protocol.samples):
        shift_launches(sample)
        for name in order_of(list(calls), sample, protocol.samples):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush()
            start.record()
            calls[name]()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: Timing.of([1e3 * a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def _host_us_of_a_round(calls: Mapping[str, Callable[[], object]], flush: Callable[[], None]) -> float:
    """Microseconds that the host takes to launch each call once."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for call in calls.values():
        flush()
        call()
    taken = 1e6 * (time.perf_counter() - begin)
    torch.cuda.synchronize()
    return taken


def _in_a_graph(call: Callable[[], object], warmup: int) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with nothing_collected(), torch.cuda.graph(graph):
        call()
    return graph.replay


@dataclass(frozen=True)
class Clock:
    """How calls are timed by name, with a cold L2 each, how one is captured, and a launch that does nothing."""

    in_turn: Callable[..., dict[str, Timing]] = _by_events
    capture: Callable[[Callable[[], object], int], Callable[[], object]] = _in_a_graph
    empty_launch: Callable[[], object] = lambda: torch.cuda._sleep(0)


_clock = Clock()


@contextmanager
def ticking(clock: Clock) -> Iterator[None]:
    """In this block all benchmarks go by ``clock``: one that stands still shows what they do with its times."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


def time_cold_in_turn(
    calls: Mapping[str, Callable[[], object]], flush: Callable[[], None], protocol: Protocol = DEFAULT_PROTOCOL
) -> dict[str, Timing]:
    """As `time_cold`, for several calls by name, one sample of each after the other: what slows a GPU down for a while
    meets all of them alike."""
    return _clock.in_turn(calls, flush, protocol)


def empty_launch() -> None:
    """A launch whose kernel does nothing."""
    _clock.empty_launch()


def capture(call: Callable[[], object], warmup: int = 2) -> Callable[[], object]:
    """Captures `call` in a CUDA graph and returns its replay."""
    return _clock.capture(call, warmup)


def time_graph_cold(
    call: Callable[[], object], flush: Callable[[], None], protocol: Protocol = DEFAULT_PROTOCOL
) -> Timing:
    """As `time_cold`, for a CUDA graph that holds the one call."""
    return time_cold(capture(call), flush, protocol)


def time_host(call: Callable[[], object], calls: int = 200, repeats: int = 7) -> Timing:
    """Host microseconds per call: wall clock over `calls` calls without a synchronisation between them.

    `calls` stays well below the launch queue's depth (about 1000), so a GPU slower than the host does not push back.
    """
    for _ in range(10):
        call()
    samples = []
    for _ in range(repeats):
        _synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append(1e6 * (time.perf_counter() - begin) / calls)
    _synchronize()
    return Timing.of(samples)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
