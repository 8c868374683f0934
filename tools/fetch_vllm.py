"""Fetches vLLM's Python, without its extensions and what it needs, for the interface tests of the plugin.

    python tools/fetch_vllm.py [VERSION ...]      # default: the versions that `make test` tests the plugin with

It goes to .venv/vllm/VERSION. Where it cannot be had (no network) a line says so, and those tests are skipped.
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

FOLDER = Path(__file__).resolve().parent.parent / ".venv" / "vllm"
REFERENCE = "0.33.0"
TESTED = (REFERENCE, "0.26.0")
"""Versions that `make test` has. The second goes when nothing is measured on it any more."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 17)] + ["manylinux2014_x86_64"]


def fetch(version: str) -> Path:
    """The folder that holds a version's Python; OSError or subprocess.CalledProcessError if it cannot be had."""
    folder = FOLDER / version
    if (folder / "vllm" / "__init__.py").is_file():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        platforms = [option for name in PLATFORMS for option in ("--platform", name)]
        command = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--abi", "abi3"]
        subprocess.run([*command, *platforms, "-d", scratch, f"vllm=={version}"], check=True, timeout=600)
        wheel = next(Path(scratch).glob("vllm-*.whl"))
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py") and name.startswith("vllm/")]
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
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=[*TESTED])
    versions = parser.parse_args(arguments).versions
    if os.environ.get("OFFLINE"):
        return 0
    for version in versions:
        try:
            fetch(version)
        except (OSError, StopIteration, subprocess.SubprocessError) as error:
            print(f"vllm {version}: not fetched ({error}); the plugin's interface tests are skipped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
