"""How many numbers code that works through large tensors in blocks holds at a time: a bound that a caller may lower.

References, importers and calibration look at a block after the other, of about as many elements as their own constant
says. On a machine with little memory, `with blocks.at_most(1 << 18):` makes all of them smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_most: ContextVar[int | None] = ContextVar("cute_kernels_block_elements", default=None)


def elements(usual: int) -> int:
    """The elements of a block: ``usual``, or fewer in a block of :func:`at_most`."""
    most = _most.get()
    return usual if most is None else min(usual, most)


@contextmanager
def at_most(most: int) -> Iterator[None]:
    """Limits the elements of a block within this context, unless what goes into one block is larger itself."""
    token = _most.set(most)
    try:
        yield
    finally:
        _most.reset(token)
