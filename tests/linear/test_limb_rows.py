"""The kernel that makes limbs of rows, lane by lane in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.gemm.operands.fp8_config import LIMBS, RowsConfig
from cute_kernels.gemm.operands.rows import LimbCodes
from cute_kernels.gemm.wgmma import limb_rows
from tests.attention.warp import LANES
from tests.linear.limbs import GROUP, limbs_of
from tests.linear.warp import LinearWarp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def split(dtype: str, x: torch.Tensor, run_on) -> tuple[np.ndarray, np.ndarray]:
    """(int8 [2, 2, 128], fp32 [2]) of x [2, 128], a row for each half of a warp, as the kernel makes them."""
    gpu = LinearWarp(np.zeros(0, np.uint8), np.zeros(0, np.uint8))
    run_on(gpu)
    words = x.contiguous().view(torch.int32).numpy().view(np.uint32).reshape(32, 4)
    subject = limb_rows.RowLimbs(dtype)
    lane = LANES % limb_rows.GROUP_LANES
    given = [gpu.pinned(np.ascontiguousarray(words[:, i]).view(type(LANES))) for i in range(4)]
    factor, scale = subject.scales_of(subject.of_group(subject.largest(given)))
    found = subject.limbs(given, factor, lane)
    memory = np.zeros(2 * 2 * GROUP, np.uint8)
    target = 16 * LimbCodes(RowsConfig(dtype, makes=LIMBS)).target(LANES, lane)
    for i, word in enumerate(found):
        memory.view(np.uint32)[target // 4 + i] = np.asarray(word)
    return memory.view(np.int8).reshape(2, 2, GROUP), np.asarray(scale).view(np.float32)[::16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_limbs_are_those_of_the_format(dtype: str, seed: int, run_on):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, GROUP, generator=generator) * 10.0 ** (seed - 3)
    x[0, 5] *= (1, 100, 0, 1000, 1, 10)[seed]
    if seed == 4:
        x[0] = 1.9921875  # a high limb of 128, were it not for the next power of two
        x[1] = 0
    x = x.to(DTYPES[dtype])
    wanted, scales = limbs_of(x)
    found, found_scales = split(dtype, x, run_on)
    assert np.array_equal(found, wanted[:, 0])
    assert np.array_equal(found_scales, scales[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_inputs_are_exact_and_small_ones_nearly(dtype: str, run_on):
    x = (torch.randn(2, GROUP, generator=torch.Generator().manual_seed(9)) ** 5).to(DTYPES[dtype])
    found, scales = split(dtype, x, run_on)
    order = np.arange(GROUP).reshape(-1, 2, 8).transpose(0, 2, 1).reshape(-1)
    values = np.zeros((2, GROUP))
    values[:, order] = (256.0 * found[:, 0] + found[:, 1]) * scales[:, None] * 16
    error, largest = np.abs(values - x.double().numpy()), np.abs(x.double().numpy()).max(axis=1, keepdims=True)
    assert error.max() > 0 and (error <= 2.0**-15 * largest).all()
    exact = np.abs(x.double().numpy()) >= largest / (64 if dtype == "bf16" else 8)
    assert exact.sum() > 8 and not error[exact].any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_rows_that_are_not_finite_have_no_scale(value: float, run_on):
    x = torch.ones(2, GROUP, dtype=torch.bfloat16)
    x[1, 77] = value
    _, scales = split("bf16", x, run_on)
    assert np.isfinite(scales[0]) and np.isnan(scales[1])
