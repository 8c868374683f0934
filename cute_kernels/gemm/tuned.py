"""Which schedules of a product there are to choose from, over all kernels, and what a tuned table chose."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.formats.weights.base import of_table_name
from cute_kernels.gemm import schedule as few
from cute_kernels.gemm.config import LinearConfig
from cute_kernels.gemm.schedule import FEW_ROWS, MAX_TOKENS, LinearProblem, StreamSchedule
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma import schedule as many
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.schedule import TileSchedule
from cute_kernels.runtime.tuned import Choice, TunedTable, choice_of, shipped_tables

FEW, MANY = "few_rows", "many_rows"
MOST_ALIKE = 16  # rows that are in one tile whichever kernel serves them
MOST = 6  # schedules of a kernel that are measured,
MOST_CUTS = 2  # of one configuration, as models compare cuts better than configurations,
WITHIN = 1.5  # and how much longer than the best of its kernel one may be expected to take


class HasConfig(Protocol):
    @property
    def config(self) -> Any: ...


S = TypeVar("S", bound=HasConfig)
P = TypeVar("P")


@dataclass(frozen=True)
class Candidate(Generic[S]):
    """A schedule, and how tables name it.

    Attributes:
        kernel: FEW or MANY.
        cut: parts of K.
        estimate_us: what the kernel's model expects.
    """

    kernel: str
    schedule: S
    cut: int
    estimate_us: float

    @property
    def name(self) -> tuple[str, str, int]:
        return self.kernel, self.schedule.config.name, self.cut


def weight_name(problem: Any) -> str:
    """The weight of a problem as keys of tables name it."""
    return problem.format.table_name(problem.dtype)


WEIGHT_PATTERN = r"([a-z0-9]+_[a-z0-9]+_[a-z0-9]+)"


def weight_of(n: int, k: int, name: str) -> tuple[int, int, int, WeightFormat, str] | None:
    """Fields of a problem, from n to dtype, of a weight's name in a key; None if there is no such format."""
    found = of_table_name(name)
    return None if found is None else (n, k, padded_shape((n, k), found[0].group_size)[1], *found)


def key_of(problem: LinearProblem) -> str:
    """A problem as tables name it."""
    return f"linear {weight_name(problem)} n{problem.n} k{problem.k} m{problem.m} sms{problem.num_sms}"


def problem_of(key: str) -> LinearProblem | None:
    """The problem that a key of `key_of` names, None for other keys."""
    match = re.fullmatch(rf"linear {WEIGHT_PATTERN} n(\d+) k(\d+) m(\d+) sms(\d+)", key)
    if match is None:
        return None
    weight = weight_of(int(match[2]), int(match[3]), match[1])
    return None if weight is None else LinearProblem(int(match[4]), *weight, num_sms=int(match[5]))


def few_rows(problem: LinearProblem) -> Iterator[StreamSchedule]:
    """The memory-bound kernel's schedules that are right for a problem."""
    if problem.m <= MAX_TOKENS and not problem.batch_invariant:
        for config in few.candidate_configs(problem):
            yield from few.schedules(problem, config)


def many_rows(problem: LinearProblem) -> Iterator[TileSchedule]:
    """The schedules of tiles that are right for a problem."""
    return (invariant.schedules if problem.batch_invariant else many.tile_schedules)(problem)


def candidates(problem: LinearProblem) -> Iterator[Candidate[StreamSchedule | TileSchedule]]:
    """Every schedule of either kernel that is right for a problem."""
    for schedule in few_rows(problem):
        yield Candidate(FEW, schedule, schedule.num_slices, few.estimate_us(problem, schedule))
    for tiles in many_rows(problem):
        yield Candidate(MANY, tiles, tiles.splits, many.estimate_us(problem, tiles))


