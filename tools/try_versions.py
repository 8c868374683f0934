"""Runs tests under other versions of Python, torch and transformers: `python tools/try_versions.py TESTS...`.

`make versions` does it for the tests of `make quick`, with each row of `CASES` whose interpreter is on this machine. An
environment is made in a scratch folder, filled from pyproject.toml with the row's versions, used and removed: about
6 GB and ten minutes a row. What was seen goes to bench/results/versions.json, and from there into docs/install.md; a
row that fails is recorded as well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "bench" / "results" / "versions.json"
PAGE = ROOT / "docs" / "install.md"
MARKS = ("<!-- versions -->", "<!-- /versions -->")
# The rest of what the tests import; constraints.txt holds one version of each and would forbid the row's.
BESIDE = ("numpy", "pytest", "pytest-xdist", "hypothesis", "safetensors", "ruff", "pyright")


@dataclass(frozen=True)
class Case:
    """One row of the table of versions: exact releases, as pip names them."""

    python: str
    torch: str
    transformers: str
    numpy: str = ""  # empty: pip's choice

    @property
    def interpreter(self) -> str | None:
        """Path of a Python of this version that starts (a version manager's name for a missing one does not)."""
        found = shutil.which(f"python{self.python}")
        works = found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0
        return found if works else None

    def requirements(self) -> list[str]:
        numpy = f"numpy=={self.numpy}" if self.numpy else "numpy"
        exact = [f"torch=={self.torch}", f"transformers=={self.transformers}", numpy]
        return exact + [name for name in BESIDE if name != "numpy"]


# The ends of what pyproject.toml lets in, and one between. Python 3.10 has no newer transformers than 5.20.
CASES = (
    Case("3.10", "2.11.0", "5.0.0", numpy="1.26.4"),
    Case("3.12", "2.12.1", "5.17.0"),
    Case("3.13", "2.14.1", "5.23.0"),
)


def summary(text: str) -> dict[str, int]:
    """{"passed": n, "failed": n, "skipped": n} of pytest's closing line; `error` counts as failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    closing = next((line for line in reversed(text.splitlines()) if " in " in line and re.search(r"\d+ \w", line)), "")
    for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", closing):
        counts["failed" if word == "error" else word] += int(number)
    return counts


def run(case: Case, tests: list[str]) -> dict[str, object]:
    """Makes the environment of `case`, runs `tests` in it, and returns the row that is recorded."""
    with tempfile.TemporaryDirectory(prefix="versions-") as scratch:
        environment = Path(scratch) / "env"
        subprocess.run([str(case.interpreter), "-I", "-m", "venv", str(environment)], check=True)
        python = environment / "bin" / "python"
        install = [python, "-m", "pip", "install", "-q", "--no-cache-dir"]
        subprocess.run([*install, *case.requirements(), f"{ROOT}[compiler]"], check=True, cwd=scratch)
        # The checkout comes first on the path: what is tested is the tree, the installation brings its requirements.
        variables = os.environ | {"PYTHONPATH": str(ROOT), "CUTE_KERNELS_CACHE_DIR": str(Path(scratch) / "kernels")}
        # Of Python's distutils, which 3.12 no longer has, and setuptools' own, torch's compiler wants whichever was
        # imported first to stay.
        if case.python in ("3.10", "3.11"):
            variables["SETUPTOOLS_USE_DISTUTILS"] = "stdlib"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        print(done.stdout[-3000:], flush=True)
        counts = summary(done.stdout)
        installed = "import numpy; print(numpy.__version__)"
        found = subprocess.check_output([python, "-I", "-c", installed], text=True).strip()
        if done.returncode and not counts["failed"]:
            raise RuntimeError(
                f"pytest ended with {done.returncode} and said nothing of failures: {done.stderr[-2000:]}"
            )
    row: dict[str, object] = {**asdict(case), "numpy": found, **counts}
    return row | {"date": date.today().isoformat(), "commit": commit()}


def table(rows: list[dict[str, object]]) -> str:
    """The rows as a Markdown table."""
    columns = ("python", "torch", "transformers", "numpy", "passed", "failed", "skipped", "date")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def with_table(page: str, rows: list[dict[str, object]]) -> str:
    """`page` with the table between the marks."""
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return f"{before}{MARKS[0]}\n{table(rows)}\n{MARKS[1]}{after}"


def commit() -> str:
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="+", help="files of tests, as pytest takes them")
    parser.add_argument("--python", help="only the rows of this interpreter, 3.12 say")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if options.python in (None, case.python)]
    if not chosen:
        parser.error(f"--python {options.python}: the table has {', '.join(case.python for case in CASES)}")
    rows = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
    for case in chosen:
        if case.interpreter is None:
            print(f"python{case.python} is not on this machine: its row stays as it is", flush=True)
            continue
        print(f"== {case}", flush=True)
        row = run(case, options.tests)
        rows = [other for other in rows if other["python"] != case.python] + [row]
        rows.sort(key=lambda row: str(row["torch"]))
        RECORD.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        PAGE.write_text(with_table(PAGE.read_text(), rows))
        print(row, flush=True)
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
