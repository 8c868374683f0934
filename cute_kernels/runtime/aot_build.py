"""Builds ahead-of-time bundles, which :mod:`cute_kernels.runtime.aot` reads."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cute_kernels._version import __version__
from cute_kernels.runtime import native
from cute_kernels.runtime.aot import FORMAT, LIBRARY, MANIFEST, sha256_of
from cute_kernels.runtime.cache import KernelCache, ProgressCallback
from cute_kernels.runtime.elf import dynamic_symbols
from cute_kernels.runtime.sources import is_settled, question
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.store import source_digest

ERRORS = Path(__file__).with_name("errors_of_older_runtimes.c")
"""A C file that is linked into bundles if there is a C compiler. Bundles without this file need the DSL's runtime
library of version 4.8 or later."""


def build(
    specs: Iterable[KernelSpec],
    arch: str,
    out_dir: Path,
    *,
    cache: KernelCache,
    jobs: int | None = None,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Compiles `specs` for `arch` through `cache` and writes a bundle into `out_dir`. It replaces a bundle there.

    Needs the DSL and a linker, no GPU. Returns the manifest. Raises ValueError for an empty list or two specs with the
    same symbol, native.LinkerMissingError without a linker, workers.CompileError if a kernel does not compile, and
    OSError if out_dir cannot be written.
    """
    specs = list(dict.fromkeys(specs))
    _check_symbols(specs)
    if native.find_linker() is None:
        raise native.LinkerMissingError("building a bundle needs a linker: install cc or ld")
    out_dir.mkdir(parents=True, exist_ok=True)  # fails before anything is compiled, if it does
    artifacts = cache.artifacts(specs, arch, jobs, progress)
    with tempfile.TemporaryDirectory(prefix=".bundle-", dir=out_dir) as scratch:
        objects = [Path(scratch) / f"{artifact.symbol}.o" for artifact in artifacts]
        for path, artifact in zip(objects, artifacts, strict=True):
            path.write_bytes(artifact.object_code)
        library = Path(scratch) / LIBRARY
        errors = Path(scratch) / "errors.o"
        native.link([*objects, *([errors] if native.compile_c(ERRORS, errors) else [])], library)
        kernels = {
            spec.symbol: {
                "family": spec.family,
                "config": json.loads(spec.identity_json()),
                "sources": source_digest(spec),
                "question": question(spec) if is_settled(spec) else None,
                "launches": artifact.launches_json(),
            }
            for spec, artifact in zip(specs, artifacts, strict=True)
        }
        manifest = {
            "format": FORMAT,
            "arch": arch,
            "host": native.host_isa(),
            "toolkit": native.runtime_flavor(),
            "versions": {
                "cute-kernels": __version__,
                "nvidia-cutlass-dsl": native.dsl_version(),
                "apache-tvm-ffi": native.tvm_ffi_version(),
            },
            "wanted": sorted(dynamic_symbols(library).wanted),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "library": {"name": LIBRARY, "sha256": sha256_of(library), "bytes": library.stat().st_size},
            "kernels": kernels,
        }
        (Path(scratch) / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        for name in (LIBRARY, MANIFEST):
            (Path(scratch) / name).replace(out_dir / name)
    return manifest


def _check_symbols(specs: list[KernelSpec]) -> None:
    if not specs:
        raise ValueError("specs is empty: a bundle needs at least one kernel")
    owners: dict[str, KernelSpec] = {}
    for spec in specs:
        spec.check()
        other = owners.setdefault(spec.symbol, spec)
        if other is not spec:
            raise ValueError(f"two specs have the symbol {spec.symbol}: {other.config!r} and {spec.config!r}")
