"""Finds a spec's compiled kernel in memory, in ahead-of-time bundles or on disk; only then compiles it."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.runtime import native, workers
from cute_kernels.runtime.aot import DIRECTORY_VARIABLE as BUNDLES_VARIABLE
from cute_kernels.runtime.aot import Bundle, open_bundle
from cute_kernels.runtime.artifact import Artifact, compile_artifact
from cute_kernels.runtime.installed import open_installed
from cute_kernels.runtime.sources import reached
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.store import DiskStore, Entry, Key, default_directory, key_of


class Progress(NamedTuple):
    """A report that a kernel is ready: the `done`-th of `total` kernels. `source` says where it was found ("memory",
    "bundle", "disk" or "compiled"). `seconds` is how long loading or compiling took."""

    done: int
    total: int
    spec: KernelSpec
    source: str
    seconds: float


ProgressCallback = Callable[[Progress], None]


class KernelCache:
    """The kernels of one process, backed by one directory. Thread-safe; compiles one kernel at a time.

    Attributes:
        directory: where compiled kernels persist. If it cannot be written, kernels are kept in memory only, with one
            warning.
        bundles: opened ahead-of-time bundles, which are searched before the disk.
    """

    def __init__(self, directory: Path, bundles: Sequence[Bundle] = ()) -> None:
        self.store = DiskStore(directory)
        self._bundles = list(bundles)
        self._functions: dict[tuple[KernelSpec, str], Any] = {}
        self._artifacts: dict[tuple[KernelSpec, str], Artifact] = {}
        self._lock = threading.RLock()
        self._warned = False

    def add_bundle(self, bundle: Bundle) -> None:
        """Makes `load` look into this bundle before all others."""
        with self._lock:
            self._bundles.insert(0, bundle)

    def load(self, spec: KernelSpec, arch: str) -> Any:
        """Loads the raw TVM-FFI function of `spec`, which takes the arguments of its host function."""
        return self.load_from(spec, arch)[0]

    def load_from(self, spec: KernelSpec, arch: str) -> tuple[Any, str]:
        """Loads a kernel as `load` does. Returns (the kernel's function, where it was found: "memory", "bundle", "disk"
        or "compiled").
        """
        function = self._functions.get((spec, arch))
        if function is not None:
            return function, "memory"
        with self._lock:
            function = self._functions.get((spec, arch))
            if function is not None:
                return function, "memory"
            found = (bundle.get(spec, arch) for bundle in self._bundles)
            function, source = next((each for each in found if each is not None), None), "bundle"
            if function is None:
                function, source = self._from_disk_or_compiler(spec, arch)
            self._functions[spec, arch] = function
            return function, source

    def has(self, spec: KernelSpec, arch: str) -> bool:
        """Returns whether `load` would find `spec` without the compiler: in memory, in a bundle or on disk."""
        if (spec, arch) in self._functions or any(bundle.holds(spec, arch) for bundle in self._bundles):
            return True
        return self._has_artifact(spec, arch)

    def artifact(self, spec: KernelSpec, arch: str) -> Artifact:
        """Returns the compiled object of `spec`, from disk or compiled now: for resource reports and bundles."""
        with self._lock:
            if (spec, arch) not in self._artifacts:
                self._artifacts[spec, arch] = self._entry(spec, arch)[0]
            return self._artifacts[spec, arch]

    def load_many(
        self, specs: Iterable[KernelSpec], arch: str, jobs: int | None = None, progress: ProgressCallback | None = None
    ) -> list[Any]:
        """Loads each spec, compiling what is missing in `jobs` worker processes (default: by cores and memory).

        Returns the functions in the order of `specs`. If kernels do not compile, raises workers.CompileError after all
        other kernels are done; the error names every kernel that failed.
        """
        specs = list(specs)
        return self._many(specs, arch, jobs, progress, self.load_from, self.has)

    def artifacts(
        self, specs: Iterable[KernelSpec], arch: str, jobs: int | None = None, progress: ProgressCallback | None = None
    ) -> list[Artifact]:
        """Returns the `artifact` of each spec, compiled in parallel as `load_many` does."""

        def fetch(spec: KernelSpec, arch: str) -> tuple[Artifact, str]:
            return self.artifact(spec, arch), "disk"

        return self._many(list(specs), arch, jobs, progress, fetch, self._has_artifact)

    def _many(
        self,
        specs: list[KernelSpec],
        arch: str,
        jobs: int | None,
        progress: ProgressCallback | None,
        fetch: Callable[[KernelSpec, str], tuple[Any, str]],
        has: Callable[[KernelSpec, str], bool],
    ) -> list[Any]:
        missing = [spec for spec in dict.fromkeys(specs) if not has(spec, arch)]
        compiled: set[KernelSpec] = set()
        total, done = len(specs), 0

        def report(spec: KernelSpec, source: str, seconds: float) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(Progress(done, total, spec, source, seconds))

        def on_compiled(spec: KernelSpec, seconds: float) -> None:
            compiled.add(spec)
            report(spec, "compiled", seconds)

        with tempfile.TemporaryDirectory(prefix="cute_kernels_") as scratch:
            if missing:
                directory = self.store.root if self._is_writable() else Path(scratch)
                workers.compile_all(missing, arch, directory, jobs, on_compiled)
                if directory != self.store.root:
                    self._adopt(missing, arch, DiskStore(directory))
        results = []
        for spec in specs:
            start = time.perf_counter()
            value, source = fetch(spec, arch)
            results.append(value)
            if spec not in compiled:
                report(spec, source, time.perf_counter() - start)
            compiled.discard(spec)
        return results

    def _has_artifact(self, spec: KernelSpec, arch: str) -> bool:
        return (spec, arch) in self._artifacts or self.store.read(key_of(spec, arch)) is not None

    def _adopt(self, specs: list[KernelSpec], arch: str, store: DiskStore) -> None:
        """Keeps in memory the artifacts that workers stored in a scratch directory, since the cache's directory cannot
        be written."""
        for spec in specs:
            entry = store.read(key_of(spec, arch))
            if entry is not None:
                self._artifacts[spec, arch] = entry.artifact

    def _from_disk_or_compiler(self, spec: KernelSpec, arch: str) -> tuple[Any, str]:
        failure: Exception | None = None
        for _ in range(2):
            artifact, entry, source = self._entry(spec, arch)
            if entry is None:
                return _open_artifact(artifact), source
            try:
                return _open_entry(entry), source
            except (OSError, RuntimeError, AttributeError) as error:
                if isinstance(error, (native.RuntimeLibraryError, native.CompilerMissingError)):
                    raise
                # Complete by its checksums and yet not loadable: rebuilt once, then the error is the compiler's.
                failure = error
                self.store.quarantine(key_of(spec, arch), f"does not load: {error}")
        raise RuntimeError(f"{spec} was compiled and does not load: {failure}") from failure

    def _entry(self, spec: KernelSpec, arch: str) -> tuple[Artifact, Entry | None, str]:
        """Returns (the artifact of `spec`, its entry on disk or None, "disk" or "compiled"); compiles it if need be."""
        held = self._artifacts.get((spec, arch))
        key = key_of(spec, arch)
        entry = self.store.read(key)
        if entry is not None:
            return entry.artifact, entry, "disk"
        if held is not None:
            return held, None, "compiled"
        if reached(spec).changed:
            self._warn_once(f"sources of {spec} changed after this process started: compiled kernels are not stored")
            return compile_artifact(spec, arch), None, "compiled"
        if not self._is_writable():
            return compile_artifact(spec, arch), None, "compiled"
        return self._compile_once(spec, arch, key)

    def _compile_once(self, spec: KernelSpec, arch: str, key: Key) -> tuple[Artifact, Entry | None, str]:
        """Compiles a kernel under its entry's lock: one of several processes compiles it, the others wait and read the
        entry. Returns as `_entry` does."""
        with self.store.lock(key):
            entry = self.store.read(key)
            if entry is not None:
                return entry.artifact, entry, "disk"
            artifact = compile_artifact(spec, arch)
            try:
                return artifact, self.store.write(key, artifact), "compiled"
            except OSError as error:
                self._warn_once(f"kernel cache {self.store.root}: {error}; kernels stay in memory")
                return artifact, None, "compiled"

    def _is_writable(self) -> bool:
        try:
            refusal = self.store.refusal
            if refusal is not None:
                self._warn_once(
                    f"kernel cache {self.store.root} is not used, as others could put code there: {refusal}; want a "
                    "directory that is yours alone to write (chmod go-w); kernels stay in memory"
                )
                return False
            with tempfile.TemporaryFile(dir=self.store.root):
                return True
        except OSError as error:
            self._warn_once(f"kernel cache {self.store.root} cannot be written ({error}); kernels stay in memory")
            return False

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def _open_entry(entry: Entry) -> Any:
    symbol = entry.artifact.symbol
    if entry.library is not None:
        return native.open_library(entry.library)(symbol)
    return native.open_object(entry.folder / "kernel.o")(symbol)


def _open_artifact(artifact: Artifact) -> Any:
    """Loads an artifact that has no entry on disk, through a temporary file."""
    with tempfile.TemporaryDirectory(prefix="cute_kernels_") as folder:
        path = Path(folder) / f"{artifact.symbol}.o"
        path.write_bytes(artifact.object_code)
        if native.find_linker() is None:
            return native.open_object(path)(artifact.symbol)
        native.link([path], path.with_suffix(".so"))
        return native.open_library(path.with_suffix(".so"))(artifact.symbol)


_used: list[KernelCache] = []  # by blocks of `using`, the innermost last


def default_cache() -> KernelCache:
    """Returns the process's cache. Within a block of :func:`using`, returns that block's cache. The process's cache has
    the directory `CUTE_KERNELS_CACHE_DIR`, the bundles in `CUTE_KERNELS_AOT_DIR` (separated by ":"), and installed
    packages of bundles.

    Raises aot.BundleError if a bundle in `CUTE_KERNELS_AOT_DIR` does not fit this installation. An installed package
    that does not fit is left out, with a warning.
    """
    return _used[-1] if _used else _cache_of_process()


@contextmanager
def using(cache: KernelCache) -> Iterator[KernelCache]:
    """Makes the whole process load kernels from ``cache`` within the block. Plans that were made before the block keep
    their functions."""
    _used.append(cache)
    try:
        yield cache
    finally:
        _used.remove(cache)


@functools.cache
def _cache_of_process() -> KernelCache:
    folders = [Path(path) for path in os.environ.get(BUNDLES_VARIABLE, "").split(os.pathsep) if path]
    return KernelCache(default_directory(), [*(open_bundle(folder) for folder in folders), *open_installed()])


def load(spec: KernelSpec, arch: str) -> Any:
    """Loads the raw TVM-FFI function of `spec` for `arch` from the process's cache (see KernelCache.load)."""
    return default_cache().load(spec, arch)


def load_many(
    specs: Iterable[KernelSpec], arch: str, jobs: int | None = None, progress: ProgressCallback | None = None
) -> list[Any]:
    """Loads the functions of `specs`, compiling in parallel what is missing (see KernelCache.load_many)."""
    return default_cache().load_many(specs, arch, jobs, progress)


def load_bundle(directory: str | os.PathLike[str]) -> Bundle:
    """Opens an ahead-of-time bundle and makes `load` look there first (see aot.open_bundle)."""
    bundle = open_bundle(Path(directory))
    default_cache().add_bundle(bundle)
    return bundle
