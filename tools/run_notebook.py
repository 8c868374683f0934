"""Executes notebooks in the repository's root and fails where a cell fails: `python tools/run_notebook.py FILE...`.

As many at a time as there are cores; each runs in a kernel of its own anyway.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT_S = 300


def execute(path: Path) -> None:
    """Runs every cell in a fresh kernel; raises CellExecutionError with the cell's source and traceback."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3")
    client.execute(cwd=str(ROOT))


def failure_of(path: str) -> str | None:
    """What went wrong in a notebook, None if nothing did."""
    try:
        execute(Path(path))
    except CellExecutionError as error:
        return str(error)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", metavar="FILE")
    paths = parser.parse_args(arguments).paths
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each kernel: those that run beside it want the cores
    failures = 0
    with ProcessPoolExecutor(max(1, min(len(paths), len(os.sched_getaffinity(0))))) as pool:
        runs = {pool.submit(failure_of, path): path for path in paths}
        for run in as_completed(runs):
            failure = run.result()
            print(f"executed {runs[run]}" if failure is None else f"{runs[run]}: {failure}", flush=True)
            failures += failure is not None
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
