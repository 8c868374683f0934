"""Compiles many kernels in parallel worker processes.

The DSL's compiler is not thread-safe. So kernels are compiled in processes, which run `cute_kernels.runtime.worker`.
multiprocessing does not start these processes. So the caller's `__main__` does not run again, no GPU context is
inherited, and a crash of the compiler loses one kernel, not the pool. A worker takes seconds to start. So once `keep`
was called, workers that are done wait for the next call.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.store import compile_environment

WORKER_BYTES = 1 << 30  # resident size of one worker (0.4 GiB) with room for large kernels

CompiledCallback = Callable[[KernelSpec, float], None]


class CompileError(RuntimeError):
    """Some kernels did not compile; `failures` maps each spec to its compiler's message."""

    def __init__(self, failures: dict[KernelSpec, str]) -> None:
        self.failures = failures
        texts = "\n".join(f"--- {spec}\n{text.strip()}" for spec, text in failures.items())
        super().__init__(f"{len(failures)} kernel(s) did not compile:\n{texts}")


def import_path() -> tuple[str, ...]:
    """Returns the folders that this process imports from: `sys.path`, with the path of the current directory in place
    of ""."""
    return tuple(entry or os.getcwd() for entry in sys.path)


def python_command(code: str, path: Sequence[str]) -> list[str]:
    """Returns the command that runs `code` in a new Python, which imports from `path` alone.

    `python -m`, `python -c` and multiprocessing's "spawn" import from the current directory first, where other users
    may have put files. The command's first statement, which needs only a built-in module, sets the path before any
    import.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {list(path)!r}; {code}"]


def default_jobs() -> int:
    """Returns the largest number of workers: at most one for each core of this process, and at most one for each
    `WORKER_BYTES` of available memory. Memory is available if it is free, or held by workers that wait.
    """
    cores = len(os.sched_getaffinity(0))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, free // WORKER_BYTES + len(_waiting)))


def keep(seconds: float) -> None:
    """Lets workers that are done wait for later calls of this process. At most `default_jobs()` workers wait. They end
    once none of them was used for ``seconds``. Only the first call of `keep` has an effect.

    A worker keeps the sources that it was started with, so sources must not change meanwhile.
    """
    global _waiting
    if _waiting.seconds is None and not _waiting.most:
        _waiting = _Waiting(default_jobs(), seconds)


def compile_all(
    specs: Sequence[KernelSpec],
    arch: str,
    directory: Path,
    jobs: int | None = None,
    on_compiled: CompiledCallback | None = None,
) -> None:
    """Compiles each spec into the store at `directory`; calls `on_compiled(spec, seconds)` as each is done.

    The callback runs in the calling thread. Raises ValueError for jobs < 1. Raises CompileError, once all specs are
    done, if one failed.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    tasks: queue.SimpleQueue[tuple[KernelSpec, str] | None] = queue.SimpleQueue()
    for spec in specs:
        tasks.put((spec, _encode(directory, arch, spec)))
    results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
    count = min(jobs or default_jobs(), len(specs))
    stop = threading.Event()
    threads = [threading.Thread(target=_serve, args=(tasks, results, stop), daemon=True) for _ in range(count)]
    for thread in threads:
        tasks.put(None)
        thread.start()
    failures: dict[KernelSpec, str] = {}
    try:
        for _ in specs:
            result = results.get()
            if result.error is not None:
                failures[result.spec] = result.error
            elif on_compiled is not None:
                on_compiled(result.spec, result.seconds)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failures:
        raise CompileError(failures)


class _Result(NamedTuple):
    spec: KernelSpec
    error: str | None
    seconds: float


def _encode(directory: Path, arch: str, spec: KernelSpec) -> str:
    module = type(spec).__module__
    if module == "__main__":
        raise TypeError(
            f"{type(spec).__qualname__} is defined in the script that runs; workers can only compile specs of "
            "importable modules"
        )
    return base64.b64encode(pickle.dumps((directory.resolve(), arch, spec.modules(), spec))).decode()


