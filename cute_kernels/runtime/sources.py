"""A digest of the Python sources that decide what a kernel compiles to.

They are the spec's own `source_roots`, the modules of `layouts` and `device/` that these import, with what those
import, and what every kernel has: limits of architectures and what it is launched with. An edit of another layout, or
of a drawing of one, leaves a kernel's digest as it was.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import layouts
from cute_kernels.runtime import launch_arguments
from cute_kernels.runtime.spec import KernelSpec

PACKAGE = Path(__file__).resolve().parent.parent

# An import statement of one of the two libraries, in a module or in a function: its module, and the names it takes.
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+((?:layouts|cute_kernels\.device)\b[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|.*)"
    r"|import[ \t]+((?:layouts|cute_kernels\.device)\b[\w.]*))",
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


def roots_of(spec: KernelSpec) -> tuple[Path, ...]:
    """The files, and folders of them, that decide what a kernel compiles to.

    A spec with sources outside this package has both libraries as wholes: its files may import them by way of files
    that it does not name.
    """
    roots = (PACKAGE / "architecture.py", *launch_arguments.SOURCES, *spec.source_roots())
    return _with_libraries(tuple(dict.fromkeys(roots)))


@functools.lru_cache(maxsize=1024)
def _with_libraries(roots: tuple[Path, ...]) -> tuple[Path, ...]:
    if not all(root.is_relative_to(PACKAGE) for root in roots):
        return (*roots, *_libraries().values())
    found: dict[Path, None] = {}
    todo = [file for root in roots for file in _files_of(root)]
    while todo:
        new = [module for module in library_imports(todo.pop()) if module not in found]
        found |= dict.fromkeys(new)
        todo += new
    return (*roots, *sorted(found))


@functools.cache
def _libraries() -> dict[str, Path]:
    """The folders whose modules many kernels share, by the package's name."""
    return {"cute_kernels.device": PACKAGE / "device", "layouts": Path(str(layouts.__file__)).resolve().parent}


@functools.lru_cache(maxsize=4096)
def library_imports(file: Path) -> tuple[Path, ...]:
    """The modules of the libraries that a file imports, wherever it does so.

    Packages that an import passes on its way are none of them: they hold nothing but imports and constants.
    """
    found: dict[Path, None] = {}
    for module, names, plain in _IMPORT.findall(file.read_text()):
        candidates = (module or plain, *(f"{module}.{name}" for name in re.findall(r"\w+", names)))
        found |= dict.fromkeys(path for name in candidates if (path := _file_of(name)) is not None)
    return tuple(found)


def _file_of(module: str) -> Path | None:
    """The file of a module of the libraries; None where there is no such module."""
    library, folder = next(item for item in _libraries().items() if f"{module}.".startswith(f"{item[0]}."))
    path = folder.joinpath(*module.removeprefix(library).split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def source_state(spec: KernelSpec) -> SourceState:
    """The state of a kernel's sources: the files of `roots_of`."""
    return _state_of(roots_of(spec))


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
