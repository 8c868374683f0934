"""Finds what works on this machine, and why the rest does not."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from cute_kernels._version import __version__
from cute_kernels.runtime import native
from cute_kernels.runtime.aot import DIRECTORY_VARIABLE as BUNDLES_VARIABLE
from cute_kernels.runtime.aot import BundleError, open_bundle
from cute_kernels.runtime.device import UnsupportedGPUError, arch_of
from cute_kernels.runtime.installed import PACKAGES, installed
from cute_kernels.runtime.store import DIRECTORY_VARIABLE, DiskStore, default_directory, nearest
from cute_kernels.runtime.trust import distrust

OK, LIMITED, MISSING = "ok", "limited", "missing"


class ToolMissingError(RuntimeError):
    """A disassembly tool is not installed."""


@functools.cache
def find_tool(name: str) -> str:
    """Returns the path of "cuobjdump" or "nvdisasm": the newest from a pip package, else the one on PATH. Raises
    ToolMissingError."""
    for folder in sys.path:
        for candidate in sorted(Path(folder or ".").glob(f"nvidia/c*/bin/{name}"), reverse=True):
            if os.access(candidate, os.X_OK):
                return str(candidate)
    found = shutil.which(name)
    if found is None:
        raise ToolMissingError(f"{name} was not found: pip install nvidia-cuda-{name}, or put a CUDA toolkit on PATH")
    return found


@dataclass(frozen=True)
class Finding:
    """The result of one check. `status` is "ok", "limited" (works with a drawback) or "missing"."""

    subject: str
    status: str
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Checks everything the package depends on; raises nothing, changes nothing, compiles nothing."""
    return [check() for check in CHECKS]


def _python() -> Finding:
    detail = f"cute-kernels {__version__}, Python {platform.python_version()}, {platform.system()}, {native.host_isa()}"
    if platform.system() != "Linux":
        return Finding("install", LIMITED, detail, "kernels run on Linux; elsewhere only the reference does")
    return Finding("install", OK, detail)


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    status = OK if torch.version.cuda else LIMITED
    remedy = "" if torch.version.cuda else "runs the fp32 reference only; install a CUDA build to run kernels"
    return Finding("torch", status, f"{torch.__version__} ({build})", remedy)


def _driver() -> Finding:
    version = native.driver_version()
    if version is None:
        return Finding("driver", MISSING, "libcuda.so.1 was not found", "install the NVIDIA driver to run kernels")
    detail = f"takes CUDA {version[0]}.{version[1]}"
    if version[0] < 13:
        return Finding("driver", LIMITED, detail, "CUDA 13 (driver 580 or newer) is what is tested")
    return Finding("driver", OK, detail)


def _gpu() -> Finding:
    try:
        arch = arch_of()
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("gpu", OK, f"{', '.join(names)}; cuda:0 compiles for {arch}")
    except UnsupportedGPUError as error:
        return Finding("gpu", MISSING, str(error), "kernels can be compiled and bundled here, not run")


def _compiler() -> Finding:
    version = native.dsl_version()
    if version is None or native.compiler_version() is None:
        found = "is not installed" if version is None else f"{version} is installed, by another package"
        remedy = f"{native.compiler_remedy()}; without it only bundles and cached kernels run"
        return Finding("compiler", MISSING, f"{native.DSL_DISTRIBUTION} {found}", remedy)
    flavor = native.runtime_flavor()
    detail = f"{native.DSL_DISTRIBUTION} {version} ({flavor})"
    if flavor == "cu12":
        return Finding("compiler", LIMITED, detail, "install the [cu13] extra: its ptxas is what is tested")
    return Finding("compiler", OK, detail)


def _runtime_library() -> Finding:
    try:
        path = native.load_runtime()
        return Finding("runtime library", OK, f"{path}, apache-tvm-ffi {native.tvm_ffi_version()}")
    except (native.RuntimeLibraryError, ImportError) as error:
        return Finding("runtime library", MISSING, str(error), "no kernel can run without it")


