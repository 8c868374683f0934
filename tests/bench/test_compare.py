"""Two revisions are compared row by row: in turn, by their least times, and what is slower a second time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import __main__ as command
from bench import compare, compare_rows
from bench.compare import BASE, NEW, Verdict
from bench.compare_rows import ROWS, Row
from bench.record import Recorder

TREES = {BASE: Path("base"), NEW: Path("new")}
NAMES = ("steady", "slower", "slow once")


def rows(*names: str) -> list[Row]:
    return [Row(name, lambda device: lambda: None) for name in names]


class FakeTimer:
    """Times by tree and row; each turn of a tree takes the next one of a list, the last one again and again."""

    def __init__(self, us: dict[tuple[str, str], list[float] | str], host_us: dict[str, float] | None = None) -> None:
        self.us, self.host_us = us, host_us or {}
        self.prepared: list[str] = []
        self.turns: list[tuple[str, list[str]]] = []

    def prepare(self, tree: Path, names: Sequence[str]) -> compare.Times:
        self.prepared.append(tree.name)
        return {}

    def time(self, tree: Path, names: Sequence[str]) -> compare.Times:
        self.turns.append((tree.name, list(names)))
        return {name: self._row(tree.name, name) for name in names}

    def _row(self, tree: str, name: str) -> dict[str, Any]:
        values = self.us[tree, name]
        if isinstance(values, str):
            return {"error": values, "trace": ""}
        return {"us": values.pop(0) if len(values) > 1 else values[0], "host_us": self.host_us.get(tree)}


def run(timer: FakeTimer, names: Sequence[str] = NAMES) -> tuple[dict[str, Verdict], Recorder]:
    recorder = Recorder(None, kind="compare", compare=[])
    found = compare.run(recorder, TREES, timer, lambda line: None, rows(*names))
    return {verdict.name: verdict for verdict in found}, recorder


@pytest.fixture
def timer() -> FakeTimer:
    return FakeTimer(
        {
            ("base", "steady"): [10.4, 10.0],
            ("new", "steady"): [10.1, 11.0],
            ("base", "slower"): [20.0],
            ("new", "slower"): [22.0],
            ("base", "slow once"): [30.0],
            ("new", "slow once"): [33.0, 33.0, 30.0],
        }
    )


def test_trees_have_turns_in_changing_order_after_both_were_prepared(timer: FakeTimer):
    run(timer)
    assert timer.prepared == ["base", "new"]
    assert [tree for tree, _ in timer.turns] == ["base", "new", "new", "base"] * 2
    assert [names for _, names in timer.turns] == [list(NAMES)] * 4 + [["slower", "slow once"]] * 4


def test_the_least_times_count_and_a_row_is_slower_if_both_runs_say_so(timer: FakeTimer):
    found, recorder = run(timer)
    assert found["steady"].us == {BASE: 10.0, NEW: 10.1} and not found["steady"].is_suspect
    assert found["slower"].is_slower
    assert found["slow once"].is_suspect and not found["slow once"].is_slower
    assert compare.fails(found.values())
    assert recorder.data["geometric_mean"] == pytest.approx((1.01 * 1.1 * 1.1) ** (1 / 3))
    said = compare.text(recorder.data)
    assert said.splitlines()[-1] == "slower by more than 3% in both runs: slower"
    assert said.count("SLOWER") == 1 and f"geometric mean of all rows: {(1.01 * 1.21) ** (1 / 3):.4f}" in said


def test_nothing_is_timed_twice_where_nothing_is_slower():
    timer = FakeTimer({("base", "steady"): [10.0], ("new", "steady"): [10.2]})
    found, _ = run(timer, ["steady"])
    assert len(timer.turns) == 4 and not compare.fails(found.values())


def test_a_row_that_fails_in_the_new_tree_alone_is_a_failure_and_has_no_ratio():
    us: dict[tuple[str, str], list[float] | str] = {
        ("base", "gone"): [1.0],
        ("new", "gone"): "TypeError: no",
        ("base", "added"): "AttributeError: no such name",
        ("new", "added"): [1.0],
    }
    found, recorder = run(FakeTimer(us), ["gone", "added"])
    assert found["gone"].is_broken and not found["added"].is_broken and compare.fails([found["gone"]])
    assert not compare.fails([found["added"]])
    assert [failure["what"] for failure in recorder.data["failures"]] == ["gone", "added"]
    assert math.isnan(recorder.data["geometric_mean"]) and "new fails: TypeError: no" in compare.text(recorder.data)


def test_host_times_are_kept_beside_and_what_takes_longer_is_said(timer: FakeTimer):
    timer.host_us = {"base": 5.0, "new": 6.5}
    found, recorder = run(timer)
    assert found["steady"].host_us == {BASE: 5.0, NEW: 6.5} and found["steady"].is_host_slower
    assert "host slower" in compare.text(recorder.data)
    timer.host_us = {"base": 5.0, "new": 5.5}
    assert not run(timer)[0]["steady"].is_host_slower


def test_a_second_run_for_which_no_time_is_left_leaves_what_was_found(timer: FakeTimer):
    def time(tree: Path, names: Sequence[str]) -> compare.Times:
        if len(names) < len(NAMES):
            raise compare.OutOfTimeError("over")
        return FakeTimer.time(timer, tree, names)

    timer.time = time  # type: ignore[method-assign]
    found, _ = run(timer)
    assert found["slower"].is_suspect and not found["slower"].is_slower


# -- the processes -----------------------------------------------------------------------------------------------------


def test_a_base_that_is_a_folder_or_a_revision_is_found(tmp_path: Path):
    with pytest.raises(ValueError, match="--base-dir: got .*, want a checkout"), compare.base_tree(None, tmp_path):
        pass
    with compare.base_tree(None, compare.ROOT) as (tree, _):
        assert tree == compare.ROOT
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("text")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    with compare.base_tree("HEAD", None, tmp_path) as (tree, name):
        assert (tree / "file").read_text() == "text" and len(name) == 40
    assert not tree.exists()
    with pytest.raises(ValueError, match="BASE: got nothing, want a revision"):
        compare.base_tree("nothing", None, tmp_path).__enter__()


def test_a_process_takes_the_library_of_its_tree_alone(tmp_path: Path):
    request = {"tree": str(tmp_path), "output": str(tmp_path / "out"), "rows": [], "prepare": True}
    done = subprocess.run(
        [sys.executable, str(compare.WORKER), json.dumps(request)],
        cwd=compare.ROOT,
        env={**os.environ, "PYTHONPATH": str(compare.ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and f"not from {tmp_path}" in done.stderr


def test_rows_are_shared_out_to_the_processes_that_compile():
    asked: list[tuple[str, ...]] = []

    class Noted(compare.Processes):
        def _run(self, tree: Path, names: Sequence[str], *, prepare: bool = False) -> compare.Times:
            asked.append(tuple(names))
            return {name: {"us": 0.0, "host_us": None} for name in names}

    names = [row.name for row in ROWS]
    assert Noted(0.0).prepare(Path("tree"), names).keys() == set(names)
    assert sorted(name for part in asked for name in part) == sorted(names)


def test_a_process_that_has_no_time_left_is_not_started():
    with pytest.raises(compare.OutOfTimeError, match="no time is left"):
        compare.Processes(0.0).time(Path("tree"), ["row"])


def test_without_a_gpu_or_a_base_the_command_says_so(capsys: pytest.CaptureFixture[str]):
    assert command.main(["compare"]) == 2 and "want a revision BASE or --base-dir" in capsys.readouterr().err
    assert command.main(["compare", "HEAD", "--only", "no such row"]) == 2
    if not torch.cuda.is_available():
        assert command.main(["compare", "HEAD"]) == 2 and "sees no CUDA GPU" in capsys.readouterr().err


# -- the rows ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, dict[str, Any]] = {
    "linear": {"n": 128, "k": 256, "m": 2},
    "with_norm": {"n": 256, "k": 256, "m": 2},
    "layer": {"hidden": 256, "inner": 512, "qkv": 384, "m": 1},
    "moe": {"experts_": 4, "topk": 2, "hidden": 256, "inner": 128, "tokens": 3},
    "decode": {"batch": 2, "tokens": 70, "q_heads": 4, "kv_heads": 2},
    "extend": {"batch": 2, "q_len": 3, "tokens": 70, "q_heads": 4, "kv_heads": 2},
    "append": {"batch": 2, "tokens": 70, "q_heads": 4, "kv_heads": 2},
    "step": {"batch": 2, "tokens": 70, "q_heads": 4, "kv_heads": 2},
    "mla": {"batch": 2, "heads": 16, "tokens": 70},
    "sparse_mla": {"batch": 2, "heads": 16, "topk": 64},
    "norm": {"rows": 2, "hidden": 256},
}


def test_rows_are_some_forty_of_all_families_with_names_of_their_own():
    assert 36 <= len(ROWS) <= 48 and len({row.name for row in ROWS}) == len(ROWS)
    assert {row.kind for row in ROWS} == SMALL.keys()
    assert {"linear", "moe", "decode", "extend", "norm"} <= {row.kind for row in ROWS if row.host}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_a_call_that_the_package_takes(row: Row):
    call = row.make("cpu", **{**row.sizes, **SMALL[row.kind]})
    call()
    result = call()
    tensors = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, torch.Tensor)]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def test_a_row_that_fails_says_why_and_the_others_go_on():
    def broken(device: str) -> Callable[[], object]:
        raise ValueError("n: got 0")

    found = compare_rows.measure([Row("broken", broken), *rows("fine")], compare_rows.OneCall(), "cpu")
    assert found["broken"]["error"] == "ValueError: n: got 0"
    assert found["fine"] == {"us": 0.0, "host_us": None}
