"""The reference means what the API says: checked against an oracle that shares nothing with it, and torch's SDPA."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from cute_kernels import blocks
from cute_kernels.attention.reference import (
    decode_attention_reference,
    decode_attention_splits_reference,
)
from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import format_of, format_pair
from tests.attention.cases import ALL_FORMATS, FORMATS, Call, make_call
from tests.attention.oracle import oracle
from tests.attention.strategies import calls


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for rounding in fp64."""
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def assert_exact(call: Call) -> None:
    """The fp64 reference is the oracle."""
    for got, want in zip(call.reference(), oracle(call), strict=True):
        assert_same(got, want)


# -- all of it, against the oracle -------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(calls())
def test_any_call_is_the_oracles(arguments):
    assert_exact(make_call(**arguments))


FORMATS_AND_DIMS = [
    (kv_format, head_dim)
    for kv_format in (*ALL_FORMATS, ("int8_channel", "e4m3_head"), ("bf16", "int4_g8"), ("e5m2", "fp16"))
    for head_dim in (80, 128)
    if not any(cannot_read(format_of(name), head_dim) for name in format_pair(kv_format))
]


@pytest.mark.parametrize(("kv_format", "head_dim"), FORMATS_AND_DIMS)
@pytest.mark.parametrize("page_size", [None, 32])
def test_every_format_contiguous_and_paged(kv_format, page_size, head_dim):
    assert_exact(make_call(kv_format, [0, 1, 33, 64], num_kv_heads=2, group=3, head_dim=head_dim, page_size=page_size))


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"q_len": 5},
    "not causal": {"q_len": 5, "causal": False},
    "a window of the query itself": {"q_len": 3, "window_size": 1},
    "a window": {"q_len": 3, "window_size": 7},
    "a window wider than the cache": {"q_len": 3, "window_size": 10**12},
    "a window hides later keys even if not causal": {"q_len": 3, "window_size": 7, "causal": False},
    "more queries than tokens": {"q_len": 16},
    "a cap": {"softcap": 5.0},
    "a cap so low that all scores are alike": {"softcap": 1e-6},
    "sinks": {"sinks": True},
    "slopes": {"alibi": True, "q_len": 2},
    "slopes that look ahead": {"alibi": True, "q_len": 4, "causal": False},
    "bias": {"attn_bias": "fp32", "q_len": 2},
    "bias in bf16": {"attn_bias": "bf16", "q_len": 2},
    "bias of the keys": {"attn_bias": "fp32", "bias_dims": "j"},
    "bias of the heads": {"attn_bias": "fp32", "bias_dims": "h"},
    "bias of request and query": {"attn_bias": "fp32", "bias_dims": "bi", "q_len": 3},
    "wide values": {"v_head_dim": 256},
    "narrow values": {"v_head_dim": 80},
    "heads first": {"cache_layout": "HND"},
}


@pytest.mark.parametrize("options", FEATURES.values(), ids=list(FEATURES))
@pytest.mark.parametrize("page_size", [None, 16])
def test_every_feature_alone(options, page_size):
    assert_exact(make_call("bf16", [0, 1, 9, 40], num_kv_heads=2, group=2, head_dim=64, page_size=page_size, **options))


# -- edges, by what they must give -------------------------------------------------------------------------------------


def test_the_first_queries_of_a_request_shorter_than_q_len_see_nothing():
    call = make_call("bf16", [0, 2, 4], q_len=4, group=2, head_dim=64)
    out, lse = call.reference()
    for request, blind in enumerate([4, 2, 0]):
        assert not out[request, :blind].any() and torch.all(lse[request, :blind] == -math.inf)
        assert lse[request, blind:].isfinite().all()


def test_without_causal_they_see_every_token():
    out, lse = make_call("bf16", [2], q_len=4, head_dim=64, causal=False).reference()
    assert lse.isfinite().all() and out.abs().sum(-1).all()


