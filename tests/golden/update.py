"""Measures every shipped kernel and rewrites the files of reviewed resources: `python -m tests.golden.update`.

Then the test files that compile kernels of their own run in full (`python -m tests.golden.update passed`: they alone).
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cute_kernels import families
from cute_kernels.__main__ import show_progress
from cute_kernels.runtime import default_cache
from tests import golden


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "passed"], default="all", help="passed: only the tests")
    if parser.parse_args(arguments).what == "all":
        update_kernels()
    update_passed()
    return 0


def update_kernels() -> None:
    specs = families.shipped_specs()
    measured = golden.measure(specs, default_cache(), show_progress)
    before = golden.read()["kernels"] if golden.PATH.exists() else {}
    for symbol in sorted(before.keys() | measured.keys()):
        if symbol not in measured:
            print(f"- {symbol}")
        elif symbol not in before:
            print(f"+ {symbol}")
        else:
            for line in golden.differences(before[symbol], measured[symbol]):
                print(f"~ {symbol}: {line}")
    golden.write(measured, golden.known_sources(specs))
    update_portable()
    print(f"{golden.PATH}: {len(measured)} configurations; review the diff before committing it")


def update_portable() -> None:
    measured = {
        arch: golden.measure(golden.portable_specs(), default_cache(), show_progress, arch)
        for arch in golden.PORTABLE_ARCHS
    }
    golden.write_portable(measured)


def files_that_compile(tests: Path) -> list[Path]:
    """The files of tests that ask which kernels are worth compiling, or import a helper that does."""
    texts = {path: path.read_text() for path in sorted(tests.glob("*/*.py")) if path.parent.name != "golden"}
    asking = {path for path, text in texts.items() if "golden.worth_compiling(" in text}
    imports = [f"from {module_of(path, tests)} import" for path in asking if not path.name.startswith("test_")]
    found = {path for path, text in texts.items() if path in asking or any(line in text for line in imports)}
    return sorted(path for path in found if path.name.startswith("test_"))


def module_of(path: Path, tests: Path) -> str:
    return ".".join(path.relative_to(tests.parent).with_suffix("").parts)


def update_passed() -> None:
    """Runs the test files that compile kernels of their own, in full, and writes down that they have passed."""
    tests = Path(__file__).parents[1]
    files = files_that_compile(tests)
    environment = {**os.environ, golden.ALL: "1"}
    if subprocess.run([sys.executable, "-m", "pytest", "-q", *files], env=environment, check=False).returncode:
        raise SystemExit(f"{golden.PASSED_PATH} is as it was: not all tests of {len(files)} files have passed")
    for path in files:
        importlib.import_module(module_of(path, tests))
    golden.write_passed(golden.asked)
    print(f"{golden.PASSED_PATH}: {len(files)} files of tests have passed in full")


if __name__ == "__main__":
    sys.exit(main())
