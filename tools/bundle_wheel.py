"""Builds the wheel of compiled kernels: `python tools/bundle_wheel.py [--only PATTERN ...] [-o DIRECTORY]`.

`pip install cute-kernels-sm90a` beside cute-kernels makes kernels load without a compiler, also beside engines that pin
another version of it. The wheel holds this project's kernels alone. NVIDIA's runtime library, which they call, is found
in the nvidia-cutlass-dsl that is installed: its licence (section 1.1 d) lets others distribute its Python files, and no
binary of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cute_kernels.__main__ import chosen_specs, show_progress  # noqa: E402
from cute_kernels._version import __version__  # noqa: E402
from cute_kernels.integrations.vllm import engine_kernels  # noqa: E402
from cute_kernels.runtime import KernelCache, aot_build  # noqa: E402
from cute_kernels.runtime.cache import default_cache  # noqa: E402
from cute_kernels.runtime.installed import PACKAGES  # noqa: E402
from cute_kernels.runtime.spec import KernelSpec  # noqa: E402
from tools import backend  # noqa: E402

ARCH = "sm_90a"
PLATFORM = "manylinux2014"  # the library has no symbol of libc that is bound to a version

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "Compiled kernels of cute-kernels for NVIDIA Hopper ({arch}), for a host CPU of at least {host}"
license = "Apache-2.0"
requires-python = ">=3.10"
dependencies = ["cute-kernels=={version}"]

[tool.setuptools]
packages = ["{package}"]

[tool.setuptools.package-data]
"*" = ["*.so", "*.json"]
"""


def build(specs: Iterable[KernelSpec], output: Path, cache: KernelCache) -> Path:
    """The wheel, in ``output``; raises what `aot_build.build` does, and CalledProcessError."""
    package = PACKAGES[ARCH]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / package
        manifest = aot_build.build(specs, ARCH, folder, cache=cache, progress=show_progress)
        (folder / "__init__.py").write_text('"""Compiled kernels of cute-kernels, which finds them here."""\n')
        text = PROJECT.format(
            name=package.replace("_", "-"), package=package, version=__version__, arch=ARCH, host=manifest["host"]
        )
        (Path(scratch) / "pyproject.toml").write_text(text)
        machine = manifest["host"].partition("-v")[0]
        (Path(scratch) / "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = {PLATFORM}_{machine}\n")
        backend.build(Path(scratch), output, "--wheel")
    return next(output.glob(f"{package}-{__version__}-*.whl"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="PATTERN", help="shipped kernels that match, and no others")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", metavar="DIRECTORY")
    options = parser.parse_args(arguments)
    backend.need()
    specs = chosen_specs(options.only or ["*"])
    if not options.only:
        print("listing the kernels of common models: some minutes", flush=True)
        start = time.perf_counter()
        specs = list(dict.fromkeys([*specs, *engine_kernels.specs()]))
        print(f"{len(specs)} kernels, listed in {time.perf_counter() - start:.0f} s", flush=True)
    wheel = build(specs, options.output, default_cache())
    print(f"{wheel}: {len(specs)} kernels, {wheel.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
