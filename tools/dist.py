"""Builds the sdist and the wheel into dist/, and tries them: `python tools/dist.py`, the dry run of a release.

What git has of the packages is in the wheel, and all that it has is in the sdist. The wheel is then installed by
itself, and tests of the sdist run against it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import backend  # noqa: E402

DIST = ROOT / "dist"
PACKAGES = ("cute_kernels", "layouts")
NOT_SHIPPED = (".ci/", ".gitignore")  # of the repository, not of a release
TESTS = (
    "tests/test_package.py",
    "tests/test_public_api.py",
    "tests/attention/test_call.py",
    "tests/layouts/test_kv_int4.py",
)


def tracked() -> set[str]:
    """Files of the repository, as git names them."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if not name.startswith(NOT_SHIPPED)}


def build() -> tuple[Path, Path]:
    """(sdist, wheel), the wheel from the sdist."""
    shutil.rmtree(DIST, ignore_errors=True)
    backend.build(ROOT, DIST)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def missing(sdist: Path, wheel: Path) -> list[str]:
    """What the repository has and they have not."""
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        installed = set(archive.namelist())
    wanted = tracked()
    packaged = {name for name in wanted if name.startswith(tuple(f"{package}/" for package in PACKAGES))}
    return [f"sdist: {name}" for name in sorted(wanted - sources)] + [
        f"wheel: {name}" for name in sorted(packaged - installed)
    ]


def try_out(sdist: Path, wheel: Path) -> None:
    """Installs the wheel alone and runs tests of the sdist against it; raises CalledProcessError for a failure."""
    with tempfile.TemporaryDirectory() as scratch:
        site, tree = Path(scratch) / "site", Path(scratch) / "tree"
        command = [sys.executable, "-I", "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
        subprocess.run(command, check=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(tree, filter="data")
        (folder,) = tree.iterdir()
        for package in PACKAGES:  # or the tests would import these
            shutil.rmtree(folder / package)
        environment = os.environ | {"PYTHONPATH": str(site)}
        subprocess.run([str(site / "bin/cute-kernels"), "--version"], env=environment, check=True)
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
            cwd=folder,
            env=environment,
            check=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=str(__doc__).partition("\n")[0]).parse_args(arguments)
    backend.need()
    sdist, wheel = build()
    lacking = missing(sdist, wheel)
    for line in lacking:
        print(f"missing in the {line}", file=sys.stderr)
    if lacking:
        return 1
    try_out(sdist, wheel)
    print(f"{sdist.relative_to(ROOT)} and {wheel.relative_to(ROOT)} are complete")
    return 0


if __name__ == "__main__":
    sys.exit(main())
