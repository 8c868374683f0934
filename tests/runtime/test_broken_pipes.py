"""Programs whose output nobody reads to its end, as `| head` does not, say nothing about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "bench" / "results" / "append.json"
COMMANDS = {
    "layouts": ["layouts", "list"],
    "cute_kernels": ["cute_kernels", "cache", "info"],
    "bench": ["bench", "table", str(RECORD)],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_program_ends_quietly_where_nobody_reads(command: list[str], tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    environment = os.environ | {"CUTE_KERNELS_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", *command], stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, env=environment, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