def modelled(problem: LinearProblem) -> StreamSchedule | TileSchedule:
    """What is taken if no table says otherwise.

    Few rows are the memory-bound kernel's, unless tiles in limbs, or of warpgroups that take turns, are expected to be
    faster. Of other tiles the model is not fitted for so few.
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


def worth_measuring(problem: LinearProblem) -> list[Candidate[StreamSchedule | TileSchedule]]:
    """What is taken without a table, first, and of each kernel the schedules that its model expects most of."""
    return shortlist(candidates(problem), modelled(problem))


def shortlist(found: Iterable[Candidate[S]], first: S) -> list[Candidate[S]]:
    """The candidate of the schedule ``first``, then of each kernel those that are expected to be the fastest."""
    found = list(dict.fromkeys(found))
    kept = [one for one in found if one.schedule == first]
    for kernel in dict.fromkeys(one.kernel for one in found):
        expected = sorted((one for one in found if one.kernel == kernel), key=lambda one: one.estimate_us)
        cuts = Counter(one.schedule.config for one in kept)
        taken = 0
        for one in expected:
            config = one.schedule.config
            if one in kept or cuts[config] == MOST_CUTS or one.estimate_us > WITHIN * expected[0].estimate_us:
                continue
            kept.append(one)
            cuts[config] += 1
            taken += 1
            if taken == MOST:
                break
    return kept


def chosen(problem: LinearProblem, gpu: str) -> StreamSchedule | TileSchedule:
    """What serves a problem on a GPU: what a table says, or else what is expected to be the fastest."""
    return tuned(problem, gpu) or modelled(problem)


def chosen_by(problem: LinearProblem, table: TunedTable | None) -> StreamSchedule | TileSchedule:
    """What serves a problem where there is this table alone, or none."""
    return (table and _tuned(problem, table.entries.get)) or modelled(problem)


def shipped_configs() -> list[LinearConfig | WgmmaConfig]:
    """The configurations that shipped tables choose."""
    return configs_of_tables(problem_of, find)


def configs_of_tables(
    problem_of: Callable[[str], P | None], find: Callable[[P, Choice], HasConfig | None]
) -> list[LinearConfig | WgmmaConfig]:
    """The configurations that shipped tables choose for the problems that ``problem_of`` knows the keys of."""
    found: dict[str, LinearConfig | WgmmaConfig] = {}  # by name, which tells them apart
    for table in shipped_tables():
        for key, choice in table.entries.items():
            problem = problem_of(key) if choice.config not in found else None
            schedule = None if problem is None else find(problem, choice)
            if schedule is not None:
                found[choice.config] = schedule.config
    return list(found.values())


def tuned(problem: LinearProblem, gpu: str) -> StreamSchedule | TileSchedule | None:
    """What a table says is fastest, if it says so and is possible."""
    return _tuned(problem, lambda key: choice_of(key, gpu))


def _tuned(problem: LinearProblem, choice_of: Callable[[str], Choice | None]) -> StreamSchedule | TileSchedule | None:
    if problem.batch_invariant:
        return None  # tables hold what is fastest without
    # Of so few rows, all in one tile, more take as long: what serves the next number that a table has serves them, too.
    for m in range(problem.m, MOST_ALIKE + 1) if problem.m < MOST_ALIKE else [problem.m]:
        choice = choice_of(key_of(replace(problem, m=m)))
        if choice is not None:
            return find(problem, choice)
    return None


def find(problem: LinearProblem, choice: Choice) -> StreamSchedule | TileSchedule | None:
    """The schedule that a choice names, None if there is none of that name any more."""
    # Names of configurations are made of those alone whose parts of K are as many; no model is asked.
    if choice.kernel == FEW:
        found = (one for one in few_rows(problem) if one.num_slices == choice.cut)
        return next((one for one in found if one.config.name == choice.config), None)
    if choice.kernel == MANY:
        tiles = (one for one in many_rows(problem) if one.splits == choice.cut)
        return next((one for one in tiles if one.config.name == choice.config), None)
    return None
