"""Fetches the Python of vLLM and SGLang, without extensions and requirements, for the plug-ins' interface tests.

    python tools/fetch_engine.py [ENGINE==VERSION ...]      # default: the versions that `make test` tests them with

It goes to .venv/ENGINE/VERSION. Where it cannot be had (no network) a line says so, and those tests are skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv"
TESTED = {
    "vllm": ("0.33.0", "0.26.0"),
    "sglang": ("0.5.23",),
}
"""Versions that `make test` has, the reference first. vLLM's second goes when nothing is measured on it any more."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 17)] + ["manylinux2014_x86_64"]


def folder_of(engine: str, version: str) -> Path:
    """Where a version's Python is, or would be."""
    return ENVIRONMENT / engine / version


def is_there(engine: str, folder: Path) -> bool:
    """Whether a folder holds an engine's Python."""
    return (folder / engine / "__init__.py").is_file()


def fetch(engine: str, version: str) -> Path:
    """The folder that holds a version's Python; OSError or subprocess.CalledProcessError if it cannot be had."""
    folder = folder_of(engine, version)
    if is_there(engine, folder):
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        platforms = [option for name in PLATFORMS for option in ("--platform", name)]
        command = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--abi", "abi3"]
        command += ["--abi", "cp312"]  # SGLang has a wheel for each Python
        subprocess.run([*command, *platforms, "-d", scratch, f"{engine}=={version}"], check=True, timeout=600)
        wheel = next(Path(scratch).glob(f"{engine}-*.whl"))
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") and name.startswith(f"{engine}/")]
            archive.extractall(unpacked, names)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Copied by another process at the same time: whichever comes first stays.
        subprocess.run(["cp", "-r", unpacked, f"{folder}.{os.getpid()}"], check=True)
        try:
            os.rename(f"{folder}.{os.getpid()}", folder)
        except OSError:
            subprocess.run(["rm", "-r", f"{folder}.{os.getpid()}"], check=True)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "engines", nargs="*", metavar="ENGINE==VERSION", help="default: those that plug-ins are tested with"
    )
    engines = parser.parse_args(arguments).engines
    engines = engines or [f"{engine}=={version}" for engine, versions in TESTED.items() for version in versions]
    if os.environ.get("OFFLINE"):
        return 0
    for asked in engines:
        engine, _, version = asked.partition("==")
        try:
            fetch(engine, version)
        except (OSError, StopIteration, subprocess.SubprocessError) as error:
            print(f"{asked}: not fetched ({error}); the plug-in's interface tests are skipped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
