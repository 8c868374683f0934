"""FlashAttention's calls mean what they mean there: against torch's own attention, request by request."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch

from cute_kernels.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

HEADS, KV_HEADS, DIM = 4, 2, 64
TOLERANCE: dict[str, Any] = {"atol": 2e-2, "rtol": 2e-2}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ends(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """One request by torch, fp64; seen: bool [queries, keys]."""
    return attention_and_lse(q, k, v, seen)[0]


def attention_and_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the log-sum-exp [heads, queries]."""
    group = HEADS // KV_HEADS
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * DIM**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return (weights @ v.repeat_interleave(group, 0)).transpose(0, 1), scores.logsumexp(-1)


def seen_by(queries: int, keys: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """FlashAttention's own rule."""
    left, right = window
    at = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    right = 0 if causal else right
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if right >= 0:
        seen &= key <= at + right
    if left >= 0:
        seen &= key >= at - left
    return seen


@pytest.mark.parametrize(
    "causal, window",
    [(True, (-1, -1)), (False, (-1, -1)), (True, (3, 0)), (True, (3, -1)), (False, (3, 0)), (False, (-1, 0))],
)
@pytest.mark.parametrize("paged", [False, True])
def test_ragged_calls(causal, window, paged):
    q_lens, k_lens = (5, 0, 7, 2), (9, 4, 7, 20)
    q, k, v = random(14, HEADS, DIM), random(40, KV_HEADS, DIM, seed=1), random(40, KV_HEADS, DIM, seed=2)
    cu_q, cu_k = ends(*q_lens), ends(*k_lens)
    keys, values, table = k, v, None
    if paged:
        table = torch.tensor([[0, 9], [1, 9], [2, 9], [3, 4]], dtype=torch.int32)
        keys, values = (random(5, 16, KV_HEADS, DIM, seed=3) for _ in range(2))
        for request, (start, stop) in enumerate(itertools.pairwise(cu_k.tolist())):
            for i, token in enumerate(range(start, stop)):
                keys[table[request, i // 16], i % 16] = k[token]
                values[table[request, i // 16], i % 16] = v[token]
    given: Any = {"causal": causal, "window_size": window, "block_table": table}
    out: Any = flash_attn_varlen_func(q, keys, values, cu_q, cu_k, 7, 20, **given)
    again, lse, _ = flash_attn_varlen_func(q, keys, values, cu_q, cu_k, 7, 20, return_attn_probs=True, **given)
    assert torch.equal(again, out)
    pairs = itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist())
    for (start, stop), (k_start, k_stop) in zip(*pairs, strict=True):
        own, seen = slice(k_start, k_stop), seen_by(stop - start, k_stop - k_start, causal, window)
        want, want_lse = attention_and_lse(q[start:stop], k[own], v[own], seen)
        torch.testing.assert_close(out[start:stop].double(), want, **TOLERANCE)
        torch.testing.assert_close(lse[:, start:stop].double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [None, 11, torch.tensor([11, 3], dtype=torch.int32)])
def test_calls_over_a_cache(lengths):
    q = random(2, 3, HEADS, DIM)
    k, v = random(2, 12, KV_HEADS, DIM, seed=1), random(2, 12, KV_HEADS, DIM, seed=2)
    out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    assert (out.shape, lse.shape) == (q.shape, (2, HEADS, 3))
    counts = [12, 12] if lengths is None else [11, 11] if isinstance(lengths, int) else lengths.tolist()
    for request, count in enumerate(counts):
        want = attention(q[request], k[request, :count], v[request, :count], seen_by(3, count, True, (-1, -1)))
        torch.testing.assert_close(out[request].double(), want, **TOLERANCE)


def test_parts_of_a_fused_projection_are_taken():
    projected = random(14, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = projected.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    cu = ends(5, 9)
    out: Any = flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, causal=True)
    want: Any = flash_attn_varlen_func(q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, 9, 9, causal=True)
    assert torch.equal(out, want)
    cache = random(2, 12, KV_HEADS, DIM, seed=1)
    newest = projected.view(2, 7, -1, DIM)[:, :, :HEADS]
    found, wanted = (flash_attn_with_kvcache(x, cache, cache, causal=True) for x in (newest, newest.contiguous()))
    assert isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor) and torch.equal(found, wanted)


def test_signatures_are_flash_attentions():
    """Those of flash_attn 2.7 and 2.8."""
    ragged = "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size "
    ragged += "softcap alibi_slopes deterministic return_attn_probs block_table"
    cached = "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
    cached += "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    defaults = {"dropout_p": 0.0, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "deterministic": False}
    defaults |= {"return_attn_probs": False, "rotary_interleaved": True, "num_splits": 0, "return_softmax_lse": False}
    needed = {"q", "k_cache", "v_cache", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    for call, names in ((flash_attn_varlen_func, ragged), (flash_attn_with_kvcache, cached)):
        found = inspect.signature(call).parameters
        assert list(found) == names.split()
        own = needed | ({"k", "v"} if call is flash_attn_varlen_func else set())
        for name, parameter in found.items():
            want = inspect.Parameter.empty if name in own else defaults.get(name)
            assert parameter.default is want or parameter.default == want, name


def test_more_splits_than_there_are_is_named():
    cache = random(1, 12, KV_HEADS, DIM)
    with pytest.raises(ValueError, match="num_splits: got 64, want None or an int from 1 to 32"):
        flash_attn_with_kvcache(random(1, 3, HEADS, DIM), cache, cache, num_splits=64)


REFUSED = {
    "dropout_p": ({"dropout_p": 0.1}, "dropout_p: got 0.1, want 0.0"),
    "window_size": ({"window_size": (3, 2)}, r"window_size: got \(3, 2\)"),
    "an open window": ({"window_size": (3, -1)}, r"window_size: got \(3, -1\) without causal"),
    "alibi_slopes": ({"alibi_slopes": torch.ones(HEADS)}, "alibi_slopes: got a tensor without causal"),
    "slopes of requests": ({"alibi_slopes": torch.ones(1, HEADS), "causal": True}, "alibi_slopes: got shape"),
    "k": ({"k": random(4, KV_HEADS, 32)}, "k: got shape|v: got shape"),
    "cu_seqlens_k": ({"cu_seqlens_k": ends(4, 1)}, "cu_seqlens_q: got shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_is_named(case):
    changed, message = REFUSED[case]
    k = random(4, KV_HEADS, DIM)
    arguments = {"q": random(3, HEADS, DIM), "k": k, "v": k, "cu_seqlens_q": ends(3), "cu_seqlens_k": ends(4)}
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(**(arguments | {"max_seqlen_q": 3, "max_seqlen_k": 4} | changed))


@pytest.mark.parametrize("name", ["k", "v", "rotary_cos", "cache_batch_idx", "cache_leftpad"])
def test_what_a_cache_call_does_not_take_is_named(name):
    k = random(1, 12, KV_HEADS, DIM)
    with pytest.raises(ValueError, match=f"{name}: got a Tensor, want None"):
        given: dict[str, Any] = {name: torch.ones(1)}
        flash_attn_with_kvcache(random(1, 3, HEADS, DIM), k, k, **given)
