"""Products of a server: kernels are made ready before its first step, and a step may have any number of rows.

Which kernel is the fastest depends on the number of rows. A server says here for which numbers it made kernels ready.
Products of numbers in between take one of these kernels: that of the next larger numbers which is expected to be the
fastest. So no step waits for a compiler, or fails where there is none.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from cute_kernels.linear import schedule as few
from cute_kernels.linear.config import LinearConfig
from cute_kernels.linear.schedule import LinearProblem, StreamSchedule
from cute_kernels.linear.tuned import chosen
from cute_kernels.linear.wgmma import invariant
from cute_kernels.linear.wgmma import schedule as many
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.policies import SequentialSplitK
from cute_kernels.linear.wgmma.schedule import MAX_SPLITS, TileSchedule

COMPARED = 3  # kernels of larger numbers of rows

_ready: dict[LinearProblem, tuple[int, ...]] = {}


def note_ready(problem: LinearProblem, rows: Iterable[int]) -> None:
    """Says that kernels of a product are ready for some numbers of rows, beside those of earlier calls.

    problem: of one row. Plans that were made before stay: their kernels are there.
    """
    _ready[problem] = tuple(sorted({*_ready.get(problem, ()), *rows}))


def forget_ready() -> None:
    """Forgets what was noted: each number of rows has its own kernel again."""
    _ready.clear()


def schedule_for(problem: LinearProblem, gpu: str) -> StreamSchedule | TileSchedule:
    """What serves a product on a GPU of that name; of kernels that are ready, where the product was noted."""
    rows = _ready.get(replace(problem, m=1), ())
    if problem.m in rows or not rows or problem.m > rows[-1]:
        return chosen(problem, gpu)
    larger = rows[bisect.bisect(rows, problem.m) :]
    found = list(islice(_of_others(problem, (chosen(replace(problem, m=m), gpu) for m in larger)), COMPARED))
    if not found or isinstance(found[0], StreamSchedule):
        return found[0] if found else chosen(problem, gpu)
    expected = invariant.expected_us if problem.batch_invariant else many.estimate_us
    tiles = [one for one in found if isinstance(one, TileSchedule)]
    return min(tiles, key=lambda one: expected(problem, one))


def _of_others(
    problem: LinearProblem, others: Iterable[StreamSchedule | TileSchedule]
) -> Iterator[StreamSchedule | TileSchedule]:
    """The best schedule for a problem of each configuration that others have, where there is one."""
    seen = set()
    for config in (other.config for other in others):
        if config in seen:
            continue
        seen.add(config)
        found = with_config(problem, config)
        if found is not None:
            yield found


def with_config(problem: LinearProblem, config: LinearConfig | WgmmaConfig) -> StreamSchedule | TileSchedule | None:
    """The best schedule of a configuration for a product of no more rows than those that it was chosen for; None if it
    has none for so few."""
    if isinstance(config, LinearConfig):
        cuts = few.schedules(problem, config)
        return min(cuts, key=lambda one: few.estimate_us(problem, one), default=None)
    if problem.batch_invariant:
        return _with_same_bits(problem, config)
    tiles = (many.schedule_of(problem, config, splits) for splits in range(1, MAX_SPLITS + 1))
    return min((one for one in tiles if one is not None), key=lambda one: many.estimate_us(problem, one), default=None)


def _with_same_bits(problem: LinearProblem, config: WgmmaConfig) -> TileSchedule | None:
    parts = invariant.parts_of_k(replace(problem, m=1))
    cut = invariant.sequential_schedule_of if isinstance(config.reduction, SequentialSplitK) else invariant.schedule_of
    found = cut(problem, config, parts)
    if found is None or found.workspace_words > invariant.MOST_WORKSPACE_WORDS:
        return None
    begins_alike = found.split_k_blocks * config.block_k == invariant.part_inputs(problem.k_pad, parts)
    return found if begins_alike else None
