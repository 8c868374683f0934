"""A batch in which some requests decode is what extend attention makes of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.attention import mixed, mixed_attention
from cute_kernels.runtime.gpu import standing_in
from tests.extend.cases import make_call
from tests.extend.other_rows import KINDS, assert_other_rows_stay
from tests.launchers import cpu_as_gpu


def run(call, num_decodes, **options):
    keywords = call.keywords | options
    return mixed_attention(*call.tensors, num_decodes=num_decodes, **keywords)


@pytest.mark.parametrize("page_size", [16, None])
@pytest.mark.parametrize("q_lens, num_decodes", [([1, 1, 1, 7, 0, 20], 3), ([5, 9], 0), ([1, 1], 2), ([1, 1, 1], 1)])
def test_it_is_extend_attention(q_lens, num_decodes, page_size):
    lengths = [40, 3, 17, 9, 5, 20][: len(q_lens)]
    call = make_call("int8_token_head", q_lens, lengths, page_size=page_size, sinks=True, window_size=30)
    out = torch.full_like(call.q, torch.nan)
    assert run(call, num_decodes, out=out) is out
    torch.testing.assert_close(out, call.run(), atol=1e-2, rtol=1e-2)
    assert torch.equal(run(call, num_decodes), out)


@pytest.mark.parametrize("kind", [*KINDS, "operator"])
def test_rows_of_no_request_stay_as_they_are(kind):
    assert_other_rows_stay(kind, "cpu")


@pytest.mark.parametrize(
    "num_decodes, options, message",
    [
        (4, {}, "num_decodes: got 4, want a number of requests from 0 to 3"),
        (True, {}, "num_decodes: got True, want"),
        (2, {}, r"cu_seqlens_q: got \[0, 1, 3\] first, want 0 to 2: one query for each"),
        (1, {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32)}, r"cu_seqlens_q: got shape \[2\], want \[4\]"),
        (1, {"out": torch.empty(3).bfloat16()}, r"out: got shape \[3\], want \[7, 8, 128\]"),
        (1, {"sm_margin": -1}, "sm_margin: got -1, want a number of SMs"),
        (0, {"window_size": 0}, "window_size: got 0, want"),
        (0, {"block_table": None}, r"k_cache: got shape \[.*\], want \[3, max_seq_len,"),
        (1, {"block_table": torch.zeros(4, 1).int()}, r"block_table: got shape \[4, 1\], want \[3,"),
    ],
)
def test_what_does_not_fit_is_named(num_decodes, options, message):
    call = make_call("bf16", [1, 2, 4], [9, 9, 9])
    with pytest.raises(ValueError, match=message):
        run(call, num_decodes, **options)


@pytest.mark.parametrize("page_size", [16, None])
def test_a_batch_that_decodes_has_as_many_requests_as_its_caches(page_size):
    """No part of the batch shows that there are more."""
    call = make_call("bf16", [1, 1, 1], [9, 9, 9], page_size=page_size)
    q, lengths = call.q[:2], call.seq_lens[:2].contiguous()
    options: dict[str, Any] = {**call.keywords, "cu_seqlens_q": call.cu_seqlens_q[:3].contiguous()}
    name = "k_cache" if page_size is None else "block_table"
    with pytest.raises(ValueError, match=rf"{name}: got shape \[3, .*want \[2, .*of seq_lens"):
        mixed_attention(q, call.k_cache, call.v_cache, lengths, num_decodes=2, **options)


@pytest.mark.parametrize(
    "kv_format, options, beside",
    [
        ("bf16", {}, True),
        ("bf16", {"max_seq_len": 8192}, True),
        ("bf16", {"window_size": (500, 0)}, False),
        ("int8_token_head", {}, False),
        (("bf16", "bf16"), {"cache_layout": "HND"}, True),
    ],
)
def test_decoding_runs_beside_a_prefill_where_that_is_sooner(kv_format, options, beside):
    """63 requests that decode and 2048 new tokens over 8192, by shapes alone."""
    q = torch.empty(63 + 2048, 32, 128, dtype=torch.bfloat16, device="meta")
    pages = (9000, 8, 64, 128) if "cache_layout" in options else (9000, 64, 8, 128)
    table = torch.empty(64, 128, dtype=torch.int32, device="meta")
    given: dict[str, Any] = {"block_table": table, **options}
    of_extend = {"max_seq_len": given.pop("max_seq_len")} if "max_seq_len" in given else {}
    with standing_in(cpu_as_gpu()):
        margin = mixed._margin_of(q, torch.empty(pages, device="meta"), 64, 63, kv_format, given, of_extend)
    assert (margin is not None) == beside


@pytest.mark.parametrize("name", ["attn_bias", "tree_mask", "new_k"])
def test_options_that_only_one_of_the_calls_has_are_refused_before_anything_runs(name):
    call = make_call("bf16", [1, 5], [40, 30])
    out = torch.full_like(call.q, torch.nan)
    option: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=f"{name}: got it as an option of mixed_attention, want one of block_table"):
        mixed_attention(*call.tensors, **call.keywords, num_decodes=1, out=out, **option)
    assert out.isnan().all()


def test_it_is_traced_without_graph_breaks():
    call = make_call("bf16", [1, 1, 20], [40, 7, 30], page_size=16)

    def run():
        return mixed_attention(*call.tensors, num_decodes=2, return_lse=True, **call.keywords)

    torch.compiler.reset()
    for got, want in zip(torch.compile(run, fullgraph=True, backend="aot_eager")(), run(), strict=True):
        assert torch.equal(got, want)
    call.cu_seqlens_q[1] = 2
    with pytest.raises(ValueError, match=r"cu_seqlens_q: got \[0, 2, 2\] first, want 0 to 2"):
        run()
