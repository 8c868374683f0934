"""Two revisions beside each other on one GPU: `python -m bench compare BASE`.

The fixed calls of :mod:`bench.compare_rows` are timed for both in turn, in a process for each turn, after the kernels
of both were compiled on all cores. What is slower by more than `SLOWER` is timed in a second run, which confirms it or
does not. Where vLLM is installed, steps of a model that it serves come on top (:mod:`bench.e2e_vllm` of each revision).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench import compare_rows, e2e_cases, e2e_vllm
from bench.environment import ROOT
from bench.record import Recorder
from bench.report import aligned
from bench.turns import in_turns

WORKER = Path(compare_rows.__file__)
BASE, NEW = "base", "new"
TURNS = 2  # of each revision in a run; of each row the least time counts
SLOWER = 1.03
HOST_SLOWER_US = 1.0  # of a call's host time, which is not timed again
MOST_PROCESSES = 16  # that compile side by side; each holds a context of the GPU
SERVED = e2e_cases.Case("llama3-8b", "w4", "fp8", "on", batches=(1, 8, 32, 64), context=2048, beside=True)
SERVED_SECONDS = 240

Times = dict[str, dict[str, Any]]
"""By row: what `compare_rows` writes."""


class OutOfTimeError(RuntimeError):
    """The seconds that a comparison may take are over."""


class Timer(Protocol):
    """What calls rows of a tree; `Processes` does it in processes of their own."""

    def prepare(self, tree: Path, names: Sequence[str]) -> Times:
        """Calls each row once, so that no kernel is missing afterwards."""
        ...

    def time(self, tree: Path, names: Sequence[str]) -> Times:
        """One turn."""
        ...


@dataclass(frozen=True)
class Processes:
    """Calls rows in processes that import the tree's library. deadline: of `time.monotonic`."""

    deadline: float

    def prepare(self, tree: Path, names: Sequence[str]) -> Times:
        count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(names))
        with ThreadPoolExecutor(count) as pool:
            parts = pool.map(lambda first: self._run(tree, names[first::count], prepare=True), range(count))
            return {name: row for part in parts for name, row in part.items()}

    def time(self, tree: Path, names: Sequence[str]) -> Times:
        return self._run(tree, names)

    def _run(self, tree: Path, names: Sequence[str], *, prepare: bool = False) -> Times:
        with tempfile.TemporaryDirectory(prefix="bench_compare_") as folder:
            output = Path(folder) / "rows.json"
            request = {"tree": str(tree), "output": str(output), "rows": list(names), "prepare": prepare}
            path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
            command = [sys.executable, str(WORKER), json.dumps(request)]
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise OutOfTimeError(f"no time is left for {tree}")
            try:
                done = subprocess.run(
                    command, cwd=tree, env=environment, capture_output=True, text=True, timeout=left, check=False
                )
            except subprocess.TimeoutExpired:
                raise OutOfTimeError(
                    f"{tree}: {len(names)} rows took more than the {left:.0f} s that were left"
                ) from None
            if done.returncode:
                raise RuntimeError(f"{tree}: status {done.returncode}\n{done.stderr[-2000:]}")
            return json.loads(output.read_text())


@dataclass
class Verdict:
    """One row of both revisions: the least times of each, and those of the second run, where there was one."""

    name: str
    kind: str
    us: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    again_us: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """New over base; None where one of them failed."""
        return ratio_of(self.us)

    @property
    def is_suspect(self) -> bool:
        return self.ratio is not None and self.ratio > SLOWER

    @property
    def is_slower(self) -> bool:
        """Whether both runs say so."""
        again = ratio_of(self.again_us)
        return self.is_suspect and again is not None and again > SLOWER

    @property
    def is_host_slower(self) -> bool:
        return len(self.host_us) == 2 and self.host_us[NEW] > self.host_us[BASE] + HOST_SLOWER_US

    @property
    def is_broken(self) -> bool:
        """Whether the new revision alone fails."""
        return NEW in self.errors and BASE not in self.errors

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "ratio": self.ratio, "slower": self.is_slower}


def ratio_of(us: Mapping[str, float]) -> float | None:
    return us[NEW] / us[BASE] if len(us) == 2 and us[BASE] > 0 else None


def geometric_mean(ratios: Iterable[float | None]) -> float:
    logarithms = [math.log(ratio) for ratio in ratios if ratio]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def run(
    recorder: Recorder,
    trees: Mapping[str, Path],
    timer: Timer,
    say: Callable[[str], None],
    rows: Sequence[compare_rows.Row] = compare_rows.ROWS,
) -> list[Verdict]:
    """Prepares both trees, times all rows, and again those that are slower; records each state.

    trees: of `BASE` and `NEW`. A row that fails on one side is recorded as a failure, and has no ratio.
    """
    names = [row.name for row in rows]
    for side, tree in trees.items():
        say(f"{side}: compiling what {len(names)} rows lack")
        timer.prepare(tree, names)
    verdicts = {row.name: Verdict(row.name, row.kind) for row in rows}
    for side, turn in in_turn(trees, timer, names, say):
        _add(verdicts, side, turn, "us")
        _record(recorder, verdicts.values())
    suspects = [verdict.name for verdict in verdicts.values() if verdict.is_suspect]
    if suspects:
        say(f"{len(suspects)} rows are slower by more than {SLOWER - 1:.0%}: once more")
        try:
            for side, turn in in_turn(trees, timer, suspects, say):
                _add(verdicts, side, turn, "again_us")
        except OutOfTimeError as error:
            say(f"not confirmed: {error}")
        _record(recorder, verdicts.values())
    return list(verdicts.values())


