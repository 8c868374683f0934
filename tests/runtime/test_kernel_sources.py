"""The cache's key covers every function that a kernel is made of: a change of any of them is another kernel."""

from __future__ import annotations

import ast
import cProfile
import gc
import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType

import pytest

import cute_kernels
import layouts
from cute_kernels import families
from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.runtime import KernelSpec, definitions, native, sources
from cute_kernels.runtime.store import key_of
from tests import golden
from tests.each import each
from tests.golden import collect
from tests.runtime.tiny import TinySpec

PACKAGE = Path(cute_kernels.__file__).resolve().parent
LAYOUTS = Path(layouts.__file__).resolve().parent
ALL_SOURCES = sorted(path for folder in (PACKAGE, LAYOUTS) for path in folder.rglob("*.py"))
ALL_SPECS = families.shipped_specs()


@cache
def some_specs() -> list[KernelSpec]:
    """One of each kind and of other definitions."""
    return list({(type(spec), sources.reached(spec).places): spec for spec in ALL_SPECS}.values())


def named(spec: KernelSpec) -> set[str]:
    return {file.relative_to(PACKAGE.parent).as_posix() for file in sources.reached(spec).files}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@each("path", ALL_SOURCES, ids=module_of)
def test_every_import_means_a_definition_or_a_module(path: Path):
    """Else a name that device code uses would be in no key."""
    module = definitions.read(module_of(path), path)
    for where, attribute in (target for targets in module.imports.values() for target in targets):
        if where.partition(".")[0] in sources.PACKAGES:
            found = sources._found(where)
            assert found is not None, where
            known = attribute is None or attribute in found.definitions or attribute in found.imports
            assert known or sources._found(f"{where}.{attribute}") is not None, f"{where}: {attribute}"


@pytest.mark.parametrize("path", [*LAYOUTS.rglob("__init__.py"), PACKAGE / "device" / "__init__.py"], ids=str)
def test_packages_that_an_import_passes_hold_nothing_but_imports_and_constants(path: Path):
    for node in ast.parse(path.read_text()).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_constant = isinstance(node, ast.Assign) and not any(isinstance(part, ast.Call) for part in ast.walk(node))
        assert is_text or is_constant or isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(node)


def test_a_key_has_what_its_kernels_are_made_with_and_nothing_else():
    names = {spec.symbol: named(spec) for spec in some_specs()}
    ops = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.glob("*/ops.py")}
    others = {"cute_kernels/runtime/cache.py", "cute_kernels/runtime/operator.py", "layouts/registry.py"}
    for symbol, own in names.items():
        assert "cute_kernels/runtime/launch_arguments.py" in own
        assert not own & (ops | others) and not any(name.startswith("layouts/draw") for name in own), symbol
    decode = next(own for symbol, own in names.items() if symbol.startswith("decode_"))
    tiles = next(own for symbol, own in names.items() if symbol.startswith("linear_wgmma_"))
    assert "layouts/kv/tile.py" in decode and not any(name.startswith("layouts/weights/") for name in decode)
    assert "layouts/weights/hopper.py" in tiles and not any(name.startswith("layouts/kv/") for name in tiles)


def test_a_key_has_the_readers_of_its_formats_alone():
    def readers(prefix: str) -> set[str]:
        spec = next(spec for spec in ALL_SPECS if spec.symbol.startswith(prefix))
        return {Path(name).stem for name in named(spec) if "/readers/" in name}

    assert "bytes" not in readers("decode_int4_g1_bf16_d128") and "dense" not in readers("decode_int4_g1_bf16_d128")
    assert "dense" in readers("decode_bf16_bf16_d128") and "bytes" in readers("decode_int8_token_head_bf16_d128")


def test_a_key_of_tiles_has_its_own_mainloop_alone():
    """So an edit of one leaves the kernels of the others as they are."""
    own = {"RegisterWgmma": "register_mainloop.py", "MmaSync": "synchronous.py", "Limbs": "limbs.py"}
    others, specs = {*own.values(), "fp8_mainloop.py", "fp8_tail.py"}, {}
    for spec in ALL_SPECS:
        specs.setdefault(type(getattr(spec.config, "mainloop", None)).__name__, spec)
    for kind, file in own.items():
        found = {Path(name).name for name in named(specs[kind])} & others
        assert file in found <= {file, "register_mainloop.py"}, kind  # that one has a base of the others


def test_a_key_of_extend_attention_has_key_rows_if_keys_are_the_rows():
    extend = [spec for spec in ALL_SPECS if isinstance(spec.config, ExtendConfig)]
    held = {spec.config.key_rows is not None: any("/key_rows/" in name for name in named(spec)) for spec in extend}
    assert held == {False: False, True: True}


def test_a_key_names_classes_and_not_where_they_lie():
    for spec in some_specs():
        assert "cute_kernels." not in key_of(spec, golden.ARCH).content, spec


def test_a_spec_from_elsewhere_has_what_it_imports_from_its_own_package():
    names = {file.name for file in sources.reached(TinySpec()).files}
    assert {"tiny.py", "tiny_kernel.py", "launch_arguments.py"} <= names


# -- what runs while a kernel is made ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything_imported() -> None:
    """Every module of both packages but what asks for other software: bodies of modules are not what is looked for."""
    for package in (cute_kernels, layouts):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not {"__main__", "integrations"} & set(module.name.split(".")):
                importlib.import_module(module.name)


@contextmanager
def functions_run() -> Iterator[set[tuple[str, int, str]]]:
    """(file, line, name) of every Python function that is called, once the block has ended."""
    found: set[tuple[str, int, str]] = set()
    with cProfile.Profile(builtins=False) as profile:
        yield found
    codes = (entry.code for entry in profile.getstats() if isinstance(entry.code, CodeType))
    found.update((code.co_filename, code.co_firstlineno, code.co_name) for code in codes)


def forget_results() -> None:
    """Of functions that keep them: they run again."""
    for kept in gc.get_objects():
        if type(kept).__name__ == "_lru_cache_wrapper" and kept.__module__.partition(".")[0] in sources.PACKAGES:
            kept.cache_clear()


@pytest.mark.skipif(native.dsl_version() is None, reason="runs kernels' programs")
@each("spec", lambda: golden.sample(some_specs(), 10))
def test_no_function_outside_the_key_runs_while_a_kernel_is_made(
    spec: KernelSpec, everything_imported: None, compiler_kept: None
):
    lines: defaultdict[str, set[int]] = defaultdict(set)
    for place in sources.reached(spec).places:
        lines[str(place.file)].update(range(place.first, place.last + 1))
    forget_results()
    with functions_run() as run:
        collect.trace((spec, golden.ARCH))
    ours = {each for each in run if Path(each[0]).is_relative_to(PACKAGE) or Path(each[0]).is_relative_to(LAYOUTS)}
    assert len(ours) > 10
    assert {each for each in ours if each[1] not in lines[each[0]] and each[2] != "<module>"} == set()
