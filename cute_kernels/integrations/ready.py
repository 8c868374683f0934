"""Kernels of a served model, loaded or compiled before its first step.

Nothing may be compiled inside a CUDA graph capture, and nothing should be compiled in a step that a user waits for.
Layers register here. When the first layer's weights are processed, the kernels of all registered layers are loaded,
many at a time.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred_choice import config_beside_a_norm
from cute_kernels.gemm.layer.call import configs_for
from cute_kernels.gemm.layer.operator import may_serve
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.served import note_ready
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.deferred_config import DeferredKind
from cute_kernels.runtime import wanted, workers
from cute_kernels.runtime.aot import DIRECTORY_VARIABLE as BUNDLES_VARIABLE
from cute_kernels.runtime.cache import default_cache
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import forgotten
from cute_kernels.runtime.native import compiler_remedy, compiler_version
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.store import default_directory
from cute_kernels.runtime.workspace import COUNTERS, POOL

T = TypeVar("T")
GRID = ((256, 16), (512, 32), (1024, 128), (4096, 512), (1 << 20, 2048))
"""The row counts, beyond the captured ones, for which kernels are made ready. An item (last, step) stands for every
``step``-th count from the previous item's end up to ``last``.

For a row count in between, a product uses one of these kernels (`cute_kernels.gemm.served`).
"""


COMPILERS_WAIT = 60.0  # seconds, for the kernels of the next layers: they take longer to start than kernels to compile


@dataclass(frozen=True)
class RowCounts:
    """The numbers of rows with which an engine runs layers.

    Attributes:
        captured: batch sizes of the engine's CUDA graphs.
        most: the largest number of tokens of a step.
    """

    captured: tuple[int, ...]
    most: int

    def all(self) -> list[int]:
        """Returns 1, the captured counts, and larger counts of `GRID` up to the first that is at least ``most``.

        The grid is the same for every engine, so that one bundle of compiled kernels serves all.
        """
        last, found = max(self.captured, default=0), {1, *self.captured}
        for m in _grid():
            found.update([m] if m > last else [])
            if m >= self.most:
                break
        return sorted(found)


def _grid() -> Iterator[int]:
    begin = 0
    for end, step in GRID:
        yield from range(begin + step, end + 1, step)
        begin = end


DEFAULT_ROWS = RowCounts((), 2048)
"""The row counts that are assumed if no engine says what it will run."""


_noted: dict[LinearProblem, RowCounts] = {}
_loaded: dict[LinearProblem, RowCounts] = {}
forgotten(_loaded.clear)


def note(problem: LinearProblem, rows: RowCounts) -> None:
    """Remembers a layer for `load_noted`, unless its kernels for these numbers of rows are loaded. problem: the layer's
    product for one row.
    """
    if _loaded.get(problem) != rows:
        _noted[problem] = rows


def load_noted(device: torch.device, load_all: Callable[[torch.device, Iterable[KernelSpec]], None]) -> None:
    """Calls ``load_all`` with the kernels of all layers that were noted since the last call."""
    if not _noted:
        return
    problems = dict(_noted)
    _noted.clear()
    load_all(device, [spec for problem, rows in problems.items() for m in rows.all() for spec in specs_for(problem, m)])
    for problem, rows in problems.items():
        note_ready(problem, rows.all())
    _loaded.update(problems)


def load(device: torch.device, specs: Iterable[KernelSpec], logger: logging.Logger) -> None:
    """Allocates the workspaces of a device, then loads kernels, many at a time, and compiles those that are not cached.
    The log gets one line, or two if any must be compiled."""
    index = index_of(device)
    arch = arch_of(index)
    asked = list(dict.fromkeys(specs))
    missing = [spec for spec in asked if not default_cache().has(spec, arch)]
    start = time.perf_counter()
    # Launches wait to see words of this memory changed: other contents give wrong results.
    outlasting(device, lambda: [pool.prepare(index) for pool in (POOL, COUNTERS)])
    if missing:
        logger.info("cute-kernels: compiling %d of %d kernels, once for this machine", len(missing), len(asked))
        workers.keep(COMPILERS_WAIT)
    default_cache().load_many(asked, arch)
    logger.info("cute-kernels: %d kernels ready after %.1f s", len(asked), time.perf_counter() - start)


def outlasting(device: torch.device, make: Callable[[], T]) -> T:
    """Runs ``make``, which allocates on a device, outside of this thread's memory pools. Returns its result.

    torch's pools belong to a thread, and an engine may empty them when it sleeps (vLLM's `--enable-sleep-mode`). So
    ``make`` runs in another thread, and its memory outlasts the pools.
    """
    if device.type != "cuda":
        return make()

    def run() -> T:
        made = make()
        torch.cuda.synchronize(device)
        return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


_kinds: set[tuple[KernelSpec, ...]] = set()
forgotten(_kinds.clear)


def make_ready(
    device: torch.device, specs: Callable[[], Iterable[KernelSpec]], logger: logging.Logger, file_name: str
) -> str | None:
    """Loads the kernels of a layer, once for all equal layers. Returns why they are not ready, as `why_not_ready` does.

    Returns None if they are ready, or if the layer is not on a GPU.
    """
    if device.type != "cuda" or (asked := tuple(specs())) in _kinds:
        return None
    if (reason := why_not_ready(device, asked, file_name)) is None:
        load(device, asked, logger)
        _kinds.add(asked)
    return reason


def index_of(device: torch.device) -> int:
    """Returns the index of a CUDA device; a device without an index means the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def specs_for(problem: LinearProblem, m: int) -> list[KernelSpec]:
    """Returns the kernels of a layer for ``m`` rows."""
    return [GemmSpec(chosen(replace(problem, m=m)).config)]


