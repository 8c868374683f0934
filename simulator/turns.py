"""Hundreds of threads of which one runs at a time, until it waits for another: `Turns`.

It needs greenlet, which `.[dev]` brings; nothing else of the package does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from greenlet import getcurrent, greenlet


class Turns:
    """Threads of which one runs at a time, until it waits; the next is drawn among those that can go on.

    For many threads that wait for each other often: each is woken by whoever it waits for, and nobody else. They are
    greenlets, which take turns a hundred times as fast as threads of the operating system.
    """

    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)
        self._hub = getcurrent()
        self._ready: list[greenlet] = []
        self._waiting: set[greenlet] = set()
        self._last: list[greenlet] = []

    @staticmethod
    def own() -> Any:
        """An object for the attributes of the thread that asks."""
        return getcurrent()

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Runs all bodies to their ends; raises the first error, AssertionError if all that are left wait."""
        self._hub = getcurrent()
        threads = [_Thread(body) for body in bodies]
        for thread in threads:
            thread.gr_context = copy_context()  # in which NumPy keeps how it takes overflows
        self._ready += threads
        try:
            while self._ready or self._last:
                self._next().switch()
            assert not self._waiting, f"deadlock: {len(self._waiting)} threads wait for each other"
        finally:
            for thread in threads:
                thread.throw()  # to its end, if it has not come there
            self._waiting.clear()

    def wait(self, place: list[greenlet]) -> None:
        """Lets others go on until one of them calls :meth:`wake` with the same list."""
        place.append(getcurrent())
        self._waiting.add(getcurrent())
        self._hub.switch()

    def wake(self, place: list[greenlet]) -> None:
        """Those who wait in a list can go on."""
        self._waiting.difference_update(place)
        self._ready += place
        place.clear()

    def pause(self) -> None:
        """Lets others go on: for who polls."""
        self._ready.append(getcurrent())
        self._hub.switch()

    def linger(self) -> None:
        """Lets all others go as far as they can, which shows what they do too early."""
        self._last.append(getcurrent())
        self._hub.switch()

    def _next(self) -> greenlet:
        if not self._ready:
            return self._last.pop()
        ready = self._ready
        place = int(self._random.random() * len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        return ready.pop()


class _Thread(greenlet):
    """Has a `__dict__`, unlike a greenlet that was not derived from."""
