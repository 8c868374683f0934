"""Reads Python modules as graphs of top-level definitions: the text of each, and the definitions that it names.

A definition's text is its syntax tree without comments, docstrings, positions and imports. So wording, formatting and
moves of a module do not change it. But docstrings of attributes in the body of a class belong to the text. A
definition's names are resolved by links to other definitions.

The methods of a class are definitions of their own, except those that Python calls (`__init__`). A method is hashed
only if reached code mentions its name, as an attribute or a string. So a method that only the host calls changes no
kernel's digest.

In a dictionary at the top level of a module whose keys are classes, such as `{Split: SplitReduction, ...}`, each entry
is a definition of its own. An entry is hashed if the class that is its key is hashed. A class is *held* if it is the
type of a value in the configuration. The defaults of a held class's fields are not hashed.

A link is *weak* if the code needs only the identity of a type: annotations, `isinstance`, comparisons with
`type(...)`, class patterns and parameters of generic classes. A weak link passes through aliases and ends at a class,
whose code is not hashed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("cute_kernels", "layouts")
TYPE_TESTS = ("isinstance", "issubclass")
TYPE_MAKERS = ("NewType", "ParamSpec", "TypeVar")


class Definition(NamedTuple):
    """One top-level statement of a module, or one method of a class.

    Attributes:
        binds: the names that the statement assigns or defines.
        digest: the digest of the statement's text.
        uses: dotted names that the definition refers to, sorted.
        weak: further dotted names, whose links are weak; see the module's docstring.
        mentions: the names of attributes that the definition uses, and its strings that may be names of attributes.
        spans: (first line, last line) of each part of the statement.
        is_class: whether it is a class, at which weak links end.
        members: a class's methods by name.
        held: for a class, the definition that is hashed if the class is held: without bases and defaults of fields.
        bases: for ``held``, the names of the class's bases.
        entries: for a dict whose keys are classes, the definitions of its values, by the classes' names.
    """

    binds: tuple[str, ...]
    digest: str
    uses: tuple[str, ...]
    weak: tuple[str, ...]
    mentions: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    is_class: bool = False
    members: tuple[tuple[str, Definition], ...] = ()
    bases: tuple[str, ...] = ()
    held: Definition | None = None
    entries: tuple[tuple[str, Definition], ...] = ()


class Import(NamedTuple):
    """The target of an imported name: a module, or an attribute of a module."""

    module: str
    attribute: str | None


class Module(NamedTuple):
    """A module's definitions and imports, by the names that they bind."""

    name: str
    file: Path
    definitions: dict[str, tuple[Definition, ...]]
    imports: dict[str, tuple[Import, ...]]


@functools.lru_cache(maxsize=4096)
def file_of(module: str) -> Path | None:
    """Returns the file of a module; None if there is no such module. Imports only the top-level package."""
    top, *names = module.split(".")
    for folder in folders_of(top):  # a package without a file has parts all the same
        path = folder.joinpath(*names)
        for file in (path.with_suffix(".py") if names else path, path / "__init__.py"):
            if file.is_file():
                return file
    return None


def folders_of(package: str) -> list[Path]:
    """Returns the folders of a top-level package, or the file of a module that is no package. The result is empty if
    there is no such file. `__main__` is the file that runs."""
    try:
        found = importlib.util.find_spec(package)
        places = [] if found is None else found.submodule_search_locations or [found.origin]
    except (ImportError, ValueError):  # of a module that was not imported, such as `__main__`
        places = [getattr(sys.modules.get(package), "__file__", None)]
    return [path for place in places if place and (path := Path(place).resolve()).exists()]


@functools.lru_cache(maxsize=4096)
def read(name: str, file: Path) -> Module:
    """Reads a module. Raises ValueError for a star import."""
    tree = ast.parse(file.read_bytes(), str(file))
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    imports: dict[str, tuple[Import, ...]] = {}
    for bound, target in _imports(tree, package, file):
        imports[bound] = tuple(dict.fromkeys((*imports.get(bound, ()), target)))
    known = {*sys.stdlib_module_names, *PACKAGES, name.partition(".")[0]}
    tops = {bound: {target.module.partition(".")[0] for target in targets} for bound, targets in imports.items()}
    foreign = {bound for bound in tops if tops[bound] - known}
    definitions: dict[str, tuple[Definition, ...]] = {}
    for node in tree.body:
        binds = tuple(dict.fromkeys(_bound_by(node)))
        if binds:
            found = _class(node, foreign) or _table(node, binds) or _definition(node, binds)
            definitions |= {bound: (*definitions.get(bound, ()), found) for bound in binds}
    return Module(name, file, definitions, imports)


