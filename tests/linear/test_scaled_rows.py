"""Inputs of x that are multiplied by factors on their way to limbs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.resident_rows import ResidentRows, RowsRoom
from cute_kernels.gemm.wgmma.resident_schedule import resident_configs, scaled
from simulator import Uint32, Warp, running

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_rounded_as_a_launch_of_their_own_would(dtype: str):
    generator = torch.Generator().manual_seed(1)
    x, factors = (torch.randn(64, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    words = [tensor.view(torch.int16).numpy().copy().view(np.uint32) for tensor in (x, factors)]
    with running(Warp(np.zeros(0, np.uint8), np.zeros(0, np.uint8))):
        rows = ResidentRows(RowsRoom(dtype, 8, 8, 32, scaled=True))
        (found,) = rows.scale(*([Uint32(one)] for one in words))
    want = (x.float() * factors.float()).to(DTYPES[dtype])
    assert np.array_equal(np.asarray(found), want.view(torch.int16).numpy().view(np.uint32))


def test_scaled_configurations_are_of_limbs_that_ctas_make_and_want_no_more_memory():
    for config in resident_configs(LinearProblem(1, 4096, 4096, 4096, integers(4), "bf16")):
        changed = scaled(config)
        assert changed is not None and changed.can_implement() is None
        assert changed.smem_bytes == config.smem_bytes and changed.name == config.name + "scaled"
    assert scaled(WgmmaConfig(integers(4), "bf16", tile_m=8)) is None
