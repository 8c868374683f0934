"""New tokens that attend and are appended by one call: as the two calls, and nothing written where one is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels import append_and_extend, append_kv, extend_attention
from tests.extend.cases import appended, fused, make_call, writable

Q_LENS, LENGTHS = [5, 0, 20], [30, 9, 20]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "int4": ("int4_g1", {}),
    "a scale a head, HND": ("int8_head", {"cache_layout": "HND"}),
    "contiguous": ("bf16", {"page_size": None, "max_seq_len": 40}),
    "a pair, options": (("bf16", "int4_g4"), {"window_size": 7, "sinks": True}),
    "tree": ("e4m3_token_head", {"tree": True}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("apart", [False, True])
def test_it_is_both_calls(name, apart):
    kv_format, options = CASES[name]
    call = writable(make_call(kv_format, Q_LENS, LENGTHS, new=True, **{"page_size": 16, **options}))
    call = fused(call) if apart else call
    want, want_lse = call.run(return_lse=True)
    caches = call.k_cache.clone(), call.v_cache.clone()
    of_append = {
        option: call.options[option]
        for option in ("block_table", "cache_layout", "k_scale", "v_scale")
        if option in call.options
    }
    append_kv(
        call.options["new_k"], call.options["new_v"], *caches, kv_format=call.kv_format, seq_lens=call.seq_lens,
        cu_seqlens=call.cu_seqlens_q, **of_append,
    )  # fmt: skip
    out = torch.full_like(want, torch.nan)
    result, lse = appended(call, out=out, return_lse=True)
    assert result is out and torch.equal(out, want) and torch.equal(lse, want_lse)
    for mine, other in zip((call.k_cache, call.v_cache), caches, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_what_is_refused_writes_nothing():
    call = writable(make_call("int4_g1", Q_LENS, LENGTHS, new=True, page_size=16))
    before = call.k_cache.clone()
    for wrong, message in (
        ({"window_size": 0}, "window_size: got 0"),
        ({"num_splits": 99}, "num_splits: got 99"),
        ({"block_table": call.options["block_table"].long()}, "block_table: got"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            appended(call, **wrong)
    rows = call.options["new_k"].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="new_k: got strides .* want the last two dimensions contiguous"):
        appended(replace(call, options=call.options | {"new_k": rows}))
    assert torch.equal(call.k_cache, before)


def test_it_can_be_traced():
    call = writable(make_call("int4_g1", Q_LENS, LENGTHS, new=True, page_size=16))
    options = {name: value for name, value in call.options.items() if name not in ("new_k", "new_v")}
    want = extend_attention(*call.tensors, **call.keywords)
    new = call.options["new_k"], call.options["new_v"]
    keywords = {"cu_seqlens_q": call.cu_seqlens_q, "kv_format": call.kv_format, **options}
    compiled = torch.compile(lambda q: append_and_extend(q, *new, *call.tensors[1:], **keywords), fullgraph=True)
    torch.testing.assert_close(compiled(call.q), want, atol=0, rtol=0)
