"""The house's own rules, counted: names with one meaning, kernels without kernel parents, small configurations."""

from __future__ import annotations

import ast
import collections
import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import cute_kernels
import layouts
from tests import golden

ROOTS = [Path(str(package.__path__[0])) for package in (cute_kernels, layouts)]
SOURCES = [path for root in ROOTS for path in root.rglob("*.py")]
# The stages from a call to a launch (docs/glossary.md): a class that is named by one belongs to one family.
STAGE = re.compile(r"(Call|Problem|Schedule|Plan|Sizes|Shape|Memory|KvFormat|WeightFormat)\Z")
MOST_FIELDS, MOST_BOOLEANS = 12, 2


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
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
