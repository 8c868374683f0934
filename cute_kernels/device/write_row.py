"""Writing rows of a KV cache by a team of lanes, and division by numbers that only the host knows."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint64, const_expr

from cute_kernels.device import numbers


@dataclass(frozen=True)
class Slice:
    """A run of a register tensor."""

    tensor: Any
    start: int

    def __getitem__(self, i: int):
        return self.tensor[self.start + i]

    def __setitem__(self, i: int, value) -> None:
        self.tensor[self.start + i] = value


@dataclass(frozen=True)
class Rows:
    """Rows of ``count`` numbers each, one after the other, in a register tensor."""

    tensor: Any
    count: int

    def of(self, u: int) -> Slice:
        return Slice(self.tensor, u * self.count)


@cute.jit
def encode_rows(cache_row, rows, givens):
    """Quantises some of a team's rows; all lanes of the warp take part.

    What is done to a row is one long chain of dependent instructions: two of them side by side take little longer than
    one.

    Args:
        cache_row: what :func:`cute_kernels.device.rows.make_row` made.
        rows: the lane's fp32 numbers, changed where one is NaN or out of range.
        givens: what `load_given` gave for each row.

    Returns:
        What `store_row` takes, for each row.
    """
    count = max(cache_row.num_statistics, 1)
    statistics = Rows(cute.make_rmem_tensor(len(givens) * count, Float32), count)
    if const_expr(cache_row.num_statistics > 0):
        for u in cutlass.range_constexpr(len(givens)):
            for i, value in enumerate(cache_row.measure(rows.of(u))):
                statistics.of(u)[i] = value
        # Once at most. As an `if` it would be predicated: 60 instructions issued for every row.
        while cute.arch.vote_any_sync(_any_unusual(cache_row, statistics, len(givens))):
            for u in cutlass.range_constexpr(len(givens)):
                for i in cutlass.range_constexpr(cache_row.count):
                    rows.of(u)[i] = cache_row.repair(rows.of(u)[i])
                for i, value in enumerate(cache_row.measure(rows.of(u))):
                    statistics.of(u)[i] = value
        for u in cutlass.range_constexpr(len(givens)):
            for i, value in enumerate(cache_row.reduce(statistics.of(u))):
                statistics.of(u)[i] = value
    return [cache_row.encode(rows.of(u), statistics.of(u), givens[u]) for u in range(len(givens))]


def store_row(cache_row, encoded, address, team_lane) -> None:
    """Stores one of the rows that `encode_rows` made."""
    words, header = encoded
    cache_row.codes.store(address, team_lane, words)
    if cache_row.has_header:
        cache_row.store_header(address, team_lane, header)


def _any_unusual(cache_row, statistics: Rows, together: int):
    unusual = cache_row.unusual(statistics.of(0))
    for u in range(1, together):
        unusual = unusual | cache_row.unusual(statistics.of(u))
    return unusual


def load_given(cache_row, scale, head, team_lane):
    """Asks for the scale of a row's columns, from the address of the KV heads' scales; None if they have none.

    Worth doing before the row itself has come: it is a latency of its own.
    """
    return None if cache_row.given_scale is None else cache_row.load_scale(scale, head, team_lane)


def divide_by(value: Int64, divisor: Int64) -> Int64:
    """value // d for 0 <= value < 2**63 / d by a multiplication, from ceil(2**63 / d)."""
    return Int64(numbers.multiply_high(Uint64(value << 1), Uint64(divisor)))
