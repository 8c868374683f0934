"""`append_kv`, which appends a layer's new tokens to its cache, and `append_and_decode`, which runs attention
concurrently with the append.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from cute_kernels.attention.options import CallNumbers, ScoreOptions, options_of
from cute_kernels.formats.kv import format_of, format_pair
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.kv_cache import channel_blocks, ops, step_ops, step_plan
from cute_kernels.kv_cache.call import split_bias
from cute_kernels.kv_cache.options import NewTokenOptions
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.names import CacheLayout, KvFormats, QkvBias, WindowSize

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StepOptions(ScoreOptions, CallNumbers, NewTokenOptions, total=False):
    """The optional arguments of a step; :func:`append_and_decode` documents each."""

    transform: CacheTransform | None


@overload
def append_and_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    return_lse: Literal[False] = ...,
    **options: Unpack[StepOptions],
) -> torch.Tensor: ...


@overload
def append_and_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    return_lse: Literal[True],
    **options: Unpack[StepOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def append_and_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    return_lse: bool = ...,
    **options: Unpack[StepOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def append_and_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: KvFormats,
    qkv_bias: QkvBias | None = None,
    rope: Rope | None = None,
    position_ids: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
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
    transform: CacheTransform | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """Appends each request's last q_len tokens (`append_kv`), then attends with their queries over the whole cache
    (`decode_attention`).

    The result is that of the two calls, bit for bit if ``num_splits`` is given. On a GPU attention starts while the
    append runs. It first reads older tokens, and waits for the append only before the new tokens and the rotated
    queries. With one token a request, most caches take a single launch: attention writes the new rows itself
    (docs/api.md lists the exceptions). If the transform has a center, a step with a soft cap, sinks or the log-sum-exp
    takes two launches, since these depend on the constant that the center adds to all scores of a query.

    Args:
        q: bf16 or fp16 [batch, q_len, num_q_heads, head_dim], before norm and RoPE; q_len 1 to 16.
        k, v: [batch, q_len, num_kv_heads, head_dim] in q's dtype; V may have another head_dim. q, k and v may be views
            of one fused QKV tensor: the last two dimensions contiguous, tokens evenly spaced.
        k_cache, v_cache, kv_format, block_table, cache_layout, k_scale, v_scale: as for `decode_attention`. No other
            request may use the slot of a new token.
        seq_lens: int32 [batch], tokens of each request after the append. New tokens take positions seq_lens[b] - q_len
            to seq_lens[b] - 1; tokens at negative positions are not written. There is no slot_mapping: a token that is
            not at the place of its position could be read before it is written.
        qkv_bias: (bias of q, bias of k, bias of v), each [heads * head_dim] in q's dtype, or None.
        rope, q_norm, k_norm, norm_eps: as for `append_kv`.
        position_ids: int32 or int64 [batch, q_len], contiguous: positions for RoPE in place of those in the cache.
        softmax_scale, causal, window_size, softcap, sinks, alibi_slopes, attn_bias, num_splits: as for
            `decode_attention`.
        transform: the transform of the cache, as for `append_kv`. The append transforms q as well, and the result is
            attention over the original K and V. Attention undoes V's rotation in its epilogue for blocks of up to 128
            columns; wider blocks take a dozen more launches. If V's transform is folded into the projections around
            attention, leave V's part out here.
        return_lse: also return the log-sum-exp of the scores, without the sinks.
        out: the tensor for the result, contiguous.

    Returns:
        The result of `decode_attention`: out [batch, q_len, num_q_heads, head_dim of V] in q's dtype, with
        ``return_lse`` also lse, fp32 [batch, q_len, num_q_heads], natural log.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted, and
            nothing was appended. Lengths and pages are checked as `append_kv` and `decode_attention` do: on the CPU,
            and with CUTE_KERNELS_DEBUG=1.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors run the reference implementation.
    """
    if type(kv_format) is not str:
        kv_format = format_pair(kv_format)
    # Before names are looked at: who has such keys gives k_tail and tail_slots as well.
    if (keys := format_of(format_pair(kv_format)[0])).in_blocks:
        raise ValueError(
            f"kv_format: got {keys.name} keys, whose blocks a launch of their own fills; want another format, or "
            "append_kv and then decode_attention"
        )
    extras: step_plan.Extras | None = None
    if qkv_bias is not None or not (position_ids is q_norm is k_norm is None):
        biases = (None, None, None) if qkv_bias is None else split_bias("qkv_bias", qkv_bias)
        extras = (position_ids, *biases, q_norm, k_norm)
    options = options_of(
        block_table, cache_layout, k_scale, v_scale, causal, window_size, softcap, sinks, alibi_slopes, attn_bias
    )  # fmt: skip
    numbers = (softmax_scale, num_splits, return_lse, out, options, transform)
    step = step_plan.Step(q, k, v, k_cache, v_cache, seq_lens, kv_format, rope, norm_eps, extras, *numbers)
    result, lse = step_ops.path_of(step)(step)
    return (result, lse) if return_lse else result


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    kv_format: KvFormats,
    seq_lens: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_layout: CacheLayout = "NHD",
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    qkv_bias: QkvBias | None = None,
    rope: Rope | None = None,
    position_ids: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    transform: CacheTransform | None = None,
    q_shift: torch.Tensor | None = None,
    k_tail: torch.Tensor | None = None,
    tail_slots: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Appends new tokens' K and V to a cache in one launch (two for keys in blocks), and rotates their q.

    The kernel computes in fp32, in this order: qkv_bias, the RMS norm of q and k over head_dim, RoPE of q and k, the
    transform. Then it quantises k and v to the cache's format, and rounds q to its dtype.

    Args:
        k, v: bf16 or fp16 [tokens, num_kv_heads, head_dim], head_dim 64, 80, 96, 128, 192, 256 or 512; V's may differ
            from K's. They may be views of one fused QKV tensor: the last two dimensions contiguous, any token stride.
        k_cache, v_cache: in ``kv_format``: contiguous [batch, max_seq_len, num_kv_heads, row], or pages [num_pages,
            page_size, num_kv_heads, row]; with ``cache_layout`` "HND" heads come before tokens. Rows are contiguous
            and do not overlap, nor do K and V; other strides are free.
        kv_format: a name in :data:`cute_kernels.formats.kv.FORMATS`, or a pair of names (K's, V's); "int4", "int8" and
            "fp8" stand for "int4_g4", "int8_token_head" and "e4m3_token_head".
        seq_lens: int32 [batch], each request's tokens in the cache after the append. Its n new tokens take positions
            seq_lens - n to seq_lens - 1. Without ``cu_seqlens`` every request has one new token.
        cu_seqlens: int32 [batch + 1], from 0 on: request b's new tokens are cu_seqlens[b] to cu_seqlens[b + 1] - 1.
            Tokens from cu_seqlens[batch] on belong to no request. They are written only if ``slot_mapping`` has a slot
            for them, and their rows of the returned q may hold anything.
        slot_mapping: int64 [tokens], instead of lengths: page * page_size + offset (request * max_seq_len + position in
            a contiguous cache); -1 writes nothing.
        block_table: int32 [batch, max_pages]: position t of request b lies in page block_table[b, t // page_size].
            Columns are contiguous; the stride of rows is free.
        q: [tokens, num_q_heads, head_dim], dtype and strides as for k.
        q_out: the tensor for the rotated q, which may be q itself.
        qkv_bias: (bias of q, bias of k, bias of v), each [heads * head_dim] in k's dtype, or None.
        rope: see :class:`Rope`.
        position_ids: int32 or int64 [tokens], below 2**31: positions for RoPE in place of those in the cache. They are
            needed if rope and slot_mapping are given and seq_lens is not.
        q_norm, k_norm: weights [head_dim] in k's dtype of the RMS norm, or None without norm.
        norm_eps: a number that is added to the mean square.
        k_scale, v_scale: fp32, for formats with a scale beside the cache: "tensor" [] or [1], "head" [num_kv_heads] or
            [num_kv_heads, 1], "channel" [num_kv_heads, head_dim]. Positive and finite.

    Other Parameters:
        transform: the transform of this cache, see :class:`CacheTransform`; all appends and queries of a cache need the
            same. The returned q is transformed: pass it to `decode_attention` without ``transform``. Rotations are for
            head_dim 64, 128 and 256.
        q_shift: fp32 [tokens, num_q_heads], contiguous: receives q . k_center of the untransformed q, which
            `decode_attention` needs for a soft cap, sinks or the log-sum-exp. Only with a transform that has a center.
        k_tail: fp16 [slots, 64, num_kv_heads, head_dim], contiguous, for keys in blocks ("int4_channel32"): the last
            keys of each sequence, position p in row p % 64. A block of 32 tokens that becomes full is read from k_tail
            and written to k_cache. Afterwards a sequence may be cut back by up to 32 tokens, or to whole blocks.
        tail_slots: int32 [batch], each request's slot of k_tail; slots are distinct. It needs seq_lens and excludes
            slot_mapping.

    Returns:
        The rotated q in q's dtype, in q_out or a new tensor; None without q.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted. Lengths,
            pages and slots are not checked on a GPU (that would wait for it): a token whose slot is unmapped or outside
            the cache is not written. On the CPU, and with CUTE_KERNELS_DEBUG=1 in the environment at import, three
            things are errors: such slots, a slot that two tokens share, and scales that are not positive.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors run the reference implementation.
    """
    k_format, v_format = (kv_format, kv_format) if type(kv_format) is str else format_pair(kv_format)
    q_bias, k_bias, v_bias = (None, None, None) if qkv_bias is None else split_bias("qkv_bias", qkv_bias)
    call = (k, v, k_cache, v_cache, k_format, v_format, cache_layout, rope, norm_eps, q, q_out, seq_lens, block_table,
            transform)  # fmt: skip
    extras = (cu_seqlens, slot_mapping, position_ids, q_bias, k_bias, v_bias, q_norm, k_norm, k_scale, v_scale, q_shift)
    usual = cu_seqlens is slot_mapping is position_ids is qkv_bias is q_norm is k_norm is k_scale is v_scale is None
    usual = usual and q_shift is None
    if format_of(k_format).in_blocks or k_tail is not None or tail_slots is not None:
        return channel_blocks.append(call, None if usual else extras, k_tail, tail_slots)
    return ops.append(call, None if usual else extras)
