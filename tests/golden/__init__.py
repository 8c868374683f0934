"""Reviewed resources of every shipped kernel, and how they are measured and compared.

`resources.json` beside this file is the reviewed truth: registers, stack, spills, shared memory and key instructions
of each kernel of each shipped configuration. A change in it is a change in the kernels and is looked at as such.
It also names the compiler, and the sources by their digest: what those compile to is known. So tests compile a sample
of the kernels whose sources are the same, and all others.
`portable.json` has the same of some portable kernels, by architecture.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cute_kernels import families
from cute_kernels.linear.portable.compile import PortableSpec
from cute_kernels.linear.portable.schedule import example_configs
from cute_kernels.runtime import KernelCache, KernelSpec, native
from cute_kernels.runtime.cache import ProgressCallback
from cute_kernels.runtime.resources import KernelResources, resource_report, short_name
from cute_kernels.runtime.sources import source_state

ARCH = "sm_90a"
PATH = Path(__file__).parent / "resources.json"
PORTABLE_ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100")
PORTABLE_PATH = Path(__file__).parent / "portable.json"
SAMPLED = 8
ALL = "GOLDEN_ALL"  # set: tests compile every kernel
COMMAND = "make golden (or: python -m tests.golden.update)"

Entry = list[dict[str, Any]]
"""The kernels of one spec in launch order, each with its resources."""


def inventory() -> list[tuple[KernelSpec, str]]:
    """Every kernel that is reviewed, with its architecture: what ships, and the examples of portable kernels."""
    shipped: list[tuple[KernelSpec, str]] = [(spec, ARCH) for spec in families.shipped_specs()]
    return shipped + [(spec, arch) for arch in PORTABLE_ARCHS for spec in portable_specs()]


def portable_specs() -> list[KernelSpec]:
    return [PortableSpec(config) for config in example_configs()]


def toolchain() -> str:
    return f"nvidia-cutlass-dsl {native.dsl_version()} ({native.runtime_flavor()})"


def measure(
    specs: Iterable[KernelSpec], cache: KernelCache, progress: ProgressCallback | None = None, arch: str = ARCH
) -> dict[str, Entry]:
    """Compiles `specs` (what the cache lacks, in worker processes) and reads their resources, by symbol.

    The longest kernels first, so that no worker is left with one of them when the others are done.
    """
    specs = sorted(specs, key=_reviewed_instructions(), reverse=True)
    artifacts = cache.artifacts(specs, arch, progress=progress)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # the work is in the disassembler's processes
        reports = list(pool.map(resource_report, artifacts))
    return {spec.symbol: [entry_of(item) for item in report] for spec, report in zip(specs, reports, strict=True)}


def _reviewed_instructions() -> Callable[[KernelSpec], float]:
    """How long a kernel was when it was last reviewed, in opcodes that are counted; those that are new are longest."""
    kernels = read()["kernels"] if PATH.exists() else {}
    sizes = {symbol: sum(sum(item["opcodes"].values()) for item in entry) for symbol, entry in kernels.items()}
    return lambda spec: sizes.get(spec.symbol, float("inf"))


def known_sources(specs: Iterable[KernelSpec]) -> list[str]:
    """The digests of the sources of `specs`, one for each set of sources."""
    return sorted({source_state(spec).digest for spec in specs})


def to_compile(specs: Iterable[KernelSpec], reviewed: dict[str, Any]) -> list[KernelSpec]:
    """Those of `specs` that tests measure: all that may differ from `reviewed`, and one in SAMPLED of the others.

    reviewed: the content of a file. Which are sampled follows from their sources, so every process takes the same.
    """
    known = (
        set(reviewed.get("sources", ())) if reviewed["toolchain"] == toolchain() and not os.environ.get(ALL) else set()
    )
    return [spec for spec in specs if _sampled(spec) or not _is_known(spec, reviewed, known)]


def _is_known(spec: KernelSpec, reviewed: dict[str, Any], known: set[str]) -> bool:
    return spec.symbol in reviewed["kernels"] and source_state(spec).digest in known


def _sampled(spec: KernelSpec) -> bool:
    name = f"{spec.symbol} {source_state(spec).digest}"
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % SAMPLED == 0


def write_portable(measured: dict[str, dict[str, Entry]], path: Path = PORTABLE_PATH) -> None:
    """measured: by architecture and symbol."""
    content = {"toolchain": toolchain(), "kernels": measured}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def entry_of(resources: KernelResources) -> dict[str, Any]:
    """A kernel's resources as the files have them."""
    # The mangled name carries every argument's type: too long to review, and told by other fields.
    return {**resources.as_dict(), "kernel": short_name(resources.kernel)}


def read(path: Path = PATH) -> dict[str, Any]:
    return json.loads(path.read_text())


def write(measured: dict[str, Entry], sources: list[str], path: Path = PATH) -> None:
    """sources: :func:`known_sources` of what was measured."""
    content = {"arch": ARCH, "toolchain": toolchain(), "sources": sources, "kernels": measured}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def differences(reviewed: Entry, measured: Entry) -> list[str]:
    """What differs, one line each, such as "decode: registers 168 -> 176 (+8)"; empty if nothing does."""
    names = [[item["kernel"] for item in entry] for entry in (reviewed, measured)]
    if names[0] != names[1]:
        return [f"kernels {names[0]} -> {names[1]}"]
    lines = []
    for old, new in zip(reviewed, measured, strict=True):
        before, after = _flat(old), _flat(new)
        for name in sorted(before.keys() | after.keys()):
            # An opcode that does not occur is not listed.
            a, b = (values.get(name, 0) for values in (before, after))
            if a != b:
                change = f" ({b - a:+d})" if isinstance(a, int) and isinstance(b, int) else ""
                lines.append(f"{old['kernel']}: {name} {a} -> {b}{change}")
    return lines


def _flat(item: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in item.items() if name != "opcodes"}
    return values | item["opcodes"]
