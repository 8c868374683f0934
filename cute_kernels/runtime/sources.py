"""Computes a digest of the Python sources that decide what a kernel compiles to.

The digest covers the definitions that the compilation of a spec can reach, in any module (:mod:`.definitions`). The
search begins with the spec's methods, the types of all values in its configuration, and its policies. It follows the
names that each definition uses. So an edit of one policy changes only the digests of kernels with that policy.
Comments, docstrings (except those of attributes in a class), formatting and moves of modules change no digest.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.runtime import definitions
from cute_kernels.runtime.definitions import PACKAGES, Definition, Module
from cute_kernels.runtime.spec import KernelSpec

# Sources changed after this moment may differ from what this process has imported.
_STARTED = time.time()


class Root(NamedTuple):
    """A root of the search: a definition in a module, a member of a class in the module, or, without a name, the whole
    module.

    Without a ``module``, ``name`` is a text to be hashed. held: whether the root is the type of a value in the
    configuration.
    """

    module: str
    name: str = ""
    member: str = ""
    held: bool = False


class Place(NamedTuple):
    """The place of a definition: its file, its first and its last line."""

    file: Path
    first: int
    last: int


class Reached(NamedTuple):
    """The definitions that a kernel's compilation can reach.

    Attributes:
        digest: the digest of all definitions.
        texts: (name, digest of the text) of each definition.
    """

    digest: str
    places: frozenset[Place]
    texts: frozenset[tuple[str, str]]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({place.file for place in self.places}))

    @property
    def changed(self) -> bool:
        """Whether a file was changed after this process started. The code in memory may then be older than the files,
        so nothing compiled here may be stored under the files' digest."""
        return any(file.stat().st_mtime > _STARTED for file in self.files)


def reached(spec: KernelSpec) -> Reached:
    """Returns the definitions that decide a kernel, and their digest. Raises TypeError for a spec that is not defined
    in a file."""
    question(spec)  # before any file is read
    return _reached(tuple(dict.fromkeys(_roots(spec))))


def question(spec: KernelSpec, reads: int = 0) -> tuple[str, str]:
    """Returns two digests that together decide what `reached` returns, without a search: the digest of all files that
    the search may read, and the digest of the names at which the search begins.

    reads: 0 for the files as they were before this process's first search (this digest is cached);
    `definitions.reads()` for the files as they are now.
    """
    begins = [*(Root(kind.__module__, kind.__qualname__) for kind in _owners(spec)), *_values(spec)]
    files = [_state(package, reads) for package in sorted(_packages(root.module for root in begins))]
    return digest_of(sys.version_info[:2], files), digest_of(begins)


def is_settled(spec: KernelSpec) -> bool:
    """Returns whether all files are as they were before this process's first search. Only then does `question` decide
    what `reached` returns."""
    return question(spec) == question(spec, definitions.reads())


def digest_of(*what: object) -> str:
    """Returns a digest of the `repr` of values."""
    return hashlib.sha256(repr(what).encode()).hexdigest()


@functools.cache
def _state(package: str, reads: int) -> str:
    """Returns the digest of a package's files. The result is cached for each value of ``reads``; a new value reads the
    files again."""
    return state_of(definitions.folders_of(package))


def _owners(spec: KernelSpec) -> list[type]:
    """Returns the classes of a spec besides `KernelSpec` and its bases."""
    return [kind for kind in type(spec).__mro__ if kind not in KernelSpec.__mro__]


def _packages(modules: Iterable[str]) -> frozenset[str]:
    """Returns the packages that a search enters: this project's, and those of the modules where it begins."""
    return frozenset((*PACKAGES, *(module.partition(".")[0] for module in modules if module)))


def _roots(spec: KernelSpec) -> Iterator[Root]:
    """Yields the roots of a spec. First come the members that its classes define (`_owners`), then the roots of
    `_values`.
    """
    owners = _owners(spec)
    members = {kind: definitions.members(_file_of(kind), kind.__qualname__) for kind in owners}
    known = vars(KernelSpec).keys() - {"compile"}
    for name in sorted({name for own in members.values() for name in own} - known):
        for kind in (kind for kind in owners if name in members[kind]):
            yield Root(kind.__module__, kind.__qualname__, name)
            if "super" not in members[kind][name].uses:
                break
    yield from _values(spec)


def _values(spec: KernelSpec) -> Iterator[Root]:
    """Yields the roots of the types in a spec's configuration, then those of its policies."""
    packages = _packages(kind.__module__ for kind in _owners(spec))
    yield from _roots_of(spec.config, packages)
    for policy in spec.policies():
        if isinstance(policy, str):
            module, _, name = policy.partition(":")
            yield Root(module, name)
        else:
            yield from _roots_of(policy, packages, "")


