"""Shared memory of a CTA as its policies declare it: regions and barriers, laid out one after the other. No GPU types.

`config.WgmmaConfig.regions` and `barriers` put the policies' parts in order, `memory.allocate` hands them out.
"""

from __future__ import annotations

from typing import NamedTuple


class Region(NamedTuple):
    """A region of shared memory, named after its field of `memory.TileMemory`; size and alignment are in bytes.

    A region of no bytes has address 0.
    """

    name: str
    size: int
    alignment: int = 128


class Barriers(NamedTuple):
    """Consecutive mbarriers; the first one's address is the field ``name`` of `memory.TileMemory`.

    Attributes:
        count: number of barriers.
        arrivals: number of arrivals that a phase waits for; 0 for barriers that `memory.init_barriers` does not
            initialise.
        expected_bytes: bytes that the first phase waits for in addition.
    """

    name: str
    count: int
    arrivals: int = 0
    expected_bytes: int = 0
