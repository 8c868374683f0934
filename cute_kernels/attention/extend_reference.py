"""Extend attention in plain PyTorch: what the operator means, and what runs on a CPU.

Request by request what :mod:`cute_kernels.attention.reference` defines for the newest tokens of a request, of which
there are as many as it has queries here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cute_kernels.attention.call import AttentionCall
from cute_kernels.attention.extend_call import ExtendCall, check_device_values, make_call
from cute_kernels.attention.reference import apply_sinks, attend, merge_states_reference
from cute_kernels.attention.reference import attention_of as attention_of_request


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
    """Attention as :func:`cute_kernels.extend_attention` defines it, whose arguments these are.

    compute_dtype: float32, or float64 for use as a yardstick.

    Returns out [total_q, num_q_heads, head_dim] and lse [total_q, num_q_heads], both in `compute_dtype`: not rounded to
    q's dtype, so that a kernel's error can be measured against them. Queries of no request give out 0 and lse -inf.
    Works on CPU and CUDA; reads lengths and pages on the host.

    Raises TypeError and ValueError as `extend_attention`, and ValueError for lengths and pages that cannot be right.
    """
    call = make_call(q, k_cache, v_cache, seq_lens, cu_seqlens_q=cu_seqlens_q, kv_format=kv_format, **options)
    check_device_values(call)
    return attention_of(call, compute_dtype)


def attention_of(call: ExtendCall, compute_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a checked call, as `extend_attention_reference`."""
    out = call.q.new_zeros(call.q.shape, dtype=compute_dtype)
    lse = call.q.new_full(call.q.shape[:2], -torch.inf, dtype=compute_dtype)
    for own, request in call.requests():
        if call.new is None:
            result, own_lse = attention_of_request(request, compute_dtype)
        else:
            result, own_lse = _attention_with_new_tokens(call, own, request, compute_dtype)
        out[own], lse[own] = result[0], own_lse[0]
    return out, lse


def _attention_with_new_tokens(
    call: ExtendCall, own: slice, request: AttentionCall, compute_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one request whose own queries' tokens are not in the cache."""
    new = call.new_tokens(own)
    older, newer = request.seq_lens.to(torch.int64) - request.q_len, new.seq_lens.to(torch.int64)
    zero = torch.zeros_like(older)
    if call.tree_mask is not None:
        request = replace(request, bias=None)  # which is about new tokens; the older ones are all seen
    parts = [attend(request, zero, older, compute_dtype), attend(new, zero, newer, compute_dtype)]
    out, lse = merge_states_reference(*(x for part in parts for x in (part.out, part.lse)), compute_dtype=compute_dtype)
    return apply_sinks(out, lse, request.sinks), lse
