"""Rings of shared memory that some warps fill and others empty."""

import cutlass
from cutlass import Int32


def advance(stage, phase, num_stages: int):
    """The next place of a ring and the parity of its barrier."""
    stage = stage + 1
    wrapped = stage == num_stages
    return cutlass.select_(wrapped, Int32(0), stage), cutlass.select_(wrapped, phase ^ 1, phase)


def advance_by(turns: int, stage, phase, num_stages: int):
    """As `advance`, of one of so many that take the places in turn, which divide the ring's."""
    stage = stage + turns
    wrapped = stage >= num_stages
    stage = cutlass.select_(wrapped, stage - num_stages, stage)
    return stage, cutlass.select_(wrapped, phase ^ 1, phase)
