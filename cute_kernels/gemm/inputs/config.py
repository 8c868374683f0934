"""How rows of x are prepared: sizes, and numbers of CTAs. There are no GPU types here.

`cute_kernels.gemm.operands.fp8_config.RowsConfig` is the kernel's configuration.
"""

from __future__ import annotations

VECTOR = 8  # elements of 16 bytes
THREADS = 256
ROOMS = (8192, 32768, 98304)  # inputs of a row that shared memory may hold


def room_for(k: int) -> int | None:
    """Returns the least of `ROOMS` that holds a row of k inputs; None if none does."""
    return next((room for room in ROOMS if k <= room), None)


def parts_of(m: int, k: int, num_sms: int, room: int = 0) -> int:
    """Returns the number of CTAs for each row. Without ``room``, inputs keep their order, and a row has so many CTAs
    that each thread takes one vector.

    CTAs make one part of all rows before the next part, so rows that are gathered several times are read from L2. With
    ``room`` every CTA loads all of its row. So a row has several CTAs only if there are then at most two CTAs for each
    SM.
    """
    most = -(-k // (VECTOR * THREADS))
    return max(1, min(2 * num_sms // m, most)) if room else most
