"""Workers that compile kernels, and wait for the next call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cute_kernels.runtime import workers


@contextmanager
def kept(most: int = 2) -> Iterator[None]:
    """So many wait within this block, whose workers are its own; they end with it."""
    before, workers._waiting = workers._waiting, workers._Waiting(most)
    try:
        yield
    finally:
        ended, workers._waiting = workers._waiting, before
        ended.close()
