"""Decode attention over BF16, FP16 and INT4 KV caches.

Read on in `reference` (what it means), `formats`, `config`, `schedule`, `kernel`, `compile`, `ops`.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from cute_kernels.attention import ops
from cute_kernels.attention.checks import check_call, check_lengths, check_out, check_scale
from cute_kernels.attention.reference import decode_attention_splits_reference

__all__ = ["decode_attention", "decode_attention_splits"]


@overload
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str,
    softmax_scale: float | None = ...,
    num_splits: int | None = ...,
    return_lse: Literal[False] = ...,
    out: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str,
    softmax_scale: float | None = ...,
    num_splits: int | None = ...,
    return_lse: Literal[True],
    out: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str,
    softmax_scale: float | None = ...,
    num_splits: int | None = ...,
    return_lse: bool = ...,
    out: torch.Tensor | None = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q K^T * softmax_scale) V for one new token per request, over its cached tokens.

    Args:
        q: bf16 or fp16 [batch, 1, num_q_heads, head_dim]; head_dim 64, 128 or 256.
        k_cache, v_cache: [batch, max_seq_len, num_kv_heads, row] in ``kv_format``; num_kv_heads divides num_q_heads,
            and query head h reads KV head h // (num_q_heads // num_kv_heads).
        seq_lens: int32 [batch], on the same device: how many tokens of each request to attend to, 0 to max_seq_len. It
            is read on the device: one captured CUDA graph serves changing lengths.
        kv_format: "bf16" or "fp16" (row = head_dim elements, q in the same dtype), or "int4_g1", "int4_g2", "int4_g4",
            "int4_g8": uint8 rows of :class:`layouts.kv.Int4Row` with that many groups.
        softmax_scale: a positive number, default head_dim ** -0.5.
        num_splits: into how many parts each request's tokens are cut. Default: chosen for the shapes (see
            :mod:`cute_kernels.attention.schedule`). If given, a request's result does not depend on the rest of the
            batch.
        return_lse: also return the log-sum-exp of the scaled scores.
        out: where to write the result, as q in shape and dtype.

    Returns:
        out [batch, 1, num_q_heads, head_dim] in q's dtype; with ``return_lse`` also fp32 [batch, 1, num_q_heads],
        natural log. A request of length 0 gives out 0 and lse -inf. Softmax and accumulation are fp32. Equal inputs
        give bitwise equal outputs.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted. Lengths are
            not looked at on a GPU (that would wait for it): longer ones are taken as max_seq_len. With
            CUTE_KERNELS_DEBUG=1 in the environment at import they are checked on every call, on the CPU always.
        UnsupportedGPUError: the GPU is none that the kernels are compiled for.

    CPU tensors are served by the reference implementation.
    """
    if ops.needs_dispatch(q, k_cache, v_cache, seq_lens):
        result, lse = torch.ops.cute_kernels.decode_attention(
            q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits
        )
        if out is not None:
            check_out(out, q)
            result = out.copy_(result)
    elif q.is_cuda:
        result, lse = ops.launch(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, return_lse, out)
    else:
        result, lse = ops.reference(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, out)
    if not return_lse:
        return result
    assert lse is not None
    return result, lse


def decode_attention_splits(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_format: str,
    num_splits: int,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`decode_attention` with fixed splits, and what each split contributes.

    Returns (out, split_out fp32 [batch, num_splits, num_q_heads, head_dim], split_max and split_sum fp32 [batch,
    num_splits, num_q_heads]): out is the average of split_out weighted by split_sum * exp(split_max). split_max is in
    natural units of the scaled scores; on a GPU it is the reference that the exponentials were taken against, which may
    lie above or below the greatest score (split_sum is relative to it), and splits take turns tile by tile. A split
    without tokens has split_out 0, split_max -inf, split_sum 0.
    """
    if isinstance(q, torch.Tensor) and q.is_cuda:
        return ops.launch_splits(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits)
    check_call(q, k_cache, v_cache, seq_lens, kv_format, num_splits, None)
    check_scale(softmax_scale)
    check_lengths(seq_lens, k_cache.shape[1])
    out, split_out, split_max, split_sum = decode_attention_splits_reference(
        q, k_cache, v_cache, seq_lens, kv_format=kv_format, num_splits=num_splits, softmax_scale=softmax_scale
    )
    return out.to(q.dtype), split_out, split_max, split_sum
