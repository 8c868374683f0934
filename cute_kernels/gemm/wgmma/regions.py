"""`Region` and `Barriers`, by which policies declare a CTA's shared memory. No GPU types. `config.WgmmaConfig.regions`
and `barriers` list the regions and barriers of all policies in order; `memory.allocate` allocates them.
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
        arrivals: number of arrivals that a phase waits for. 0: `memory.init_barriers` leaves the barrier to other code.
        expected_bytes: number of bytes that the first phase also waits for.
    """

    name: str
    count: int
    arrivals: int = 0
    expected_bytes: int = 0
