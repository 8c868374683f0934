"""Chooses the layout of a grouped product by the models of time.

How many rows each expert has is known on the device only. So a problem is its number of places, and the models assume
rows that are distributed at random. Plain Python, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cute_kernels.gemm.experts.ranges import schedule as ranges
from cute_kernels.gemm.experts.ranges.config import ROWS
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout, among_assignments
from cute_kernels.gemm.experts.schedule import usual_rows
from cute_kernels.gemm.experts.wgmma import schedule as tiles
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles
from cute_kernels.gemm.problem import GroupedProblem

MOST_ENTRIES = 2  # that experts may usually take of work ranges, which read a weight for each of them

GroupedLayout = RangeLayout | GroupedTiles


def candidates(problem: GroupedProblem) -> Iterator[GroupedLayout]:
    """Every layout of any kernel that is worth considering."""
    if usual_rows(problem) <= MOST_ENTRIES * ROWS:
        yield from ranges.layouts(problem)
    yield from tiles.layouts(problem)


def chosen(problem: GroupedProblem) -> GroupedLayout:
    """The layout that is expected to be the fastest."""
    if not problem.batch_invariant and ranges.has_few_rows(problem):
        return ranges.make_ranges(problem)
    return tiles.make_tiles(problem)


def assigned(
    assignments: int, problems: Sequence[GroupedProblem], layouts: Sequence[GroupedLayout]
) -> list[RangeLayout] | None:
    """Layouts of a layer's products over unsorted assignments. layouts: those of the same products over sorted ones.

    None if there are too many assignments, or one of the products has to have them sorted.
    """
    found: list[RangeLayout] = []
    for number, (problem, layout) in enumerate(zip(problems, layouts, strict=True), 1):
        choice = ranges_like(problem, layout, last=number == len(problems))
        same = None if choice is None else among_assignments(choice, assignments)
        if same is None:
            return None
        found.append(same)
    return found


def ranges_like(problem: GroupedProblem, layout: GroupedLayout, *, last: bool) -> RangeLayout | None:
    """Work ranges that may replace a layout of a layer's product, to save a launch.

    The last product, whose results are added up anyway, may have a K in parts that has no room whole.
    """
    if isinstance(layout, RangeLayout):
        return layout
    return ranges.make_parts(problem) if last and not any(ranges.layouts(problem)) else None
