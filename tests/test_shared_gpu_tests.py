"""Processes that share a list of tests run each once, with fixtures as in one process, and go on where a run ended."""

from __future__ import annotations

import subprocess
import sys
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


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.shared", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_each_test_runs_once_and_a_later_run_has_what_did_not_pass(tmp_path: Path):
    file, folder = tmp_path / "test_some.py", tmp_path / "results"
    file.write_text(TESTS)
    done = run(folder, str(file), "--processes", "2")
    assert done.returncode == 1, done.stderr
    assert "1 failed, 29 passed" in done.stdout and "test_it[7]: failed" in done.stdout
    assert sorted(map(int, (tmp_path / "ran").read_text().split())) == list(range(30))
    sessions = (tmp_path / "sessions").read_text().split()
    assert len(sessions) == len(set(sessions)) <= 2
    (tmp_path / "mended").touch()
    (tmp_path / "ran").unlink()
    done = run(folder, str(file), "--processes", "1")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "ran").read_text() == "7\n"


def test_results_of_other_sources_are_refused(tmp_path: Path):
    (tmp_path / "sources").write_text("another")
    with pytest.raises(ValueError, match="results of other sources"):
        shared.begin_run(tmp_path)
    done = run(tmp_path, "tests/each.py", "--processes", "1")
    assert done.returncode == 2 and "FOLDER: got" in done.stderr
