"""Compiled kernels on disk: one directory per entry, complete or absent, checked when read.

    <root>/<family>/<symbol>-<key>/entry.json   what the key was made of, checksums, launches (long symbols are cut)
                                   kernel.o     the exported object
                                   kernel.so    the same, linked (if a linker was found)
    <root>/locks/<key>.lock                     held by the process that compiles the entry
    <root>/sources/<digest>                     digests of kernels' sources, see `source_digest`
    <root>/quarantine/                          entries that were damaged, kept for inspection

An entry is written to a temporary directory and renamed, so readers need no lock. A directory that other users can
write (:mod:`cute_kernels.runtime.trust`) is neither read nor written.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.runtime import native, sources
from cute_kernels.runtime.artifact import Artifact, launches_from_json
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.trust import distrust

DIRECTORY_VARIABLE = "CUTE_KERNELS_CACHE_DIR"
FORMAT = 2
PRIVATE = 0o755  # of what is made: for others to read
INDEXES = 16  # that are kept: the last of those written
SYMBOL_CHARACTERS = 200  # of a directory's name: with what `quarantine` adds, file systems allow 255

# Settings of the DSL that change what it generates.
COMPILE_VARIABLES = tuple(
    f"CUTE_DSL_{setting}"
    for setting in "AUTO_M2S COMPILER_BACKEND COMPILER_OPT DEBUG ENABLE_ASSERTIONS ENABLE_PYIR LINEINFO".split()
)


def default_directory() -> Path:
    """Returns `CUTE_KERNELS_CACHE_DIR`, else ~/.cache/cute_kernels, else cute_kernels-UID in the temporary directory.

    The temporary directory is for users without a home, or with a read-only home without a cache, as in containers.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        return Path(named)
    with contextlib.suppress(RuntimeError):  # neither HOME nor an entry in the list of users
        path = Path.home() / ".cache" / "cute_kernels"
        if os.path.exists(path) or os.access(nearest(path), os.W_OK | os.X_OK):
            return path
    return Path(tempfile.gettempdir()) / f"cute_kernels-{os.geteuid()}"


def nearest(path: Path) -> Path:
    """Returns the path itself if it exists, else the nearest directory above it that exists."""
    return next(place for place in (path, *path.parents) if os.path.exists(place))  # False where it may not look


class Key(NamedTuple):
    """The identity of a compiled kernel. content: everything that can change the kernel's bytes, as JSON."""

    family: str
    symbol: str
    content: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()

    @property
    def name(self) -> str:
        return f"{self.symbol[:SYMBOL_CHARACTERS]}-{self.digest[:16]}"


def compile_environment() -> dict[str, str]:
    """Returns the environment variables that are set and change the compiler's output."""
    return {name: os.environ[name] for name in COMPILE_VARIABLES if os.environ.get(name)}


def key_of(spec: KernelSpec, arch: str) -> Key:
    """Returns the key of `spec` compiled for `arch` by this installation on this kind of host."""
    spec.check()
    content = {
        "format": FORMAT,
        "family": spec.family,
        "symbol": spec.symbol,
        "config": json.loads(spec.identity_json()),
        "arch": arch,
        "nvidia-cutlass-dsl": native.dsl_version(),
        "apache-tvm-ffi": native.tvm_ffi_version(),
        "toolkit": native.runtime_flavor(),
        "host": native.host_isa(),
        "sources": source_digest(spec),
        "environment": compile_environment(),
    }
    return Key(spec.family, spec.symbol, json.dumps(content, sort_keys=True))


def source_digest(spec: KernelSpec) -> str:
    """Returns the digest of the sources that decide a kernel: the digest that `sources.reached` finds.

    The search parses dozens of modules. So the process's cache directory keeps the results of searches, in one index
    file for each state of all source files. An index is trusted under the same conditions as compiled kernels
    (:mod:`.trust`). A line says where a search began and what it found, and ends with a digest of both. So incomplete
    lines are recognised and ignored. If an index cannot be read or written, each process searches for itself. The
    result of a search is not kept if a file changed meanwhile.
    """
    (files, begins), store = sources.question(spec), DiskStore(default_directory())
    path = store.root / "sources" / files
    known = _known(path)
    if begins not in known:
        found = known[begins] = sources.reached(spec).digest
        with contextlib.suppress(OSError):
            if sources.is_settled(spec) and store.refusal is None:
                path.parent.mkdir(mode=PRIVATE, exist_ok=True)
                path.touch(mode=PRIVATE & 0o666)
                with open(path, "a") as file:
                    file.write(f"{begins} {found} {sources.digest_of(begins, found)}\n")
                for old in sorted(path.parent.iterdir(), key=os.path.getmtime)[:-INDEXES]:
                    old.unlink(missing_ok=True)
    return known[begins]


