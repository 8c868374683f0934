"""Launches of products in limbs: what each is given, and where things lie in the memory between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.arguments import LIMB_ROWS
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.limb_launch import LimbProduct, LimbRows, block_rows
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, LIMB_TILE_M, X_SCALE_ALIGNMENT, Limbs
from cute_kernels.runtime.gpu import standing_in
from tests.launchers import cpu_as_gpu


@pytest.fixture
def new() -> Iterator[list[torch.Tensor]]:
    """What is allocated, in order."""
    found: list[torch.Tensor] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        found.append(torch.empty_strided(shape, strides, dtype=dtype))
        return found[-1]

    with standing_in(cpu_as_gpu(empty=empty)):
        yield found


@pytest.mark.parametrize("rows, groups", [(8, 1), (16, 64), (24, 5)])
def test_a_product_reads_the_blocks_that_were_made(rows: int, groups: int, new):
    calls: list[tuple[Any, ...]] = []
    product = LimbProduct(
        lambda *arguments: calls.append(("limbs", *arguments)),
        lambda *arguments: calls.append(("product", *arguments)),
        rows,
        groups,
    )
    x = torch.zeros(rows - 1, LIMB_GROUP * groups, dtype=torch.bfloat16)
    numbers = {"n": 8, "num_tiles": 9, "k_blocks": 10, "whole": 11, "splits": 12, "num_ctas": 13}
    addresses = {"codes": 1, "scales": 2, "zeros": 3, "bias": 4, "residual": 5, "out": 6, "workspace": 7}
    product.bound(numbers | {"activation": 14, "out_kind": 15})(x=x, **addresses)
    (blocks,) = new
    assert calls == [
        ("limbs", x, blocks.data_ptr(), rows, groups),
        ("product", x, 1, 2, blocks.data_ptr(), 4, 5, 6, 7, *range(8, 16), rows),
    ]
    # Both limbs of each input, and a scale for each row and group.
    assert blocks.nbytes == groups * rows * (2 * LIMB_GROUP + 4)


@pytest.mark.parametrize(
    "tile_m, row_parts, m, rows", [(8, 1, 1, 8), (16, 1, 9, 16), (16, 1, 3, 16), (32, 4, 17, 24), (32, 4, 25, 32)]
)
def test_a_block_has_the_rows_that_are_multiplied(tile_m: int, row_parts: int, m: int, rows: int):
    config = WgmmaConfig(integers(4), "bf16", tile_m=tile_m, row_parts=row_parts, block_k=LIMB_GROUP, mainloop=Limbs())
    assert block_rows(config, m) == rows


@pytest.mark.parametrize("places, groups", [(1, 1), (9, 64), (32, 5), (1023, 16)])
def test_rows_of_experts_have_scales_from_any_of_them_on(places: int, groups: int, new):
    calls: list[tuple[Any, ...]] = []
    function = LIMB_ROWS.bound(lambda *arguments: calls.append(arguments), {})
    rows = LimbRows(function, "bf16", places, groups)
    x = torch.zeros(places, LIMB_GROUP * groups, dtype=torch.bfloat16)
    limbs, scales = rows.make(x, 5, 6)
    assert calls == [(x, 5, 6, limbs.data_ptr(), scales.data_ptr(), places, groups, rows.pitch)]
    # The product has as many rows as what it is given.
    assert limbs.shape == x.shape and limbs.dtype == x.dtype and limbs.is_contiguous()
    # The last tile brings all of its scales from the last place on, or from up to three before it.
    last = (places - 1) // X_SCALE_ALIGNMENT * X_SCALE_ALIGNMENT
    assert rows.pitch % X_SCALE_ALIGNMENT == 0 and last + LIMB_TILE_M + X_SCALE_ALIGNMENT <= rows.pitch
    assert scales.dtype == torch.float32 and scales.numel() == groups * rows.pitch
