"""The kernels that the GPU tests name can be built, so that `python -m tests.gpu.prepare` builds them all."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from cute_kernels.runtime import KernelSpec
from tests.gpu import specs

FOLDER = Path(__file__).parent / "gpu"
SPECS = r"^def specs\(|^from .* import .*\bspecs\b"
# Seen in their text: importing all of them takes long, and every process of a run collects this file.
NAMES = [path.stem for path in sorted(FOLDER.glob("test_*.py")) if re.search(SPECS, path.read_text(), re.M)]

by_module = functools.cache(specs.by_module)


class Collected:
    """A plugin that keeps what was collected."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


def test_all_tests_that_need_a_gpu_can_be_collected_without_one():
    """They are collected in this process, which has imported what takes longest and needs them for their kernels."""
    found = Collected()
    # Plugins that replace hooks of this process, whose own ones would be gone behind it.
    without = [option for name in ("cacheprovider", "faulthandler", "xdist") for option in ("-p", f"no:{name}")]
    assert pytest.main(["--collect-only", "-qq", *without, str(FOLDER)], plugins=[found]) == 0
    assert {f"tests/gpu/{name}.py" for name in NAMES} <= {name.partition("::")[0] for name in found.names}


def test_modules_whose_kernels_are_compiled_on_demand_name_them():
    assert {
        "test_append",
        "test_append_and_decode",
        "test_decode_features",
        "test_decode_formats",
        "test_kv_cache",
        "test_linear_compiled",
        "test_merge_states",
        "test_modules",
        "test_moe_assigned",
        "test_moe_compiled",
        "test_moe_fp8",
        "test_moe_modules",
        "test_quantize_kv",
        "test_runtime",
    } <= set(by_module())
    assert set(by_module()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_can_be_implemented(name):
    if name not in by_module():
        pytest.skip("its packages are not here")  # an engine's
    found = by_module()[name]()
    assert found and all(isinstance(spec, KernelSpec) for spec in found)
    assert len(set(found)) == len(found) == len({spec.symbol for spec in found})
    for spec in found:
        spec.check()
        assert getattr(spec.config, "can_implement", lambda: None)() is None, spec
