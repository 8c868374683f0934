"""The choice of a grouped product's layout, by the models of time.

Only the device knows how many rows each expert has. So a problem has only its number of places, and the models assume
that rows are distributed at random. Plain Python, no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from cute_kernels.gemm.experts.ranges import schedule as ranges
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout, among_assignments
from cute_kernels.gemm.experts.wgmma import schedule as tiles
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles
from cute_kernels.gemm.problem import GroupedProblem

GroupedLayout = RangeLayout | GroupedTiles


def chosen(problem: GroupedProblem) -> GroupedLayout:
    """Returns the layout that is expected to be the fastest."""
    if not problem.batch_invariant and ranges.has_few_rows(problem):
        return ranges.make_ranges(problem)
    return tiles.make_tiles(problem)


def assigned(
    assignments: int, problems: Sequence[GroupedProblem], layouts: Sequence[GroupedLayout]
) -> list[RangeLayout] | None:
    """Returns layouts of a layer's products over unsorted assignments. layouts: the products' layouts over sorted
    assignments.

    Returns None if there are too many assignments, or if one of the products needs them sorted.
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
    """Returns the layout by work ranges of a layer's product whose layout over sorted assignments is ``layout``; None
    if there is none.

    The layer's last product may cut K into parts if there is no room for all of it, since its results are added up
    anyway. last: whether the product is the last one.
    """
    if isinstance(layout, RangeLayout):
        return layout
    return ranges.make_parts(problem) if last and not any(ranges.layouts(problem)) else None
