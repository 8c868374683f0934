"""Tokens where they lie: reading and writing slots of caches, padded and split pages included."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.mla.formats import FORMATS, format_of
from tests.mla.cases import FORMATS as NAMES
from tests.mla.cases import head_dim_of, make_cache
from tests.mla.oracle import Bytes


def test_every_format_is_tested():
    assert set(NAMES) == set(FORMATS)


def test_unknown_names_and_widths_are_listed():
    with pytest.raises(ValueError, match="kv_format: got 'x', want one of mla_bf16, mla_fp16, mla_fp8, mla_model1"):
        format_of("x")
    with pytest.raises(ValueError, match="head_dim: got 128, want 576 or 512 for mla_bf16"):
        format_of("mla_bf16").token(128)


@pytest.mark.parametrize("kv_format", NAMES)
@pytest.mark.parametrize("padding", [0, 48])
def test_written_tokens_lie_where_the_oracle_reads_them(kv_format, padding):
    form, head_dim, generator = format_of(kv_format), head_dim_of(kv_format), torch.Generator().manual_seed(3)
    nothing = torch.zeros(4 * 5, dtype=torch.bool)
    cache = make_cache(kv_format, 4, 5, nothing, generator, padding=padding)
    before = cache.clone()
    numbers, slots = torch.randn(3, head_dim, generator=generator), torch.tensor([19, 0, 7])
    rows = form.quantize(numbers)
    assert rows.dtype == form.cache_dtypes[0] and rows.shape == (3, form.row_elements(head_dim))
    form.scatter(cache, slots, rows)
    expected = form.token(head_dim).dequantize(rows.view(torch.uint8), torch.float64)
    assert torch.equal(form.fetch(cache, slots, head_dim, torch.float64), expected)
    memory = Bytes.of(kv_format, cache)
    for slot, row in zip(slots.tolist(), expected, strict=True):
        assert torch.equal(torch.from_numpy(memory.token(slot)), row)
    changed = (cache.view(torch.uint8) != before.view(torch.uint8)).sum()
    assert 0 < changed <= 3 * form.row_bytes(head_dim)  # nothing but three tokens


@pytest.mark.parametrize("kv_format", ["mla_fp8", "mla_model1"])
def test_slots_of_any_shape(kv_format):
    form, generator = format_of(kv_format), torch.Generator().manual_seed(3)
    cache = make_cache(kv_format, 4, 5, torch.ones(20, dtype=torch.bool), generator)
    slots = torch.tensor([[3, 19], [0, 7]])
    found = form.fetch(cache.view(torch.float8_e4m3fn), slots, head_dim_of(kv_format), torch.bfloat16)
    assert found.shape == (2, 2, head_dim_of(kv_format)) and found.dtype == torch.bfloat16
    assert torch.equal(found[1, 0], form.fetch(cache, torch.tensor([0]), head_dim_of(kv_format), torch.bfloat16)[0])
