"""Workers that compile kernels wait for the next call where that is asked for, and for no call that wants another."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from cute_kernels.runtime import CompileError, KernelCache, Progress, native, store, workers
from tests.compilers import kept
from tests.runtime.conftest import ARCH
from tests.runtime.tiny import TellingSpec, tiny_specs


def process(directory: Path) -> int:
    """The process that one call's kernel is compiled in."""
    with pytest.raises(CompileError) as error:
        KernelCache(directory).artifacts([TellingSpec()], ARCH)
    found = re.search(r"process (\d+)", str(error.value))
    assert found is not None
    return int(found[1])


def lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
def test_a_worker_serves_later_calls_until_the_block_ends(tmp_path: Path):
    def sources() -> list[str]:
        seen: list[Progress] = []
        KernelCache(tmp_path).artifacts(tiny_specs(1), ARCH, progress=seen.append)
        return [progress.source for progress in seen]

    with kept():  # of its own, not the session's
        first = process(tmp_path)
        assert process(tmp_path) == first and lives(first)
        assert sources() == ["compiled"] and sources() == ["disk"]
        store.DiskStore(tmp_path).clear()
        assert sources() == ["compiled"] and sources() == ["disk"], "the worker writes again what it has made before"
        assert process(tmp_path / "another") == first
    assert not lives(first)
    with kept(0):
        alone = process(tmp_path)
        assert alone != first and not lives(alone)


@dataclass(eq=False)
class Worker:
    """Stands for a worker."""

    start: Any
    alive: bool = True
    closed: bool = False

    def compile(self, encoded: str) -> tuple[str | None, float]:
        raise ValueError("half a line")

    def close(self) -> None:
        self.closed = True


def test_a_call_gets_a_worker_that_was_started_as_it_wants_one_and_lives():
    with kept(3):
        waiting: Any = workers._waiting
        dead, other, living = Worker("a", alive=False), Worker("b"), Worker("a")
        for worker in (dead, other, living):
            waiting.put(worker)
        assert waiting.take("c") is None
        assert waiting.take("a") is living and dead.closed and not living.closed
        assert waiting.take("a") is None
        assert waiting.take("b") is other and not other.closed


def test_no_more_wait_than_are_wanted():
    first, second, third, within = (Worker("a") for _ in range(4))
    with kept(2):
        waiting: Any = workers._waiting
        for worker in (first, second, third):
            waiting.put(worker)
        assert (first.closed, second.closed, third.closed) == (True, False, False), "the longest ends first"
        with kept():
            inner: Any = workers._waiting
            inner.put(within)
        assert within.closed and not second.closed and workers._waiting is waiting
    assert second.closed and third.closed


def test_memory_of_workers_that_wait_is_theirs_for_the_next_call():
    pages = {"SC_PAGE_SIZE": 1, "SC_AVPHYS_PAGES": 2 * workers.WORKER_BYTES}
    with kept(3), mock.patch.multiple(os, sysconf=pages.__getitem__, sched_getaffinity=lambda _: set(range(4))):
        found = []
        for _ in range(3):
            found.append(workers.default_jobs())
            workers._waiting.put(cast(Any, Worker("a")))
        assert found == [2, 3, 4] and workers.default_jobs() == 4, "no more than cores"


def test_workers_that_are_kept_end_once_nobody_has_used_them_for_a_while():
    first, second = Worker("a"), Worker("a")
    with kept(0):
        workers.keep(0.2)
        waiting: Any = workers._waiting
        waiting.put(first)
        workers.keep(0.2)
        assert workers._waiting is waiting and waiting.take("a") is first, "the next call finds it"
        time.sleep(0.15)
        for worker in (first, second):
            waiting.put(worker)
        time.sleep(0.1)
        assert not first.closed, "the time begins with the last use"
        time.sleep(0.3)
        assert first.closed and second.closed and len(waiting) == 0
    with kept():
        within = workers._waiting
        workers.keep(0.2)
        assert workers._waiting is within


def test_a_worker_ends_with_this_process_s_pipe_although_a_forked_child_lives():
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker = workers._Worker.__new__(workers._Worker)
    worker._process, worker._log = cast(Any, process), tempfile.TemporaryFile()
    with kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which a child does not have
        workers._waiting.put(worker)
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(timeout=10) == 0
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_worker_whose_reply_is_not_understood_ends(tmp_path: Path):
    """The next call would read the rest of it as the reply to its own request."""
    worker: Any = Worker(workers._Start.now())
    with kept():
        workers._waiting.put(worker)
        with pytest.raises(CompileError, match="half a line"):
            workers.compile_all([TellingSpec()], ARCH, tmp_path)
        assert worker.closed and len(workers._waiting) == 0


@pytest.mark.parametrize("changed", ["path", "environment"])
def test_workers_are_told_apart_by_all_that_decides_what_they_compile(changed: str, monkeypatch: pytest.MonkeyPatch):
    """Directories and architectures come with each request."""
    before = workers._Start.now()
    monkeypatch.setenv("PYTEST_OF_NO_MATTER", "1")
    assert workers._Start.now() == before
    if changed == "path":
        monkeypatch.syspath_prepend("more")
    else:
        monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert workers._Start.now() != before


def test_nothing_that_lies_in_the_current_directory_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`python -m`, `python -c` and multiprocessing would each run one of these files first."""
    for name in ("pickle", "base64", "json", "multiprocessing", "cute_kernels", "os", "site"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'a')\nraise ImportError('of the current directory')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with pytest.raises(CompileError, match=r"process \d+"):
        workers.compile_all([TellingSpec()], ARCH, tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


def test_no_other_module_of_the_package_starts_a_python():
    package = Path(workers.__file__).parent.parent
    starting = {
        path.name
        for path in package.rglob("*.py")
        if re.search(r"sys\.executable|^(import|from) multiprocessing|ProcessPool", path.read_text(), re.MULTILINE)
    }
    assert starting == {"workers.py"}
