"""A machine with filled caches or bundles needs no compiler: what is imported before a compilation imports none."""

from collections.abc import Callable
from pathlib import Path

import cute_kernels

ROOT = Path(cute_kernels.__file__).resolve().parent
BLOCK = """
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cutlass":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
for name in sys.argv[1:]:
    importlib.import_module(name)
from cute_kernels import families
print(len(families.shipped_specs()))
"""


def host_modules() -> list[str]:
    """All public entries, and of every room what calls, plans and names its kernels."""
    names = ("__init__", "ops", "launch", "plan", "compile", "schedule", "checks", "step_ops", "fbgemm", "flash_mla")
    paths = [path for path in sorted(ROOT.rglob("*.py")) if path.stem in names and path.parent.name != "device"]
    parts = [path.relative_to(ROOT.parent).with_suffix("").parts for path in paths]
    return [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]


def test_no_module_of_the_host_imports_the_compiler(output_of: Callable[..., str]):
    modules = host_modules()
    assert {"cute_kernels", "cute_kernels.mla.cache.compile", "cute_kernels.gemm.experts.ops"} <= set(modules)
    assert int(output_of(BLOCK, *modules)) > 100
