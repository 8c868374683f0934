"""The house's own rules, counted: names with one meaning, kernels without kernel parents, small configurations."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import bench
import cute_kernels
import layouts
from tests import golden

ROOTS = [Path(str(package.__path__[0])) for package in (cute_kernels, layouts)]
IMPORTING = [*ROOTS, Path(str(bench.__path__[0]))]
SOURCES = [path for root in ROOTS for path in root.rglob("*.py")]
# The stages from a call to a launch (docs/glossary.md): a class that is named by one belongs to one family.
STAGE = re.compile(r"(Call|Problem|Schedule|Plan|Sizes|Shape|Memory|KvFormat|WeightFormat)\Z")
MOST_FIELDS, MOST_BOOLEANS = 12, 2


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                yield path, node


def test_a_stages_class_has_one_meaning():
    places = collections.defaultdict(list)
    for path, node in classes():
        if STAGE.search(node.name):
            places[node.name].append(path)
    assert len(places) > 20
    assert {name for name, paths in places.items() if len(paths) > 1} == set()


def inside(path: Path) -> tuple[str, ...]:
    """Folders of a source below its package."""
    package = next(root for root in ROOTS if path.is_relative_to(root))
    return path.relative_to(package).parts


def test_no_kernel_derives_from_a_kernel():
    kernels = [(path, node) for path, node in classes() if node.name.endswith("Kernel") and "vllm" not in inside(path)]
    assert len(kernels) > 20
    assert not [(path, node.name) for path, node in kernels if node.bases]


def configs() -> list[type]:
    return sorted({type(spec.config) for spec, _ in golden.inventory()}, key=str)


@pytest.mark.parametrize("config", configs(), ids=lambda config: f"{config.__module__}.{config.__name__}")
def test_a_configuration_has_few_fields_and_hardly_a_flag(config: type):
    hints = typing.get_type_hints(config)
    fields = dataclasses.fields(config)
    assert len(fields) <= MOST_FIELDS
    assert sum(hints[field.name] is bool for field in fields) <= MOST_BOOLEANS
    assert not any(dataclasses.is_dataclass(base) for base in config.__mro__[1:])


# Files whose types need each other. A configuration holds its policies, and their methods are given the configuration:
# annotations alone, which nothing imports as it runs.
CIRCLES_OF_TYPES = {f"cute_kernels.gemm.wgmma.{name}" for name in ("config", "launch", "mainloops", "results")}


def module_of(path: Path) -> str:
    """The name of a source as a module."""
    package = next(root for root in IMPORTING if path.is_relative_to(root))
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_in(nodes: Iterable[ast.AST], with_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports in parts of a source, also inside functions; ``with_types``: and those for annotations alone."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not with_types:
            yield from imports_in(node.orelse, with_types)
        else:
            yield from imports_in(ast.iter_child_nodes(node), with_types)


def imported_modules(tree: ast.AST, modules: set[str], with_types: bool) -> set[str]:
    """The sources that a source imports."""
    found = set()
    for node in imports_in([tree], with_types):
        if isinstance(node, ast.ImportFrom):
            assert not node.level and node.module
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
        else:
            found |= {alias.name for alias in node.names}
    return found & modules


def in_circles(imports: dict[str, set[str]]) -> set[str]:
    """The modules from which imports lead back to them."""

    def reached(module: str) -> set[str]:
        found, waiting = set(), [module]
        while waiting:
            new = imports.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    return {module for module in imports if module in reached(module)}


@pytest.mark.parametrize(("with_types", "left"), [(False, set()), (True, CIRCLES_OF_TYPES)], ids=["running", "types"])
def test_no_files_import_each_other_in_a_circle(with_types: bool, left: set[str]):
    trees = {module_of(path): tree_of(path) for root in IMPORTING for path in root.rglob("*.py")}
    imports = {module: imported_modules(tree, set(trees), with_types) - {module} for module, tree in trees.items()}
    assert sum(map(len, imports.values())) > 1000
    assert in_circles(imports) == left


def test_circles_of_imports_are_found():
    source = "if TYPE_CHECKING:\n    import a.c\nelse:\n    import a.b\ndef f():\n    from a.d import name"
    tree, modules = ast.parse(source), {"a", "a.b", "a.c", "a.d"}
    assert imported_modules(tree, modules, False) == {"a.b", "a.d"}
    assert imported_modules(tree, modules, True) == {"a.b", "a.c", "a.d"}
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"b", "c"}


# -- the house in numbers: what it was brought down to, and may not grow beyond ----------------------------------------

MOST_CLASSES = {"Plan": 7, "Spec": 14, "Config": 18, "Kernel": 24}
"""Classes of the package's modules, integrations apart, whose names end so; one more Config is a protocol."""


def library() -> list[tuple[Path, ast.Module]]:
    """Returns the package's sources, with their paths."""
    return [(path, tree_of(path)) for path in ROOTS[0].rglob("*.py")]


@pytest.mark.parametrize("kind", MOST_CLASSES)
def test_kinds_of_classes_stay_few(kind: str):
    found = [
        "/".join((*inside(path), node.name))
        for path, tree in library()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith(kind) and inside(path)[0] != "integrations"
    ]
    counted = [name for name in found if name != "runtime/spec.py/Config"]
    assert 0 < len(counted) <= MOST_CLASSES[kind], counted


def test_no_two_rooms_import_each_other():
    """A room is a folder of the package, or a file beside them; imports in functions and for annotations count."""
    modules = {module_of(path) for path, _ in library()}
    rooms = collections.defaultdict[str, set[str]](set)
    for path, tree in library():
        imported = imported_modules(tree, modules, True)
        rooms[inside(path)[0].removesuffix(".py")] |= {name.split(".")[1] for name in imported if "." in name}
    pairs = {(room, other) for room, found in rooms.items() for other in found - {room}}
    assert len(pairs) > 20
    assert {pair for pair in pairs if pair[::-1] in pairs} == set()


def test_only_the_pipeline_waits_for_barriers_in_shared_memory():
    """MLA's kernels, which wait themselves, take the pipeline when they are next changed."""
    wait = re.compile(r"mbarrier_(try_)?wait\(")
    waiting = {"/".join(inside(path)) for path, _ in library() if wait.search(path.read_text())}
    assert {name for name in waiting if not name.startswith("mla/")} == {"device/pipeline.py"}
