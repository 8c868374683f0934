"""The cache's key covers every module that a kernel is made of: a change of any of them is another kernel."""

import ast
import gc
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

import cute_kernels
import layouts
from cute_kernels import families
from cute_kernels.runtime import KernelSpec, native, sources
from tests import golden
from tests.runtime.tiny import TinySpec

PACKAGE = Path(cute_kernels.__file__).resolve().parent
LAYOUTS = Path(layouts.__file__).resolve().parent
ALL_SOURCES = sorted(path for folder in (PACKAGE, LAYOUTS) for path in folder.rglob("*.py"))
# One of each kind and of other modules.
SPECS = {(type(spec).__name__, spec.source_roots()): spec for spec in families.shipped_specs()}
TO_COMPILE = golden.worth_compiling(SPECS.values(), lambda spec: spec, __file__)
# Of modules that are in no key: it raises, or changes nothing.
HARMLESS = {("cute_kernels/runtime/spec.py", "check_config")}


def files_of(spec: KernelSpec) -> set[Path]:
    return {file for root in sources.sources_of(spec) for file in sources._files_of(root)}


def named(spec: KernelSpec) -> set[str]:
    return {file.relative_to(PACKAGE.parent).as_posix() for file in files_of(spec)}


def imported_by(path: Path) -> set[Path]:
    """Modules of the package that one imports from; what is imported within functions is for the host."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("cute_kernels"):
            module = PACKAGE.parent / node.module.replace(".", "/")
            for place in (module.with_suffix(".py"), *((module / f"{alias.name}.py") for alias in node.names)):
                if place.is_file():
                    found.add(place)
    return found


@pytest.mark.parametrize("spec", SPECS.values(), ids=[f"{name}-{i}" for i, (name, _) in enumerate(SPECS)])
def test_what_device_code_imports_is_in_the_key(spec: KernelSpec):
    key = files_of(spec)
    for path in key:
        source = path.read_text()
        if path.parent != PACKAGE and "\nimport cutlass\n" in source:
            missing = imported_by(path) - key
            assert not missing, f"{path.name} imports {sorted(str(m.relative_to(PACKAGE)) for m in missing)}"


def imported_names(path: Path) -> Iterator[str]:
    """Modules that a file's import statements ask for, wherever they are: of ``from package import name`` the module of
    that name, or else the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative imports are not looked for"
            for alias in node.names:
                assert alias.name != "*", f"{path}: which names are taken from {node.module} is not seen"
                module = PACKAGE.parent.joinpath(*node.module.split("."), f"{alias.name}.py")
                yield f"{node.module}.{alias.name}" if module.is_file() else node.module


@pytest.mark.parametrize("path", ALL_SOURCES, ids=lambda path: path.relative_to(PACKAGE.parent).as_posix())
def test_every_import_is_found(path: Path):
    found = set(sources.imports_of(path))
    for name in imported_names(path):
        files = (PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py"), PACKAGE.parent / name.replace(".", "/"))
        assert found >= {file for file in files if file.is_file() and file.is_relative_to(PACKAGE.parent)}


@pytest.mark.parametrize("path", [*LAYOUTS.rglob("__init__.py"), PACKAGE / "device" / "__init__.py"], ids=str)
def test_packages_that_an_import_passes_hold_nothing_but_imports_and_constants(path: Path):
    for node in ast.parse(path.read_text()).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_constant = isinstance(node, ast.Assign) and not any(isinstance(part, ast.Call) for part in ast.walk(node))
        assert is_text or is_constant or isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(node)


def test_a_key_has_what_its_kernels_are_made_with_and_nothing_else():
    by_name = {name: named(spec) for (name, _), spec in SPECS.items()}
    assert {"layouts/kv/tile.py", "layouts/proofs.py"} <= by_name["DecodeSpec"]
    assert {"layouts/weights/hopper.py", "layouts/algebra.py"} <= by_name["WgmmaSpec"]
    assert not {name for name in by_name["WgmmaSpec"] if name.startswith("layouts/kv/")}
    assert not {name for name in by_name["DecodeSpec"] if name.startswith("layouts/weights/")}
    assert all("cute_kernels/runtime/launch_arguments.py" in names for names in by_name.values())
    others = ("layouts/draw/", "layouts/__main__.py", "layouts/registry.py", "cute_kernels/runtime/spec.py")
    calls = tuple(
        f"cute_kernels/{room.replace('.', '/')}/{name}.py"
        for room in families.family_rooms()
        for name in ("__init__", "ops", "plan")
    )
    assert not {name for names in by_name.values() for name in names if name.startswith(others) or name in calls}


def test_a_key_has_the_readers_of_its_formats_alone():
    readers = "cute_kernels/attention/readers/"
    int4 = next(spec for spec in families.shipped_specs() if str(spec).startswith("attention:decode_int4_g1_bf16_d128"))
    dense = next(spec for spec in families.shipped_specs() if str(spec).startswith("attention:decode_bf16_bf16_d128"))
    assert f"{readers}int4.py" in named(int4) and f"{readers}bytes.py" not in named(int4)
    assert f"{readers}dense.py" in named(dense) and f"{readers}dense.py" not in named(int4)


def test_a_spec_from_elsewhere_has_its_folder_and_both_libraries():
    folders = (LAYOUTS, PACKAGE / "device", Path(__file__).parent)
    assert files_of(TinySpec()) >= {file for folder in folders for file in folder.rglob("*.py")}


# -- what runs while a kernel is compiled --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything_imported() -> None:
    """Every module of both packages but what asks for other software: bodies of modules are not what is looked for."""
    for package in (cute_kernels, layouts):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not {"__main__", "integrations"} & set(module.name.split(".")):
                importlib.import_module(module.name)


@contextmanager
def functions_run() -> Iterator[set[tuple[str, str]]]:
    """(file, name) of every Python function that is called."""
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def forget_results() -> None:
    """Of functions that keep them: they run again."""
    for kept in gc.get_objects():
        if type(kept).__name__ == "_lru_cache_wrapper" and kept.__module__.partition(".")[0] in (
            "cute_kernels",
            "layouts",
        ):
            kept.cache_clear()


@pytest.mark.skipif(native.dsl_version() is None, reason="compiles kernels")
@pytest.mark.parametrize("spec", TO_COMPILE, ids=str)
def test_no_function_of_another_module_runs_while_a_kernel_is_compiled(spec: KernelSpec, everything_imported: None):
    key = {str(file) for file in files_of(spec)}
    forget_results()
    with functions_run() as run:
        spec.compile("sm_90a")
    ours = {
        (file, name) for file, name in run if Path(file).is_relative_to(PACKAGE) or Path(file).is_relative_to(LAYOUTS)
    }
    others = {(file, name) for file, name in ours if file not in key}
    assert {(Path(file).relative_to(PACKAGE.parent).as_posix(), name) for file, name in others} <= HARMLESS
