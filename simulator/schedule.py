"""Warps as threads of which one runs at a time: at every step the next is drawn among those that can go on.

So barriers are played under orders that hardware may take, reproducibly, and a deadlock is found when it is there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any


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
        # In the caller's context, where NumPy keeps how it takes overflows.
        threads = [
            threading.Thread(target=copy_context().run, args=(self._body, i, body), daemon=True)
            for i, body in enumerate(bodies)
        ]
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
