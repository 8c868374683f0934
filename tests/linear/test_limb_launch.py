"""The launch that makes limbs: what it is given, and where things lie in the memory behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.gemm.operands.fp8_config import BY_GROUP, LIMBS, ROWS
from cute_kernels.gemm.operands.fp8_launch import rows_for_products
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, LIMB_TILE_M, X_SCALE_ALIGNMENT
from tests.launchers import recording


@pytest.mark.parametrize("places, groups", [(1, 1), (9, 64), (32, 5), (1023, 16)])
def test_rows_of_experts_have_scales_from_any_of_them_on(places: int, groups: int):
    calls: list[tuple[Any, ...]] = []
    x = torch.zeros(places, LIMB_GROUP * groups, dtype=torch.bfloat16)
    with recording(lambda spec: lambda *arguments: calls.append(arguments)):
        rows = rows_for_products(places, LIMB_GROUP * groups, torch.bfloat16, BY_GROUP, 0, LIMBS)
        limbs, scales = rows.make(x, end=5, rows=6)
    (given,) = (dict(zip(ROWS.names, arguments, strict=True)) for arguments in calls)
    assert given.pop("x") is x
    assert given == {
        "end": 5, "rows": 6, "given": 0, "out": limbs.data_ptr(), "scales": scales.data_ptr(), "places": places,
        "out_pieces": 16 * groups, "groups": groups, "scale_groups": groups, "group_stride": rows.pitch,
        "place_stride": 1,
    }  # fmt: skip
    # The product has as many rows as what it is given.
    assert limbs.shape == x.shape and limbs.dtype == x.dtype and limbs.is_contiguous()
    # The last tile brings all of its scales from the last place on, or from up to three before it.
    last = (places - 1) // X_SCALE_ALIGNMENT * X_SCALE_ALIGNMENT
    assert rows.pitch % X_SCALE_ALIGNMENT == 0 and last + LIMB_TILE_M + X_SCALE_ALIGNMENT <= rows.pitch
    assert scales.dtype == torch.float32 and scales.numel() == groups * rows.pitch