def test_a_window_of_one_gives_the_querys_own_value():
    call = make_call("bf16", [9, 30], q_len=3, num_kv_heads=2, group=2, head_dim=64, window_size=1)
    out, _ = call.reference()
    for request, length in enumerate([9, 30]):
        own = call.v_cache[request, length - 3 : length].repeat_interleave(2, dim=1)
        torch.testing.assert_close(out[request], own.double())


def test_each_query_of_several_is_the_only_query_of_a_shorter_request():
    call = make_call(
        "int4_g4", [30, 7], q_len=4, num_kv_heads=2, group=3, window_size=9, alibi=True, sinks=True, softcap=3.0
    )
    together = call.reference()
    for i in range(4):
        lengths = [30 - 3 + i, 7 - 3 + i]
        alone = Call(call.q[:, i : i + 1].contiguous(), *call.tensors[1:3], call.seq_lens, "int4_g4", call.options)
        for whole, part in zip(together, alone.with_lengths(lengths).reference(), strict=True):
            assert_same(whole[:, i : i + 1], part)


def test_sinks_take_weight_and_leave_the_lse_alone():
    call = make_call("bf16", [20, 0], group=4, head_dim=64)
    out, lse = call.reference()
    sinks = torch.tensor([-math.inf, math.inf, 0.0, 3.0])
    with_sinks, same_lse = call.with_options(sinks=sinks).reference()
    assert torch.equal(same_lse, lse)
    weight = lse[0].exp() / (lse[0].exp() + sinks.double().exp())
    assert weight[0, 0] == 1 and torch.equal(with_sinks[0, 0, 0], out[0, 0, 0])
    assert not with_sinks[0, 0, 1].any()
    torch.testing.assert_close(with_sinks[0, 0, 2:], out[0, 0, 2:] * weight[0, 2:, None])
    assert not with_sinks[1].any() and torch.all(same_lse[1] == -math.inf)


def test_a_bias_of_minus_infinity_masks_and_may_mask_all():
    call = make_call("bf16", [20, 20], group=2, head_dim=64)
    bias = torch.zeros(2, 1, 2, 20)
    bias[0, :, :, 12:] = -math.inf
    bias[1, :, 0] = -math.inf
    out, lse = call.with_options(attn_bias=bias).reference()
    want, want_lse = call.with_lengths([12, 20]).reference()
    assert_same(out[0], want[0])
    assert_same(lse[0], want_lse[0])
    assert not out[1, 0, 0].any() and lse[1, 0, 0] == -math.inf
    assert_same(out[1, 0, 1], want[1, 0, 1])


def test_the_cap_comes_before_slopes_and_bias():
    call = make_call("bf16", [5], group=1, head_dim=64)
    call.q.fill_(50.0)
    far = call.with_options(softcap=2.0, alibi_slopes=torch.ones(1), attn_bias=torch.full((1, 1, 1, 5), 1000.0))
    lse = float(far.reference()[1])
    assert 1000 - 2 - 4 <= lse <= 1000 + 2 + math.log(5)


