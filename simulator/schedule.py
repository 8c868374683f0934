"""Warps as threads of which one runs at a time: at every step the next is drawn among those that can go on.

So barriers are played under orders that hardware may take, reproducibly, and a deadlock is found when it is there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

TIMEOUT = 60.0  # seconds that a thread may take to end behind the others


class Turns:
    """Threads of which one runs at a time, until it waits; the next is drawn among those that can go on.

    For many threads that wait for each other often: each is woken by whoever it waits for, and nobody else.
    """

    def __init__(self, seed: int = 0):
        self._random = random.Random(seed)
        self._own = threading.local()
        self._ready: list[threading.Lock] = []
        self._waiting: set[threading.Lock] = set()
        self._last: list[threading.Lock] = []
        self._error: BaseException | None = None

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Runs all bodies to their ends; raises the first error, AssertionError if all that are left wait."""
        threads = []
        for body in bodies:
            lock = threading.Lock()
            lock.acquire()
            self._ready.append(lock)
            threads.append(threading.Thread(target=self._body, args=(body, lock), daemon=True))
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join(TIMEOUT)
        if self._error is not None:
            raise self._error
        assert not any(thread.is_alive() for thread in threads), "a thread does not end"

    def wait(self, place: list[threading.Lock]) -> None:
        """Lets others go on until one of them calls :meth:`wake` with the same list."""
        place.append(self._own.lock)
        self._waiting.add(self._own.lock)
        self._rest()

    def wake(self, place: list[threading.Lock]) -> None:
        """Those who wait in a list can go on."""
        self._waiting.difference_update(place)
        self._ready += place
        place.clear()

    def pause(self) -> None:
        """Lets others go on: for who polls."""
        self._ready.append(self._own.lock)
        self._rest()

    def linger(self) -> None:
        """Lets all others go as far as they can, which shows what they do too early."""
        self._last.append(self._own.lock)
        self._rest()

    def _rest(self) -> None:
        self._pass_on()
        self._own.lock.acquire()
        if self._error is not None:
            raise SystemExit

    def _body(self, body: Callable[[], None], lock: threading.Lock) -> None:
        self._own.lock = lock
        lock.acquire()
        try:
            if self._error is None:
                body()
        except BaseException as error:
            self._fail(error)
        self._pass_on()

    def _pass_on(self) -> None:
        if not self._ready and self._last:
            self._ready.append(self._last.pop())
        if not self._ready and self._waiting:
            self._fail(AssertionError(f"deadlock: {len(self._waiting)} threads wait for each other"))
        if self._ready:
            place = self._random.randrange(len(self._ready))
            self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
            self._ready.pop().release()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._ready += [*self._waiting, *self._last]
        self._waiting.clear()
        self._last.clear()


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
