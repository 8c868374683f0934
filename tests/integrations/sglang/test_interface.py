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
from unittest import mock

import pytest

from cute_kernels.integrations.sglang import doctor, plugin
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
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_KERNELS_SGLANG")}
    command = [sys.executable, "-m", "tests.integrations.sglang.interface", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_interface(name: str):
    found = outcomes()
    assert found[name] == "ok", found[name]


def test_the_doctor_says_what_would_be_served_and_what_keeps_it():
    def said(version: str | None = VERSION, **environment: str) -> str:
        with pytest.MonkeyPatch.context() as patched:
            for name in ("CUTE_KERNELS_SGLANG", "CUTE_KERNELS_SGLANG_KV_FORMAT", "SGLANG_PLUGINS"):
                patched.delenv(name, raising=False)
            for name, value in environment.items():
                patched.setenv(name, value)
            with mock.patch.object(doctor, "installed", lambda: version):
                found = doctor.examine()
        return f"{found.status}: {found.detail}"

    assert said(None) == "ok: not installed"
    assert "limited: 0.5.24 is installed, nothing is replaced" in said("0.5.24")
    everything = ", ".join(seam.what for seam in plugin.SEAMS)
    assert said().startswith(f"ok: {VERSION}, served: {everything}; CUTE_KERNELS_SGLANG=0")
    assert "with pools in int4_g4" in said(CUTE_KERNELS_SGLANG_KV_FORMAT="int4_g4")
    assert "limited: CUTE_KERNELS_SGLANG_KV_FORMAT: got 'int5'" in said(CUTE_KERNELS_SGLANG_KV_FORMAT="int5")
    assert "ok" in said(SGLANG_PLUGINS="other, cute_kernels") and "served" in said(SGLANG_PLUGINS="")
    assert "limited: SGLANG_PLUGINS does not name cute_kernels" in said(SGLANG_PLUGINS="other")
    assert "ok" in said(CUTE_KERNELS_SGLANG="0") and "nothing is replaced" in said(CUTE_KERNELS_SGLANG="0")
    assert "limited" in said(CUTE_KERNELS_SGLANG="linear") and "got 'linear'" in said(CUTE_KERNELS_SGLANG="linear")


def test_versions_that_are_tested_are_supported():
    assert all(interface_of(version) for version in fetch_engine.TESTED["sglang"])
    assert fetch_engine.TESTED["sglang"][0] == VERSION
