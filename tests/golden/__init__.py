"""What every compiled kernel must keep, and which kernels tests compile.

Tests compile a sample, which follows from the digests of the kernels' sources: every process takes the same, and a
change of sources takes others. `GOLDEN_ALL=1` compiles all. `rules` says what a kernel must keep, `compare` shows how
the machine code of all kernels differs from another revision's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cute_kernels import families
from cute_kernels.runtime import KernelCache, KernelSpec, native
from cute_kernels.runtime.artifact import Artifact
from cute_kernels.runtime.cache import ProgressCallback
from cute_kernels.runtime.store import source_digest
from tools.resources import KernelResources, resource_report, short_name

ARCH = "sm_90a"
SAMPLED = 32  # of a test file's kernels one in so many
SHIPPED_SAMPLE = 4  # of all that ship, beside those that the tests of a family compile
ALL = "GOLDEN_ALL"  # set: tests compile every kernel

ConfigT = TypeVar("ConfigT", bound=Hashable)

Entry = list[dict[str, Any]]
"""The kernels of one spec in launch order, each with its resources."""


def inventory() -> list[tuple[KernelSpec, str]]:
    """Every kernel that is compared, with its architecture: what ships."""
    return [(spec, ARCH) for spec in families.shipped_specs()]


def artifacts(
    specs: Iterable[KernelSpec], cache: KernelCache, progress: ProgressCallback | None = None, arch: str = ARCH
) -> list[Artifact]:
    """Compiles `specs` (what the cache lacks) in worker processes: one for each core that is this pytest process's own.

    A worker takes as long to start as a kernel to compile, and each of pytest's processes starts its own ones. With
    `GOLDEN_ALL` there is one for each core, since the last file alone has hundreds of kernels.
    """
    processes = 1 if os.environ.get(ALL) else int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    jobs = None if processes == 1 else max(len(os.sched_getaffinity(0)) // processes, 1)
    return cache.artifacts(specs, arch, jobs, progress)


def measure(
    specs: Iterable[KernelSpec], cache: KernelCache, progress: ProgressCallback | None = None, arch: str = ARCH
) -> dict[str, Entry]:
    """Compiles `specs` (what the cache lacks, in worker processes) and reads their resources, by symbol."""
    specs = list(specs)
    compiled = artifacts(specs, cache, progress, arch)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # the work is in the disassembler's processes
        reports = list(pool.map(resource_report, compiled))
    return {spec.symbol: [entry_of(item) for item in report] for spec, report in zip(specs, reports, strict=True)}


def sample(specs: Sequence[KernelSpec], count: int) -> list[KernelSpec]:
    """So many of ``specs``, or all of them with `GOLDEN_ALL`; none where there is no compiler."""
    if native.dsl_version() is None:
        return []
    return list(specs) if os.environ.get(ALL) else sorted(specs, key=_draw)[:count]


def worth_compiling(configs: Iterable[ConfigT], spec_of: Callable[[ConfigT], KernelSpec]) -> list[ConfigT]:
    """Those of ``configs`` that tests compile: one in SAMPLED, at least one."""
    configs = list(configs)
    if native.dsl_version() is None or os.environ.get(ALL):
        return configs
    drawn = {config: _draw(spec_of(config)) for config in configs}
    return [config for config in configs if drawn[config] % SAMPLED == 0] or sorted(configs, key=drawn.__getitem__)[:1]


def _draw(spec: KernelSpec) -> int:
    """A number that follows from a kernel's sources, so that every process draws the same."""
    name = f"{spec.symbol} {source_digest(spec)}"
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def entry_of(resources: KernelResources) -> dict[str, Any]:
    """A kernel's resources, for people and for comparisons."""
    # The mangled name carries every argument's type: too long to review, and told by other fields.
    return {**resources.as_dict(), "kernel": short_name(resources.kernel)}


def differences(old: Entry, new: Entry) -> list[str]:
    """What differs, one line each, such as "decode: registers 168 -> 176 (+8)"; empty if nothing does."""
    names = [[item["kernel"] for item in entry] for entry in (old, new)]
    if names[0] != names[1]:
        return [f"kernels {names[0]} -> {names[1]}"]
    lines = []
    for one, other in zip(old, new, strict=True):
        before, after = _flat(one), _flat(other)
        for name in sorted(before.keys() | after.keys()):
            # An opcode that does not occur is not listed.
            a, b = (values.get(name, 0) for values in (before, after))
            if a != b:
                change = f" ({b - a:+d})" if isinstance(a, int) and isinstance(b, int) else ""
                lines.append(f"{one['kernel']}: {name} {a} -> {b}{change}")
    return lines


def _flat(item: dict[str, Any]) -> dict[str, Any]:
    values = {name: value for name, value in item.items() if name != "opcodes"}
    return values | item["opcodes"]
