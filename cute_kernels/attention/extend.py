"""Extend attention: many new queries a request over BF16, FP16, INT8, FP8 and INT4 KV caches, contiguous or paged.

It serves chunked prefill over a cached prefix, prefix-cache hits, verification of long drafts, and batches that mix
these with decoding. Read on in `reference` (what it computes), `call` (a checked call), `extend_config`,
`extend_schedule`, `extend_kernel`, `compile`, `ops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from cute_kernels.arguments import check_dtype, check_shape, check_tensors
from cute_kernels.attention import ops
from cute_kernels.attention.call import Given
from cute_kernels.attention.options import AppendedOptions, BlockOptions, keys_seen
from cute_kernels.attention.transformed import inputs_of, results_of
from cute_kernels.formats.kv import format_pair
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.formats.scores import check_mapping
from cute_kernels.names import CacheLayout, KvFormats, WindowSize
from cute_kernels.runtime.operator import new_call, written

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["extend_attention", "pack_tree_mask"]

WORD_BITS = 32  # of a tree's mask


class ExtendOptions(AppendedOptions, BlockOptions, total=False):
    """Options of extend attention with defaults; :func:`extend_attention` documents each."""

    new_k: torch.Tensor | None
    new_v: torch.Tensor | None


@overload
def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: KvFormats,
    return_lse: Literal[False] = ...,
    **options: Unpack[ExtendOptions],
) -> torch.Tensor: ...


@overload
def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: KvFormats,
    return_lse: Literal[True],
    **options: Unpack[ExtendOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: KvFormats,
    return_lse: bool,
    **options: Unpack[ExtendOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def extend_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    kv_format: KvFormats,
    block_table: torch.Tensor | None = None,
    cache_layout: CacheLayout = "NHD",
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: WindowSize | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    transform: CacheTransform | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    new_k: torch.Tensor | None = None,
    new_v: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    num_splits: int | None = None,
    sm_margin: int = 0,
    unpack: bool | None = None,
    max_seq_len: int | None = None,
    fp8_products: bool = False,
    score_options: Mapping[str, torch.Tensor] | None = None,
    block_list: torch.Tensor | None = None,
    block_counts: torch.Tensor | None = None,
    block_tokens: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes softmax(q K^T * softmax_scale) V for any number of new tokens of each request, over its cached tokens.

    The queries are a request's last q_len tokens; their K and V are in the cache already. Query i of request b has
    position p = seq_lens[b] - q_len + i. Its score for the key at position j is softmax_scale * (q . k). The score is
    then soft-capped, biased by position and masked, in this order.

    Args:
        q: bf16 or fp16 [total_q, num_q_heads, head_dim], the queries of all requests one after the other; head_dim 64,
            80, 96, 128, 192, 256 or 512. A query's heads are contiguous. Queries may be any multiple of 16 bytes apart,
            as in the result of a fused projection.
        k_cache, v_cache: rows in ``kv_format``. Without a block table [batch, max_seq_len, num_kv_heads, row], with one
            [num_pages, page_size, num_kv_heads, row]; page_size a multiple of 16 up to 256. Strides are as free as for
            `decode_attention`, so K and V may be views of one tensor. num_kv_heads divides num_q_heads, and query head
            h reads KV head h // (num_q_heads // num_kv_heads).
        seq_lens: int32 [batch], the tokens of each request in the cache, the queries' own included.
        cu_seqlens_q: int32 [batch + 1], from 0 on: request b has queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1,
            and may have none. It is read on the device, as seq_lens is: one captured CUDA graph serves changing
            lengths. Queries from cu_seqlens_q[batch] on belong to no request. Their rows of a given ``out`` stay as
            they are; in a new tensor they hold anything.
        kv_format: name of a format (:mod:`cute_kernels.formats.kv`), or a pair of names for K and V. A "bf16" or "fp16"
            cache needs q in the same dtype. "int4_channel32" is refused.
        block_table: int32 [batch, max_pages], columns contiguous. Token t of request b is row t % page_size of page
            block_table[b, t // page_size]. Entries of pages that no query sees may hold anything.
        cache_layout: "NHD" as above, or "HND": [batch, num_kv_heads, max_seq_len, row], [num_pages, num_kv_heads,
            page_size, row].
        k_scale, v_scale: fp32, for formats with a scale beside the cache: [] or [1] ("..._tensor"), [num_kv_heads] or
            [num_kv_heads, 1] ("..._head"), [num_kv_heads, head_dim] ("..._channel"; a head's columns contiguous and
            aligned to 16 bytes). Positive and finite; values are checked where lengths are (see Raises).
        softmax_scale: a positive number, default head_dim ** -0.5.
        causal: whether a query sees no key after its own position.
        window_size: sliding window: a query sees only keys with p - window_size < j <= p. Or FlashAttention's
            (left, 0), as for :func:`cute_kernels.decode_attention`.
        softcap: scores become softcap * tanh(score / softcap); at most 2**15.
        sinks: fp32 [num_q_heads], one more logit in the softmax's denominator, without a row of V; -inf for none.
        alibi_slopes: fp32 [num_q_heads], added as alibi_slopes[h] * (j - p).
        tree_mask: int32 [total_q, words], contiguous, for trees of drafts. Bit j % 32 of word j // 32 says whether the
            query sees its request's new token j, 0 to q_len - 1. All queries see the older tokens. No query sees a new
            token that its words have no bit for. The mask replaces causal, and is refused together with window_size or
            alibi_slopes. :func:`pack_tree_mask` makes it of booleans.
        return_lse: also return the log-sum-exp of the scores, without the sinks.
        out: the tensor for the result, contiguous, in memory that no other argument has.

    Other Parameters:
        new_k, new_v: K and V of the queries' own tokens, exact: [total_q, num_kv_heads, head_dim] in q's dtype, rows
            contiguous and on multiples of 16 bytes. The last q_len tokens of a request are then these, and the cache is
            read only for the seq_lens[b] - q_len tokens before them. A second launch merges both parts.
        transform: the transform that the cache was written with, see :class:`cute_kernels.kv_cache.CacheTransform`.
            Pass q, new_k and new_v untransformed; the result is untransformed, too. PyTorch's operations apply the
            transform before the kernels, and undo it after them. A softcap is not supported if the transform has a
            center of K.
        num_splits: the number of parts, 1 to 32, into which the keys of each tile of 128 rows of queries are cut. A row
            is a query of one query head; each part has its own CTA. Default: chosen for the shapes, 1 if there is
            enough work. If given, a request's result does not depend on the rest of the batch.
        sm_margin: SMs that are left to other kernels that run meanwhile, as in FlashAttention-3.
        unpack: whether a launch first converts the cache to 16-bit rows, once for all queries. The rows take 4 bytes
            times batch, tokens a request may have, num_kv_heads and head_dim. Default: if there are queries enough for
            unpacking to pay, and the rows take at most 512 MiB. If ``num_splits`` is given, the default does not unpack
            formats with a scale per row: their results would round differently. True: always. Refused for INT8 with
            several groups a row, and if K or V has 16 bits.
        max_seq_len: an upper bound of seq_lens that the caller knows. It bounds the memory of ``unpack`` if the
            cache has room for more. Results of longer requests are undefined.
        fp8_products: whether q and the probabilities are rounded to E4M3, 4 significant bits, and multiplied with the
            codes of K and V. For "e4m3_tensor" and "e4m3_head" caches of head_dim 128. The call then needs memory: 2
            bytes times batch, tokens a request may have, num_kv_heads and head_dim, for any number of queries.
            docs/extend.md says what it gains and what errors it makes. On the CPU the reference implementation rounds
            nothing.
        score_options: as for :func:`cute_kernels.decode_attention`; no tensor may have a size of q_len. Not with
            new_k, new_v, a tree_mask, or a transform whose K has a center.
        block_list, block_counts, block_tokens: attention over chosen blocks, the same for all queries of a request and
            KV head, as for :func:`cute_kernels.decode_attention`. Not with window_size, alibi_slopes, score_options,
            new_k, new_v, a tree_mask, unpack=True or fp8_products.

    Returns:
        out [total_q, num_q_heads, head_dim] in q's dtype; with ``return_lse`` also fp32 [total_q, num_q_heads], natural
        log. A query that sees no key has out 0 and lse -inf. Softmax and accumulation are fp32. Equal inputs give
        bitwise equal outputs.

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
    if cu_seqlens_q is None:  # which would say that it is a call of decode attention
        check_tensors(cu_seqlens_q=cu_seqlens_q)
    options: dict[str, Any] = {
        "block_table": block_table,
        "cache_layout": cache_layout,
        "causal": causal,
        "window_size": keys_seen(window_size),
        "softcap": softcap,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "new_k": new_k,
        "new_v": new_v,
        "tree_mask": tree_mask,
        "sm_margin": sm_margin,
        "unpack": unpack,
        "max_seq_len": max_seq_len,
        "fp8_products": fp8_products,
    }
    if score_options is not None:
        check_mapping(score_options)
        if score_options:
            options["score_options"] = dict(score_options)
    if block_list is not None or block_counts is not None or block_tokens is not None:
        options |= {"block_list": block_list, "block_counts": block_counts, "block_tokens": block_tokens}
    inputs, own_sinks, needs_lse = None, None, return_lse
    if transform is not None:
        inputs = inputs_of(transform, q, options, return_lse)
        q, options["new_k"], options["new_v"], shift = inputs
        if shift is not None:  # which the kernels' scores lack: sinks are for the whole ones
            own_sinks, options["sinks"], needs_lse = sinks, None, True
    tensors, numbers = (q, k_cache, v_cache, seq_lens), (softmax_scale, num_splits, needs_lse)
    given = new_call(Given, (*tensors, kv_format, *numbers, out, options, cu_seqlens_q))
    results: Any = ops.path_of(given)(given)
    if transform is not None and inputs is not None:
        result, lse = results
        restored, lse = results_of(transform, inputs, result, lse, softmax_scale, own_sinks)
        results = (restored if out is None else written(out, restored, cu_seqlens_q)), lse
    return results if return_lse else results[0]


def pack_tree_mask(seen: torch.Tensor) -> torch.Tensor:
    """Makes the ``tree_mask`` of `extend_attention`.

    Args:
        seen: bool [total_q, tokens]: whether a query sees new token j of its own request, as
            ``seen[cu_seqlens_q[b] + i, j]``. A token's query usually sees itself and its ancestors.

    Returns int32 [total_q, ceil(tokens / 32)] on the same device: 32 tokens a word, the first in the lowest bit.

    Raises TypeError and ValueError, naming the argument, what came and what is wanted.
    """
    check_tensors(seen=seen)
    check_dtype("seen", seen, torch.bool)
    check_shape("seen", seen, "total_q", "tokens")
    words = -(-seen.shape[1] // WORD_BITS)
    bits = torch.nn.functional.pad(seen, (0, words * WORD_BITS - seen.shape[1])).view(seen.shape[0], words, WORD_BITS)
    values = bits.to(torch.int64) << torch.arange(WORD_BITS, device=seen.device)
    return values.sum(dim=2).to(torch.int32)
