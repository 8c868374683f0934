"""Timing in turn with a made-up GPU: what is between two events is timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.timing import LAUNCH_PLACES, SHIFT_ROUNDS, order_of, time_cold_in_turn

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


def test_calls_do_not_always_follow_the_same_one():
    """A long call under the power limit has the clock that the one before it leaves."""
    names = ["cuBLAS", "Marlin", "Machete", "QuACK", "served"]
    few = [order_of(names, sample, 9) for sample in range(9)]
    assert all(sorted(order) == sorted(names) for order in few)
    assert len({order[order.index("served") - 1] for order in few}) > 2
    many = [order_of(names, sample, 2 * SHIFT_ROUNDS) for sample in range(2 * SHIFT_ROUNDS)]
    assert many[0] == many[SHIFT_ROUNDS - 1] != many[SHIFT_ROUNDS]
