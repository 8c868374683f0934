"""Which kernel `linear` takes on which GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.linear import plan
from cute_kernels.linear.config import LinearConfig
from cute_kernels.linear.wgmma.policies import PortableMmaSync, RegisterWgmma, ResidentLimbs
from cute_kernels.runtime import device
from cute_kernels.weight_formats import integers


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A machine with one GPU of a given compute capability, and functions that are never called."""

    def found(capability: tuple[int, int]) -> None:
        for cached in (plan.plan_of, device._arch_of, device.portable_arch_of):
            cached.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Test GPU")
        properties = SimpleNamespace(multi_processor_count=108)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(plan, "load", lambda spec, arch: (spec, arch))

    yield found
    for cached in (plan.plan_of, device._arch_of, device.portable_arch_of):
        cached.cache_clear()


def planned(m: int, **options):
    return plan.plan_of(m, 4096, 4096, integers(4), torch.bfloat16, 0, **options)


def test_hopper_takes_its_own_kernels(gpu):
    gpu((9, 0))
    config = planned(1).schedule.config
    assert isinstance(config, LinearConfig) or isinstance(config.mainloop, ResidentLimbs)
    assert isinstance(planned(64).schedule.config.mainloop, RegisterWgmma)
    assert isinstance(planned(64, portable=True).schedule.config.mainloop, PortableMmaSync)


@pytest.mark.parametrize("capability, arch", [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((10, 0), "sm_100")])
@pytest.mark.parametrize("m", [1, 64, 5000])
def test_other_gpus_take_the_portable_kernel(gpu, capability, arch: str, m: int):
    gpu(capability)
    found: Any = planned(m).function
    spec, compiled_for = found
    assert isinstance(spec.config.mainloop, PortableMmaSync) and compiled_for == arch


def test_a_gpu_that_is_too_old_is_named(gpu):
    gpu((7, 5))
    with pytest.raises(device.UnsupportedGPUError, match=r"compute capability 7\.5; supported: weight-only linear"):
        planned(1)
