"""Runs GPU tests in several processes that share one list of tests: `python -m tests.gpu.shared FOLDER [TEST ...]`.

A process takes the next few neighbouring tests that no other has taken, so slow files hold up nobody, and fixtures of a
module or session live as long as in one process. FOLDER keeps each test's result. A later run of the same sources runs
what has not passed there yet: the whole takes longer than some machines are lent for. A run that is ended (SIGTERM)
says what it has. Tests that measure host time may
fail beside others; the next run, with `--processes 1`, has them alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.environment import ROOT
from cute_kernels.runtime.sources import state_of

NEIGHBOURS = 6  # tests that a process takes at a time, of one file
GRACE_SECONDS = 20  # for the tests that run when the time is over
SOURCES = tuple(ROOT / name for name in ("cute_kernels", "layouts", "tests"))


class Share:
    """The plugin of one process of a run.

    folder: the run's. number: of the process. end: of `time.time`, after which no test begins.
    """

    def __init__(self, folder: Path, number: int, end: float) -> None:
        self.end = end
        self.passed = {name for name, (outcome, _) in results_in(folder).items() if outcome == "passed"}
        self.claims = folder / "claims"
        self.results = open(folder / f"results-{time.time_ns()}-{number}.jsonl", "a", buffering=1)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.config.option.collectonly:
            return True
        mine = self._claimed(session.items)
        item = next(mine, None)
        while item is not None and time.time() < self.end:
            following = next(mine, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.outcome == "passed" else str(report.longrepr)[-4000:]
            self.results.write(json.dumps([report.nodeid, report.outcome, text]) + "\n")

    def _claimed(self, items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
        begin = 0
        while begin < len(items):
            end = begin + 1
            while end < min(len(items), begin + NEIGHBOURS) and items[end].path == items[begin].path:
                end += 1
            try:
                (self.claims / str(begin)).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                yield from items[begin:end]
            begin = end


def results_in(folder: Path) -> dict[str, tuple[str, str]]:
    """What each test gave last: (outcome, text of its failure)."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob("results-*.jsonl")):
        for line in path.read_text().splitlines():
            name, outcome, text = json.loads(line)
            found[name] = outcome, text
    return found


def run(folder: Path, tests: Sequence[str], processes: int, seconds: float) -> None:
    """Shares the tests among processes, until all have run or the time is over."""
    begin_run(folder)
    end = time.time() + seconds
    # Threads of 16 processes on 16 cores wait for each other: one test a second passed on an H200's host, and 40 so.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"} if processes > 1 else None
    started = []
    for number in range(processes):
        which = ["--process", str(number), "--end", str(end)]
        command = [sys.executable, "-m", "tests.gpu.shared", str(folder), *tests, *which]
        with open(folder / f"log-{number}", "w") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=one_thread, stdout=log, stderr=log))
    try:
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end + GRACE_SECONDS - time.time(), 0))
    finally:
        for process in started:
            process.kill()
            process.wait()


def begin_run(folder: Path) -> None:
    """Makes the folder ready for a run.

    Raises:
        ValueError: its results are of other sources.
    """
    state = state_of(SOURCES)
    (folder / "claims").mkdir(parents=True, exist_ok=True)
    for claim in (folder / "claims").iterdir():
        claim.unlink()
    kept = folder / "sources"
    if kept.exists() and kept.read_text() != state:
        raise ValueError(f"FOLDER: got {folder} with results of other sources, want an empty one or one of these")
    kept.write_text(state)


def told(results: dict[str, tuple[str, str]]) -> list[str]:
    """Each failure's end, each file's counts, and all of them."""
    lines = [f"{name}: {outcome}\n{text[-1500:]}" for name, (outcome, text) in results.items() if outcome == "failed"]
    files: dict[str, Counter[str]] = {}
    for name, (outcome, _) in results.items():
        files.setdefault(name.partition("::")[0], Counter())[outcome] += 1
    lines += [f"{name}  {counted(counts)}" for name, counts in sorted(files.items())]
    return [*lines, counted(sum(files.values(), Counter()))]


def counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test has run"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="keeps results")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="as pytest takes them; tests/gpu without")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no test begins")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    tests, ended = options.tests or ["tests/gpu"], False
    if options.process is not None:
        share = Share(options.folder, options.process, options.end)
        return int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[share]))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(options.folder, tests, options.processes, options.seconds)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("ended before its time was over")
        ended = True
    finally:
        signal.signal(signal.SIGTERM, before)
    results = results_in(options.folder)
    print("\n".join(told(results)))
    return 0 if results and not ended and all(outcome != "failed" for outcome, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
