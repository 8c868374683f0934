"""Which kernel `linear` takes on which GPU."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from cute_kernels.formats.weights import integers
from cute_kernels.gemm import plan
from cute_kernels.gemm.config import LinearConfig
from cute_kernels.gemm.wgmma.mainloops import PortableMmaSync, RegisterWgmma, ResidentLimbs
from cute_kernels.runtime import device
from tests.launchers import RecordingCache, recording


@pytest.fixture
def gpu():
    """A machine with one GPU of a given compute capability, and functions that are never called."""
    with ExitStack() as stack:

        def found(capability: tuple[int, int]) -> RecordingCache:
            numbers = {"capability": lambda index: capability, "num_sms": lambda index: 108}
            return stack.enter_context(recording(**numbers))

        yield found


def planned(m: int, **options):
    return plan.plan_of(m, 4096, 4096, integers(4), torch.bfloat16, 0, **options)


def config_of(m: int, **options) -> Any:
    return planned(m, **options).schedule.config


def test_hopper_takes_its_own_kernels(gpu):
    gpu((9, 0))
    one, many, portable = (config_of(1), config_of(64), config_of(64, portable=True))
    assert isinstance(one, LinearConfig) or isinstance(one.mainloop, ResidentLimbs)
    assert isinstance(many.mainloop, RegisterWgmma)
    assert isinstance(portable.mainloop, PortableMmaSync)


@pytest.mark.parametrize("capability, arch", [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((10, 0), "sm_100")])
@pytest.mark.parametrize("m", [1, 64, 5000])
def test_other_gpus_take_the_portable_kernel(gpu, capability, arch: str, m: int):
    recorded = gpu(capability)
    planned(m)
    ((spec, compiled_for),) = recorded.loaded
    assert isinstance(spec.config.mainloop, PortableMmaSync) and compiled_for == arch


def test_a_gpu_that_is_too_old_is_named(gpu):
    gpu((7, 5))
    with pytest.raises(device.UnsupportedGPUError, match=r"compute capability 7\.5; supported: weight-only linear"):
        planned(1)