def _file_of(kind: type) -> Path:
    if (module := _found(kind.__module__)) is None:
        raise TypeError(f"{kind.__qualname__} must be defined in a file to be cached, not in {kind.__module__}")
    return module.file


def _is_others(value: object) -> bool:
    top = value.__module__.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("torch", "numpy")


def _roots_of(value: Any, packages: frozenset[str], name: str | None = None) -> Iterator[Root]:
    """Yields a root for the type of a value and of each of its fields, if the type or one of its bases is defined in
    ``packages``.

    name: the name of a policy's value, None in a configuration. Plain values of policies are hashed as "name=value".
    """
    if isinstance(value, tuple | list):
        for item in value:
            yield from _roots_of(item, packages, name)
    elif callable(value) and hasattr(value, "__qualname__") and not _is_others(value):
        yield Root(value.__module__, value.__qualname__.partition(".")[0])
    elif any(kind.__module__.partition(".")[0] in packages for kind in type(value).__mro__):
        yield Root(type(value).__module__, type(value).__qualname__.partition(".")[0], held=True)
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            yield from _roots_of(getattr(value, field.name), packages, None if name is None else field.name)
    elif name is not None:
        yield Root("", f"{name}={definitions.without_packages(value) if isinstance(value, str) else value!r}")


class _Node(NamedTuple):
    """A reached definition. strong: whether its code is hashed; otherwise only its name is."""

    module: Module
    definition: Definition
    strong: bool


@functools.lru_cache(maxsize=1024)
def _reached(roots: tuple[Root, ...]) -> Reached:
    walk = _Walk(_packages(root.module for root in roots))
    for root in roots:
        found = _of_root(root, walk.packages)
        walk.note("root", root.member, walk.linked(_held(found) if root.held else found))
    walk.go_on()
    return Reached(walk.digest.hexdigest(), frozenset(walk.places), frozenset(walk.texts))


class _Walk:
    """The search for definitions. It follows links in an order that only the definitions decide. It hashes each
    definition together with the indices of the definitions to which it links.
    """

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages
        self.digest = hashlib.sha256()
        self.places: set[Place] = set()
        self.texts: set[tuple[str, str]] = set()
        self._numbers: dict[tuple[int, bool], int] = {}
        self._todo: list[_Node] = []
        self._mentioned: set[str] = set()
        self._waiting: dict[str, list[tuple[int, _Node]]] = {}  # methods that nobody has mentioned, and their classes
        self._live: set[tuple[Path, str]] = set()  # classes that values may be of
        self._entries: dict[tuple[Path, str], list[tuple[int, _Node]]] = {}  # of tables, by classes that are not

    def note(self, *what: object) -> None:
        self.digest.update(f"{what}\n".encode())

    def linked(self, targets: Iterable[_Node | str]) -> list[int | str]:
        """Returns the indices of definitions, and queues new ones. A link that leaves the packages stays a name."""
        return [target if isinstance(target, str) else self._number(target) for target in targets]

    def _number(self, node: _Node) -> int | str:
        if not node.strong and node.definition.is_class:
            return node.definition.binds[0]
        key = id(node.definition), node.strong
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._todo.append(node)
            self.places.update(Place(node.module.file, *span) for span in node.definition.spans)
            if node.definition.is_class:
                self._is_live(node.module.file, node.definition.binds[0])
        return self._numbers[key]

    def _is_live(self, file: Path, name: str) -> None:
        """Notes that a class is live: values may be of this class. From now on, table entries for the class are
        followed."""
        self._live.add((file, name))
        for table, entry in self._entries.pop((file, name), ()):
            self.note(table, name, self._number(entry))

    def _follow_entries(self, number: int, node: _Node) -> None:
        """Follows those entries of a table whose key is a live class, or is no class. Each other entry waits until its
        class is live.
        """
        for key, value in node.definition.entries:
            entry = _Node(node.module, value, True)
            found = [each for each in _links(node.module.name, key, False, self.packages) if not isinstance(each, str)]
            kinds = {(each.module.file, each.definition.binds[0]) for each in found if each.definition.is_class}
            if kinds and not kinds & self._live:
                for kind in kinds:
                    self._entries.setdefault(kind, []).append((number, entry))
            else:
                self.note(number, key, self._number(entry))

    def go_on(self) -> None:
        """Follows links until no new definition is found."""
        for number, node in enumerate(self._todo):  # grows as links are followed
            found = node.definition
            self.note(found.digest)
            self.texts.add((found.binds[0], found.digest))
            for uses, strong in ((found.uses, node.strong), (found.weak, False)):
                for name in uses:
                    if links := self.linked(_links(node.module.name, name, strong, self.packages)):
                        self.note(name, links)
            for name in found.bases:
                self.note(name, self.linked(_held(_links(node.module.name, name, True, self.packages))))
            if node.strong:
                self._follow_entries(number, node)
                for name, member in found.members:
                    self._waiting.setdefault(name, []).append((number, _Node(node.module, member, True)))
                self._mentioned.update(found.mentions)
                new = {*found.mentions, *(name for name, _ in found.members)}
                for name in sorted(new & self._mentioned & self._waiting.keys()):
                    for owner, method in self._waiting.pop(name):
                        self.note(owner, name, self._number(method))


