"""What a recorded figure depends on: GPU, driver, library versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
_DISTRIBUTIONS = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "transformers", "numpy")


def environment(git: Callable[..., str] | None = None) -> dict[str, object]:
    """JSON-able description of this machine and this checkout.

    A machine that was sent the files alone, or with an older history, is told the commit by CUTE_KERNELS_COMMIT;
    whether they differ from it ("dirty") nobody can say there: None. git: what runs its commands, if not the program.
    """
    git = git or _git
    head = git("rev-parse", "HEAD")
    commit = os.environ.get("CUTE_KERNELS_COMMIT") or head
    changed = bool(git("status", "--porcelain", "--untracked-files=no")) if commit == head else None
    record: dict[str, object] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": changed,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in _DISTRIBUTIONS},
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        record["gpu"] = properties.name
        record["gpu_uuid"] = str(getattr(properties, "uuid", "")) or None
        record["num_sms"] = properties.multi_processor_count
        record["memory_bytes"] = properties.total_memory
        record["l2_bytes"] = getattr(properties, "L2_cache_size", None)
        record["cudnn"] = torch.backends.cudnn.version()
        record["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return record


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    return _run("git", "-C", str(ROOT), *arguments)


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
