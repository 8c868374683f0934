"""Decode attention in plain PyTorch: what the operator means, and what runs on a CPU.

One query token per request attends to the first `seq_lens[b]` rows of its K and V cache. Everything is written for
reading: dequantise a block of tokens, score, running softmax, accumulate. The loop over blocks of tokens exists only to
bound memory; softmax state carries over between blocks as in FlashAttention's online softmax (Milakov and Gimelshein,
2018), so the result does not depend on the block size beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cute_kernels.kv_formats import format_of

# Elements of one dequantised block of K (and of V): 128 MiB each in fp32, whatever the batch.
_BLOCK_ELEMENTS = 1 << 25

SplitTokens = Callable[[torch.Tensor, int], torch.Tensor]


class Partial(NamedTuple):
    """Attention over a part of each row's tokens; parts combine exactly (see `combine`).

    out: [batch, num_q_heads, head_dim], normalised over the part, 0 where the part is empty.
    max: [batch, num_q_heads], the greatest scaled score, natural units, -inf where the part is empty.
    sum: [batch, num_q_heads], sum of exp(score - max), 0 where the part is empty.
    """

    out: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor


def decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str,
    softmax_scale: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q K^T * softmax_scale) V over the first `seq_lens[b]` cached tokens of each request.

    q: [batch, 1, num_q_heads, head_dim], any floating dtype. k_cache, v_cache: [batch, max_seq_len, num_kv_heads, row]
    in `kv_format`. Query head h reads KV head h // (num_q_heads // num_kv_heads). seq_lens: int [batch].
    softmax_scale: default head_dim ** -0.5. compute_dtype: float32, or float64 for use as a yardstick.

    Returns out [batch, 1, num_q_heads, head_dim] and lse [batch, 1, num_q_heads] (natural log of the sum of
    exponentials), both in `compute_dtype`: not rounded to q's dtype, so that a kernel's error can be measured against
    them. A request of length 0 gives out 0 and lse -inf. Rows at or beyond the length are never looked at: they may
    hold anything, NaN included. Works on CPU and CUDA; reads seq_lens on the host.
    """
    stop = seq_lens.to(torch.int64)
    part = attend(
        q,
        k_cache,
        v_cache,
        torch.zeros_like(stop),
        stop,
        kv_format=kv_format,
        softmax_scale=softmax_scale,
        compute_dtype=compute_dtype,
    )
    return part.out.unsqueeze(1), (part.max + part.sum.log()).unsqueeze(1)