def in_turn(
    trees: Mapping[str, Path], timer: Timer, names: Sequence[str], say: Callable[[str], None]
) -> Iterator[tuple[str, Times]]:
    """TURNS turns of each tree: base and new, then new and base, and so on."""
    for number in range(TURNS):
        for side in list(trees) if number % 2 == 0 else reversed(list(trees)):
            yield side, timer.time(trees[side], names)
            say(f"{side}: turn {number + 1} of {TURNS}")


def _add(verdicts: Mapping[str, Verdict], side: str, turn: Times, kind: str) -> None:
    """Keeps the least of each row's times."""
    for name, found in turn.items():
        verdict = verdicts[name]
        if "error" in found:
            verdict.errors[side] = found["error"]
            continue
        times: dict[str, float] = getattr(verdict, kind)
        times[side] = min(found["us"], times.get(side, math.inf))
        if found["host_us"] is not None and kind == "us":
            verdict.host_us[side] = min(found["host_us"], verdict.host_us.get(side, math.inf))


def _record(recorder: Recorder, verdicts: Iterable[Verdict]) -> None:
    verdicts = list(verdicts)
    recorder.data["compare"] = [verdict.as_dict() for verdict in verdicts]
    recorder.data["failures"] = [
        {"what": verdict.name, "error": f"{side}: {error}", "trace": ""}
        for verdict in verdicts
        for side, error in verdict.errors.items()
    ]
    recorder.set("geometric_mean", geometric_mean(verdict.ratio for verdict in verdicts))


# -- served steps ------------------------------------------------------------------------------------------------------


def serves() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def run_served(
    recorder: Recorder, trees: Mapping[str, Path], say: Callable[[str], None], seconds: float
) -> list[Verdict]:
    """Decoding steps of `SERVED`: both revisions' engines start side by side and are timed in turn."""
    verdicts = {batch: Verdict(f"{SERVED.name}, {batch} requests", "served") for batch in SERVED.batches}
    with tempfile.TemporaryDirectory(prefix="bench_compare_") as scratch:
        started = {}
        for side, tree in trees.items():
            folder = Path(scratch, side)
            folder.mkdir()
            started[folder] = (side, e2e_vllm.start_process(SERVED, folder, tree))

        def take(folder: Path) -> None:
            side, process = started[folder]
            try:
                for row in e2e_vllm.rows_of(process, folder):
                    verdicts[row["batch"]].us[side] = 1e3 * row["tpot_ms"]
            except (OSError, RuntimeError, ValueError) as error:
                say(recorder.add_failure(f"{SERVED.name}, {side}", error))

        in_turns({folder: process for folder, (_, process) in started.items()}, seconds, take, e2e_vllm.TURNS)
    recorder.set("served", [verdict.as_dict() for verdict in verdicts.values()])
    return list(verdicts.values())


# -- the trees ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def base_tree(revision: str | None, folder: Path | None, root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """(the tree of what is compared with, its name): a folder as it is, or a git revision's files in a temporary one.

    Raises ValueError for a folder without the package, or a revision that git does not have here.
    """
    if folder is not None:
        tree = folder.resolve()
        if not (tree / "cute_kernels" / "__init__.py").is_file():
            raise ValueError(f"--base-dir: got {folder}, want a checkout: a folder with cute_kernels in it")
        yield tree, revision or str(folder)
        return
    with tempfile.TemporaryDirectory(prefix="bench_compare_") as scratch:
        tree, archive = Path(scratch) / "tree", Path(scratch) / "tree.tar"
        git = ["git", "-C", str(root)]
        try:
            commit = subprocess.run(
                [*git, "rev-parse", f"{revision}^{{commit}}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            subprocess.run([*git, "archive", "-o", str(archive), commit], capture_output=True, check=True)
            tree.mkdir()
            subprocess.run(["tar", "-xf", str(archive), "-C", str(tree)], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                f"BASE: got {revision}, want a revision that git has here, or --base-dir ({error})"
            ) from error
        yield tree, commit


# -- for people --------------------------------------------------------------------------------------------------------


def fails(verdicts: Iterable[Verdict]) -> bool:
    """Whether a row is slower in both runs, or fails in the new revision alone."""
    return any(verdict.is_slower or verdict.is_broken for verdict in verdicts)


def text(data: dict[str, Any]) -> str:
    """All rows, the slower ones marked, and the geometric means."""
    rows = [*data["compare"], *data.get("served", [])]
    lines: list[tuple[str, ...]] = [("row", "base, us", "new, us", "new / base", "again", "host, us: base, new", "")]
    for row in rows:
        us, host = ([_number(row[kind].get(side)) for side in (BASE, NEW)] for kind in ("us", "host_us"))
        again = ratio_of(row["again_us"])
        ratios = ["" if ratio is None else f"{ratio:.3f}" for ratio in (row["ratio"], again)]
        lines.append((row["name"], *us, *ratios, ", ".join(filter(None, host)), _remark(row)))
    means = [f"geometric mean of all rows: {geometric_mean(row['ratio'] for row in data['compare']):.4f}"]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    means += [f"{kind} {geometric_mean(row['ratio'] for row in rows if row['kind'] == kind):.4f}" for kind in kinds]
    slower = [row["name"] for row in rows if row["slower"]]
    end = f"slower by more than {SLOWER - 1:.0%} in both runs: {'; '.join(slower) or 'none'}"
    return "\n".join([*aligned(lines), ", ".join(means), end])


def _remark(row: Mapping[str, Any]) -> str:
    if row["errors"]:
        return "; ".join(f"{side} fails: {error[:80]}" for side, error in row["errors"].items())
    host = row["host_us"]
    remarks = ["SLOWER"] if row["slower"] else []
    remarks += ["host slower"] if len(host) == 2 and host[NEW] > host[BASE] + HOST_SLOWER_US else []
    return ", ".join(remarks)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
