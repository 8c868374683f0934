"""A GPU's architecture, or an error that names what is supported."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest

from cute_kernels.runtime import UnsupportedGPUError, arch_of, device
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


@pytest.mark.parametrize(
    "capability, arch",
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_portable_kernels_are_compiled_for_what_runs_on_the_gpu(capability, arch: str):
    with machine(capability=lambda index: capability):
        assert device.portable_arch_of(0) == arch
        assert device.is_supported(0) == (arch == "sm_90a")


@pytest.mark.parametrize("capability", [(7, 5), (13, 0)])
def test_a_gpu_that_nothing_runs_on_is_named(capability: tuple[int, int]):
    words = (
        rf"NVIDIA Test GPU, compute capability {capability[0]}\.{capability[1]}; supported: weight-only linear .* 8\.0"
    )
    with machine(capability=lambda index: capability), pytest.raises(UnsupportedGPUError, match=words):
        device.portable_arch_of(0)
