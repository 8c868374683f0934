"""What a call costs the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def host_us(work: Callable[[], object], calls: int = 2000, pause: int = 200) -> float:
    """Median over ``calls`` calls that do not wait for the GPU; the queue is emptied every ``pause`` of them."""
    samples = []
    for index in range(calls + pause):
        if index % pause == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        work()
        samples.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return statistics.median(samples[pause:]) / 1e3
