"""Chooses a grouped product's layout, by the models of time. Only the device knows how many rows each expert has. A
problem has only the number of places, so the models assume a random distribution of rows. Plain Python, no GPU.
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
    """Returns layouts for a layer's products over unsorted assignments. Returns None if there are too many assignments,
    or if a product needs sorted assignments. layouts: the products' layouts over sorted assignments.
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
    """Returns a layout by work ranges for a layer's product, or None if there is none.

    layout: the product's layout over sorted assignments. last: whether the product is the layer's last one. Results of
    the last product are added up anyway, so it may cut K into parts if shared memory has no room for limbs over all of
    K.
    """
    if isinstance(layout, RangeLayout):
        return layout
    return ranges.make_parts(problem) if last and not any(ranges.layouts(problem)) else None
