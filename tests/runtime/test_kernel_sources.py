"""The cache's key covers every module that a kernel is made of: a change of any of them is another kernel."""

import ast
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels import families
from cute_kernels.runtime import KernelSpec
from cute_kernels.runtime.sources import _shared_roots

PACKAGE = Path(cute_kernels.__file__).resolve().parent
# One of each kind and of other modules.
SPECS = {(type(spec).__name__, spec.source_roots()): spec for spec in families.shipped_specs()}


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
    roots = {*_shared_roots(), *spec.source_roots()}
    folders = {root for root in roots if root.is_dir()}
    for path in roots - folders:
        source = path.read_text()
        if path.parent != PACKAGE and "\nimport cutlass\n" in source:
            missing = {module for module in imported_by(path) - roots if not folders & set(module.parents)}
            assert not missing, f"{path.name} imports {sorted(str(m.relative_to(PACKAGE)) for m in missing)}"
