"""Times of calls that take turns, with a cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

FLUSH_BYTES = 256 << 20
SAMPLES = 9


class ColdTimer:
    """Medians over a few rounds in which each call has its turn after L2 has been made cold.

    L2 is made cold by reading, which leaves clean lines as a stack of layers does: lines that had been written would be
    written back while a call is timed.
    """

    def __init__(self, device: torch.device | str = "cuda", samples: int = SAMPLES) -> None:
        self._buffer = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self._sum = torch.empty((), dtype=torch.float32, device=device)
        self._samples = samples

    def __call__(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Microseconds of each call on the current stream, the launch's own latency included."""
        for call in calls:
            call()
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
        self._flush()  # a head start for the host
        for _ in range(self._samples):
            for call, pairs in zip(calls, events, strict=True):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self._flush()
                start.record()
                call()
                stop.record()
                pairs.append((start, stop))
        torch.cuda.synchronize()
        return [statistics.median(1e3 * a.elapsed_time(b) for a, b in pairs) for pairs in events]

    def _flush(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sum)
