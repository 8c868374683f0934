"""Writes one row of a KV cache; several lanes share the row. `divide_by` divides by a value that the host knows."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint64, const_expr

from cute_kernels.device import numbers


@cute.jit
def encode_row(cache_row, values, given):
    """Encodes a row for `store_row`. Several lanes share the row; all lanes of the warp call the function.

    Args:
        cache_row: the row object of the cache's format, such as a :class:`cute_kernels.kv_cache.rows.CodedRow`.
        values: register tensor of the lane's fp32 numbers; NaN and numbers out of range are replaced.
        given: the result of `load_given`.
    """
    statistics = cute.make_rmem_tensor(max(cache_row.num_statistics, 1), Float32)
    steps = cute.make_rmem_tensor(max(cache_row.num_steps, 1), Float32)
    if const_expr(cache_row.num_statistics > 0):
        for i, value in enumerate(cache_row.measure(values)):
            statistics[i] = value
        if const_expr(cache_row.num_steps == 0 or cache_row.has_header):
            # Once at most. As an `if` it would be predicated: 60 instructions issued for every row.
            while cute.arch.vote_any_sync(cache_row.unusual(statistics)):
                for i in cutlass.range_constexpr(cache_row.count):
                    values[i] = cache_row.repair(values[i])
                for i, value in enumerate(cache_row.measure(values)):
                    statistics[i] = value
            for i, value in enumerate(cache_row.reduce(statistics)):
                statistics[i] = value
    if const_expr(cache_row.num_steps > 0):
        for i, step in enumerate(cache_row.find_steps(statistics, given)):
            steps[i] = step
        awkward = cute.arch.vote_any_sync(cache_row.awkward(statistics, steps))
        while awkward:  # once at most
            size = cache_row.count // cache_row.num_steps
            for s in cutlass.range_constexpr(cache_row.num_steps):
                step = steps[s]
                for i in cutlass.range_constexpr(size):
                    values[s * size + i], steps[s] = cache_row.tame(values[s * size + i], step)
            # False, which no compiler knows: with the constant it would be an `if`, and predicated like the one above.
            awkward = awkward & (numbers.active_lanes() == 0)
    return cache_row.encode(values, statistics, steps, given)


def store_row(cache_row, encoded, address, team_lane) -> None:
    """Stores a row that `encode_row` made."""
    words, header = encoded
    cache_row.codes.store(address, team_lane, words)
    if cache_row.has_header:
        cache_row.store_header(address, team_lane, header)


def load_given(cache_row, scale, head, team_lane):
    """Starts loading a head's scale for a row. scale: the address of all KV heads' scales. Returns None for formats
    without a scale beside the cache.

    Call it before waiting for the row, so that the two latencies overlap.
    """
    return None if cache_row.given_scale is None else cache_row.load_scale(scale, head, team_lane)


def divide_by(value: Int64, divisor: Int64) -> Int64:
    """Returns value // d for 0 <= value < 2**63 / d, by a multiplication. divisor: ceil(2**63 / d)."""
    return Int64(numbers.multiply_high(Uint64(value << 1), Uint64(divisor)))
