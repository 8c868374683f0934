"""The plugin fits vLLM: its Python, imported without a GPU and without its extensions; `interface` has the checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.vllm.interface import CHECKS
from tools.fetch_vllm import FOLDER, REFERENCE

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Of each check; CUTE_KERNELS_VLLM_SOURCE names another folder than that of the reference version."""
    folder = Path(os.environ.get("CUTE_KERNELS_VLLM_SOURCE", FOLDER / REFERENCE))
    if not (folder / "vllm" / "__init__.py").is_file():
        pytest.skip(f"vLLM's Python is not in {folder}: python tools/fetch_vllm.py")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "CUTE_KERNELS_VLLM"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.vllm.interface", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_interface(outcomes: dict[str, str], name: str):
    assert outcomes[name] == "ok", outcomes[name]
