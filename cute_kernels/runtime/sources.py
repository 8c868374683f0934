"""A digest of the Python sources that decide what a kernel compiles to.

They are what every kernel has (limits of architectures, what it is launched with), the files that the spec names, and
what these import, and so on, of the folders that the spec names, of `device/` and of `layouts`. An edit of what plans
calls, of another layout, or of a drawing of one, leaves a kernel's digest as it was.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import layouts
from cute_kernels.runtime import launch_arguments
from cute_kernels.runtime.spec import KernelSpec

PACKAGE = Path(__file__).resolve().parent.parent
LAYOUTS = Path(str(layouts.__file__)).resolve().parent
LIBRARIES = (PACKAGE / "device", LAYOUTS)
"""Folders whose modules many families share."""

# An import statement, in a module or in a function: the module, and the names that it takes.
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+((?:layouts|cute_kernels)\b[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|.*)"
    r"|import[ \t]+((?:layouts|cute_kernels)\b[\w.]*))",
    re.MULTILINE,
)

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


def sources_of(spec: KernelSpec) -> tuple[Path, ...]:
    """The files, and folders of them, that decide what a kernel compiles to.

    A spec with sources outside this package has its folders and both libraries as wholes: its files may import them by
    way of files that it does not name.
    """
    module = Path(str(sys.modules[type(spec).__module__].__file__)).resolve()
    return _imported((PACKAGE / "architecture.py", *launch_arguments.SOURCES, *spec.source_roots()), module)


@functools.lru_cache(maxsize=1024)
def _imported(roots: tuple[Path, ...], module: Path) -> tuple[Path, ...]:
    if not all(root.is_relative_to(PACKAGE) for root in roots):
        return tuple(dict.fromkeys((*roots, *LIBRARIES)))
    folders = (*LIBRARIES, *(root for root in roots if root.is_dir()))
    todo = [module, *(root for root in roots if not root.is_dir())]
    found = dict.fromkeys(todo)
    while todo:
        file = todo.pop()
        imported = imports_of(file) if file.exists() else ()
        new = [file for file in imported if file not in found and any(map(file.is_relative_to, folders))]
        found |= dict.fromkeys(new)
        todo += new
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4096)
def imports_of(file: Path) -> tuple[Path, ...]:
    """The modules of this package and of `layouts` that a file imports, wherever it does so.

    Packages that an import passes on its way are none of them.
    """
    found: dict[Path, None] = {}
    for package, names, plain in _IMPORT.findall(file.read_text()):
        modules = [_file_of(f"{package}.{name}") or _file_of(package) for name in re.findall(r"\w+", names)]
        found |= dict.fromkeys(path for path in modules or [_file_of(plain)] if path is not None)
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _file_of(module: str) -> Path | None:
    """The file of a module of this package or of `layouts`; None where there is no such module."""
    root, *names = module.split(".")
    path = (PACKAGE if root == PACKAGE.name else LAYOUTS).joinpath(*names)
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def source_state(spec: KernelSpec) -> SourceState:
    """The state of a kernel's sources: the files of `sources_of`."""
    return _state_of(sources_of(spec))


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
        for file in _files_of(root, suffixes):
            name = file.relative_to(root).as_posix() if file != root else file.name
            content = file.read_bytes()
            digest.update(f"{root.name}/{name}\0{len(content)}\0".encode() + content)
            newest = max(newest, file.stat().st_mtime)
    return SourceState(digest.hexdigest(), newest > _STARTED)


def _files_of(root: Path, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    return [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.suffix in suffixes)
