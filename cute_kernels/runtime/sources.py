"""A digest of the Python sources that decide what a kernel compiles to."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cute_kernels.runtime.spec import KernelSpec

# Sources changed after this moment may differ from what this process has imported.
_STARTED = time.time()


@dataclass(frozen=True)
class SourceState:
    """`digest` names the sources as they lie on disk; `changed` says that one is newer than this process.

    With `changed`, the code in memory may be older than the files, so nothing compiled here may be stored under the
    files' digest.
    """

    digest: str
    changed: bool


def _shared_roots() -> tuple[Path, ...]:
    package = Path(__file__).resolve().parent.parent
    layouts = importlib.util.find_spec("layouts")
    folders = [Path(folder) for folder in (layouts.submodule_search_locations or [])] if layouts else []
    return package / "device", package / "architecture.py", package / "runtime" / "spec.py", *folders


def source_state(spec: KernelSpec) -> SourceState:
    """The state of a kernel's sources: `device/`, `architecture.py`, `layouts`, and the spec's own `source_roots`."""
    return _state_of(tuple(dict.fromkeys((*_shared_roots(), *spec.source_roots()))))


@functools.cache
def _state_of(roots: tuple[Path, ...]) -> SourceState:
    return state_of(roots)


def state_of(roots: Iterable[Path], suffixes: tuple[str, ...] = (".py",)) -> SourceState:
    """The state of files, and of folders' files with such endings, whatever lies below them.

    Raises FileNotFoundError for one that is not there.
    """
    digest = hashlib.sha256()
    newest = 0.0
    for root in roots:
        if not root.exists():  # a kernel must not stay as it was when a source that nobody hashed has changed
            raise FileNotFoundError(f"{root}: no such file, want the sources of a kernel")
        files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.suffix in suffixes)
        for file in files:
            name = file.relative_to(root).as_posix() if file != root else file.name
            content = file.read_bytes()
            digest.update(f"{root.name}/{name}\0{len(content)}\0".encode() + content)
            newest = max(newest, file.stat().st_mtime)
    return SourceState(digest.hexdigest(), newest > _STARTED)
