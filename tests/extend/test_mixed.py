"""A batch in which some requests decode is what extend attention makes of all of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from cute_kernels import append_and_extend, extend_attention
from cute_kernels.attention import mixed, mixed_attention
from cute_kernels.kv_cache import CacheTransform
from cute_kernels.runtime.gpu import standing_in
from tests.extend.cases import make_call, writable
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


@pytest.mark.parametrize("kind", ["plain", "transform", "empty cache", "all decode", "mixed", "operator", "append"])
def test_rows_of_no_request_stay_as_they_are(kind):
    """Queries from cu_seqlens_q[batch] on: on every path, whoever serves it."""
    q_lens = [1, 1] if kind == "all decode" else [1, 4]
    call = writable(make_call("bf16", [*q_lens, 3], [9, 20, 30], new=kind == "append", page_size=16))
    used = sum(q_lens)
    lengths, ends = call.seq_lens[:2].contiguous(), call.cu_seqlens_q[:3].contiguous()
    options = call.options | {"cu_seqlens_q": ends, "kv_format": "bf16", "out": torch.full_like(call.q, 7.0)}
    options["block_table"] = call.options["block_table"][:2]
    tensors = (call.q, call.k_cache, call.v_cache, lengths)
    if kind == "transform":
        options["transform"] = CacheTransform(k_center=torch.ones(2, 128), v_rotation=128)
    if kind == "empty cache":
        options["block_table"] = options["block_table"][:, :0]
        tensors = (*tensors[:3], torch.zeros_like(lengths))
    attend: Any = extend_attention
    if kind in ("all decode", "mixed"):
        attend = functools.partial(mixed_attention, num_decodes=len(q_lens) if kind == "all decode" else 1)
    if kind == "append":
        new = options.pop("new_k"), options.pop("new_v")
        attend = lambda q, *cache, **given: append_and_extend(q, *new, *cache, **given)  # noqa: E731
    if kind == "operator":
        attend = torch.compile(extend_attention, backend="eager", fullgraph=True)
    out = attend(*tensors, **options)
    assert out is options["out"] or kind == "operator"
    assert torch.all(options["out"][used:] == 7.0) and not torch.any((options["out"][:used] == 7.0).all(dim=-1))


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
    ],
)
def test_what_does_not_fit_is_named(num_decodes, options, message):
    call = make_call("bf16", [1, 2, 4], [9, 9, 9])
    with pytest.raises(ValueError, match=message):
        run(call, num_decodes, **options)


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


@pytest.mark.parametrize("name", ["return_lse", "attn_bias", "tree_mask", "new_k"])
def test_options_that_only_one_of_the_calls_has_are_refused_before_anything_runs(name):
    call = make_call("bf16", [1, 5], [40, 30])
    out = torch.full_like(call.q, torch.nan)
    option: dict[str, Any] = {name: True}
    with pytest.raises(TypeError, match=f"{name}: got it as an option of mixed_attention, want one of block_table"):
        mixed_attention(*call.tensors, **call.keywords, num_decodes=1, out=out, **option)
    assert out.isnan().all()
