"""What builds sdists and wheels: the environment's own `build` and setuptools, no copies fetched for the occasion."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_REQUIRES = r'^requires = \["setuptools>=(\d+)"\]$'
OLDEST_SETUPTOOLS = int(re.findall(_REQUIRES, (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0])
"""The first release that reads a licence as pyproject.toml gives it. Python 3.10 and 3.11 bring 65 and older."""


def need() -> None:
    """Raises SystemExit naming what is missing to build with, before anything has been done."""
    missing = []
    for name, oldest in (("build", 1), ("setuptools", OLDEST_SETUPTOOLS)):
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "none"
        if found == "none" or int(found.split(".")[0]) < oldest:
            missing.append(f"{name}: got {found}, want {oldest} or newer")
    if missing:
        raise SystemExit(f"{sys.executable}: {'; '.join(missing)}. `make setup` with a network installs them")


def build(source: Path, output: Path, *options: str) -> None:
    """Builds `source` into `output`; raises CalledProcessError."""
    command = [sys.executable, "-I", "-m", "build", "--no-isolation", *options, "--outdir", str(output), str(source)]
    subprocess.run(command, check=True)
