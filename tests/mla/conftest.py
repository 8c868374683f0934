"""Fixtures of the room's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from simulator.backend import Backend, running


@pytest.fixture
def run_on() -> Iterator[Callable[[Backend], None]]:
    """Device code runs on the backend that is given, until another one is or the test ends."""
    with ExitStack() as stack:

        def change(backend: Backend) -> None:
            stack.close()
            stack.enter_context(running(backend))

        yield change