def decode_attention_splits_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str,
    num_splits: int,
    softmax_scale: float | None = None,
    split_tokens: SplitTokens | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same attention with each row cut into `num_splits` parts, and what each part contributes.

    split_tokens: rule (int64 seq_lens [batch], num_splits) -> tokens per split, int64 [batch]; split s of row b covers
    [s * n, (s + 1) * n) below the length. Default: an even share, rounded up (`even_split_tokens(1)`).

    Returns out [batch, 1, num_q_heads, head_dim], split_out [batch, num_splits, num_q_heads, head_dim] (normalised per
    split), split_max and split_sum [batch, num_splits, num_q_heads] as in `Partial`, all in `compute_dtype`.
    """
    if num_splits < 1:
        raise ValueError(f"num_splits: got {num_splits}, want at least 1")
    lengths = seq_lens.to(torch.int64)
    tokens = (split_tokens or even_split_tokens(1))(lengths, num_splits)
    parts = [
        attend(
            q,
            k_cache,
            v_cache,
            torch.minimum(tokens * split, lengths),
            torch.minimum(tokens * (split + 1), lengths),
            kv_format=kv_format,
            softmax_scale=softmax_scale,
            compute_dtype=compute_dtype,
        )
        for split in range(num_splits)
    ]
    split_out, split_max, split_sum = (torch.stack(pieces, dim=1) for pieces in zip(*parts, strict=True))
    return combine(split_out, split_max, split_sum).out.unsqueeze(1), split_out, split_max, split_sum


def even_split_tokens(tile_tokens: int) -> SplitTokens:
    """Rule for `split_tokens`: an even share of the row, rounded up to a multiple of `tile_tokens`."""

    def rule(seq_lens: torch.Tensor, num_splits: int) -> torch.Tensor:
        share = (seq_lens + num_splits - 1) // num_splits
        return (share + tile_tokens - 1) // tile_tokens * tile_tokens

    return rule


def combine(split_out: torch.Tensor, split_max: torch.Tensor, split_sum: torch.Tensor) -> Partial:
    """Joins parts stacked along dim 1 ([batch, num_splits, num_q_heads(, head_dim)]) into one."""
    total_max = split_max.amax(dim=1)
    weight = split_sum * _exp_difference(split_max, total_max.unsqueeze(1))
    total_sum = weight.sum(dim=1)
    weighted = (split_out * weight.unsqueeze(-1)).sum(dim=1)
    return Partial(_normalise(weighted, total_sum), total_max, total_sum)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: torch.Tensor,
    stop: torch.Tensor,
    *,
    kv_format: str,
    softmax_scale: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> Partial:
    """Attention over tokens [start[b], stop[b]) of each row b; arguments as in `decode_attention_reference`."""
    form = format_of(kv_format)
    batch, num_q_heads, head_dim, max_seq_len, num_kv_heads = _check(q, k_cache, v_cache, stop)
    want = (form.cache_dtype, form.row_elements(head_dim))
    if (k_cache.dtype, k_cache.shape[-1]) != want:
        raise ValueError(
            f"k_cache: got {k_cache.dtype} rows of {k_cache.shape[-1]}, want {want[0]} rows of {want[1]} "
            f"for {kv_format} at head_dim {head_dim}"
        )
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    heads = q.reshape(batch, num_kv_heads, num_q_heads // num_kv_heads, head_dim).to(compute_dtype) * scale
    state = (
        heads.new_zeros(heads.shape),
        heads.new_full(heads.shape[:-1], -torch.inf),
        heads.new_zeros(heads.shape[:-1]),
    )
    first, last = (int(start.min()), min(int(stop.max()), max_seq_len)) if batch else (0, 0)
    block = max(1, _BLOCK_ELEMENTS // max(1, batch * num_kv_heads * head_dim))
    for begin in range(first, last, block):
        end = min(begin + block, last)
        position = torch.arange(begin, end, device=q.device)
        valid = (position >= start[:, None]) & (position < stop[:, None])
        keys, values = (form.dequantize(cache[:, begin:end], head_dim, compute_dtype) for cache in (k_cache, v_cache))
        state = _accumulate(state, heads, keys, values, valid)
    weighted, top, total = (tensor.reshape(batch, num_q_heads, *tensor.shape[3:]) for tensor in state)
    return Partial(_normalise(weighted, total), top, total)


def _accumulate(
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of the online softmax. heads [b, kv, group, d], keys and values [b, t, kv, d], valid [b, t]."""
    weighted, top, total = state
    scores = torch.einsum("bkgd,btkd->bkgt", heads, keys).masked_fill(~valid[:, None, None, :], -torch.inf)
    # Where the weight is 0 the value must be 0 too: what lies beyond the length may be NaN.
    values = values.masked_fill(~valid[:, :, None, None], 0)
    new_top = torch.maximum(top, scores.amax(dim=-1))
    weights = _exp_difference(scores, new_top.unsqueeze(-1))
    shrink = _exp_difference(top, new_top)
    weighted = weighted * shrink.unsqueeze(-1) + torch.einsum("bkgt,btkd->bkgd", weights, values)
    return weighted, new_top, total * shrink + weights.sum(dim=-1)


def _exp_difference(value: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """exp(value - top), with 0 for -inf - -inf: nothing seen weighs nothing."""
    return torch.exp(value - top.masked_fill(top == -torch.inf, 0))


def _normalise(weighted: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return weighted / total.masked_fill(total == 0, 1).unsqueeze(-1)


def _check(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[int, int, int, int, int]:
    """Returns batch, num_q_heads, head_dim, max_seq_len, num_kv_heads."""
    if q.dim() != 4 or q.shape[1] != 1:
        raise ValueError(f"q: got shape {tuple(q.shape)}, want [batch, 1, num_q_heads, head_dim]")
    batch, _, num_q_heads, head_dim = q.shape
    if k_cache.dim() != 4 or k_cache.shape[0] != batch:
        raise ValueError(f"k_cache: got shape {tuple(k_cache.shape)}, want [{batch}, max_seq_len, num_kv_heads, row]")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache: got shape {tuple(v_cache.shape)}, want k_cache's {tuple(k_cache.shape)}")
    if seq_lens.shape != (batch,):
        raise ValueError(f"seq_lens: got shape {tuple(seq_lens.shape)}, want [{batch}]")
    _, max_seq_len, num_kv_heads, _ = k_cache.shape
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"q: got {num_q_heads} heads, want a multiple of the cache's {num_kv_heads}")
    return batch, num_q_heads, head_dim, max_seq_len, num_kv_heads
