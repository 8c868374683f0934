"""Shared memory of a CTA as its policies declare it: regions and barriers, laid out one after the other. No GPU types.

`config.WgmmaConfig.regions` and `barriers` put the policies' parts in order, `memory.allocate` hands them out.
"""

from __future__ import annotations

from typing import NamedTuple


class Region(NamedTuple):
    """Bytes of shared memory under a name of `memory.TileMemory`; an empty region has no address."""

    name: str
    size: int
    alignment: int = 128


class Barriers(NamedTuple):
    """mbarriers one after the other, the first under a name of `memory.TileMemory`.

    Attributes:
        count: how many.
        arrivals: how many a phase waits for; 0 where the barriers' owner initialises them.
        expected_bytes: the bytes that the first phase waits for besides.
    """

    name: str
    count: int
    arrivals: int = 0
    expected_bytes: int = 0
