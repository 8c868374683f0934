"""The kernels that the GPU tests name can be built, so that `python -m tests.gpu.prepare` builds them all."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.runtime import KernelSpec
from tests.gpu import specs

FOLDER = Path(__file__).parent / "gpu"
SPECS = r"^def specs\(|^from .* import .*\bspecs\b"
# Seen in their text: importing all of them takes long, and every process of a run collects this file.
NAMES = [path.stem for path in sorted(FOLDER.glob("test_*.py")) if re.search(SPECS, path.read_text(), re.M)]

by_module = functools.cache(specs.by_module)


def test_all_tests_that_need_a_gpu_can_be_collected_without_one():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1], check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert all(f"tests/gpu/{name}.py::" in done.stdout for name in NAMES)


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