def test_what_nobody_sees_may_hold_nan_and_its_pages_need_not_exist():
    arguments: dict[str, Any] = {
        "q_len": 2,
        "window_size": 20,
        "page_size": 16,
        "group": 2,
        "head_dim": 64,
        "max_seq_len": 100,
    }
    clean = make_call("bf16", [90, 40, 0], poison=False, **arguments)
    poisoned = make_call("bf16", [90, 40, 0], **arguments)
    for name in ("k_cache", "v_cache"):
        assert getattr(poisoned, name).isnan().any()
    mapped = poisoned.options["block_table"]
    assert ((mapped >= 0) & (mapped < poisoned.k_cache.shape[0])).sum(dim=1).tolist() == [
        2,
        2,
        0,
    ]  # positions 69 to 89, and 19 to 39
    for got, want in zip(poisoned.reference(), clean.reference(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("page", [-1, 12, 2**31 - 1])
def test_a_page_that_is_needed_must_exist(page):
    call = make_call("bf16", [40, 33, 3], page_size=16, head_dim=64)
    assert call.k_cache.shape[0] == 12
    call.options["block_table"][1, 2] = page
    with pytest.raises(
        ValueError, match=f"block_table: got page {page} for request 1 at position 32, want 0 to 11, the cache's pages"
    ):
        call.reference()
    call.with_lengths([40, 32, 3]).reference()


# -- plain attention, against torch ------------------------------------------------------------------------------------


def make_case(kv_format="bf16", batch=3, max_seq_len=40, num_q_heads=4, num_kv_heads=2, head_dim=64, seed=0):
    torch.manual_seed(seed)
    form = format_of(kv_format)
    q = torch.randn(batch, 1, num_q_heads, head_dim).to(torch.float16 if kv_format == "fp16" else torch.bfloat16)
    values = torch.randn(2, batch, max_seq_len, num_kv_heads, head_dim)
    if form.codes == "u4":
        k, v = (form.row(head_dim).quantize(x) for x in values)
    else:
        k, v = values.to(form.cache_dtype)
    return q, k, v


def sdpa_row(q, keys, values, length, scale):
    """fp64 torch attention of one request: q [1, HQ, D], keys and values [T, HKV, D] -> [1, HQ, D]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x[:length].repeat_interleave(group, dim=1).transpose(0, 1).double() for x in (keys, values))
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1).double(), keys, values, scale=scale)
    return out.transpose(0, 1)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_agrees_with_torch_sdpa_in_fp64_for_every_format(kv_format):
    q, k, v = make_case(kv_format)
    lengths = torch.tensor([1, 17, 40], dtype=torch.int32)
    out, lse = decode_attention_reference(q, k, v, lengths, kv_format=kv_format, compute_dtype=torch.float64)
    form = format_of(kv_format)
    keys, values = (form.dequantize(x, 64, torch.float64) for x in (k, v))
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(out[row], sdpa_row(q[row], keys[row], values[row], length, 64**-0.5))
    assert out.dtype == lse.dtype == torch.float64


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (8, 1), (6, 2), (1, 1)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_query_heads_share_kv_heads_in_order(num_q_heads, num_kv_heads, head_dim):
    q, k, v = make_case(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    lengths = torch.tensor([5, 40, 23], dtype=torch.int32)
    out, _ = decode_attention_reference(q, k, v, lengths, kv_format="bf16", compute_dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(out[row], sdpa_row(q[row], k[row], v[row], length, head_dim**-0.5))


def test_lse_is_the_natural_log_of_the_sum_of_exponentials():
    q, k, v = make_case(num_q_heads=2, num_kv_heads=1)
    lengths = torch.tensor([3, 1, 40], dtype=torch.int32)
    _, lse = decode_attention_reference(
        q, k, v, lengths, kv_format="bf16", softmax_scale=0.3, compute_dtype=torch.float64
    )
    for row, length in enumerate(lengths.tolist()):
        scores = q[row, 0].double() @ k[row, :length, 0].double().T * 0.3
        torch.testing.assert_close(lse[row, 0], scores.logsumexp(dim=-1))


def test_an_empty_request_gives_zero_and_minus_infinity():
    q, k, v = make_case()
    out, lse = decode_attention_reference(q, k, v, torch.tensor([0, 40, 0], dtype=torch.int32), kv_format="bf16")
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert torch.all(lse[[0, 2]] == -math.inf)
    assert torch.isfinite(out[1]).all() and torch.isfinite(lse[1]).all()


def test_a_batch_of_empty_requests_and_an_empty_batch():
    q, k, v = make_case()
    out, lse = decode_attention_reference(q, k, v, torch.zeros(3, dtype=torch.int32), kv_format="bf16")
    assert not out.any() and torch.all(lse == -math.inf)
    out, lse = decode_attention_reference(q[:0], k[:0], v[:0], torch.zeros(0, dtype=torch.int32), kv_format="bf16")
    assert out.shape == (0, 1, 4, 64) and lse.shape == (0, 1, 4)


def test_rows_beyond_the_length_may_hold_nan():
    q, k, v = make_case()
    lengths = torch.tensor([7, 1, 39], dtype=torch.int32)
    want, want_lse = decode_attention_reference(q, k, v, lengths, kv_format="bf16")
    for row, length in enumerate(lengths.tolist()):
        k[row, length:], v[row, length:] = math.nan, math.nan
    out, lse = decode_attention_reference(q, k, v, lengths, kv_format="bf16")
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4"])
@pytest.mark.parametrize(
    "options", [{}, {"q_len": 3, "window_size": 9, "page_size": 16, "sinks": True, "attn_bias": "fp32"}]
)
def test_the_memory_bound_does_not_change_the_result(kv_format, options):
    call = make_call(kv_format, [0, 17, 40], num_kv_heads=2, group=2, head_dim=64, **options)
    want = call.reference()
    with blocks.at_most(3 * 2 * 64 * 7):  # of 7 tokens
        torch.testing.assert_close(call.reference(), want)


def test_huge_scores_neither_overflow_nor_vanish():
    q, k, v = make_case(batch=1, num_q_heads=1, num_kv_heads=1)
    q[0, 0, 0, 0] = 1e4
    out, lse = decode_attention_reference(
        q, k, v, torch.tensor([40], dtype=torch.int32), kv_format="bf16", softmax_scale=1.0
    )
    best = (q[0, 0].double() @ k[0, :, 0].double().T).argmax()
    torch.testing.assert_close(out[0, 0, 0], v[0, best, 0].float())
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("num_splits", [1, 2, 5, 64])
def test_splits_combine_to_the_whole(num_splits):
    q, k, v = make_case()
    lengths = torch.tensor([0, 17, 40], dtype=torch.int32)
    whole, lse = decode_attention_reference(q, k, v, lengths, kv_format="bf16", compute_dtype=torch.float64)
    out, split_out, split_max, split_sum = decode_attention_splits_reference(
        q, k, v, lengths, kv_format="bf16", num_splits=num_splits, compute_dtype=torch.float64
    )
    assert split_out.shape == (3, num_splits, 4, 64) and split_max.shape == split_sum.shape == (3, num_splits, 4)
    torch.testing.assert_close(out, whole)
    total = (split_max + split_sum.log()).logsumexp(dim=1)
    torch.testing.assert_close(total, lse[:, 0])


def test_a_split_is_attention_over_its_own_tokens_and_empty_splits_say_so():
    q, k, v = make_case()
    lengths = torch.tensor([0, 17, 40], dtype=torch.int32)
    _, split_out, split_max, split_sum = decode_attention_splits_reference(
        q, k, v, lengths, kv_format="bf16", num_splits=8
    )
    second, _ = decode_attention_reference(
        q,
        k[:, 3:6].contiguous(),
        v[:, 3:6].contiguous(),
        torch.tensor([0, 3, 0], dtype=torch.int32),
        kv_format="bf16",
    )
    torch.testing.assert_close(split_out[1, 1], second[1, 0])
    empty = [(0, 0), (0, 7), (1, 6), (1, 7)]  # shares are 0, 3 and 5 tokens
    for row, split in empty:
        assert not split_out[row, split].any() and not split_sum[row, split].any()
        assert torch.all(split_max[row, split] == -math.inf)
    assert (split_sum[2, 7] >= 1).all()


def test_it_checks_its_arguments_as_the_public_call_does():
    q, k, v = make_case()
    with pytest.raises(ValueError, match="kv_format: got 'int3'"):
        decode_attention_reference(q, k, v, torch.ones(3, dtype=torch.int32), kv_format="int3")
    with pytest.raises(ValueError, match=r"seq_lens: got 41 for request 2, want 0 to 40, the cache's tokens"):
        decode_attention_reference(q, k, v, torch.tensor([1, 1, 41], dtype=torch.int32), kv_format="bf16")
    with pytest.raises(ValueError, match="num_splits: got 0"):
        decode_attention_splits_reference(q, k, v, torch.ones(3, dtype=torch.int32), kv_format="bf16", num_splits=0)
    with pytest.raises(ValueError, match="q: got q_len 2, want 1"):
        decode_attention_splits_reference(
            q.repeat(1, 2, 1, 1), k, v, torch.ones(3, dtype=torch.int32), kv_format="bf16", num_splits=2
        )
