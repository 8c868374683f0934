"""Runs a function while CuTe DSL traces, so that its layouts can be evaluated on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def traced(body: Callable[[], Any]) -> Any:
    """Call ``body`` inside a `cute.jit` trace and return what it returned (plain Python data)."""
    from cutlass import cute

    found: list[Any] = []

    @cute.jit
    def host():
        found.append(body())

    cute.compile(host, options="--gpu-arch sm_90a")
    return found[0]


def dsl_offsets(layout: Any, count: int) -> list[int]:
    """Offsets of the first ``count`` flat coordinates of a live DSL layout."""
    return [int(layout(i)) for i in range(count)]