@functools.cache
def _known(path: Path) -> dict[str, str]:
    """Returns the complete lines of an index; none if the file cannot be read, or if other users could write it."""
    with contextlib.suppress(OSError, ValueError):
        if distrust(path) is None:
            lines = [line.split() for line in path.read_text().splitlines()]
            return {line[0]: line[1] for line in lines if line[2:] == [sources.digest_of(*line[:2])]}
    return {}


class Entry(NamedTuple):
    """A verified entry: its directory, its artifact, and its library (None if it was stored without a linker)."""

    folder: Path
    artifact: Artifact
    library: Path | None


class DiskStore:
    """The entries under one directory. Reading never raises for a damaged entry; writing raises OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def refusal(self) -> str | None:
        """Why the directory is not used, or None. A missing directory is made; raises OSError if that fails."""
        self.root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        return distrust(self.root)

    def folder(self, key: Key) -> Path:
        return self.root / key.family / key.name

    def read(self, key: Key) -> Entry | None:
        """Returns the entry of `key`, or None. A damaged entry is moved to quarantine, with a warning."""
        folder = self.folder(key)
        try:
            if not os.path.isdir(folder) or self.refusal is not None:
                return None
            return self._read(folder, key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if folder.is_dir():  # else another process removed it meanwhile
                self.quarantine(key, f"{type(error).__name__}: {error}")
            return None

    def _read(self, folder: Path, key: Key) -> Entry:
        for path in (folder, *folder.iterdir()):
            reason = distrust(path)
            if reason is not None:
                raise ValueError(reason)
        record = json.loads((folder / "entry.json").read_text())
        if record["key"] != json.loads(key.content):
            raise ValueError("entry.json belongs to another key")
        contents = {name: (folder / name).read_bytes() for name in record["sha256"]}
        for name, checksum in record["sha256"].items():
            if hashlib.sha256(contents[name]).hexdigest() != checksum:
                raise ValueError(f"{name} does not have the checksum it was stored with")
        artifact = Artifact(key.symbol, contents["kernel.o"], launches_from_json(record["launches"]))
        return Entry(folder, artifact, folder / "kernel.so" if "kernel.so" in contents else None)

    def write(self, key: Key, artifact: Artifact) -> Entry:
        """Stores `artifact`, linked if the machine has a linker, and returns its entry."""
        folder = self.folder(key)
        folder.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            self._fill(scratch, key, artifact)
            for path in scratch.iterdir():
                path.chmod(path.stat().st_mode & PRIVATE | 0o644)
            scratch.chmod(PRIVATE)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return Entry(folder, artifact, folder / "kernel.so" if (folder / "kernel.so").exists() else None)

    @staticmethod
    def _fill(folder: Path, key: Key, artifact: Artifact) -> None:
        names = ["kernel.o"]
        (folder / "kernel.o").write_bytes(artifact.object_code)
        if native.find_linker() is not None:
            native.link([folder / "kernel.o"], folder / "kernel.so")
            names.append("kernel.so")
        record: dict[str, Any] = {
            "key": json.loads(key.content),
            "sha256": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names},
            "launches": artifact.launches_json(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        (folder / "entry.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")

    def quarantine(self, key: Key, reason: str) -> None:
        """Moves a damaged entry to quarantine and warns. An entry that cannot be moved stays, and will be
        overwritten."""
        folder = self.folder(key)
        target = self.root / "quarantine" / f"{key.name}-{time.time_ns()}-{os.getpid()}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
            outcome = f"moved to {target}"
        except OSError as error:
            outcome = f"left in place ({error})"
        message = f"damaged kernel cache entry {folder} ({reason}): {outcome}; rebuilding"
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    @contextlib.contextmanager
    def lock(self, key: Key) -> Iterator[None]:
        """Holds the key's lock within the block. Only one process of this machine holds it at a time, and only one of
        all machines if the file system's flock works across them."""
        path = self.root / "locks" / f"{key.digest}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Lock files stay: removing one while another process waits on it would let two processes in.
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def entries(self) -> list[dict[str, Any]]:
        """Returns every readable entry's record with its size in bytes, for reports; verifies nothing."""
        found = []
        for path in sorted(self.root.glob("*/*-*/entry.json")):
            if path.parent.parent.name == "quarantine":
                continue
            with contextlib.suppress(OSError, ValueError):
                size = sum(file.stat().st_size for file in path.parent.iterdir())
                found.append({**json.loads(path.read_text()), "bytes": size})
        return found

    def clear(self) -> int:
        """Removes every entry, the quarantine and unfinished writes; returns the number of entries removed.

        Only directories with a store's files are removed, so a directory that is named by mistake loses nothing else.
        """
        count = 0
        for record in sorted(self.root.glob("*/*-*/entry.json")):
            count += record.parent.parent.name != "quarantine"
            shutil.rmtree(record.parent)
        for leftover in [*self.root.glob("*/.new-*"), *self.root.glob("quarantine/*-*")]:
            shutil.rmtree(leftover)
        return count
