from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cute_kernels.runtime import KernelCache
from tests.runtime.tiny import tiny_specs

ROOT = Path(__file__).resolve().parents[2]
ARCH = "sm_90a"


@pytest.fixture(scope="session")
def warm_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that holds tiny_specs(2), compiled by worker processes."""
    directory = tmp_path_factory.mktemp("warm_cache")
    KernelCache(directory).artifacts(tiny_specs(2), ARCH)
    return directory


@pytest.fixture
def warm_cache(warm_directory: Path) -> KernelCache:
    """A process's first look at that directory: nothing in memory yet."""
    return KernelCache(warm_directory)


@pytest.fixture
def python() -> Callable[..., subprocess.Popen[str]]:
    """Starts a fresh interpreter on a program, with the repository and `path` importable."""

    def start(program: str, *arguments: str, path: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        paths = [str(ROOT), *([str(path)] if path else [])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    return start