def _linker() -> Finding:
    command = native.find_linker()
    if command is None:
        tried = native.linker_names()
        remedy = "install cc or ld: bundles cannot be built, and cached kernels load through the compiler (slower)"
        return Finding("linker", LIMITED, f"none found (tried {tried})", remedy)
    return Finding("linker", OK, command[0])


def _cache() -> Finding:
    store = DiskStore(default_directory())
    existing = nearest(store.root.absolute())
    is_there = existing == store.root.absolute()
    entries = store.entries() if is_there else []
    detail = f"{store.root}: {len(entries)} kernels, {sum(entry['bytes'] for entry in entries) / 2**20:.1f} MiB"
    if is_there and (quarantined := len(list(store.root.glob("quarantine/*-*")))):
        detail += f", {quarantined} damaged in quarantine"
    try:
        with tempfile.TemporaryDirectory(dir=existing) as probe:
            reason = distrust(store.root if is_there else Path(probe))
        if reason is None:
            return Finding("cache", OK, detail)
        remedy = (
            f"kernels are compiled anew in every process; chmod go-w, or set {DIRECTORY_VARIABLE} to one of your own"
        )
        return Finding("cache", LIMITED, f"{detail}; not used, as others could put code there: {reason}", remedy)
    except OSError as error:
        remedy = f"kernels are compiled anew in every process; set {DIRECTORY_VARIABLE} to a writable directory"
        return Finding("cache", LIMITED, f"{detail}; not writable ({error.strerror})", remedy)


def _bundles() -> Finding:
    named = [Path(path) for path in os.environ.get(BUNDLES_VARIABLE, "").split(os.pathsep) if path]
    packages = installed()
    if not named and not packages:
        packages_wanted = ", ".join(name.replace("_", "-") for name in PACKAGES.values())
        return Finding("bundles", OK, f"none ({BUNDLES_VARIABLE} is not set, {packages_wanted} is not installed)")
    try:
        bundles = [open_bundle(folder) for folder in (*named, *packages.values())]
    except (BundleError, native.RuntimeLibraryError) as error:
        remedy = f"rebuild it, unset {BUNDLES_VARIABLE}, or install the package that goes with this release"
        return Finding("bundles", MISSING, str(error), remedy)
    return Finding("bundles", OK, "; ".join(f"{b.directory}: {len(b.symbols)} kernels for {b.arch}" for b in bundles))


def _tools() -> Finding:
    try:
        return Finding("resource reports", OK, ", ".join(find_tool(name) for name in ("cuobjdump", "nvdisasm")))
    except ToolMissingError as error:
        return Finding("resource reports", LIMITED, str(error), "needed for register and spill reports only")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _driver,
    _gpu,
    _compiler,
    _runtime_library,
    _linker,
    _cache,
    _bundles,
    _tools,
)


def abilities(findings: list[Finding]) -> dict[str, list[str]]:
    """Returns the abilities of this installation. Each has a list of the subjects that prevent it; an empty list means
    that the ability works.
    """
    status = {finding.subject: finding.status for finding in findings}
    needs = {
        "run the fp32 reference": ("install", "torch"),
        "run kernels": ("install", "torch", "driver", "gpu", "runtime library"),
        "run weight-only linear layers": ("install", "torch", "driver", "gpu", "runtime library"),
        "compile kernels": ("install", "compiler"),
        "build ahead-of-time bundles": ("install", "compiler", "linker"),
        "load ahead-of-time bundles": ("install", "runtime library", "bundles"),
        "report registers and spills": ("resource reports",),
    }
    # These cannot be done at all in the limited state.
    strict = {
        ("run kernels", "gpu"),
        ("build ahead-of-time bundles", "linker"),
        ("report registers and spills", "resource reports"),
    }
    return {
        ability: [
            subject
            for subject in subjects
            if status[subject] == MISSING or (status[subject] == LIMITED and (ability, subject) in strict)
        ]
        for ability, subjects in needs.items()
    }
