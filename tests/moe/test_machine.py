"""The machine's own arithmetic: it rounds numbers as PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.moe.machine import bf16_bits, e4m3_bits, fp16_bits


@pytest.mark.parametrize(
    ("dtype", "bits_of"),
    [(torch.bfloat16, bf16_bits), (torch.float16, fp16_bits), (torch.float8_e4m3fn, e4m3_bits)],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else "",
)
def test_numbers_are_rounded_to_nearest_and_ties_to_even(dtype: torch.dtype, bits_of: Callable[[Any], int]):
    """Numbers of all exponents and both signs, the middles between two of them, any bits, infinities and NaN."""
    as_bits, codes = (torch.int16, 2**16) if dtype.itemsize == 2 else (torch.int8, 2**8)
    exact = torch.arange(0, codes, 7 if dtype.itemsize == 2 else 1)
    here, after = (found.to(as_bits).view(dtype).double() for found in (exact, (exact + 1) % codes))
    middles = (here + after).float() / 2
    any_bits = torch.randint(-(2**31), 2**31, (4096,)).to(torch.int32).view(torch.float32)
    x = torch.cat([exact.to(as_bits).view(dtype).float(), middles, any_bits, torch.tensor([torch.inf, -torch.inf])])
    x = x[~x.isnan()]
    x = x.clamp(-448, 448) if dtype == torch.float8_e4m3fn else x
    with np.errstate(all="ignore"):  # as the machine runs
        got = torch.tensor([bits_of(value) for value in x.numpy()]).to(as_bits)
    assert torch.equal(got, x.to(dtype).view(as_bits))
    nan = torch.tensor(torch.nan)
    assert bits_of(np.float32(nan)) == int(nan.to(dtype).view(as_bits)) % codes
