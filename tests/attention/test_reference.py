"""The reference means softmax(q K^T * scale) V over the first seq_lens[b] rows: checked against torch SDPA in fp64."""

import math

import pytest
import torch

from cute_kernels.attention import reference
from cute_kernels.attention.reference import (
    decode_attention_reference,
    decode_attention_splits_reference,
    even_split_tokens,
)
from cute_kernels.kv_formats import Int4Format, format_of

FORMATS = ["bf16", "fp16", "int4_g1", "int4_g2", "int4_g4", "int4_g8"]


def make_case(kv_format="bf16", batch=3, max_seq_len=40, num_q_heads=4, num_kv_heads=2, head_dim=64, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(batch, 1, num_q_heads, head_dim, dtype=torch.bfloat16)
    values = torch.randn(2, batch, max_seq_len, num_kv_heads, head_dim)
    form = format_of(kv_format)
    if isinstance(form, Int4Format):
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
    out, lse = decode_attention_reference(q, k, v, torch.tensor([0, 40, 0]), kv_format="bf16")
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
def test_the_memory_bound_does_not_change_the_result(monkeypatch, kv_format):
    q, k, v = make_case(kv_format)
    lengths = torch.tensor([0, 17, 40], dtype=torch.int32)
    want = decode_attention_reference(q, k, v, lengths, kv_format=kv_format, compute_dtype=torch.float64)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 3 * 2 * 64 * 7)  # blocks of 7 tokens
    got = decode_attention_reference(q, k, v, lengths, kv_format=kv_format, compute_dtype=torch.float64)
    torch.testing.assert_close(got, want)


def test_huge_scores_neither_overflow_nor_vanish():
    q, k, v = make_case(batch=1, num_q_heads=1, num_kv_heads=1)
    q[0, 0, 0, 0] = 1e4
    out, lse = decode_attention_reference(q, k, v, torch.tensor([40]), kv_format="bf16", softmax_scale=1.0)
    best = (q[0, 0].double() @ k[0, :, 0].double().T).argmax()
    torch.testing.assert_close(out[0, 0, 0], v[0, best, 0].float())
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("num_splits", [1, 2, 5, 64])
@pytest.mark.parametrize("tile_tokens", [1, 16])
def test_splits_combine_to_the_whole(num_splits, tile_tokens):
    q, k, v = make_case()
    lengths = torch.tensor([0, 17, 40], dtype=torch.int32)
    whole, lse = decode_attention_reference(q, k, v, lengths, kv_format="bf16", compute_dtype=torch.float64)
    out, split_out, split_max, split_sum = decode_attention_splits_reference(
        q, k, v, lengths, kv_format="bf16", num_splits=num_splits, split_tokens=even_split_tokens(tile_tokens),
        compute_dtype=torch.float64,
    )  # fmt: skip
    assert split_out.shape == (3, num_splits, 4, 64) and split_max.shape == split_sum.shape == (3, num_splits, 4)
    torch.testing.assert_close(out, whole)
    total = (split_max + split_sum.log()).logsumexp(dim=1)
    torch.testing.assert_close(total, lse[:, 0])


def test_a_split_is_attention_over_its_own_tokens_and_empty_splits_say_so():
    q, k, v = make_case()
    lengths = torch.tensor([0, 17, 40], dtype=torch.int32)
    _, split_out, split_max, split_sum = decode_attention_splits_reference(
        q, k, v, lengths, kv_format="bf16", num_splits=4, split_tokens=even_split_tokens(8)
    )
    second, _ = decode_attention_reference(q, k[:, 8:16], v[:, 8:16], torch.tensor([0, 8, 0]), kv_format="bf16")
    torch.testing.assert_close(split_out[1, 1], second[1, 0])
    empty = [(0, 0), (0, 3), (1, 3), (2, 3)]  # shares are 0, 8 and 16 tokens
    for row, split in empty:
        assert not split_out[row, split].any() and not split_sum[row, split].any()
        assert torch.all(split_max[row, split] == -math.inf)
    assert (split_sum[2, 2] >= 1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[:, 0], k, v), r"q: got shape \(3, 4, 64\)"),
        (lambda q, k, v: (q, k[:2], v), r"k_cache: got shape"),
        (lambda q, k, v: (q, k, v[:, :5]), r"v_cache: got shape"),
        (lambda q, k, v: (q[:, :, :3], k, v), r"q: got 3 heads, want a multiple of the cache's 2"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        q, k, v = change(*make_case())
        decode_attention_reference(q, k, v, torch.tensor([1, 1, 1]), kv_format="bf16")


def test_an_unknown_format_and_a_wrong_number_of_lengths_are_named():
    q, k, v = make_case()
    with pytest.raises(ValueError, match="kv_format: got 'int3'"):
        decode_attention_reference(q, k, v, torch.tensor([1, 1, 1]), kv_format="int3")
    with pytest.raises(ValueError, match=r"k_cache: got torch\.bfloat16 rows of 64, want torch\.uint8 rows of 36"):
        decode_attention_reference(q, k, v, torch.tensor([1, 1, 1]), kv_format="int4_g1")
    with pytest.raises(ValueError, match=r"seq_lens: got shape \(2,\), want \[3\]"):
        decode_attention_reference(q, k, v, torch.tensor([1, 1]), kv_format="bf16")
    with pytest.raises(ValueError, match="num_splits: got 0"):
        decode_attention_splits_reference(q, k, v, torch.tensor([1, 1, 1]), kv_format="bf16", num_splits=0)
