"""Launches of products in digits: what each is given, and where things lie in the memory between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.linear.wgmma.config import DIGIT_TOKENS, X_SCALE_ALIGNMENT
from cute_kernels.linear.wgmma.digit_launch import DigitProduct, DigitRows


@pytest.mark.parametrize("places, groups", [(1, 1), (9, 64), (32, 5), (1023, 16)])
def test_the_product_has_the_rows_of_x_and_scales_lie_behind_them(places: int, groups: int):
    calls: list[tuple[Any, ...]] = []
    rows = DigitRows(lambda *arguments: calls.append(("rows", *arguments)), places, groups)
    product = DigitProduct(rows, lambda *arguments: calls.append(("product", *arguments)))
    x = torch.zeros(places, 128 * groups, dtype=torch.bfloat16)
    product(x, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    (made, source, end, index, digits, scales, *sizes), (launched, given, *numbers) = calls
    assert (made, launched) == ("rows", "product") and source is x and (end, index) == (0, 0)
    assert sizes == [places, groups, rows.pitch]
    # The kernel stores as many rows as what it is given has.
    assert given.shape == x.shape and given.dtype == x.dtype and given.data_ptr() == digits and digits % 16 == 0
    assert scales == digits + given.nbytes and scales % 16 == 0
    assert numbers == [1, 2, scales, 4, 5, 6, 7, 8, 9, rows.pitch]
    # The last tile brings all of its scales from the last place on, or from up to three before it.
    last = (places - 1) // X_SCALE_ALIGNMENT * X_SCALE_ALIGNMENT
    assert rows.pitch % X_SCALE_ALIGNMENT == 0 and last + DIGIT_TOKENS + X_SCALE_ALIGNMENT <= rows.pitch
    end_of_scales = scales - digits + 4 * groups * rows.pitch
    assert end_of_scales <= given.untyped_storage().nbytes()
