"""Compiles what the GPU tests of this folder run and no bundle holds: `python -m tests.gpu.prepare`, without a GPU.

Compiled kernels go to the disk cache (CUTE_KERNELS_CACHE_DIR), from which the tests load them.
"""

from __future__ import annotations

import sys

from cute_kernels.attention.compile import DecodeSpec
from cute_kernels.runtime import default_cache
from tests.gpu import test_decode_features, test_decode_formats, test_linear

ARCH = "sm_90a"


def main() -> int:
    formats = [DecodeSpec(config) for case in test_decode_formats.CASES for config in case.configs()]
    specs = dict.fromkeys((*test_decode_features.specs(), *formats, *test_linear.specs()))
    default_cache().artifacts(
        specs, ARCH, progress=lambda p: print(f"[{p.done}/{p.total}] {p.spec}  {p.source} {p.seconds:.1f} s")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
