"""The plugin fits vLLM: its Python, imported without a GPU and without its extensions; `interface` has the checks.

CUTE_KERNELS_VLLM_SOURCE names another folder than those of the versions that `tools/fetch_engine.py` fetches.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.integrations.vllm.versions import interface_of
from tests.integrations.vllm.interface import CHECKS, ONCE
from tools import fetch_engine

ROOT = Path(__file__).resolve().parents[3]
TESTED = fetch_engine.TESTED["vllm"]
REFERENCE = TESTED[0]
SOURCE = os.environ.get("CUTE_KERNELS_VLLM_SOURCE")
FOLDERS = {"given": Path(SOURCE)} if SOURCE else {each: fetch_engine.folder_of("vllm", each) for each in TESTED}


@functools.cache
def processes() -> dict[str, subprocess.Popen[str]]:
    """Of each version that is there, side by side."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "CUTE_KERNELS_VLLM"))
    }
    command = [sys.executable, "-m", "tests.integrations.vllm.interface"]
    return {
        version: subprocess.Popen(
            [*command, str(folder), *(["short"] if version in TESTED and version != REFERENCE else [])],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for version, folder in FOLDERS.items()
        if fetch_engine.is_there("vllm", folder)
    }


@functools.cache
def outcomes(version: str) -> dict[str, str]:
    """Of each check."""
    process = processes().get(version)
    if process is None:
        pytest.skip(f"vLLM's Python is not in {FOLDERS[version]}: python tools/fetch_engine.py")
    out, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("version", "name"),
    [(version, name) for version in FOLDERS for name in CHECKS if version in ("given", REFERENCE) or name not in ONCE],
)
def test_interface(version: str, name: str):
    found = outcomes(version)
    assert found[name] == "ok", found[name]


def test_versions_that_are_tested_are_supported():
    assert all(interface_of(version) for version in TESTED)
