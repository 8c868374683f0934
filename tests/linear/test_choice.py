"""Which kernel `linear` takes on which GPU."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from cute_kernels.formats.weights import FP8, FP8_BLOCK, FP8_POWER_BLOCK, NVFP4, WeightFormat, integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.experts.wgmma.schedule import make_tiles
from cute_kernels.gemm.problem import GroupedProblem, LinearProblem
from cute_kernels.gemm.product import Product, problem_of, product_of
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma, ResidentLimbs, ScaledSums
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


def mainloop_of(problem: LinearProblem) -> Any:
    return getattr(chosen(problem).config, "mainloop", None)


@pytest.mark.parametrize("m", [9, 16, 32, 64, 128])
def test_fp32_scales_of_groups_multiply_sums_where_a_thread_has_registers_for_them(m: int):
    problem = LinearProblem(m, 8192, 8192, 8192, FP8_BLOCK, "bf16")
    assert isinstance(mainloop_of(problem), ScaledSums)
    if m <= 64:  # of an expert, on average
        experts = GroupedProblem(8 * m, 8, 4096, 4096, 4096, FP8_BLOCK, "bf16")
        assert isinstance(make_tiles(experts).config.mainloop, ScaledSums)


@pytest.mark.parametrize("form", [FP8, FP8_POWER_BLOCK, NVFP4, integers(8, 128), integers(4, 128, True)])
def test_no_other_scales_multiply_sums(form: WeightFormat):
    for m in (16, 64, 128):
        assert not isinstance(mainloop_of(LinearProblem(m, 8192, 8192, 8192, form, "bf16")), ScaledSums)
    scaling = WgmmaConfig(form, "bf16", tile_m=64, block_k=128, mainloop=ScaledSums())
    assert form.key in str(scaling.can_implement())


def test_batch_invariant_products_round_weights_in_all_tiles():
    """Tiles of 256 rows have no registers for sums of their own, so smaller tiles may not have them either."""
    for m in (1, 16, 64, 1024):
        problem = LinearProblem(m, 8192, 8192, 8192, FP8_BLOCK, "bf16", batch_invariant=True)
        assert type(mainloop_of(problem)) is RegisterWgmma
        experts = GroupedProblem(8 * m, 8, 4096, 4096, 4096, FP8_BLOCK, "bf16", batch_invariant=True)
        assert type(make_tiles(experts).config.mainloop) is RegisterWgmma
    assert "accumulators" in str(WgmmaConfig(FP8_BLOCK, "bf16", mainloop=ScaledSums()).can_implement())


def test_sums_that_three_warpgroups_would_spill_are_refused():
    sizes = {"warpgroups": 3, "block_k": 128, "num_stages": 2, "mainloop": ScaledSums()}
    assert "spill" in str(WgmmaConfig(FP8_BLOCK, "bf16", tile_m=32, n_tiles=2, **sizes).can_implement())
    assert WgmmaConfig(FP8_BLOCK, "bf16", tile_m=16, n_tiles=2, **sizes).can_implement() is None
