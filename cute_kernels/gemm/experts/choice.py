"""Which layout serves a grouped product: all there are, over all kernels, and the fastest by the models of time.

How rows fall to experts is known on the device only: a problem is its number of places, and the models assume rows that
fall at random. Plain Python, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cute_kernels.gemm.experts import schedule as few
from cute_kernels.gemm.experts.ranges import schedule as ranges
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout, among_assignments
from cute_kernels.gemm.experts.schedule import CAPACITIES, GroupedProblem, GroupedSchedule, usual_rows
from cute_kernels.gemm.experts.wgmma import schedule as many
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles

MOST_ENTRIES = 2  # that experts may usually take of the memory-bound kernel, which reads a weight for each of them

GroupedLayout = GroupedSchedule | RangeLayout | GroupedTiles


def has_few_entries(problem: GroupedProblem) -> bool:
    return usual_rows(problem) <= MOST_ENTRIES * CAPACITIES[-1]


def candidates(problem: GroupedProblem) -> Iterator[GroupedLayout]:
    """Every layout of any kernel that is worth a thought."""
    if has_few_entries(problem):
        for capacity in CAPACITIES:
            yield from few.schedules(problem, capacity)
        yield from ranges.layouts(problem)
    yield from many.layouts(problem)


def chosen(problem: GroupedProblem) -> GroupedLayout:
    """The layout that is expected to be the fastest."""
    if problem.batch_invariant:
        return many.make_tiles(problem)
    if ranges.has_few_rows(problem):
        return ranges.make_ranges(problem)
    return many.make_tiles(problem) if many.has_many_rows(problem) else few.make_schedule(problem)


def assigned(
    assignments: int, problems: Sequence[GroupedProblem], layouts: Sequence[GroupedLayout]
) -> list[RangeLayout] | None:
    """How a layer's products find assignments as they are; layouts: what serves each of them among sorted ones.

    None if there are too many assignments, or one of the products has to have them sorted.
    """
    found: list[RangeLayout] = []
    for number, (problem, layout) in enumerate(zip(problems, layouts, strict=True), 1):
        choices = ranges_like(problem, layout, last=number == len(problems))
        possible = (among_assignments(choice, assignments) for choice in choices)
        same = next((one for one in possible if one), None)
        if same is None:
            return None
        found.append(same)
    return found


def ranges_like(problem: GroupedProblem, layout: GroupedLayout, *, last: bool) -> Iterator[RangeLayout]:
    """Runs that may serve a product of a layer in place of a layout, if not by themselves, then for a launch less.

    Those of more rows an entry than are found among assignments give way to the model's. The last product, whose
    results are added up anyway, may have a K in parts that has no room whole.
    """
    if isinstance(layout, RangeLayout):
        yield layout
        if ranges.has_few_rows(problem):
            yield ranges.make_ranges(problem)
    elif last and not any(ranges.layouts(problem)):
        parts = ranges.make_parts(problem)
        if parts:
            yield parts
