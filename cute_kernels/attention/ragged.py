"""Attention over ragged K and V of 16 bits, without a cache: the tokens of all requests lie one after the other."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from cute_kernels import arguments
from cute_kernels.arguments import check_dtype, check_place, check_tensors, check_vector, shape_of
from cute_kernels.attention import checks
from cute_kernels.attention.call import AttentionCall, make_call
from cute_kernels.attention.extend_checks import check_query, check_rows
from cute_kernels.attention.extend_schedule import choose, choose_newer
from cute_kernels.attention.launches import Keys
from cute_kernels.attention.ops import options_key
from cute_kernels.attention.options import NO_EXTEND_OPTIONS
from cute_kernels.attention.plan import check_alignment, extend_launches, problem_of
from cute_kernels.attention.reference import attention_of
from cute_kernels.runtime.operator import Plan, launcher
from cute_kernels.runtime.plans import identity


def ragged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes (out, lse) of :func:`cute_kernels.extend_attention` over K and V outside a cache.

    Args:
        q: bf16 or fp16 [total_q, num_q_heads, head_dim].
        k, v: [total_k, num_kv_heads, head_dim], in q's dtype.
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], from 0 on: where each request's queries, and its keys, begin. A
            request's queries are its last tokens.
        options: causal, window_size, softcap, sinks, alibi_slopes.

    Raises TypeError and ValueError, naming the argument, as `extend_attention` does.
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    arguments.check_optional_positive("softmax_scale", softmax_scale)
    complete = NO_EXTEND_OPTIONS | options
    if not q.is_cuda:
        call = _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, complete)
        return _reference(replace(call, softmax_scale=softmax_scale or call.softmax_scale), cu_seqlens_k)
    return launch((q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, complete))


def _key(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*[identity(tensor) for tensor in given[:5]], options_key(given[-1]))


def _checked_launch(given: tuple[Any, ...]) -> AttentionCall:
    call = _checked(*given[:5], options=given[-1])
    check_alignment(call)
    return call


def _plan_of(call: AttentionCall) -> Plan | None:
    if not (call.q.shape[0] and call.k.cache.numel() and call.batch):
        return None
    launches = extend_launches(call, replace(choose_newer(choose(problem_of(call))), merges=False))

    def launch(given: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, options = given
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        rows = k.unsqueeze(0), v.unsqueeze(0)
        launches.call(Keys(q, *rows, cu_seqlens_q, cu_seqlens_k, out, lse, softmax_scale, options))
        return out, lse

    return Plan(call.q.device.index, launch)


def _without_tokens(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(call.q), call.q.new_full(call.q.shape[:2], -torch.inf, dtype=torch.float32)


launch = launcher(_key, _checked_launch, _plan_of, _without_tokens)
"""Computes a call on CUDA tensors from (q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, all options)."""


def _checked(q, k, v, cu_seqlens_q, cu_seqlens_k, options: dict[str, Any]) -> AttentionCall:
    """Returns the checked call. The call treats K and V as one contiguous cache that has the tokens of all requests;
    its seq_lens say where each request's tokens end in this cache.
    """
    check_query(q)
    if cu_seqlens_k.dim() != 1 or cu_seqlens_k.shape[0] < 1:
        raise ValueError(f"cu_seqlens_k: got shape {shape_of(cu_seqlens_k)}, want [batch + 1]")
    batch = cu_seqlens_k.shape[0] - 1
    for name, ends in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_place(name, ends, q.device)
        check_vector(name, ends, torch.int32, batch + 1, "the batch and one")
    for name, rows in (("k", k), ("v", v)):
        if rows.dim() != 3:
            raise ValueError(f"{name}: got {rows.dim()} dimensions, want 3: [total_k, num_kv_heads, head_dim]")
        check_dtype(name, rows, q.dtype, why=", that of q")
        if rows.shape[2] != q.shape[2] or rows.shape != k.shape:
            raise ValueError(f"{name}: got shape {shape_of(rows)}, want {[*k.shape[:2], q.shape[2]]}, k's and q's")
        check_rows(name, rows)
    wanted = ("causal", "window_size", "softcap", "sinks", "alibi_slopes")
    call = make_call(
        q.new_empty((1, 1, *q.shape[1:])),
        k.unsqueeze(0),
        v.unsqueeze(0),
        cu_seqlens_k[:1],
        kv_format=checks.Q_DTYPES[q.dtype],
        **{name: options[name] for name in wanted},
    )
    return replace(call, q=q, cu_seqlens_q=cu_seqlens_q, seq_lens=cu_seqlens_k[1:])


def _reference(call: AttentionCall, cu_seqlens_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes (out, lse) request by request, each over its own K and V."""
    out, lse = _without_tokens(call)
    assert call.cu_seqlens_q is not None
    ends = call.cu_seqlens_q.tolist()
    for request, (start, stop) in enumerate(itertools.pairwise(cu_seqlens_k.tolist())):
        own = slice(ends[request], ends[request + 1])
        if own.start >= own.stop:
            continue
        k, v = (replace(operand, cache=operand.cache[:, start:stop]) for operand in (call.k, call.v))
        length, size = torch.tensor([stop - start], dtype=torch.int32, device=out.device), stop - start
        alone = replace(call, q=call.q[own][None], cu_seqlens_q=None, k=k, v=v, seq_lens=length, max_seq_len=size)
        result, own_lse = attention_of(replace(alone, page_size=size))
        out[own], lse[own] = result[0].to(out.dtype), own_lse[0]
    return out, lse
