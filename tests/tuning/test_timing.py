"""The cold timer with a made-up GPU: what is between two events is timed, and long calls have fewer samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.tuning import timing
from cute_kernels.tuning.timing import FEWEST_SAMPLES, SAMPLES, ColdTimer

FLUSH_US = 70.0


class Gpu:
    """Its clock, in microseconds, and the events that tell it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.flushed = 0.0, False
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                self.at = gpu.now

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        for name, replacement in (("Event", Event), ("_sleep", lambda cycles: None), ("synchronize", lambda: None)):
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(timing, "ColdL2", lambda device: self._flush)

    def _flush(self) -> None:
        self.now, self.flushed = self.now + FLUSH_US, True

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
