"""Decode attention: each request has one to 16 queries, which are the newest of its cached tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, overload

import torch

from cute_kernels.arguments import check_count, check_tensors
from cute_kernels.attention import ops
from cute_kernels.attention.call import Given
from cute_kernels.attention.checks import MAX_SPLITS
from cute_kernels.attention.options import CallNumbers, CallOptions, options_of, with_more
from cute_kernels.attention.reference import decode_attention_splits_reference
from cute_kernels.attention.transformed import restore, transform_query
from cute_kernels.attention.trees import attend_to_trees
from cute_kernels.formats.kv import format_pair
from cute_kernels.formats.kv.transforms import CacheTransform, check_transform
from cute_kernels.formats.scores import check_mapping
from cute_kernels.names import CacheLayout, KvFormatName, KvFormats, WindowSize
from cute_kernels.runtime.operator import as_kernels, new_call

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DecodeOptions(CallOptions, CallNumbers, total=False):
    """The optional arguments of a decode call; :func:`decode_attention` documents each."""

    transform: CacheTransform | None
    tree_mask: torch.Tensor | None


@overload
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    return_lse: Literal[False] = ...,
    **options: Unpack[DecodeOptions],
) -> torch.Tensor: ...


@overload
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    return_lse: bool = ...,
    **options: Unpack[DecodeOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    block_table: torch.Tensor | None = None,
    cache_layout: CacheLayout = "NHD",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: WindowSize | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
    q_shift: torch.Tensor | None = None,
    k_tail: torch.Tensor | None = None,
    tail_slots: torch.Tensor | None = None,
    transform: CacheTransform | None = None,
    tree_mask: torch.Tensor | None = None,
    score_options: Mapping[str, torch.Tensor] | None = None,
    block_list: torch.Tensor | None = None,
    block_counts: torch.Tensor | None = None,
    block_tokens: int | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes softmax(q K^T * softmax_scale) V for the last tokens of each request, over its cached tokens.

    The queries are a request's last q_len tokens; their K and V are in the cache already. Query i of request b has
    position p = seq_lens[b] - q_len + i. Its score for the key at position j is softmax_scale * (q . k). The score is
    then soft-capped, biased by position and by ``attn_bias``, and masked, in this order.

    Args:
        q: bf16 or fp16 [batch, q_len, num_q_heads, head_dim]; q_len 1 to 16, head_dim 64, 80, 96, 128, 192, 256 or
            512. It may be a view of a fused projection: the last two dimensions contiguous, other strides any multiples
            of 16 bytes.
        k_cache, v_cache: rows in ``kv_format``. Without a block table [batch, max_seq_len, num_kv_heads, row], with one
            [num_pages, page_size, num_kv_heads, row]; page_size a multiple of 16 up to 256. V may have another head_dim
            and format. num_kv_heads divides num_q_heads, and query head h reads KV head h // (num_q_heads //
            num_kv_heads). Rows are contiguous and do not overlap. Other strides are multiples of 16 bytes, or of 4 in
            formats whose rows carry their scales. So K and V may be views of one tensor, such as ``kv[:, 0]`` and
            ``kv[:, 1]`` of [num_pages, 2, ...]. Calls take longer if tokens are not adjacent (in "HND": the tokens of a
            head), and still longer if strides are no multiples of 16.
        seq_lens: int32 [batch], the tokens of each request in the cache, the queries' own included. Lengths are read on
            the device: one captured CUDA graph serves changing lengths.
        kv_format: name of a format (:mod:`cute_kernels.formats.kv`), or a pair of names for K and V. "int4", "int8" and
            "fp8" stand for "int4_g4", "int8_token_head" and "e4m3_token_head". A "bf16" or "fp16" cache needs q in the
            same dtype.
        block_table: int32 [batch, max_pages], columns contiguous, any stride of rows. Token t of request b is row
            t % page_size of page block_table[b, t // page_size]. Entries of pages that no query sees may hold anything.
        cache_layout: "NHD" as above, or "HND": [batch, num_kv_heads, max_seq_len, row], [num_pages, num_kv_heads,
            page_size, row].
        k_scale, v_scale: fp32, for formats with a scale beside the cache: [] or [1] ("..._tensor"), [num_kv_heads] or
            [num_kv_heads, 1] ("..._head"), [num_kv_heads, head_dim] ("..._channel"; a head's columns contiguous and
            aligned to 16 bytes). Positive and finite; values are checked where lengths are (see Raises).
        softmax_scale: a positive number, default head_dim ** -0.5.
        causal: whether a query sees no key after its own position. It makes no difference if q_len is 1.
        window_size: sliding window: a query sees only keys with p - window_size < j <= p, as transformers counts its
            sliding_window. Or FlashAttention's (left, 0), where window_size = left + 1; (-1, 0) and (-1, -1) are no
            window.
        softcap: scores become softcap * tanh(score / softcap); at most 2**15.
        sinks: fp32 [num_q_heads], one more logit in the softmax's denominator, without a row of V; -inf for none.
        alibi_slopes: fp32 [num_q_heads], added as alibi_slopes[h] * (j - p).
        attn_bias: fp32 or bf16, broadcastable to [batch, q_len, num_q_heads, max_seq_len] (max_pages * page_size with a
            block table), added to the scores; -inf masks.
        return_lse: also return the log-sum-exp of the scores, without the sinks.
        out: the tensor for the result, contiguous, in memory that no other argument has.

    Other Parameters:
        num_splits: the number of parts into which each request's tokens are cut. Default: chosen for the shapes (see
            :mod:`cute_kernels.attention.decode_schedule`). If given, a request's result does not depend on the rest of
            the batch.
        transform: the transform that the cache was written with. Pass q after RoPE, but not transformed; V's transform
            is undone in the result. Transforming takes a dozen launches of PyTorch's operations. `append_and_decode`
            needs none of them, since its append transforms q. Not together with q_shift.
        q_shift: fp32 [batch, q_len, num_q_heads], contiguous: what `append_kv` wrote to its ``q_shift`` when it
            transformed this q. The result is then that of the transformed V; ``transform.restore(out)`` undoes V's
            part. The shift matters only for a soft cap, sinks, score_options and the log-sum-exp.
        k_tail: fp16 [slots, 64, num_kv_heads, head_dim], contiguous, for keys in blocks ("int4_channel32"): the keys
            whose block of 32 tokens is not full yet, position p in row p % 64, as `append_kv` writes them. Pages then
            hold a multiple of 32 tokens.
        tail_slots: int32 [batch], each request's slot of k_tail. Read on the device and not checked there.
        tree_mask: int32 [batch, q_len, words], which of its request's last q_len tokens each query sees, in bits as for
            :func:`cute_kernels.extend_attention`. `extend_attention` computes such calls; options that it does not have
            are refused.
        score_options: tensors, by the names of options that :func:`cute_kernels.formats.scores.register` has
            registered. They act on scores after ``attn_bias``, in the order of their registration. Not with a
            tree_mask.
        block_list, block_counts, block_tokens: attention over chosen blocks of 64 or 128 tokens: int32 [batch,
            num_kv_heads, max_blocks] and [batch, num_kv_heads]. The query heads of KV head h see the tokens of the
            first block_counts[b, h] blocks in block_list[b, h] of request b. Blocks ascend, and each holds a token of
            the request. If queries are causal and more than one, the last blocks are those of the queries' own tokens.
            A GPU does not check this. A block is a number of whole pages; contiguous caches are "NHD". Not with
            window_size, alibi_slopes, attn_bias, score_options, q_shift, k_tail or a tree_mask.

    Returns:
        out [batch, q_len, num_q_heads, head_dim of V] in q's dtype; with ``return_lse`` also fp32 [batch, q_len,
        num_q_heads], natural log. A query that sees no key has out 0 and lse -inf: all queries of a request of length
        0, and the first q_len - seq_lens[b] of a request shorter than q_len. Softmax and accumulation are fp32. Equal
        inputs give bitwise equal outputs.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted. A GPU does
            not check lengths and pages (that would wait for it): longer requests count as max_seq_len. The CPU checks
            them, and so does a GPU with CUTE_KERNELS_DEBUG=1 in the environment at import; the message names the
            request and the position.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors run the reference implementation.
    """
    if type(kv_format) is not str:
        kv_format = format_pair(kv_format)
    if tree_mask is not None:
        if block_list is not None:
            raise ValueError("block_list: got one with a tree_mask, want one of them")
        if score_options:
            raise ValueError(f"score_options: got {', '.join(score_options)} with a tree_mask, want one of them")
        if k_tail is not None or tail_slots is not None:
            raise ValueError("k_tail: got one with a tree_mask, want None: extend attention reads no such cache")
    elif transform is not None:
        check_transform("transform", transform)
        if transform.kind is not None:
            sees_shift = return_lse or bool(score_options) or softcap is not None or sinks is not None
            caches = k_cache, v_cache
            q, q_shift = transform_query(transform, q, q_shift, caches, kv_format, cache_layout, sees_shift)
    options = options_of(
        block_table, cache_layout, k_scale, v_scale, causal, window_size, softcap, sinks, alibi_slopes, attn_bias,
        q_shift, k_tail, tail_slots,
    )  # fmt: skip
    if tree_mask is not None:
        others = {"kv_format": kv_format, "softmax_scale": softmax_scale, "num_splits": num_splits, "out": out}
        others |= {"transform": transform, **(options or {})}
        result, lse = attend_to_trees(q, k_cache, v_cache, seq_lens, tree_mask, **others)
        return (result, lse) if return_lse else result
    if score_options:
        check_mapping(score_options)
        options = with_more(options, score_options=dict(score_options))
    if block_list is not None or block_counts is not None or block_tokens is not None:
        options = with_more(options, block_list=block_list, block_counts=block_counts, block_tokens=block_tokens)
    values = q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, return_lse, out, options, None
    given = new_call(Given, values)
    result, lse = ops.path_of(given)(given)
    if transform is not None and transform.changes_values:
        result = restore(transform, result, out)
    return (result, lse) if return_lse else result


