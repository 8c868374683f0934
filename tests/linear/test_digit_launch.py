"""Launches of products in digits: what each is given, and where things lie in the memory between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.linear.wgmma import digit_launch
from cute_kernels.linear.wgmma.config import DIGIT_TOKENS, X_SCALE_ALIGNMENT
from cute_kernels.linear.wgmma.digit_launch import DigitProduct, DigitRows


@pytest.mark.parametrize("places, groups", [(1, 1), (9, 64), (32, 5), (1023, 16)])
def test_the_product_has_the_rows_of_x_and_scales_from_any_of_them_on(places: int, groups: int, monkeypatch):
    calls: list[tuple[Any, ...]] = []
    new: list[torch.Tensor] = []

    def empty_strided(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        new.append(torch.empty_strided(shape, strides, dtype=dtype))
        return new[-1]

    monkeypatch.setattr(digit_launch, "empty_strided", empty_strided)
    rows = DigitRows(lambda *arguments: calls.append(("rows", *arguments)), "bf16", places, groups)
    product = DigitProduct(rows, lambda *arguments: calls.append(("product", *arguments)))
    x = torch.zeros(places, 128 * groups, dtype=torch.bfloat16)
    product(x, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    (made, source, end, index, digits, scales, *sizes), (launched, given, *numbers) = calls
    assert (made, launched) == ("rows", "product") and source is x and (end, index) == (0, 0)
    assert sizes == [places, groups, rows.pitch]
    # The kernel stores as many rows as what it is given has.
    assert given is new[0] and given.shape == x.shape and given.dtype == x.dtype and given.is_contiguous()
    assert given.data_ptr() == digits and new[1].data_ptr() == scales
    assert numbers == [1, 2, scales, 4, 5, 6, 7, 8, 9, rows.pitch]
    # The last tile brings all of its scales from the last place on, or from up to three before it.
    last = (places - 1) // X_SCALE_ALIGNMENT * X_SCALE_ALIGNMENT
    assert rows.pitch % X_SCALE_ALIGNMENT == 0 and last + DIGIT_TOKENS + X_SCALE_ALIGNMENT <= rows.pitch
    assert new[1].dtype == torch.float32 and new[1].numel() == groups * rows.pitch
