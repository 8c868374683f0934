"""Rows of x that meet factors, or a norm, on their way to limbs: every warp of a CTA in NumPy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import FACTOR_ROWS, NORMED, SCALED, ResidentLimbs
from cute_kernels.gemm.wgmma.resident_schedule import with_factors
from cute_kernels.gemm.wgmma.results import dsmem
from cute_kernels.gemm.wgmma.row_factors import Factors, RowFactors
from simulator import LANES, Int32, Uint32, Warp, running, stand_in

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CONFIG = WgmmaConfig(
    integers(4), "bf16", tile_m=8, block_k=128, num_stages=4, warpgroups=4,
    mainloop=ResidentLimbs(32, loads=True), reduction=dsmem(2, 2),
)  # fmt: skip


def bits(value: float) -> Any:
    return Int32(int(np.float32(value).view(np.int32)))


def source(rows: int, k: int, eps: float = 0.0, offset: float = 0.0) -> Any:
    return SimpleNamespace(
        address=0, rows=rows, row_pieces=k // 8, factors=stand_in(Factors)(0, bits(eps), bits(offset))
    )


@pytest.mark.parametrize("warps", [8, 16])
@pytest.mark.parametrize(("rows", "k"), [(1, 4096), (2, 264), (3, 1096), (4, 8), (5, 2048), (8, 1000)])
def test_a_row_is_multiplied_with_the_root_of_its_mean_square(rows: int, k: int, warps: int):
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(k)).bfloat16()
    warp = Warp(np.full(FACTOR_ROWS * 16 * 4, 0xFF, np.uint8), x.view(torch.uint8).numpy().reshape(-1))  # NaN
    subject, memory = RowFactors(NORMED, "bf16", warps), SimpleNamespace(row_sums=0)
    with running(warp), np.errstate(invalid="ignore"):
        for number in range(warps):
            subject.add_squares(source(rows, k), memory, number, LANES)
        found = np.asarray(subject.of_rows(source(rows, k, eps=1e-5), memory, LANES))
        shuffled = np.asarray(subject.of_row(found, Int32(rows - 1)))
    want = (x.double().square().mean(-1) + 1e-5).rsqrt().numpy()
    assert np.allclose(found[:rows], want, rtol=2e-6)
    assert (shuffled == found[rows - 1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [SCALED, NORMED])
def test_inputs_are_rounded_as_a_launch_of_their_own_would(dtype: str, kind: str):
    generator = torch.Generator().manual_seed(1)
    x, factors = (torch.randn(64, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    words = [tensor.view(torch.int16).numpy().copy().view(np.uint32) for tensor in (x, factors)]
    with running(Warp(np.zeros(0, np.uint8), np.zeros(0, np.uint8))):
        subject, row_factor = RowFactors(kind, dtype, 8), np.float32(0.75)
        inputs, given = ([Uint32(one)] for one in words)
        (found,) = subject.apply(source(1, 64, offset=1.0), inputs, given, row_factor)
    want = x.float() * factors.float() if kind == SCALED else x.float() * 0.75 * (factors.float() + 1)
    assert np.array_equal(np.asarray(found), want.to(DTYPES[dtype]).view(torch.int16).numpy().view(np.uint32))


def test_room_for_sums_is_counted_and_large_tiles_are_refused():
    normed, scaled = with_factors(CONFIG, NORMED), with_factors(CONFIG, SCALED)
    assert normed is not None and scaled is not None
    assert scaled.smem_bytes == CONFIG.smem_bytes
    assert normed.smem_bytes == CONFIG.smem_bytes + FACTOR_ROWS * CONFIG.consumer_warps * 4
    assert len({CONFIG.name, normed.name, scaled.name}) == 3
    large = replace(normed, tile_m=16)
    assert "16 rows are not normed" in (large.can_implement() or "")
    assert "factors 'other'" in (replace(CONFIG, mainloop=ResidentLimbs(32, factors="other")).can_implement() or "")
    assert with_factors(WgmmaConfig(integers(4), "bf16", tile_m=8), NORMED) is None