def reads() -> int:
    """Returns how often this process has looked for a file or read one."""
    return sum(cached.cache_info().misses for cached in (file_of, read, members))


def _is_called_by(foreign: set[str], node: ast.ClassDef) -> bool:
    """Returns whether other software may call a class's methods: whether a base or a decorator of the class comes from
    there. foreign: names that are imported from other software."""
    parts = [part for item in (*node.bases, *node.decorator_list) for part in ast.walk(item)]
    return any(isinstance(part, ast.Name) and part.id in foreign for part in parts)


def _class(node: ast.stmt, foreign: set[str]) -> Definition | None:
    """Returns the definition of a class, with its methods as members. Returns None for other statements, and for a
    class whose methods foreign code may call."""
    if not isinstance(node, ast.ClassDef) or _is_called_by(foreign, node):
        return None
    methods = [
        item
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not item.name.startswith("__")
    ]
    rest = [item for item in node.body if item not in methods]
    head = ast.ClassDef(node.name, node.bases, node.keywords, rest, node.decorator_list)
    ast.copy_location(head, node)
    members = tuple((item.name, _definition(item, (item.name,))) for item in methods)
    found, held = _definition(head, (node.name,)), _definition(head, (node.name,), _HeldUses())
    (start, end), spans = found.spans[0], []
    for first, last in sorted(span for _, member in members for span in member.spans):
        spans.append((start, first - 1))
        start = last + 1
    spans = [span for span in (*spans, (start, end)) if span[0] <= span[1]]
    bases = _Uses()
    for base in node.bases:
        bases.visit(base.value if isinstance(base, ast.Subscript) else base)
    held = held._replace(spans=tuple(spans), members=members, bases=tuple(sorted(bases.strong)))
    return found._replace(spans=tuple(spans), members=members, held=held)


def _table(node: ast.stmt, binds: tuple[str, ...]) -> Definition | None:
    """Returns the definition of a dict whose keys are all names, such as classes; each entry has a definition of its
    own. Returns None for other statements."""
    table = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if not isinstance(table, ast.Dict) or not table.keys:
        return None
    names = [ast.unparse(key) for key in table.keys if isinstance(key, ast.Name | ast.Attribute)]
    if len(names) < len(table.keys) or not all(part.isidentifier() for name in names for part in name.split(".")):
        return None
    entries = tuple((name, _definition(value, (name,))) for name, value in zip(names, table.values, strict=True))
    keys, values, table.keys, table.values = table.keys, table.values, [], []
    found = _definition(node, binds)
    table.keys, table.values = keys, values
    return found._replace(entries=entries)


@functools.lru_cache(maxsize=1024)
def members(file: Path, name: str) -> dict[str, Definition]:
    """Returns the definitions in the body of a file's top-level class, by the names that they bind."""
    tree = ast.parse(file.read_bytes(), str(file))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {bound: _definition(item, (bound,)) for node in classes for item in node.body for bound in _bound_by(item)}


