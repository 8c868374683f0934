"""What the package asks for, and where its parts are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.runtime import native
from cute_kernels.runtime.artifact import compile_artifact
from cute_kernels.runtime.native import CompilerMissingError
from tests.runtime.tiny import tiny_specs

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_engines_that_pin_their_own_compiler_can_be_installed_beside_the_package(project: dict[str, Any]):
    assert not [need for need in project["dependencies"] if need.startswith(native.DSL_DISTRIBUTION)]
    # vLLM 0.24 to 0.33 pin apache-tvm-ffi 0.1.9 to 0.1.11.
    assert "apache-tvm-ffi>=0.1.9,<0.2" in project["dependencies"]


def test_the_compiler_extra_is_what_the_package_compiles_with(project: dict[str, Any]):
    pinned = [f"{native.DSL_DISTRIBUTION}[cu13]=={native.COMPILER_VERSION}"]
    assert project["optional-dependencies"]["compiler"] == pinned
    assert set(pinned) <= set(project["optional-dependencies"]["dev"])


def test_the_plugins_are_entry_points(project: dict[str, Any]):
    assert project["entry-points"]["sglang.srt.plugins"] == {
        "cute_kernels": "cute_kernels.integrations.sglang:register"
    }
    assert project["entry-points"]["vllm.general_plugins"] == {
        "cute_kernels": "cute_kernels.integrations.vllm:register"
    }


def test_a_compiler_that_another_package_brings_compiles_nothing():
    words = r"installed is nvidia-cutlass-dsl 4\.6\.0, .* build a bundle"
    with native.having(dsl_version=lambda: "4.6.0"), pytest.raises(CompilerMissingError, match=words):
        assert native.compiler_version() is None
        compile_artifact(tiny_specs(1)[0], "sm_90a")


def test_an_environment_that_borrows_packages_hides_none_by_what_python_bundles(tmp_path: Path):
    """Python 3.10 and 3.11 put an old setuptools into each new environment."""
    place = f"setup_env.ENV = __import__('pathlib').Path({str(tmp_path / 'env')!r})"
    command = f"from tools import setup_env; {place}; setup_env.create_environment(system_site_packages=True)"
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True)
    own = {path.name.partition("-")[0] for path in (tmp_path / "env").glob("lib/python3*/site-packages/*.dist-info")}
    assert own <= {"pip"}


def test_what_wheels_are_built_with_is_asked_for_before_anything_is_done(tmp_path: Path):
    (tmp_path / "setuptools-65.5.0.dist-info").mkdir()
    (tmp_path / "setuptools-65.5.0.dist-info/METADATA").write_text("Name: setuptools\nVersion: 65.5.0\n")
    for program in ("dist", "bundle_wheel"):
        run = subprocess.run(
            [sys.executable, "-c", f"from tools import {program}; {program}.main([])"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 1 and not run.stdout
        assert "setuptools: got 65.5.0, want 77 or newer" in run.stderr.splitlines()[-1]