def _serve(
    tasks: queue.SimpleQueue[tuple[KernelSpec, str] | None],
    results: queue.SimpleQueue[_Result],
    stop: threading.Event,
) -> None:
    """Runs in a thread: compiles tasks in one worker process, until there are no more tasks. Replaces the process if it
    dies."""
    start = _Start.now()
    worker: _Worker | None = None
    try:
        while (task := tasks.get()) is not None:
            spec, encoded = task
            if stop.is_set():
                break
            try:
                worker = worker or _waiting.take(start) or _Worker(start)
                error, seconds = worker.compile(encoded)
                results.put(_Result(spec, error, seconds))
            except _WorkerDiedError as died:
                worker = None
                results.put(_Result(spec, str(died), 0.0))
            except Exception as failure:  # the caller counts one result per spec, whatever happens
                if worker is not None:  # what it replies next may be the answer to this request
                    worker.close()
                    worker = None
                results.put(_Result(spec, f"{type(failure).__name__}: {failure}", 0.0))
    finally:
        if worker is not None:
            _waiting.put(worker)


class _WorkerDiedError(Exception):
    pass


class _Start(NamedTuple):
    """The conditions under which a worker is started. Workers with equal conditions compile kernels in the same way."""

    path: tuple[str, ...]  # the same modules must be importable in the worker as here, wherever they were found
    environment: tuple[tuple[str, str], ...]

    @staticmethod
    def now() -> _Start:
        return _Start(import_path(), tuple(compile_environment().items()))


class _Worker:
    """One worker process. It reads lines, each with a spec, and answers each with a JSON line that says the outcome."""

    def __init__(self, start: _Start) -> None:
        self.start = start
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            python_command("from cute_kernels.runtime import worker; worker.main([])", start.path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def compile(self, encoded: str) -> tuple[str | None, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(encoded + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self._process.wait()
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace")[-4000:]
            self.close()
            raise _WorkerDiedError(f"the worker process ended with status {self._process.returncode}\n{tail}")
        reply = json.loads(line)
        return reply["error"], reply["seconds"]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):  # a request that a dead process never read
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


class _Waiting:
    """The workers that wait for the next call; the one that has waited longest comes first. Thread-safe.

    Attributes:
        most: the largest number of workers that may wait.
        seconds: how long all of them wait after the last `put`; None: without limit.
    """

    def __init__(self, most: int, seconds: float | None = None) -> None:
        self.most, self.seconds = most, seconds
        self._timer: threading.Timer | None = None
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._workers)

    def take(self, start: _Start) -> _Worker | None:
        """Takes out and returns a worker that was started under the conditions ``start``. Returns None if no such
        worker waits and is alive.
        """
        with self._lock:
            alike = [worker for worker in self._workers if worker.start == start]
            living = [worker for worker in alike if worker.alive]
            taken = living[:1]
            dead = [worker for worker in alike if worker not in living]
            self._workers = [worker for worker in self._workers if worker not in taken + dead]
        for worker in dead:
            worker.close()
        return taken[0] if taken else None

    def put(self, worker: _Worker) -> None:
        """Keeps a worker for later; ends the one that has waited for the longest if there are too many."""
        with self._lock:
            self._workers.append(worker)
            surplus = self._workers[: max(len(self._workers) - self.most, 0)]
            self._workers = self._workers[len(surplus) :]
            if self.seconds is not None:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = threading.Timer(self.seconds, self.close)
                self._timer.daemon = True
                self._timer.start()
        for other in surplus:
            other.close()

    def close(self) -> None:
        """Ends all waiting workers."""
        with self._lock:
            ended, self._workers = self._workers, []
        for worker in ended:
            worker.close()


_waiting = _Waiting(0)


def _leave_in_child() -> None:
    """Closes a forked child's copies of the pipes to waiting workers. With open pipes, the workers would live as long
    as the child."""
    _waiting._lock = threading.Lock()  # another thread may have held it
    _waiting.close()


os.register_at_fork(after_in_child=_leave_in_child)
