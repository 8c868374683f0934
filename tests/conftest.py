"""What holds for all tests: which need a GPU, and how they share the processor.

Tests under tests/gpu need a CUDA GPU: there they run, elsewhere each file is reported as skipped with the reason, and
not imported (`--collect-only` still lists its tests).

Without one, `pytest -n auto` runs modules side by side, one process for each core. PyTorch then has one thread in each:
tensors of tests are small, and threads that wait for one another on a busy machine cost ten times what they save.
On a GPU `pytest -n 8` shares it, and the cores, among as many processes.
"""

from __future__ import annotations

import functools
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from simulator.backend import Backend

settings.register_profile("no-deadline", deadline=None)  # machines are shared, and some are slow
settings.load_profile("no-deadline")

GPU_TESTS = Path(__file__).parent / "gpu"


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


@functools.cache
def reason_without_gpu() -> str | None:
    import torch

    if "JUDGE_ONLY" in os.environ:  # what was served elsewhere, by tests/gpu/test_vllm_serving.py
        return None

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU"


@pytest.fixture
def run_on() -> Iterator[Callable[[Backend], None]]:
    """Device code runs on the simulator's backend that is given, until another one is or the test ends."""
    from simulator.backend import running

    with ExitStack() as stack:

        def change(backend: Backend) -> None:
            stack.close()
            stack.enter_context(running(backend))

        yield change


@pytest.fixture
def compiler_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `tests.golden.collect.trace` replaces in the compiler is put back when the test ends."""
    from cutlass.base_dsl import dsl

    monkeypatch.setattr(dsl.BaseDSL, "compile_and_cache", dsl.BaseDSL.compile_and_cache)


@pytest.fixture(scope="session", autouse=True)
def compilers_wait_for_the_next_kernels() -> Iterator[None]:
    """A worker that compiles kernels takes longer to start than a kernel to compile; a dozen files want some."""
    from tests.compilers import kept

    with kept():
        yield


@pytest.fixture(scope="session")
def output_of() -> Iterator[Callable[..., str]]:
    """What a program prints that runs in a process of its own; fails the test with its stderr if it does not end well.

    The process has imported PyTorch, and nothing of this project's.
    """
    from tests.forks import of_one_process

    with of_one_process(Path(__file__).parents[1]) as programs:
        yield programs.run


def pytest_configure() -> None:
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if reason_without_gpu() or processes > 1:
        import torch

        threads = 1 if reason_without_gpu() else max(num_cores() // processes, 1)
        torch.set_num_threads(threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of processes that tests start


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Gradients are on: a generator that had turned them off, and is collected late, puts back what held long ago.

    A fixture draws the same numbers whatever was tested before.
    """
    import torch

    torch.set_grad_enabled(True)
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """A test draws the same numbers whatever was tested before."""
    seed()


def seed() -> None:
    """Seeds PyTorch's generators.

    Without a GPU only the CPU's: `torch.manual_seed` keeps a seed, with the caller's stack, for each kind of
    accelerator that may be initialised later. That takes longer than a short test, and is never freed.
    """
    import torch

    (torch.default_generator if reason_without_gpu() else torch).manual_seed(0)


def pytest_collection_finish() -> None:
    """Takes what has been imported and collected out of the garbage collector's sight: a million objects that stay."""
    gc.collect()
    gc.freeze()
    if reason_without_gpu():  # what holds a GPU's memory shall go early
        gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: a process for each core, but no other beside this one where a GPU would have to be shared."""
    return num_cores() if reason_without_gpu() else 0


class FileForGpu(pytest.File):
    """A file of tests/gpu where there is no GPU: one item, which is skipped."""

    def collect(self) -> Iterator[pytest.Item]:
        yield TestsForGpu.from_parent(self, name="all")


class TestsForGpu(pytest.Item):
    """Stands for thousands, whose collection, reports and garbage would take a minute of each run."""

    def runtest(self) -> None:
        raise AssertionError("without a GPU it is skipped")

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if GPU_TESTS in module_path.parents and reason_without_gpu() and not parent.config.option.collectonly:
        return FileForGpu.from_parent(parent, path=module_path)
    return None


LONG = {"CompileCounter", "default_cache", "golden", "subprocess"}
"""Names that modules of tests have if they compile kernels or models, or start processes."""


def long_modules_first(items: list[pytest.Item]) -> None:
    """Orders modules, since a long one that comes last leaves the other processes without work.

    Long modules have few tests. pytest-xdist orders modules by the number of tests, as this does with all others.
    """
    count = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, int, Path]:
        names = vars(item.module) if isinstance(item, pytest.Function) else {}
        return LONG.isdisjoint(names), -count[item.path], item.path

    items.sort(key=place)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        long_modules_first(items)
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        reason = reason_without_gpu() if item.get_closest_marker("gpu") else None
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU: {reason}"))
