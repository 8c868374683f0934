"""mbarriers as `cute_kernels.device.pipeline` uses them: phases that end with arrivals and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index
from typing import Any


@dataclass
class Mbarrier:
    """A phase ends with its last arrival and its last byte; a wait for a parity passes when the last one had it."""

    arrivals: int
    pending: int = field(init=False)
    bytes: int = 0
    phase: int = 0

    def __post_init__(self):
        self.pending = self.arrivals

    def change(self, arrivals: int = 0, num_bytes: int = 0) -> bool:
        """So many arrive, and so many bytes more are expected, or have come where negative; whether a phase ends."""
        self.pending -= arrivals
        self.bytes += num_bytes
        assert self.pending >= 0, "more arrivals than were said"
        if self.pending or self.bytes:
            return False
        self.pending, self.phase = self.arrivals, self.phase + 1
        return True

    def passes(self, parity: int) -> bool:
        """Whether a wait for a parity ends."""
        return (self.phase - 1) % 2 == parity


class Mbarriers:
    """Those of a CTA, by their addresses. until: lets others go on until a condition holds."""

    def __init__(self, until: Callable[[Callable[[], bool]], None]):
        self.until = until
        self.all: dict[int, Mbarrier] = {}

    def init(self, barrier: Any, arrivals: int) -> None:
        """A barrier is made once."""
        assert index(barrier) not in self.all, "initialised twice"
        self.all[index(barrier)] = Mbarrier(arrivals)

    def arch(self) -> dict[str, Callable[..., Any]]:
        """What `Meanings.arch` has of them."""
        return {
            "mbarrier_init": self.init,
            "mbarrier_init_fence": lambda: None,
            "mbarrier_arrive": lambda barrier: self.all[index(barrier)].change(1),
            "mbarrier_arrive_and_expect_tx": lambda barrier, count: self.all[index(barrier)].change(1, index(count)),
            "mbarrier_wait": lambda barrier, parity: self.until(lambda: self.all[index(barrier)].passes(index(parity))),
        }