def decode_attention_splits(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormatName,
    num_splits: int,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes :func:`decode_attention` with fixed splits, and also returns the contribution of each split.

    Args:
        q: [batch, 1, num_q_heads, head_dim]: one query a request.
        k_cache, v_cache, seq_lens, kv_format, softmax_scale: as for `decode_attention`, without a block table.
        num_splits: 1 to 65535.

    Returns (out, split_out fp32 [batch, num_splits, num_q_heads, head_dim], split_max and split_sum fp32 [batch,
    num_splits, num_q_heads]). out is the average of split_out weighted by split_sum * exp(split_max).

    split_sum is the sum of exp(score - split_max) over scaled scores. On a GPU split_max may lie above or below the
    largest score, and split i has tiles i, i + num_splits and so on, not a run of neighbouring tokens. A split without
    tokens has split_out 0, split_max -inf, split_sum 0.

    Raises: as `decode_attention`.
    """
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens)
    check_count("num_splits", num_splits, 1, MAX_SPLITS)
    if q.is_cuda:
        return ops.launch_splits(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits)
    out, split_out, split_max, split_sum = as_kernels(decode_attention_splits_reference)(
        q, k_cache, v_cache, seq_lens, kv_format=kv_format, num_splits=num_splits, softmax_scale=softmax_scale
    )
    return out.to(q.dtype), split_out, split_max, split_sum