def _bound_by(node: ast.stmt) -> Iterator[str]:
    """Yields the names that a top-level statement binds, except imports."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.stmt):
            yield from _bound_by(each)
        else:
            names = (part for part in ast.walk(each) if isinstance(part, ast.Name))
            yield from (name.id for name in names if isinstance(name.ctx, ast.Store))


def _imports(tree: ast.Module, package: str, file: Path) -> Iterator[tuple[str, Import]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or whole, Import(whole, None)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            module = ".".join(filter(None, (base if node.level else "", node.module)))
            for alias in node.names:
                if alias.name == "*":
                    raise ValueError(f"{file}: got a star import of {module}, want names")
                yield alias.asname or alias.name, Import(module, alias.name)


def _definition(node: ast.stmt | ast.expr, binds: tuple[str, ...], uses: _Uses | None = None) -> Definition:
    uses = uses or _Uses()
    uses.visit(node)
    digest = hashlib.sha256(repr(text_of(node)).encode()).hexdigest()
    start = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", ()))])
    lines = start, node.end_lineno or start
    strong, weak = tuple(sorted(uses.strong)), tuple(sorted(uses.weak - uses.strong))
    mentions = tuple(sorted(uses.mentions))
    return Definition(binds, digest, strong, weak, mentions, (lines,), isinstance(node, ast.ClassDef))


def text_of(node: object) -> object:
    """Returns a syntax tree as nested tuples, without imports, strings that begin a body, and fields that differ
    between versions of Python."""
    if isinstance(node, ast.AST):
        fields = []
        for name in node._fields:
            value = getattr(node, name, None)
            if name == "body" and isinstance(value, list):
                value = [item for i, item in enumerate(value) if not _is_silent(item, i)]
            if name not in ("ctx", "kind", "type_comment") and value is not None and value != []:
                fields.append((name, text_of(value)))
        return (type(node).__name__, *fields)
    if isinstance(node, list):
        return [text_of(item) for item in node]
    return without_packages(node) if isinstance(node, str) else node


def without_packages(text: str) -> str:
    """Returns a string that names a module of this project, or an object in one, without the packages. Returns all
    other strings unchanged.
    """
    return re.sub(r"\A(?:cute_kernels|layouts)(?:\.\w+)*\.(\w+(?::\w+)?)\Z", r"\1", text)


def _is_silent(node: ast.stmt, position: int) -> bool:
    """Returns whether a statement is left out of a definition's text: an import, or a string that begins a body."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom) or (position == 0 and is_text)


class _Uses(ast.NodeVisitor):
    """Collects the dotted names that a statement refers to."""

    def __init__(self) -> None:
        self.strong: set[str] = set()
        self.weak: set[str] = set()
        self.mentions: set[str] = set()
        self._is_weak = False
        self._plain_class = True  # whether annotations of a class's body are types alone

    def _weakly(self, nodes: Iterable[ast.AST | None]) -> None:
        before, self._is_weak = self._is_weak, True
        self._visit_all(nodes)
        self._is_weak = before

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        (self.weak if self._is_weak else self.strong).add(node.id)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.isidentifier() and not self._is_weak:
            self.mentions.add(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names, value = [node.attr], node.value
        while isinstance(value, ast.Attribute):
            names.append(value.attr)
            value = value.value
        self.mentions.update(() if self._is_weak else names)
        if isinstance(value, ast.Name):
            (self.weak if self._is_weak else self.strong).add(".".join((value.id, *reversed(names))))
        else:
            self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name in TYPE_TESTS and len(node.args) == 2:
            self.visit(node.args[0])
            self._weakly(node.args[1:])
        elif name in TYPE_MAKERS:
            self._weakly([*node.args, *node.keywords])
        elif name == "cast" and len(node.args) == 2:
            self._weakly(node.args[:1])
            self.visit(node.args[1])
        else:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        if any(isinstance(side, ast.Call) and ast.unparse(side.func) == "type" for side in sides):
            for side in sides:
                self._visit_all([side]) if isinstance(side, ast.Call) else self._weakly([side])
        else:
            self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self._weakly([node.cls])
        self.mentions.update(node.kwd_attrs)
        self._visit_all([*node.patterns, *node.kwd_patterns])

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        self._visit_all([*node.decorator_list, *arguments.defaults, *arguments.kw_defaults])
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        self._weakly([node.returns, *(each.annotation for each in every if each is not None)])
        before, self._plain_class = self._plain_class, True
        self._visit_all(node.body)
        self._plain_class = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.keywords])
        for base in node.bases:
            self.visit(base.value if isinstance(base, ast.Subscript) else base)
            if isinstance(base, ast.Subscript):
                self._weakly([base.slice])
        before, self._plain_class = self._plain_class, all(map(_is_dataclass, node.decorator_list))
        self._visit_all(node.body)
        self._plain_class = before

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visits an annotated assignment. Annotations are code if a decorator other than `dataclass` may read them."""
        self._visit_all([node.target, node.value])
        (self._weakly if self._plain_class else self._visit_all)([node.annotation])


class _HeldUses(_Uses):
    """Collects the uses of a held class. The defaults of its fields are left out. So are its bases, which are listed
    separately.
    """

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.keywords])
        self._weakly(base.slice for base in node.bases if isinstance(base, ast.Subscript))
        fields = any(map(_is_dataclass, node.decorator_list))
        for item in node.body:
            is_field = fields and isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
            self._weakly([item]) if is_field else self.visit(item)


def _is_dataclass(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).partition("(")[0].endswith("dataclass")
