"""Chooses a product's schedule: among the schedules of all kernels, the one that the time models expect to be fastest.

Plain Python, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.stream import schedule as stream
from cute_kernels.gemm.stream.schedule import FEW_ROWS, StreamSchedule
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma import schedule as tiles
from cute_kernels.gemm.wgmma.launch import TileSchedule

Schedule = StreamSchedule | TileSchedule


def candidates(problem: LinearProblem) -> Iterator[Schedule]:
    """Yields all schedules, of all kernels, that support a problem."""
    if problem.batch_invariant:
        yield from invariant.schedules(problem)
        return
    if problem.m <= FEW_ROWS:
        for config in stream.candidate_configs(problem):
            yield from stream.schedules(problem, config)
    yield from tiles.tile_schedules(problem)


@lru_cache(maxsize=4096)
def chosen(problem: LinearProblem) -> Schedule:
    """Returns the schedule that the time model expects to be the fastest. If the model is fitted for some schedules
    (`is_fitted`), only these are considered.
    """
    found = list(candidates(problem))
    fitted = [schedule for schedule in found if is_fitted(problem, schedule)]
    return min(fitted or found, key=lambda schedule: expected_us(problem, schedule))


def is_fitted(problem: LinearProblem, schedule: Schedule) -> bool:
    """Returns whether the time model's constants were fitted to measurements of schedules like this one.

    For up to `FEW_ROWS` rows, `chosen` considers only fitted schedules, if there are any: schedules of `stream`, and
    tiles that `Reduction.is_fitted` accepts. With more rows, and for batch-invariant problems, every schedule counts as
    fitted.
    """
    if problem.m > FEW_ROWS or problem.batch_invariant or isinstance(schedule, StreamSchedule):
        return True
    return schedule.config.reduction.is_fitted(schedule.config)


def expected_us(problem: LinearProblem, schedule: Schedule) -> float:
    """Returns the expected microseconds of a schedule. All schedules of a problem can be compared by this number."""
    if isinstance(schedule, StreamSchedule):
        return stream.estimate_us(problem, schedule) + stream.launch_us(problem)
    return (invariant if problem.batch_invariant else tiles).expected_us(problem, schedule)
