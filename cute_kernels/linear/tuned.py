"""Which schedules of a product there are to choose from, over all kernels, and what a tuned table chose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cute_kernels.linear import schedule as few
from cute_kernels.linear.schedule import FEW_ROWS, MAX_TOKENS, Problem, Schedule
from cute_kernels.linear.wgmma import schedule as many
from cute_kernels.linear.wgmma.schedule import TileSchedule
from cute_kernels.runtime.tuned import Choice, choice_of

FEW, MANY = "few_rows", "many_rows"


@dataclass(frozen=True)
class Candidate:
    """A schedule, and how tables name it.

    Attributes:
        kernel: FEW or MANY.
        cut: parts of K.
        estimate_us: what the kernel's model expects.
    """

    kernel: str
    schedule: Schedule | TileSchedule
    cut: int
    estimate_us: float

    @property
    def name(self) -> tuple[str, str, int]:
        return self.kernel, self.schedule.config.name, self.cut


def key_of(problem: Problem) -> str:
    """A problem as tables name it."""
    weight = f"w{problem.bits}_{problem.dtype}_g{problem.group_size or 'channel'}{'z' if problem.zero_point else ''}"
    return f"linear {weight} n{problem.n} k{problem.k} m{problem.m} sms{problem.num_sms}"


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Every schedule of either kernel that is right for a problem."""
    if problem.m <= MAX_TOKENS and not problem.batch_invariant:
        for config in few.candidate_configs(problem):
            for schedule in few.schedules(problem, config):
                yield Candidate(FEW, schedule, schedule.num_slices, few.estimate_us(problem, schedule))
    for tiles in many.tile_schedules(problem):
        yield Candidate(MANY, tiles, tiles.splits, many.estimate_us(problem, tiles))


def modelled(problem: Problem) -> Schedule | TileSchedule:
    """What is taken if no table says otherwise."""
    if problem.m > FEW_ROWS or problem.batch_invariant:
        return many.make_tile_schedule(problem)
    return few.make_schedule(problem)


def worth_measuring(problem: Problem, most: int = 6) -> list[Candidate]:
    """What is taken without a table, first, and of each kernel the schedules that its model expects most of."""
    found = list(dict.fromkeys(candidates(problem)))
    first = [one for one in found if one.schedule == modelled(problem)]
    others = sorted((one for one in found if one not in first), key=lambda one: one.estimate_us)
    for kernel in (FEW, MANY):
        first += [one for one in others if one.kernel == kernel][:most]
    return first


def tuned(problem: Problem, gpu: str) -> Schedule | TileSchedule | None:
    """What a table says is fastest, if it says so and is possible."""
    if problem.batch_invariant:
        return None  # tables hold what is fastest without
    choice = choice_of(key_of(problem), gpu)
    return None if choice is None else find(problem, choice)


def find(problem: Problem, choice: Choice) -> Schedule | TileSchedule | None:
    """The schedule that a choice names, None if there is none of that name any more."""
    name = choice.kernel, choice.config, choice.cut
    return next((one.schedule for one in candidates(problem) if one.name == name), None)
