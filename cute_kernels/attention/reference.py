"""Attention in plain PyTorch: the definition of the operators, and the implementation on a CPU.

The last `q_len` tokens of each request attend to the first `seq_lens[b]` tokens of its K and V cache. The code is
written for reading: fetch and dequantise a block of tokens, score, mask, running softmax, accumulate. The loop over
blocks of tokens only bounds memory. Softmax state carries over between blocks, as in online softmax (Milakov and
Gimelshein, 2018), so the block size changes the result by rounding alone.

For one query at position p, one key at position j and query head h:

    score = softmax_scale * (q . k)                       (q . k) + q_shift[b, i, h] if there is a shift
    score = softcap * tanh(score / softcap)               if there is a cap
    score = score + alibi_slopes[h] * (j - p)             if there are slopes
    score = score + attn_bias[b, i, h, j]                 if there is a bias
    seen  = j < seq_lens[b] and (j <= p, if causal) and (p - window_size < j <= p, if there is a window)

A sink is one more logit in the denominator. The log-sum-exp leaves it out.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_kernels import blocks
from cute_kernels.attention.call import AttentionCall, make_call, make_extend_call
from cute_kernels.attention.device_values import check_device_values
from cute_kernels.attention.operands import CacheOperand
from cute_kernels.attention.options import CallOptions
from cute_kernels.formats.kv import KvFormat
from cute_kernels.formats.scores import KeyBlock, options_in

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Elements of one dequantised block of K (and of V), and of its scores: 128 MiB each in fp32, whatever the batch.
_BLOCK_ELEMENTS = 1 << 25


class Partial(NamedTuple):
    """Attention over a part of each request's tokens. `combine` joins parts exactly.

    Attributes:
        out: [batch, q_len, num_q_heads, v_head_dim], normalised over the part; 0 for an empty part.
        max: [batch, q_len, num_q_heads], the largest score in natural units; -inf for an empty part.
        sum: [batch, q_len, num_q_heads], the sum of exp(score - max); 0 for an empty part.
    """

    out: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor

    @property
    def lse(self) -> torch.Tensor:
        """Natural log of the sum of exponentials, -inf if the part is empty."""
        return self.max + self.sum.log()


def decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str | tuple[str, str],
    softmax_scale: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
    **options: Unpack[CallOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes decode attention as this module defines it, with the arguments of :func:`cute_kernels.decode_attention`.

    compute_dtype: float32, or float64 for use as a yardstick.

    Returns out [batch, q_len, num_q_heads, v_head_dim] and lse [batch, q_len, num_q_heads], both in `compute_dtype`.
    Neither is rounded to q's dtype, so that a kernel's error can be measured against them. Works on CPU and CUDA; reads
    lengths and pages on the host.

    Raises TypeError and ValueError as `decode_attention`, and ValueError for lengths and pages that cannot be right.
    """
    call = make_call(q, k_cache, v_cache, seq_lens, kv_format=kv_format, softmax_scale=softmax_scale, **options)
    check_device_values(call)
    return attention_of(call, compute_dtype)


def extend_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: str | tuple[str, str],
    compute_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention as :func:`cute_kernels.extend_attention` defines it, with that function's arguments.

    compute_dtype: float32, or float64 for use as a yardstick.

    Returns out [total_q, num_q_heads, head_dim] and lse [total_q, num_q_heads], both in `compute_dtype`. Neither is
    rounded to q's dtype, so that a kernel's error can be measured against them. Queries that belong to no request have
    out 0 and lse -inf. Works on CPU and CUDA; reads lengths and pages on the host.

    Raises TypeError and ValueError as `extend_attention`, and ValueError for lengths and pages that cannot be right.
    """
    call = make_extend_call(q, k_cache, v_cache, seq_lens, cu_seqlens_q=cu_seqlens_q, kv_format=kv_format, **options)
    check_device_values(call)
    return attention_of(call, compute_dtype)


def attention_of(call: AttentionCall, compute_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of a checked call, as `decode_attention_reference` or `extend_attention_reference` returns
    them."""
    if call.extends:
        return _attention_of_requests(call, compute_dtype)
    stop = call.seq_lens.to(torch.int64)
    part = attend(call, torch.zeros_like(stop), stop, compute_dtype)
    return apply_sinks(part.out, part.lse, call.sinks), part.lse


