"""Reviewed resources of every shipped kernel, and how they are measured and compared.

`resources.json` beside this file is the reviewed truth: registers, stack, spills, shared memory and key instructions
of each kernel of each shipped configuration. A change in it is a change in the kernels and is looked at as such.
It also names the compiler, and the sources by their digest: what those compile to is known. So tests compile a sample
of the kernels whose sources are the same, and all others.
`portable.json` has the same of some portable kernels, by architecture.
`passed.json` names test files that compile kernels of their own, with the sources that they have passed with in full:
they compile a sample, too, until a source, the compiler or the file itself is another one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from cute_kernels import families
from cute_kernels.gemm.portable.compile import PortableSpec
from cute_kernels.gemm.portable.schedule import example_configs
from cute_kernels.runtime import KernelCache, KernelSpec, native
from cute_kernels.runtime.cache import ProgressCallback
from cute_kernels.runtime.resources import KernelResources, resource_report, short_name
from cute_kernels.runtime.sources import source_state

ARCH = "sm_90a"
PATH = Path(__file__).parent / "resources.json"
PORTABLE_ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100")
PORTABLE_PATH = Path(__file__).parent / "portable.json"
PASSED_PATH = Path(__file__).parent / "passed.json"
SAMPLED = 32
ALL = "GOLDEN_ALL"  # set: tests compile every kernel
COMMAND = "make golden (or: python -m tests.golden.update)"

ConfigT = TypeVar("ConfigT")
asked: dict[str, set[str]] = {}  # by test file, digests of the sources of what it may compile

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


def worth_compiling(
    configs: Iterable[ConfigT],
    spec_of: Callable[[ConfigT], KernelSpec],
    file: str,
    known: dict[str, Any] | None = None,
) -> list[ConfigT]:
    """Those of ``configs`` that the tests in ``file`` compile: all of which it has not passed with the same sources and
    compiler, and of the others one in SAMPLED, at least one.

    known: the content of `passed.json`, if not that of the file.
    """
    configs = list(configs)
    if native.dsl_version() is None:
        return configs
    path = Path(file)
    name = path.relative_to(Path(__file__).parents[2]).as_posix()
    digests = {config: source_state(spec_of(config)).digest for config in configs}
    asked.setdefault(name, set()).update(digests.values())
    passed = set() if os.environ.get(ALL) else _passed(name, file_digest(path), known)
    rest = [config for config in configs if digests[config] in passed]
    drawn = {config: _draw(spec_of(config)) for config in rest}
    sample = {config for config in rest if drawn[config] % SAMPLED == 0} or set(sorted(rest, key=drawn.__getitem__)[:1])
    return [config for config in configs if digests[config] not in passed or config in sample]


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _passed(name: str, digest: str, known: dict[str, Any] | None) -> set[str]:
    """The digests of sources that a test file, as it is now, has passed with."""
    known = known or _passed_files()
    entry = known["files"].get(name, {}) if known["toolchain"] == toolchain() else {}
    return set(entry["sources"]) if entry.get("tests") == digest else set()


@functools.cache
def _passed_files() -> dict[str, Any]:
    return read(PASSED_PATH) if PASSED_PATH.exists() else {"toolchain": None, "files": {}}


def write_passed(files: Mapping[str, Iterable[str]], path: Path = PASSED_PATH) -> None:
    """files: :data:`asked`, after all tests of these files have passed with `GOLDEN_ALL` set."""
    root = Path(__file__).parents[2]
    entries = {name: {"tests": file_digest(root / name), "sources": sorted(sources)} for name, sources in files.items()}
    path.write_text(json.dumps({"toolchain": toolchain(), "files": entries}, indent=1, sort_keys=True) + "\n")


def _is_known(spec: KernelSpec, reviewed: dict[str, Any], known: set[str]) -> bool:
    return spec.symbol in reviewed["kernels"] and source_state(spec).digest in known


def _sampled(spec: KernelSpec) -> bool:
    return _draw(spec) % SAMPLED == 0


def _draw(spec: KernelSpec) -> int:
    """A number that follows from a kernel's sources, so that every process draws the same."""
    name = f"{spec.symbol} {source_state(spec).digest}"
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


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
