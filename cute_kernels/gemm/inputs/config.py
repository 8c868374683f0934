"""The sizes of rows, and the numbers of CTAs, with which rows of x are prepared. There are no GPU types here.

`cute_kernels.gemm.operands.fp8_config.RowsConfig` is the kernel's configuration.
"""

from __future__ import annotations

VECTOR = 8  # elements of 16 bytes
THREADS = 256
ROOMS = (8192, 32768, 98304)  # inputs of a row that shared memory may hold


def room_for(k: int) -> int | None:
    """Returns the smallest of `ROOMS` that holds a row of k inputs, or None if a row is too long."""
    return next((room for room in ROOMS if k <= room), None)


def parts_of(m: int, k: int, num_sms: int, room: int = 0) -> int:
    """Returns the number of CTAs for each row.

    If ``room`` is 0, inputs keep their order. A row then has so many CTAs that each thread has one vector. CTAs make
    the first part of all rows, then the second part of all rows, and so on. So if a row is gathered several times, L2
    still holds the part.

    Otherwise inputs are permuted, and every CTA of a row loads all of the row. So a row has several CTAs only as long
    as there are at most two CTAs for each SM.
    """
    most = -(-k // (VECTOR * THREADS))
    return max(1, min(2 * num_sms // m, most)) if room else most
