"""Warps as threads of which one runs at a time: at every step the next is drawn among those that can go on.

So barriers are played under orders that hardware may take, reproducibly, and a deadlock is found when it is there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
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

    own: Callable[[], Any] = staticmethod(getcurrent)  # an object for the thread's own attributes

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Runs all bodies to their ends; raises the first error, AssertionError if all that are left wait."""
        self._hub = getcurrent()
        threads = [_Thread(body) for body in bodies]
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


class Scheduler:
    """Threads of which one runs at a time; at every step the next is drawn among those that can go on."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.turn = threading.Condition()
        self.waiting: dict[int, Any] = {}
        self.running: int | None = None
        self.error: BaseException | None = None

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Runs all bodies, each of which calls :meth:`until` with its own number, to their ends; raises the first
        error."""
        threads = [threading.Thread(target=self._body, args=(i, body), daemon=True) for i, body in enumerate(bodies)]
        self.waiting = {i: lambda: True for i in range(len(bodies))}
        with self.turn:
            self._next()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if self.error is not None:
            raise self.error
        assert not any(thread.is_alive() for thread in threads), "a thread does not end"

    def until(self, condition: Callable[[], bool], who: int) -> None:
        """Lets others go on until ``condition`` holds."""
        with self.turn:
            self.waiting[who] = condition
            self._next()
            self._resume(who)

    def _body(self, who: int, body) -> None:
        try:
            with self.turn:
                self._resume(who)
            body()
        except BaseException as error:
            self.error = self.error or error
        with self.turn:
            if self.error is None:
                self._next()
            self.turn.notify_all()

    def _resume(self, who: int) -> None:
        self.turn.wait_for(lambda: self.running == who or self.error is not None)
        if self.error is not None:
            raise SystemExit
        del self.waiting[who]

    def _next(self) -> None:
        able = [who for who, condition in self.waiting.items() if condition()]
        self.running = self.random.choice(able) if able else None
        if not able and self.waiting:
            self.error = self.error or AssertionError(f"deadlock: {sorted(self.waiting)} wait for each other")
        self.turn.notify_all()
