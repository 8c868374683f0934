"""Compiles what GPU tests and benchmarks run and no bundle holds: `python -m tests.gpu.prepare`, without a GPU.

Compiled kernels go to the disk cache (CUTE_KERNELS_CACHE_DIR), from which the tests load them. Bundles hold the shipped
kernels: `python -m cute_kernels aot build`. They are for the GPU that is here, without one for an H200
or the one that CUTE_KERNELS_AHEAD_GPU names, as torch does: "NVIDIA H100 80GB HBM3".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import linear as linear_bench
from bench import mla as mla_bench
from cute_kernels.families import shipped_specs
from cute_kernels.runtime import default_cache
from tests.gpu.specs import ARCH, by_module


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    shipped = set(shipped_specs())
    layers = linear_bench.specs(formats=linear_bench.FORMATS + linear_bench.OTHER_FORMATS)
    needed = [*(spec for specs in by_module().values() for spec in specs()), *layers, *mla_bench.specs()]
    wanted = dict.fromkeys(spec for spec in needed if spec not in shipped)
    default_cache().artifacts(
        wanted, ARCH, progress=lambda p: print(f"[{p.done}/{p.total}] {p.spec}  {p.source} {p.seconds:.1f} s")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
