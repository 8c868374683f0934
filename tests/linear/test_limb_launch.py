"""The launch that makes limbs: what it is given, and where things lie in the memory behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.gemm.experts.product import limb_rows
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, LIMB_TILE_M, X_SCALE_ALIGNMENT
from tests.launchers import recording


@pytest.mark.parametrize("places, groups", [(1, 1), (9, 64), (32, 5), (1023, 16)])
def test_rows_of_experts_have_scales_from_any_of_them_on(places: int, groups: int):
    calls: list[tuple[Any, ...]] = []
    x = torch.zeros(places, LIMB_GROUP * groups, dtype=torch.bfloat16)
    with recording(lambda spec: lambda *arguments: calls.append(arguments)):
        rows = limb_rows("bf16", places, groups, "sm_90a")
        limbs, scales = rows.make(x, end=5, rows=6)
    assert calls == [(x, 5, 6, limbs.data_ptr(), scales.data_ptr(), places, groups, rows.pitch)]
    # The product has as many rows as what it is given.
    assert limbs.shape == x.shape and limbs.dtype == x.dtype and limbs.is_contiguous()
    # The last tile brings all of its scales from the last place on, or from up to three before it.
    last = (places - 1) // X_SCALE_ALIGNMENT * X_SCALE_ALIGNMENT
    assert rows.pitch % X_SCALE_ALIGNMENT == 0 and last + LIMB_TILE_M + X_SCALE_ALIGNMENT <= rows.pitch
    assert scales.dtype == torch.float32 and scales.numel() == groups * rows.pitch
