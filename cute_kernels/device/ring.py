"""`advance`, the step from one stage to the next of a ring in shared memory."""

import cutlass
from cutlass import Int32


def advance(stage, phase, num_stages: int):
    """Returns (next stage of a ring, parity of its barrier's phase)."""
    stage = stage + 1
    wrapped = stage == num_stages
    return cutlass.select_(wrapped, Int32(0), stage), cutlass.select_(wrapped, phase ^ 1, phase)
