"""Executes notebooks in the repository's root and fails where a cell fails: `python tools/run_notebook.py FILE...`."""

from __future__ import annotations

import os
import sys
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


def main(paths: list[str]) -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for path in paths:
        try:
            execute(Path(path))
        except CellExecutionError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
