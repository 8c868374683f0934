"""Rings of shared memory that some warps fill and others empty."""

import cutlass
from cutlass import Int32


def advance(stage, phase, num_stages: int):
    """Returns the next stage of a ring and the parity of its barrier."""
    stage = stage + 1
    wrapped = stage == num_stages
    return cutlass.select_(wrapped, Int32(0), stage), cutlass.select_(wrapped, phase ^ 1, phase)
