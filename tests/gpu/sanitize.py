"""Small calls for compute-sanitizer; all inputs are initialised, so initcheck reports only what the kernels leave out.

    python -m tests.gpu.sanitize build [CASE ...] compiles what cases need (no GPU); keep CUTE_KERNELS_CACHE_DIR
    compute-sanitizer --tool memcheck|racecheck|synccheck|initcheck python -m tests.gpu.sanitize [CASE ...]
    python -m tests.gpu.sanitize list

Results are compared with a reference: a tool that slows the kernels down shows races as wrong numbers, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from cute_kernels.runtime import KernelCache, arch_of, default_cache, load_many
from tests.gpu.sanitize_cases import CASES
from tests.gpu.specs import ARCH


def missing(names: Iterable[str], cache: KernelCache) -> list[str]:
    """Those of these cases of whose kernels one is in no bundle and not on disk."""
    return [name for name in names if not all(cache.has(spec, ARCH) for spec in CASES[name].specs())]


def build(names: Iterable[str]) -> None:
    """Compiles the kernels of cases."""
    specs = {spec: None for name in names for spec in CASES[name].specs()}
    load_many(list(specs), ARCH, progress=lambda done: print(done.spec, done.source))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="list | [build] CASE")
    words: list[str] = parser.parse_args(arguments).words
    if words == ["list"]:
        print("\n".join(CASES))
        return 0
    builds = words[:1] == ["build"]
    chosen = words[1:] if builds else words
    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        print(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    names = chosen or list(CASES)
    if builds:
        build(names)
        return 0
    arch_of()  # says what is supported if this GPU is not
    absent = missing(names, default_cache())
    if absent:
        print(f"not compiled: {', '.join(absent)}; run `python -m tests.gpu.sanitize build` first", file=sys.stderr)
        return 2
    for name in names:
        print(f"{name}: right, {CASES[name].run()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