def _held(targets: Iterable[_Node | str]) -> Iterator[_Node | str]:
    """Yields the targets of links. A class is replaced by its definition ``held``."""
    for target in targets:
        held = None if isinstance(target, str) else target.definition.held
        yield target if isinstance(target, str) or held is None else target._replace(definition=held)


def _of_root(root: Root, packages: frozenset[str]) -> Iterator[_Node | str]:
    if not root.module:
        yield root.name
        return
    if (module := _module(root.module, packages)) is None:
        raise FileNotFoundError(f"{root.module}: no such module, want the sources of a kernel")
    if root.member:
        yield _Node(module, definitions.members(module.file, root.name)[root.member], True)
    else:
        yield from _targets(module, root.name, True, packages) if root.name else _all_of(module, True)


def _all_of(module: Module, strong: bool) -> Iterator[_Node]:
    for found in dict.fromkeys(each for several in module.definitions.values() for each in several):
        yield _Node(module, found, strong)


@functools.lru_cache(maxsize=65536)
def _links(module: str, name: str, strong: bool, packages: frozenset[str]) -> tuple[_Node | str, ...]:
    """Returns the targets of a dotted name in a module. The result is cached, as all kernels of a family share most
    names."""
    return () if (found := _found(module)) is None else tuple(_targets(found, name, strong, packages))


def _targets(
    module: Module, name: str, strong: bool, packages: frozenset[str], seen: frozenset[tuple[str, str]] = frozenset()
) -> Iterator[_Node | str]:
    """Yields the targets of a dotted name in a module: definitions, or a name outside the packages.

    seen: the names followed so far, which stop circles of imports.
    """
    if (module.name, name) in seen:
        return
    seen = seen | {(module.name, name)}
    first, *rest = name.split(".")
    yield from (_Node(module, found, strong) for found in module.definitions.get(first, ()))
    for target in module.imports.get(first, ()):
        if target.module.partition(".")[0] not in packages:
            yield f"{target.module}:{target.attribute}"
            continue
        names = [*([] if target.attribute is None else [target.attribute]), *rest]
        yield from _attributes(target.module, names, strong, packages, seen)


def _attributes(
    where: str, names: list[str], strong: bool, packages: frozenset[str], seen: frozenset[tuple[str, str]]
) -> Iterator[_Node | str]:
    """Yields the targets of ``names``, a chain of attributes of module ``where``. The first names may be modules in
    packages; then comes a definition."""
    module = _module(where, packages)
    while names:
        inner = _module(f"{where}.{names[0]}", packages)
        if module is not None and (names[0] in module.definitions or names[0] in module.imports):
            yield from _targets(module, ".".join(names), strong, packages, seen)
            if inner is None:
                return
        if inner is None:
            break
        where, module, names = f"{where}.{names[0]}", inner, names[1:]
    if module is None:
        yield f"{where}:{'.'.join(names)}"
    elif module.file.name == "__init__.py" and not names:
        yield where.rpartition(".")[2]  # a package, named without a part of it
    else:  # a module as a value, or a name that no statement of it binds: any of it may be meant
        yield from _all_of(module, strong)


@functools.lru_cache(maxsize=4096)
def _found(name: str) -> Module | None:
    """Reads the module of this name, which need not be imported; `__main__` is the file that runs."""
    file = definitions.file_of(name)
    return None if file is None else definitions.read(name, file)


def _module(name: str, packages: frozenset[str]) -> Module | None:
    return _found(name) if name.partition(".")[0] in packages else None


def state_of(roots: Iterable[Path]) -> str:
    """Returns the digest of Python files. A folder stands for all Python files below it. Links that lead nowhere, such
    as editors' locks, are ignored. Raises FileNotFoundError for a root that does not exist.
    """
    digest = hashlib.sha256()
    for root in roots:
        walk = os.walk(root, followlinks=True)
        below = [os.path.join(folder, name) for folder, _, names in walk for name in names if name.endswith(".py")]
        for file in sorted(filter(os.path.isfile, below)) if root.is_dir() else [str(root)]:
            with open(file, "rb") as opened:
                content = opened.read()
            digest.update(f"{root.name}{file[len(str(root)) :]}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
