"""Which layouts of a grouped product there are to choose from, over all kernels, and what a tuned table chose.

As `cute_kernels.gemm.tuned` for linear layers. How rows fall to experts is known on the device only: a problem is its
number of places, and what is measured for it are rows that fall at random.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from cute_kernels.gemm.config import LinearConfig
from cute_kernels.gemm.experts import schedule as few
from cute_kernels.gemm.experts.ranges import schedule as ranges
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout, among_assignments
from cute_kernels.gemm.experts.schedule import CAPACITIES, GroupedProblem, GroupedSchedule, usual_entries, usual_rows
from cute_kernels.gemm.experts.wgmma import schedule as many
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles
from cute_kernels.gemm.schedule import MEMORY_BYTES_PER_US
from cute_kernels.gemm.tuned import (
    FEW,
    MANY,
    WEIGHT_PATTERN,
    Candidate,
    configs_of_tables,
    shortlist,
    weight_name,
    weight_of,
)
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.schedule import CLOCKS_PER_US
from cute_kernels.runtime.tuned import Choice, choice_of

RANGES = "ranges"  # as tables name these kernels, beside `FEW` and `MANY`
MOST_ENTRIES = 2  # that experts may usually take of the memory-bound kernel, which reads a weight for each of them
SLICE_US = 0.7  # of exchanging partial results with a further slice of K

GroupedLayout = GroupedSchedule | RangeLayout | GroupedTiles
GroupedCandidate = Candidate[GroupedLayout]


def key_of(problem: GroupedProblem) -> str:
    """A problem as tables name it."""
    sizes = f"e{problem.num_experts} n{problem.n} k{problem.k} p{problem.places}"
    return f"experts {weight_name(problem)} {sizes} sms{problem.num_sms}"


def problem_of(key: str) -> GroupedProblem | None:
    """The problem that a key of `key_of` names, None for other keys."""
    match = re.fullmatch(rf"experts {WEIGHT_PATTERN} e(\d+) n(\d+) k(\d+) p(\d+) sms(\d+)", key)
    if match is None:
        return None
    experts, n, k, places, num_sms = map(int, match.groups()[1:])
    weight = weight_of(n, k, match[1])
    return None if weight is None else GroupedProblem(places, experts, *weight, num_sms=num_sms)


def few_rows(problem: GroupedProblem) -> Iterator[GroupedSchedule]:
    """The memory-bound kernel's layouts that are worth a thought."""
    if has_few_entries(problem):
        for capacity in CAPACITIES:
            yield from few.schedules(problem, capacity)


def few_ranges(problem: GroupedProblem) -> Iterator[RangeLayout]:
    """The layouts of ranges that are worth a thought."""
    if has_few_entries(problem):
        yield from ranges.layouts(problem)


def has_few_entries(problem: GroupedProblem) -> bool:
    return usual_rows(problem) <= MOST_ENTRIES * CAPACITIES[-1]


def candidates(problem: GroupedProblem) -> Iterator[GroupedCandidate]:
    """Every layout of any kernel that is worth a thought."""
    for schedule in few_rows(problem):
        yield Candidate(FEW, schedule, schedule.num_slices, few_rows_us(problem, schedule))
    for layout in few_ranges(problem):
        yield Candidate(RANGES, layout, 1, ranges.estimate_us(problem, layout))
    for tiles in many.layouts(problem):
        yield Candidate(MANY, tiles, 1, many.estimate_clocks(problem, tiles) / CLOCKS_PER_US)


def few_rows_us(problem: GroupedProblem, schedule: GroupedSchedule) -> float:
    """Microseconds of the memory-bound kernel: the weights of all entries, each read once, and what slices cost."""
    entries = problem.num_experts * usual_entries(problem.places / problem.num_experts, schedule.entry_rows)
    weight_bytes = schedule.num_blocks * schedule.k_blocks * schedule.config.k_block_stage_bytes
    return entries * weight_bytes / MEMORY_BYTES_PER_US + SLICE_US * (schedule.num_slices - 1)


def modelled(problem: GroupedProblem) -> GroupedLayout:
    """What is taken if no table says otherwise."""
    if problem.batch_invariant:
        return many.make_tiles(problem)
    if ranges.has_few_rows(problem):
        return ranges.make_ranges(problem)
    return many.make_tiles(problem) if many.has_many_rows(problem) else few.make_schedule(problem)


def worth_measuring(problem: GroupedProblem) -> list[GroupedCandidate]:
    """What is taken without a table, first, and of each kernel the layouts that are expected to be fast."""
    return shortlist(candidates(problem), modelled(problem))


def chosen(problem: GroupedProblem, gpu: str) -> GroupedLayout:
    """What serves a problem on a GPU: what a table says, or else what is expected to be the fastest."""
    return tuned(problem, gpu) or modelled(problem)


def tuned(problem: GroupedProblem, gpu: str) -> GroupedLayout | None:
    """What a table says is fastest, if it says so and is possible."""
    if problem.batch_invariant:
        return None  # tables hold what is fastest without
    choice = choice_of(key_of(problem), gpu)
    return None if choice is None else find(problem, choice)


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


def find(problem: GroupedProblem, choice: Choice) -> GroupedLayout | None:
    """The layout that a choice names, None if there is none of that name any more."""
    if choice.kernel == FEW:
        schedules = (one for one in few_rows(problem) if one.num_slices == choice.cut)
        return next((one for one in schedules if one.config.name == choice.config), None)
    if choice.kernel not in (RANGES, MANY) or choice.cut != 1:
        return None
    layouts = few_ranges(problem) if choice.kernel == RANGES else many.layouts(problem)
    return next((one for one in layouts if one.config.name == choice.config), None)


def shipped_configs() -> list[LinearConfig | WgmmaConfig]:
    """The configurations that shipped tables choose."""
    return configs_of_tables(problem_of, find)
