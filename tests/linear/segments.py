"""Which k blocks the CTAs of a stream take, in plain Python: what the device has to find."""

from __future__ import annotations

from collections.abc import Iterator

from cute_kernels.gemm.stream.schedule import StreamSchedule


def segments_of(schedule: StreamSchedule, group: int, slice_index: int) -> Iterator[tuple[int, int, int, bool]]:
    """(block, begin, end, last) of a CTA's segments, in its order, as `gemm.stream.work.Work` computes them."""
    first, end = schedule.group_range(group)
    own = min(schedule.slice_k_blocks, schedule.k_blocks - slice_index * schedule.slice_k_blocks)
    for block in range((end - 1) // schedule.slice_k_blocks, first // schedule.slice_k_blocks - 1, -1):
        start = block * schedule.slice_k_blocks
        stop = min(end - start, schedule.slice_k_blocks)
        yield block, max(first - start, 0), min(stop, own), stop == schedule.slice_k_blocks
