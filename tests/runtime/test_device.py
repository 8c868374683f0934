"""A GPU's architecture, or an error that names what is supported."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from cute_kernels.runtime import UnsupportedGPUError, arch_of
from cute_kernels.runtime.gpu import Gpu, standing_in


def machine(**others: Any) -> AbstractContextManager[None]:
    """With one Hopper GPU, as far as torch tells, or ``others``."""
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "count": lambda: 1,
        "current": lambda: 0,
        "capability": lambda index: (9, 0),
        "name": lambda index: "NVIDIA Test GPU",
    }
    return standing_in(Gpu(**functions | others))


def test_hopper_compiles_for_its_own_variant():
    with machine():
        assert arch_of(0) == arch_of() == "sm_90a"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_another_gpu_is_named_with_what_is_supported(capability: tuple[int, int]):
    words = rf"cuda:0 is NVIDIA Test GPU, compute capability {capability[0]}\.{capability[1]}; supported: sm_90a .*H200"
    with machine(capability=lambda index: capability), pytest.raises(UnsupportedGPUError, match=words):
        arch_of(0)


def test_a_device_that_is_not_there_is_a_value_error():
    with machine(), pytest.raises(ValueError, match=r"device_index must be in \[0, 1\), got 3"):
        arch_of(3)


def test_no_gpu_is_a_clear_error():
    words = r"no GPU: torch .*; supported: sm_90a"
    with machine(is_available=lambda: False), pytest.raises(UnsupportedGPUError, match=words):
        arch_of()
