"""Chooses schedules of a server's products among kernels that were compiled and loaded before the server's first step.

The fastest kernel depends on the number of rows, and a step may have any number of rows. A server notes here for which
numbers of rows it has made kernels ready. For all other numbers, a product takes the ready kernel that is expected to
be the fastest. So no step waits for a compiler, or fails because there is none.
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
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.schedule import MAX_SPLITS
from cute_kernels.runtime.cache import default_cache
from cute_kernels.runtime.native import compiler_version
from cute_kernels.runtime.spec import KernelSpec

Config: TypeAlias = "StreamConfig | WgmmaConfig"

_ready: dict[LinearProblem, tuple[int, ...]] = {}


def note_ready(problem: LinearProblem, rows: Iterable[int]) -> None:
    """Notes that a product's kernels are ready for each number of rows in ``rows``. Earlier notes stay. problem: the
    product with one row. Existing plans do not change, as their kernels are ready.
    """
    _ready[problem] = tuple(sorted({*_ready.get(problem, ()), *rows}))


def is_noted(problem: LinearProblem) -> bool:
    """Whether `note_ready` was called for a product, with any ``rows``."""
    return replace(problem, m=1) in _ready


def may_load(spec: KernelSpec, arch: str, problem: LinearProblem) -> bool:
    """Whether an optional kernel of a product may be loaded. A compiled kernel may always be loaded. Any other kernel
    may be loaded if there is a compiler, unless a server has noted ready kernels of the product (`note_ready`).
    """
    may_compile = compiler_version() is not None and not is_noted(problem)
    return may_compile or default_cache().has(spec, arch)


def forget_ready() -> None:
    """Forgets all calls of `note_ready`. Every number of rows then gets its own fastest kernel again."""
    _ready.clear()


def schedule_for(problem: LinearProblem) -> StreamSchedule | TileSchedule:
    """Returns the schedule of a product. Its kernel is ready if `note_ready` was called for the product with at least
    as many rows."""
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
    """Returns the configurations that are chosen for the numbers of rows ``rows``. Each comes with the largest number
    of rows for which it is chosen.
    """
    return tuple({chosen(replace(one, m=m)).config: m for m in rows}.items())


def takes_any_rows(config: Config) -> bool:
    """Whether a configuration supports more rows than it was chosen for, since its tiles are independent."""
    return isinstance(config, WgmmaConfig) and config.cluster == 1 and isinstance(config.mainloop, RegisterWgmma)


def with_config(problem: LinearProblem, config: Config) -> StreamSchedule | TileSchedule | None:
    """Returns a configuration's fastest schedule for a product. The product has at most as many rows as the
    configuration was chosen for. Returns None if the configuration has no schedule for so few rows.
    """
    if isinstance(config, StreamConfig):
        cuts = few.schedules(problem, config)
        return min(cuts, key=lambda one: few.estimate_us(problem, one), default=None)
    if problem.batch_invariant:
        return invariant.schedule_of(problem, config, invariant.parts_of_k(replace(problem, m=1)))
    tiles = (many.schedule_of(problem, config, splits) for splits in range(1, MAX_SPLITS + 1))
    return min((one for one in tiles if one is not None), key=lambda one: many.expected_us(problem, one), default=None)
