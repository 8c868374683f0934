"""Which kernel `linear` takes on which GPU."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.product import Product, problem_of, product_of
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma, ResidentLimbs
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


def planned(m: int, **options) -> Product:
    return product_of(problem_of(m, 4096, 4096, integers(4), torch.bfloat16, 0), 0, **options)


def config_of(m: int, **options) -> Any:
    return planned(m, **options).schedule.config


def test_hopper_takes_its_own_kernels(gpu):
    gpu((9, 0))
    one, many = config_of(1), config_of(64)
    assert isinstance(one, StreamConfig) or isinstance(one.mainloop, ResidentLimbs)
    assert isinstance(many.mainloop, RegisterWgmma)


@pytest.mark.parametrize("capability, have", [((8, 0), r"8\.0"), ((10, 0), r"10\.0")])
def test_another_gpu_is_named(gpu, capability, have: str):
    gpu(capability)
    with pytest.raises(device.UnsupportedGPUError, match=rf"compute capability {have}; supported: sm_90a"):
        planned(1)


@pytest.mark.parametrize(("m", "k", "num_sms"), [(3, 1 << 20, 26), (8, 3 << 17, 16), (8, 1 << 23, 132)])
def test_few_rows_that_the_sms_together_have_no_room_for_are_multiplied_in_tiles(m: int, k: int, num_sms: int):
    schedule = chosen(LinearProblem(m, 16384, k, k, integers(8, 256), "fp16", num_sms))
    assert isinstance(schedule, TileSchedule) and schedule.config.can_implement() is None