def _attention_of_requests(call: AttentionCall, compute_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a call of extend attention, one request after the other."""
    out = call.q.new_zeros(call.q.shape, dtype=compute_dtype)
    lse = call.q.new_full(call.q.shape[:2], -torch.inf, dtype=compute_dtype)
    for own, request in call.requests():
        if call.new is None:
            result, own_lse = attention_of(request, compute_dtype)
        else:
            result, own_lse = _attention_with_new_tokens(call, own, request, compute_dtype)
        out[own], lse[own] = result[0], own_lse[0]
    return out, lse


def _attention_with_new_tokens(
    call: AttentionCall, own: slice, request: AttentionCall, compute_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of one request whose queries' own tokens are not in the cache."""
    new = call.new_tokens(own)
    older, newer = request.seq_lens.to(torch.int64) - request.q_len, new.seq_lens.to(torch.int64)
    zero = torch.zeros_like(older)
    if call.tree_mask is not None:
        request = replace(request, bias=None)  # which is about new tokens; the older ones are all seen
    parts = [attend(request, zero, older, compute_dtype), attend(new, zero, newer, compute_dtype)]
    out, lse = merge_states_reference(*(x for part in parts for x in (part.out, part.lse)), compute_dtype=compute_dtype)
    return apply_sinks(out, lse, request.sinks), lse


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Returns out * exp(lse) / (exp(lse) + exp(sink)), [batch, q_len, num_q_heads, v_head_dim] with one sink per query
    head."""
    if sinks is None:
        return out
    kept = torch.sigmoid(lse - sinks.to(lse.dtype)).masked_fill(lse == -torch.inf, 0)  # -inf - -inf would be NaN
    return out * kept.unsqueeze(-1)


def merge_states_reference(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention over the union of two disjoint sets of keys from the attention over each.

    out_a, out_b: [..., num_heads, head_dim]; lse_a, lse_b: [..., num_heads], natural log. A part with lse -inf is
    ignored, and its out may hold anything. +inf is treated as -inf, since MLA decode returns it for a query without
    keys. If both parts are ignored, out is 0 and lse -inf. Returns (out, lse) in `compute_dtype`.
    """
    lse_a, lse_b = (lse.to(compute_dtype).masked_fill(lse == torch.inf, -torch.inf) for lse in (lse_a, lse_b))
    top = torch.maximum(lse_a, lse_b)
    weights = [_exp_difference(lse, top).unsqueeze(-1) for lse in (lse_a, lse_b)]
    parts = [
        (out.to(compute_dtype) * weight).masked_fill(weight == 0, 0)
        for out, weight in zip((out_a, out_b), weights, strict=True)
    ]
    total = (weights[0] + weights[1]).squeeze(-1)
    return _normalise(parts[0] + parts[1], total), top + total.log()


# -- parts of the tokens -----------------------------------------------------------------------------------------------


def decode_attention_splits_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str | tuple[str, str],
    num_splits: int,
    softmax_scale: float | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes attention of one query a request over `num_splits` parts of its tokens, and the contribution of each
    part. Parts have equal shares of the tokens, rounded up; the last parts may have fewer tokens or none.

    Returns out [batch, 1, num_q_heads, v_head_dim], split_out [batch, num_splits, num_q_heads, v_head_dim] (normalised
    per split), split_max and split_sum [batch, num_splits, num_q_heads] as in `Partial`, all in `compute_dtype`.
    """
    call = make_call(
        q, k_cache, v_cache, seq_lens, kv_format=kv_format, softmax_scale=softmax_scale, num_splits=num_splits
    )
    if call.q_len != 1:
        raise ValueError(f"q: got q_len {call.q_len}, want 1")
    check_device_values(call)
    lengths = seq_lens.to(torch.int64)
    tokens = (lengths + num_splits - 1) // num_splits
    bounds = [torch.minimum(tokens * split, lengths) for split in range(num_splits + 1)]
    parts = [attend(call, start, stop, compute_dtype) for start, stop in itertools.pairwise(bounds)]
    split_out, split_max, split_sum = (torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))
    return combine(split_out, split_max, split_sum).out.unsqueeze(1), split_out, split_max, split_sum


def combine(split_out: torch.Tensor, split_max: torch.Tensor, split_sum: torch.Tensor) -> Partial:
    """Joins parts that are stacked along dim 1, [batch, num_splits, num_q_heads(, v_head_dim)], into one part without
    this dim."""
    total_max = split_max.amax(dim=1)
    weight = split_sum * _exp_difference(split_max, total_max.unsqueeze(1))
    total_sum = weight.sum(dim=1)
    weighted = (split_out * weight.unsqueeze(-1)).sum(dim=1)
    return Partial(_normalise(weighted, total_sum), total_max, total_sum)


def attend(call: AttentionCall, start: torch.Tensor, stop: torch.Tensor, compute_dtype: torch.dtype) -> Partial:
    """Computes attention over tokens start[b] to stop[b] - 1 of each request b, without the sinks. start, stop: int64
    [batch].

    Rows of the cache that no query sees may hold anything, NaN included. They may be fetched, but do not change the
    result.
    """
    batch, q_len, heads, group = call.batch, call.q_len, call.num_kv_heads, call.group
    queries = call.q.reshape(batch, q_len, heads, group, call.head_dim).to(compute_dtype) * call.softmax_scale
    weighted = queries.new_zeros(batch, q_len, heads, group, call.v.head_dim)
    top = queries.new_full(weighted.shape[:-1], -torch.inf)
    total = queries.new_zeros(weighted.shape[:-1])

    start = torch.maximum(start, call.first_seen(call.seq_lens.to(torch.int64)))
    first, last = (int(start.min()), int(stop.max())) if batch else (0, 0)
    token_elements = batch * max(heads * max(call.head_dim, call.v.head_dim), q_len * call.num_q_heads)
    block = max(1, blocks.elements(_BLOCK_ELEMENTS) // max(1, token_elements))
    for begin in range(first, last, block):
        keys_at = torch.arange(begin, min(begin + block, last), device=call.q.device)
        inside = (keys_at >= start[:, None]) & (keys_at < stop[:, None])
        seen = inside[:, None] & seen_keys(call, keys_at)
        keys = fetch(call, call.k, keys_at, compute_dtype)
        # Where the weight is 0 the value must be 0 too: what lies where nobody looks may be NaN.
        values = fetch(call, call.v, keys_at, compute_dtype).masked_fill(~seen.any(dim=1)[:, :, None, None], 0)

        scores = scores_of(call, queries, keys, keys_at).masked_fill(~seen[:, :, None, None, :], -torch.inf)
        if call.blocks is not None:
            chosen = call.blocks.seen(keys_at)
            scores = scores.masked_fill(~chosen[:, None, :, None], -torch.inf)
            values = values.masked_fill(~chosen.transpose(1, 2)[..., None], 0)
        new_top = torch.maximum(top, scores.amax(dim=-1))
        weights = _exp_difference(scores, new_top.unsqueeze(-1))
        shrink = _exp_difference(top, new_top)
        weighted = weighted * shrink.unsqueeze(-1) + torch.einsum("bikgt,btkd->bikgd", weights, values)
        total = total * shrink + weights.sum(dim=-1)
        top = new_top
    out = _normalise(weighted, total)
    return Partial(out.flatten(2, 3), top.flatten(2, 3), total.flatten(2, 3))


def seen_keys(call: AttentionCall, keys_at: torch.Tensor) -> torch.Tensor:
    """Returns bool [batch, q_len, tokens]: which keys at positions `keys_at` [tokens] each query sees. The ends of the
    requests are not considered.
    """
    distance = query_positions(call)[:, :, None] - keys_at
    seen = torch.ones_like(distance, dtype=torch.bool)
    if call.causal:
        seen &= distance >= 0
    if call.window is not None:
        seen &= distance < call.window
    return seen


def query_positions(call: AttentionCall) -> torch.Tensor:
    """Returns the queries' positions, int64 [batch, q_len]. Some are negative if a request has fewer tokens than
    queries."""
    steps = torch.arange(call.q_len, device=call.q.device) - call.q_len
    return call.seq_lens.to(torch.int64)[:, None] + steps


def scores_of(call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, keys_at: torch.Tensor) -> torch.Tensor:
    """Returns the scores before masks, [batch, q_len, num_kv_heads, group, tokens].

    queries [batch, q_len, num_kv_heads, group, head_dim], scaled; keys [batch, tokens, num_kv_heads, head_dim].
    """
    scores = torch.einsum("bikgd,btkd->bikgt", queries, keys)
    block = KeyBlock(call, keys_at, query_positions(call))
    for option in options_in(call.features):
        scores = option.reference(scores, block)
    return scores


def fetch(call: AttentionCall, operand: CacheOperand, keys_at: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns tokens `keys_at` [tokens] of every request, dequantised: [batch, tokens, num_kv_heads, head_dim].

    For positions in pages that no query sees, the tokens come from an arbitrary page of the cache.
    """
    if operand.form.in_blocks:
        return _fetch_blocks(call, keys_at, dtype)
    rows = rows_at(call, operand, keys_at)
    scale = None if operand.scale is None else operand.scale.tensor
    return operand.form.dequantize(rows, operand.head_dim, dtype, shaped_scale(operand.form, scale))


def rows_at(call: AttentionCall, operand: CacheOperand, keys_at: torch.Tensor) -> torch.Tensor:
    """Returns the rows of tokens `keys_at` [tokens] of every request: [batch, tokens, num_kv_heads, row]."""
    cache = operand.cache
    if cache.element_size() == 1:
        cache = cache.view(torch.uint8)  # torch cannot index FP8
    if call.head_major:
        cache = cache.transpose(1, 2)
    if call.block_table is None:
        return cache[:, keys_at]
    pages = call.block_table[:, keys_at // call.page_size].clamp(0, call.num_blocks - 1)
    return cache[pages, keys_at % call.page_size]


def _fetch_blocks(call: AttentionCall, keys_at: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the result of `fetch` for keys in blocks, at neighbouring positions. Tokens of full blocks come from the
    cache, all others from the tail."""
    assert call.tail is not None
    form, size = call.k.form, call.k.form.block_tokens
    first = int(keys_at[0]) // size * size
    around = torch.arange(first, -(-(int(keys_at[-1]) + 1) // size) * size, device=keys_at.device)
    # A block may hang over the end of the cache: it is never full.
    rows = rows_at(call, call.k, around.clamp(max=call.max_seq_len - 1))
    keys = form.dequantize(rows, call.head_dim, dtype)[:, keys_at - first]
    slots, ring = call.tail.slots.long().clamp(0, len(call.tail.rows) - 1), keys_at % call.tail.rows.shape[1]
    waiting = call.tail.rows[slots][:, ring].to(dtype)
    full = keys_at[None] < (call.seq_lens.long() // size * size)[:, None]
    return torch.where(full[:, :, None, None], keys, waiting)


def shaped_scale(form: KvFormat, scale: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a scale beside the cache in the shape that :mod:`layouts.kv` takes; None for None."""
    if scale is None or form.given_scale == "channel":
        return scale
    return scale.reshape(()) if form.given_scale == "tensor" else scale.reshape(-1, 1)


def _exp_difference(value: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Returns exp(value - top), but 0 if both are -inf, so that a part without keys has weight 0."""
    return torch.exp(value - top.masked_fill(top == -torch.inf, 0))


def _normalise(weighted: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return weighted / total.masked_fill(total == 0, 1).unsqueeze(-1)
