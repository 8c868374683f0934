"""The kernels that the GPU tests name can be built, so that `python -m tests.gpu.prepare` builds them all."""

from __future__ import annotations

import pytest

from cute_kernels.runtime import KernelSpec
from tests.gpu.specs import by_module

MODULES = by_module()


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
    } <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_can_be_implemented(name):
    specs = MODULES[name]()
    assert specs and all(isinstance(spec, KernelSpec) for spec in specs)
    assert len(set(specs)) == len(specs) == len({spec.symbol for spec in specs})
    for spec in specs:
        spec.check()
        assert getattr(spec.config, "can_implement", lambda: None)() is None, spec
