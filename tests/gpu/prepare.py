"""Compiles what GPU tests and benchmarks run and no bundle holds: `python -m tests.gpu.prepare`, without a GPU.

Compiled kernels go to the disk cache (CUTE_KERNELS_CACHE_DIR), from which the tests load them. Bundles hold the shipped
kernels: `python -m cute_kernels aot build`. They are for the GPU that is here, without one for an H200
or the one that CUTE_KERNELS_AHEAD_GPU names, as torch does: "NVIDIA H100 80GB HBM3".

For a machine with another CPU, whose cache would compile them anew, ``-o DIR`` makes one bundle of all of them and of
the shipped ones; CUTE_KERNELS_AOT_DIR names it there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import linear as linear_bench
from bench import mla as mla_bench
from cute_kernels.families import shipped_specs
from cute_kernels.runtime import aot_build, default_cache
from cute_kernels.runtime.cache import Progress
from tests.gpu.specs import ARCH, by_module


def tell(done: Progress) -> None:
    print(f"[{done.done}/{done.total}] {done.spec}  {done.source} {done.seconds:.1f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="make a bundle")
    output: Path | None = parser.parse_args(arguments).output
    shipped = set(shipped_specs())
    layers = linear_bench.specs(formats=linear_bench.FORMATS + linear_bench.OTHER_FORMATS)
    needed = [*(spec for specs in by_module().values() for spec in specs()), *layers, *mla_bench.specs()]
    if output is not None:
        aot_build.build(dict.fromkeys([*shipped, *needed]), ARCH, output, cache=default_cache(), progress=tell)
        return 0
    default_cache().artifacts(dict.fromkeys(spec for spec in needed if spec not in shipped), ARCH, progress=tell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
