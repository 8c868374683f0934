"""Products of a server: kernels are made ready before its first step, and a step may have any number of rows.

Which kernel is the fastest depends on the number of rows. A server says here for which numbers it made kernels ready.
Products of numbers in between take the one of these kernels that is expected to be the fastest. So no step waits for a
compiler, or fails where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from cute_kernels.gemm.choice import chosen, expected_us
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.stream import schedule as few
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.gemm.stream.schedule import StreamSchedule
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma import schedule as many
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.schedule import MAX_SPLITS, TileSchedule
from cute_kernels.runtime.cache import default_cache
from cute_kernels.runtime.native import compiler_version
from cute_kernels.runtime.spec import KernelSpec

Config: TypeAlias = "StreamConfig | WgmmaConfig"

_ready: dict[LinearProblem, tuple[int, ...]] = {}


def note_ready(problem: LinearProblem, rows: Iterable[int]) -> None:
    """Notes that kernels of a product are ready for some numbers of rows, besides those of earlier calls.

    problem: of one row. Plans that were made before stay: their kernels are ready.
    """
    _ready[problem] = tuple(sorted({*_ready.get(problem, ()), *rows}))


def is_noted(problem: LinearProblem) -> bool:
    """Whether kernels of a product have been compiled or loaded for a list of row counts."""
    return replace(problem, m=1) in _ready


def may_load(spec: KernelSpec, arch: str, problem: LinearProblem) -> bool:
    """Whether an optional kernel of a product may be loaded: it is compiled, or may be compiled now.

    It may not be compiled where there is no compiler, nor for a server that has noted which kernels it made ready.
    """
    may_compile = compiler_version() is not None and not is_noted(problem)
    return may_compile or default_cache().has(spec, arch)


def forget_ready() -> None:
    """Forgets these row counts, so each number of rows has its own kernel again."""
    _ready.clear()


def schedule_for(problem: LinearProblem) -> StreamSchedule | TileSchedule:
    """The schedule of a product; where the product was noted, one of the kernels that are ready."""
    one = replace(problem, m=1)
    rows = _ready.get(one, ())
    if problem.m in rows or not rows or problem.m > rows[-1]:
        return chosen(problem)
    after = next(m for m in rows if m > problem.m)
    nearest = with_config(problem, chosen(replace(problem, m=after)).config)
    if isinstance(nearest, StreamSchedule):
        return nearest
    configs = (config for config, most in _configs(one, rows) if most > problem.m or takes_any_rows(config))
    found = (with_config(problem, config) for config in configs)
    tiles = [schedule for schedule in found if isinstance(schedule, TileSchedule)]
    return min(tiles, key=lambda schedule: expected_us(problem, schedule)) if tiles else chosen(problem)


@lru_cache(maxsize=256)
def _configs(one: LinearProblem, rows: tuple[int, ...]) -> tuple[tuple[Config, int], ...]:
    """The configurations of some numbers of rows, each with the largest of these."""
    return tuple({chosen(replace(one, m=m)).config: m for m in rows}.items())


def takes_any_rows(config: Config) -> bool:
    """Whether a configuration takes more rows than those that it was chosen for, as independent tiles do."""
    return isinstance(config, WgmmaConfig) and config.cluster == 1 and isinstance(config.mainloop, RegisterWgmma)


def with_config(problem: LinearProblem, config: Config) -> StreamSchedule | TileSchedule | None:
    """The best schedule of a configuration for a product of no more rows than those that it was chosen for. None if the
    configuration has no schedule for so few rows."""
    if isinstance(config, StreamConfig):
        cuts = few.schedules(problem, config)
        return min(cuts, key=lambda one: few.estimate_us(problem, one), default=None)
    if problem.batch_invariant:
        return _with_same_bits(problem, config)
    tiles = (many.schedule_of(problem, config, splits) for splits in range(1, MAX_SPLITS + 1))
    return min((one for one in tiles if one is not None), key=lambda one: many.expected_us(problem, one), default=None)


def _with_same_bits(problem: LinearProblem, config: WgmmaConfig) -> TileSchedule | None:
    parts = invariant.parts_of_k(replace(problem, m=1))
    cut = invariant.sequential_schedule_of if config.reduction.sequential else invariant.schedule_of
    found = cut(problem, config, parts)
    if found is None or found.workspace_words > invariant.MOST_WORKSPACE_WORDS:
        return None
    begins_alike = found.split_k_blocks * config.block_k == invariant.part_inputs(problem.k_pad, parts)
    return found if begins_alike else None
