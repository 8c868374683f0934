"""The kernel's own code, run lane by lane: the bytes it writes are the formats', and it writes no others."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.kv_cache.rope import Rope, YarnScaling
from cute_kernels.mla.formats import format_of
from tests.mla_cache.cases import DTYPES, ROPES, TOKENS, assert_appended, awkward, bytes_of, make_call
from tests.mla_cache.simulate import simulate_append, simulate_quantize

every_token = pytest.mark.parametrize(("kv_format", "head_dim"), TOKENS)


@every_token
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("padding", [0, 48])
def test_awkward_numbers_become_the_formats_tokens(kv_format, head_dim, dtype, padding):
    page_size = 2 if kv_format == "mla_model1" else 3
    call = make_call(kv_format, head_dim, awkward(head_dim, DTYPES[dtype]), padding=padding, page_size=page_size)
    before = call.cache.clone()
    simulate_append(call)
    assert_appended(call, before)


@every_token
@pytest.mark.parametrize("dtype", DTYPES)
def test_bulk_tokens_are_the_formats(kv_format, head_dim, dtype):
    form, x = format_of(kv_format), awkward(head_dim, DTYPES[dtype])
    rows = torch.zeros(x.shape[0], form.row_elements(head_dim), dtype=form.cache_dtypes[0])
    simulate_quantize(x, kv_format, rows)
    assert torch.equal(bytes_of(rows), bytes_of(form.quantize(x)))


@every_token
@pytest.mark.parametrize("rope", ["interleaved", "half"])
@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
def test_every_kind_of_rope(kv_format, head_dim, rope, positions):
    x = torch.randn(9, head_dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    call = make_call(kv_format, head_dim, x, rope=ROPES[rope], positions=positions, page_size=4)
    before = call.cache.clone()
    simulate_append(call)
    assert_appended(call, before)


def test_yarn_and_its_attention_factor():
    x = torch.randn(6, 576, generator=torch.Generator().manual_seed(2)).bfloat16()
    rope = Rope(64, interleaved=True, scaling=YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.5))
    assert rope.attention_factor != 1
    call = make_call("mla_fp8", 576, x, rope=rope)
    before = call.cache.clone()
    simulate_append(call)
    assert_appended(call, before)


def test_slots_outside_the_cache_are_not_written():
    x = torch.randn(5, 576).bfloat16()
    call = make_call("mla_fp8", 576, x, lost=0)
    room = call.cache.shape[0] * call.cache.shape[1]
    call.slot_mapping[:] = torch.tensor([room, -2, 2**62, -(2**62), room - 1])
    before = call.cache.clone()
    simulate_append(call)
    call.slot_mapping[:4] = -1
    assert_appended(call, before)
