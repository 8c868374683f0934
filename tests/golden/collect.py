"""Traces or compiles a source tree's shipped kernels, and writes what came out as JSON: run by `compare`.

`python collect.py REQUEST` with the request's tree first on PYTHONPATH and as the working directory. It is run by path,
so that the same code asks two revisions; it uses of them only what is as old as the comparison. The request is a JSON
object: "tree" and "output" (paths), "families" (all if empty), "only" (a regular expression of symbols), "what" ("ir",
"objects" or "sources", for which nothing is compiled). What is written: a list of [symbol, architecture, digest of the
IR, folder of the object or digest of the sources].
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import cute_kernels
from cute_kernels.runtime import KernelSpec, default_cache
from cute_kernels.runtime.cache import Progress
from cute_kernels.runtime.store import key_of

MEMOS = "compared"  # a folder of the kernel cache: what is known of each program's kernels
Wanted = list[tuple[KernelSpec, str]]


def inventory() -> Wanted:
    """What the tree ships, with the architecture of each: as `tests.golden.inventory` of the tree has it."""
    import tests.golden as golden  # of the tree, not of this file

    return golden.inventory()


def memo_of(spec: KernelSpec, arch: str, kind: str) -> Path:
    """The file that remembers something about what a kernel's key compiles to, wherever its spec lies."""
    key = json.loads(key_of(spec, arch).content) | {"class": type(spec).__qualname__}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return default_cache().store.root / MEMOS / f"{digest}.{kind}"


def remember(memo: Path, text: str) -> None:
    memo.parent.mkdir(parents=True, exist_ok=True)
    scratch = memo.with_suffix(f".{os.getpid()}")
    scratch.write_text(text)
    scratch.rename(memo)


def recall(memo: Path) -> str | None:
    return memo.read_text() if memo.exists() else None


def entry_of(spec: KernelSpec, arch: str) -> Path | None:
    """The kernel cache's folder of what this program compiles to; None if it has to be compiled."""
    folder = default_cache().store.folder(key_of(spec, arch))
    if not (folder / "entry.json").exists():
        folder = Path(recall(memo_of(spec, arch, "folder")) or folder)
    return folder if (folder / "entry.json").exists() else None


def compile_all(wanted: Wanted) -> list[str]:
    """The folder of each kernel's object, compiled where none is known."""
    missing = [(spec, arch) for spec, arch in wanted if entry_of(spec, arch) is None]
    print(f"  {len(wanted)} kernels, {len(missing)} to compile", flush=True)
    for arch in dict.fromkeys(arch for _, arch in missing):
        default_cache().artifacts([spec for spec, other in missing if other == arch], arch, progress=show)
    folders = []
    for spec, arch in wanted:
        folder = entry_of(spec, arch)
        if folder is None:
            raise SystemExit(f"{spec} for {arch}: the kernel cache {default_cache().store.root} does not keep it")
        remember(memo_of(spec, arch, "folder"), str(folder))
        folders.append(str(folder))
    return folders


def trace_all(wanted: Wanted) -> list[str]:
    """The digest of each kernel's IR, its program run where none is known."""
    missing = [(spec, arch) for spec, arch in wanted if recall(memo_of(spec, arch, "ir")) is None]
    print(f"  {len(wanted)} kernels, {len(missing)} to trace", flush=True)
    if missing:
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
            for done, (item, digest) in enumerate(zip(missing, pool.map(trace, missing), strict=True), 1):
                remember(memo_of(*item, "ir"), digest)
                if done % 50 == 0 or done == len(missing):
                    print(f"  {done}/{len(missing)} traced", flush=True)
    return [recall(memo_of(*item, "ir")) or "" for item in wanted]


class _Traced(Exception):
    """Carries a kernel's IR out of the DSL, before the compiler runs."""


def trace(item: tuple[KernelSpec, str]) -> str:
    """Digest of the IR that a kernel's program makes, without the names of its functions."""
    from cutlass.base_dsl import dsl

    def stop(self: Any, module: Any, *arguments: Any, **options: Any) -> Any:
        raise _Traced(str(module))

    dsl.BaseDSL.compile_and_cache = stop  # of this worker process, which does nothing else
    spec, arch = item
    try:
        spec.compile(arch)
    except _Traced as traced:
        return hashlib.sha256(without_names(str(traced)).encode()).hexdigest()
    raise SystemExit(f"{spec} for {arch}: the DSL compiled it without passing its IR on")


def without_names(ir: str) -> str:
    """IR with its functions numbered in the order they are first named; they are named after classes and modules."""
    numbers: dict[str, str] = {}
    return re.sub(r"@\"?(?:kernel_)?cutlass_[\w$.]*", lambda name: numbers.setdefault(name[0], f"@{len(numbers)}"), ir)


def digests(wanted: Wanted) -> list[str]:
    """The digest of each kernel's sources, and those of the definitions that they are: "DIGEST NAME:DIGEST ..."."""
    try:
        from cute_kernels.runtime.sources import reached
    except ImportError:
        raise SystemExit("this tree's kernels have no digests by definition, want a later revision") from None
    found = [reached(spec) for spec, _ in wanted]
    return [
        " ".join([each.digest, *sorted(f"{name}:{digest[:16]}" for name, digest in getattr(each, "texts", ()))])
        for each in found
    ]


def show(progress: Progress) -> None:
    if progress.done % 20 == 0 or progress.done == progress.total:
        print(f"  {progress.done}/{progress.total} compiled, last {progress.spec}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", type=json.loads, metavar="REQUEST", help="a JSON object")
    request: dict[str, Any] = parser.parse_args(arguments).request
    found = Path(cute_kernels.__file__).resolve().parent.parent
    if found != Path(request["tree"]).resolve():
        raise SystemExit(f"cute_kernels was imported from {found}, not from {request['tree']}")
    families, only = set(request["families"]), re.compile(request["only"])
    wanted = [(spec, arch) for spec, arch in inventory() if not families or spec.family in families]
    wanted = [(spec, arch) for spec, arch in wanted if only.search(spec.symbol)]
    if not wanted:
        raise SystemExit(f"no shipped kernel is of {sorted(families) or 'any family'} and has {request['only']!r}")
    values = {"ir": trace_all, "objects": compile_all, "sources": digests}[request["what"]](wanted)
    records = [[spec.symbol, arch, value] for (spec, arch), value in zip(wanted, values, strict=True)]
    Path(request["output"]).write_text(json.dumps(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
