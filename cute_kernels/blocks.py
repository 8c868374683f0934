"""The block size of code that processes large tensors in blocks. A caller may lower it.

References, importers and calibration process one block after another. A constant in each module gives the usual number
of elements in a block. On a machine with little memory, `with blocks.at_most(1 << 18):` makes all blocks smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_most: ContextVar[int | None] = ContextVar("cute_kernels_block_elements", default=None)


def elements(usual: int) -> int:
    """Returns the number of elements in a block: ``usual``, or fewer within :func:`at_most`."""
    most = _most.get()
    return usual if most is None else min(usual, most)


@contextmanager
def at_most(most: int) -> Iterator[None]:
    """Limits the number of elements in a block within this context. An item with more elements is processed as a block
    of its own."""
    token = _most.set(most)
    try:
        yield
    finally:
        _most.reset(token)
