"""All layouts of a grouped product that are worth considering, of which the library chooses one."""

from __future__ import annotations

from collections.abc import Iterator

from cute_kernels.gemm.experts.choice import GroupedLayout
from cute_kernels.gemm.experts.ranges import schedule as ranges
from cute_kernels.gemm.experts.ranges.config import entry_rows
from cute_kernels.gemm.experts.schedule import usual_rows
from cute_kernels.gemm.experts.wgmma import schedule as tiles
from cute_kernels.gemm.problem import GroupedProblem

MOST_ENTRIES = 2  # that experts may usually take of work ranges, which read a weight for each of them


def candidates(problem: GroupedProblem) -> Iterator[GroupedLayout]:
    """Yields every layout of any kernel that is worth considering."""
    if usual_rows(problem) <= MOST_ENTRIES * entry_rows(problem.format):
        yield from ranges.layouts(problem)
    yield from tiles.layouts(problem)
