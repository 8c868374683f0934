"""Processes that share a list of tests run each once, with fixtures as in one process, and go on where a run ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.environment import ROOT
from tests.gpu import shared

TESTS = """
import os, pathlib, pytest

HERE = pathlib.Path(__file__).parent

@pytest.fixture(scope="session")
def whole():
    with open(HERE / "sessions", "a") as file:
        file.write(f"{os.getpid()}\\n")

@pytest.mark.parametrize("number", range(30))
def test_it(number, whole):
    with open(HERE / "ran", "a") as file:
        file.write(f"{number}\\n")
    assert number != 7 or (HERE / "mended").exists()
"""


def test_each_test_runs_once_and_a_later_run_has_what_did_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, folder = tmp_path / "test_some.py", str(tmp_path / "results")
    file.write_text(TESTS)
    assert shared.main([folder, str(file), "--processes", "2"]) == 1
    out = capsys.readouterr().out
    assert "1 failed, 29 passed" in out and "test_it[7]: failed" in out
    assert sorted(map(int, (tmp_path / "ran").read_text().split())) == list(range(30))
    sessions = (tmp_path / "sessions").read_text().split()
    assert len(sessions) == len(set(sessions)) <= 2
    (tmp_path / "mended").touch()
    (tmp_path / "ran").unlink()
    assert shared.main([folder, str(file), "--processes", "1"]) == 0, capsys.readouterr().out
    assert (tmp_path / "ran").read_text() == "7\n"


def test_a_run_that_is_ended_says_what_it_has(tmp_path: Path):
    file = tmp_path / "test_some.py"
    file.write_text("import time\ndef test_one(): pass\ndef test_two(): time.sleep(600)\n")
    command = [sys.executable, "-m", "tests.gpu.shared", str(tmp_path / "results"), str(file), "--processes", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 100
    while not any("test_one" in each.read_text() for each in (tmp_path / "results").glob("results-*.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.1)
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert "ended before its time was over" in out and out.endswith("1 passed\n") and process.returncode == 1


def test_results_of_other_sources_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "sources").write_text("another")
    with pytest.raises(ValueError, match="results of other sources"):
        shared.begin_run(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        shared.main([str(tmp_path), "tests/each.py", "--processes", "1"])
    assert "FOLDER: got" in capsys.readouterr().err
