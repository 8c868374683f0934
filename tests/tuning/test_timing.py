"""The cold timer with a made-up GPU: what is between two events is timed, and long calls have fewer samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.timing import time_cold_in_turn
from cute_kernels.gemm.tuning import timing
from cute_kernels.gemm.tuning.timing import FEWEST_SAMPLES, LAUNCH_PLACES, SAMPLES, SHIFT_ROUNDS, ColdTimer, order_of

FLUSH_US = 70.0


class Gpu:
    """Its clock, in microseconds, the events that tell it, and how many kernels it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.flushed, self.launches = 0.0, False, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        for name, replacement in (
            ("Event", Event),
            ("_sleep", lambda cycles: self._launch()),
            ("synchronize", lambda: None),
        ):
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(timing, "ColdL2", lambda device: self._flush)

    def _launch(self) -> None:
        self.launches += 1

    def _flush(self) -> None:
        self._launch()
        self.now, self.flushed = self.now + FLUSH_US, True

    def launch(self, count: int, us: tuple[float, ...]) -> Callable[[], None]:
        """A call of ``count`` launches that takes as long as its first one's place says."""

        def run() -> None:
            self.now += us[self.launches % len(us)]
            for _ in range(count):
                self._launch()

        return run

    def call(self, us: list[float]) -> Any:
        """A call that takes us[i] the i-th time, and the last of them from then on."""

        def run() -> None:
            assert self.flushed
            self.flushed = False
            run.count += 1  # pyright: ignore[reportFunctionMemberAccess]
            self.now += us[min(run.count, len(us)) - 1]  # pyright: ignore[reportFunctionMemberAccess]

        run.count = 0  # pyright: ignore[reportFunctionMemberAccess]
        return run


def test_medians_of_calls_in_turn(monkeypatch):
    gpu = Gpu(monkeypatch)
    calls = [gpu.call([900.0, 10.0]), gpu.call([5.0, 5.0, 800.0, 6.0]), gpu.call([7.0])]
    assert ColdTimer("cpu")(calls) == pytest.approx([10.0, 6.0, 7.0])
    assert [call.count for call in calls] == [2 + SAMPLES] * 3


@pytest.mark.parametrize("us, samples", [(1.0, SAMPLES), (10_000.0, 10), (500_000.0, FEWEST_SAMPLES)])
def test_long_calls_have_fewer_samples(monkeypatch, us: float, samples: int):
    call = Gpu(monkeypatch).call([us])
    assert ColdTimer("cpu")([call]) == pytest.approx([us])
    assert call.count == 2 + samples


PLACES_US = (3.4, 3.4, 3.1, 4.05)  # of an empty launch by its number


@pytest.mark.parametrize("counts", [(1,), (2,), (1, 1), (1, 1, 1, 1), (1, 2, 3), (3, 1), (2, 1, 1)])
def test_a_calls_time_does_not_depend_on_where_it_stands(monkeypatch, counts):
    """Every place in four launches is met alike, so that equal calls get equal medians."""
    for before in range(LAUNCH_PLACES):
        gpu = Gpu(monkeypatch)
        gpu.launches = before
        times = time_cold_in_turn({str(i): gpu.launch(n, PLACES_US) for i, n in enumerate(counts)}, gpu._flush)
        assert [timing.median_us for timing in times.values()] == pytest.approx([3.4] * len(counts))
        assert [timing.min_us for timing in times.values()] == pytest.approx([3.1] * len(counts))
        assert ColdTimer("cpu")([gpu.launch(n, PLACES_US) for n in counts]) == pytest.approx([3.4] * len(counts))


def test_calls_do_not_always_follow_the_same_one():
    """A long call under the power limit has the clock that the one before it leaves."""
    names = ["cuBLAS", "Marlin", "Machete", "QuACK", "served"]
    few = [order_of(names, sample, 9) for sample in range(9)]
    assert all(sorted(order) == sorted(names) for order in few)
    assert len({order[order.index("served") - 1] for order in few}) > 2
    many = [order_of(names, sample, 2 * SHIFT_ROUNDS) for sample in range(2 * SHIFT_ROUNDS)]
    assert many[0] == many[SHIFT_ROUNDS - 1] != many[SHIFT_ROUNDS]


def test_calls_that_are_tuned_do_not_always_follow_the_same_one(monkeypatch):
    gpu, order = Gpu(monkeypatch), []

    def named(index: int) -> Any:
        call = gpu.call([500.0])
        return lambda: (order.append(index), call())

    ColdTimer("cpu")([named(index) for index in range(5)])
    rounds = [tuple(order[i : i + 5]) for i in range(0, len(order), 5)]
    assert all(sorted(one) == list(range(5)) for one in rounds)
    assert len(set(rounds)) > 1