def specs_beside_norm(problem: LinearProblem, rows: Iterable[int], kind: DeferredKind) -> list[GemmSpec]:
    """Returns the kernels with which a layer's product produces or consumes a deferred norm. kind: whether the product
    produces (GIVES) or consumes (TAKES) the norm. Numbers of rows without such a kernel are skipped.
    """
    problems = [replace(problem, m=m) for m in rows]
    found = (config_beside_a_norm(one, chosen(one), kind) for one in problems)
    return list(dict.fromkeys(GemmSpec(config) for config in found if config is not None))


def whole_specs(problem: LinearProblem) -> list[GemmSpec]:
    """Returns a list with the kernel of all products from one attention to the next, or [] if there is no such kernel.
    problem: the MLP's last layer.
    """
    n, k = problem.n, problem.k
    return [GemmSpec(one) for one in configs_for(max(n, k))[:1]] if may_serve([(problem.format.key, n, k)]) else []


def why_not_ready(device: torch.device, specs: Iterable[KernelSpec], file_name: str) -> str | None:
    """Returns why kernels cannot be ready before the first capture; None if they can.

    If no compiler is installed, kernels that are in no bundle are listed in ``file_name``, in the directory of the
    kernel cache. A bundle can be built from this list.
    """
    if compiler_version() is not None:
        return None
    arch = arch_of(index_of(device))
    missing = [spec for spec in dict.fromkeys(specs) if not default_cache().has(spec, arch)]
    if not missing:
        return None
    path = default_directory() / file_name
    try:
        wanted.write(path, missing, arch)
    except OSError as error:
        return (
            f"{len(missing)} kernels are in no bundle, and their list cannot be written ({error}); {compiler_remedy()}"
        )
    return (
        f"{len(missing)} kernels are in no bundle. Build one where the compiler is: "
        f"cute-kernels aot build --arch {arch} --list {path} -o DIR, and set {BUNDLES_VARIABLE}=DIR"
    )


@functools.cache
def linear_reason(problem: LinearProblem, rows: RowCounts, device_index: int, file_name: str) -> str | None:
    """Returns why a linear layer's kernels cannot be ready, as `why_not_ready` does; computed once for all equal
    layers."""
    if compiler_version() is not None:
        return None
    specs = [spec for m in rows.all() for spec in specs_for(problem, m)]
    return why_not_ready(torch.device("cuda", device_index), specs, file_name)
