"""Which schedule serves a product: all there are, over all kernels, and the fastest by the models of time.

Plain Python, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from cute_kernels.gemm import schedule as few
from cute_kernels.gemm.schedule import FEW_ROWS, MAX_TOKENS, LinearProblem, StreamSchedule
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma import schedule as many
from cute_kernels.gemm.wgmma.schedule import TileSchedule


def few_rows(problem: LinearProblem) -> Iterator[StreamSchedule]:
    """The memory-bound kernel's schedules that are right for a problem."""
    if problem.m <= MAX_TOKENS and not problem.batch_invariant:
        for config in few.candidate_configs(problem):
            yield from few.schedules(problem, config)


def candidates(problem: LinearProblem) -> Iterator[StreamSchedule | TileSchedule]:
    """Every schedule of any kernel that is right for a problem."""
    yield from few_rows(problem)
    yield from (invariant.schedules if problem.batch_invariant else many.tile_schedules)(problem)


def chosen(problem: LinearProblem) -> StreamSchedule | TileSchedule:
    """The schedule that is expected to be the fastest.

    Few rows are the memory-bound kernel's, unless tiles in limbs, or of warpgroups that interleave k blocks, are
    expected to be faster. Of other tiles the model is not fitted for so few.
    """
    if problem.batch_invariant:
        return invariant.make_schedule(problem)
    if problem.m > FEW_ROWS:
        return many.make_tile_schedule(problem)
    schedule = few.make_schedule(problem)
    few_us = few.estimate_us(problem, schedule) + few.launch_us(problem)
    fitted = [tiles for tiles in many.tile_schedules(problem) if tiles.config.limbs or tiles.config.k_warpgroups > 1]
    in_time = [tiles for tiles in fitted if many.expected_us(problem, tiles) < few_us]
    return min(in_time, key=lambda tiles: many.expected_us(problem, tiles), default=schedule)
