"""Ahead-of-time bundles: every kernel of a list in one shared library, built anywhere, loaded without the compiler.

DIR/bundle.so       the kernels
DIR/manifest.json   their names, the versions that they were built with, and the symbols that they need
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cute_kernels.runtime import native
from cute_kernels.runtime.sources import question
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.store import source_digest
from cute_kernels.runtime.trust import distrust

DIRECTORY_VARIABLE = "CUTE_KERNELS_AOT_DIR"
FORMAT = 3
LIBRARY = "bundle.so"
MANIFEST = "manifest.json"


class BundleError(RuntimeError):
    """A bundle is damaged, or was built for another installation; the message lists every difference."""


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads the manifest of the bundle in `directory`. Raises BundleError if there is none or it cannot be read."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] != FORMAT:
            raise BundleError(f"{path} has format {manifest['format']}, wanted {FORMAT}; rebuild the bundle")
        return manifest
    except FileNotFoundError:
        raise BundleError(f"{directory} holds no bundle: {MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path} cannot be read ({type(error).__name__}: {error}); rebuild the bundle") from error


def mismatches(manifest: dict[str, Any]) -> list[str]:
    """Returns the reasons why a bundle cannot run in this installation; empty if it can.

    A bundle needs no compiler, and the DSL may have another version than the one that built the bundle. The bundle's
    code calls functions of the DSL's runtime library and of apache-tvm-ffi. These functions are looked up by name.
    """
    problems = []
    built = manifest["versions"]
    try:
        missing = native.missing_symbols(manifest["wanted"])
    except (native.RuntimeLibraryError, OSError, ValueError):
        missing = []  # what is wrong with the runtime library is said when it is opened
    if missing:
        dsl = native.dsl_version() or native.runtime_library()
        names = ", ".join(missing)
        problems.append(
            f"built with nvidia-cutlass-dsl {built['nvidia-cutlass-dsl']}, {names} not in the runtime library of {dsl}"
        )
    ffi = native.tvm_ffi_version()
    if ffi.split(".")[:2] != built["apache-tvm-ffi"].split(".")[:2]:
        problems.append(f"built with apache-tvm-ffi {built['apache-tvm-ffi']}, installed is {ffi}")
    if not native.isa_runs(manifest["host"], native.host_isa()):
        problems.append(f"host code is for {manifest['host']}, this machine is {native.host_isa()}")
    driver = native.driver_version()
    toolkit = manifest["toolkit"]
    if driver is not None and toolkit.startswith("cu") and toolkit[2:].isdigit() and int(toolkit[2:]) > driver[0]:
        problems.append(f"built for CUDA {toolkit[2:]}, the driver takes CUDA {driver[0]}.{driver[1]}")
    return problems


def open_bundle(directory: Path) -> Bundle:
    """Opens the bundle in `directory` without the compiler and without a GPU.

    Raises BundleError if it is damaged, does not fit this installation (see `mismatches`), or lies where other users
    can write (see `trust`). Raises native.RuntimeLibraryError if the DSL's runtime library is missing.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    library = directory / manifest["library"]["name"]
    _check_trust(directory, directory / MANIFEST, library)
    problems = mismatches(manifest)
    if problems:
        advice = f"rebuild it here: python -m cute_kernels aot build --arch {manifest['arch']} -o {directory}"
        raise BundleError(f"the bundle in {directory} does not fit this installation: {'; '.join(problems)}. {advice}")
    if not library.is_file() or sha256_of(library) != manifest["library"]["sha256"]:
        raise BundleError(f"{library} is missing or not the file that {MANIFEST} describes; rebuild the bundle")
    return Bundle(directory, manifest, native.open_library(library))


def _check_trust(directory: Path, *contents: Path) -> None:
    for path in (directory, *contents):
        reason = distrust(path) if path.exists() else None
        if reason is not None:
            raise BundleError(
                f"the bundle in {directory} is not loaded, as others could put code there: {reason}; want it to be "
                "yours alone to write (chmod -R go-w)"
            )


class Bundle:
    """An open bundle. `manifest` is the content of manifest.json."""

    def __init__(self, directory: Path, manifest: dict[str, Any], lookup: Callable[[str], Any]) -> None:
        self.directory = directory
        self.manifest = manifest
        self._lookup = lookup
        self._warned = False

    @property
    def arch(self) -> str:
        """The architecture that the bundle's kernels are compiled for, such as "sm_90a"."""
        return self.manifest["arch"]

    @property
    def symbols(self) -> list[str]:
        """The symbols of the bundle's kernels, sorted."""
        return sorted(self.manifest["kernels"])

    def holds(self, spec: KernelSpec, arch: str) -> bool:
        """Returns whether the bundle contains `spec` for `arch`, built from the sources that are installed here.

        If no source file has changed since the build, none is parsed. Warns once if the bundle's kernel was built from
        different sources; the caller then compiles the kernel.
        """
        kernel = self.manifest["kernels"].get(spec.symbol)
        wanted = (spec.family, json.loads(spec.identity_json()))
        if arch != self.arch or kernel is None or (kernel["family"], kernel["config"]) != wanted:
            return False
        if kernel.get("question") == [*question(spec)] or kernel["sources"] == source_digest(spec):
            return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the bundle in {self.directory} was built from other sources than are installed: {spec} and kernels "
                f"like it are not taken from it. Rebuild: python -m cute_kernels aot build --arch {arch} "
                f"-o {self.directory}",
                RuntimeWarning,
                stacklevel=2,
            )
        return False

    def get(self, spec: KernelSpec, arch: str) -> Any | None:
        """Returns the raw TVM-FFI function of `spec`, or None if the bundle does not hold it."""
        return self._lookup(spec.symbol) if self.holds(spec, arch) else None


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 digest of a file, in hex. It reads the file in pieces that fit a CPU cache, as a bundle may
    have hundreds of megabytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 18):
            digest.update(piece)
    return digest.hexdigest()
