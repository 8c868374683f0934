"""The plug-in fits SGLang: its Python, imported without a GPU and without its extensions.

`interface` has the checks.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.integrations.sglang.versions import interface_of
from tests.integrations.sglang.checks import CHECKS
from tests.integrations.sglang.interface import VERSION
from tools import fetch_engine

ROOT = Path(__file__).resolve().parents[3]


@functools.cache
def outcomes() -> dict[str, str]:
    """Of each check."""
    folder = fetch_engine.folder_of("sglang", VERSION)
    if not fetch_engine.is_there("sglang", folder):
        pytest.skip(f"SGLang's Python is not in {folder}: python tools/fetch_engine.py")
    environment = {name: value for name, value in os.environ.items() if name != "CUTE_KERNELS_SGLANG"}
    command = [sys.executable, "-m", "tests.integrations.sglang.interface", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_interface(name: str):
    found = outcomes()
    assert found[name] == "ok", found[name]


def test_versions_that_are_tested_are_supported():
    assert all(interface_of(version) for version in fetch_engine.TESTED["sglang"])
    assert fetch_engine.TESTED["sglang"][0] == VERSION
