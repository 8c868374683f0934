"""Attention of many new tokens, or of new columns with padding among them, by `extend_attention`.

A first turn attends to the keys and values that it has just computed, as they are. A later one attends to the packed
rows, its own new tokens among them. Padding is left out: queries and keys are tokens only, one request after the other.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.attention.extend import extend_attention
from cute_kernels.attention.extend_policies import HEAD_DIMS, cannot_read
from cute_kernels.formats.kv import format_of
from cute_kernels.integrations.transformers.handle import CachedTokens, token_major

_DENSE_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def can_extend(tokens: CachedTokens, softcap: float | None) -> bool:
    """Whether the kernel reads what a turn attends to."""
    transform = tokens.layer.transform
    if softcap is not None and transform is not None and transform.k_center is not None:
        return False
    head_dim = tokens.new_k.shape[3]
    if head_dim not in HEAD_DIMS or tokens.new_v.shape[3] != head_dim or tokens.new_k.dtype not in _DENSE_FORMATS:
        return False
    return not any(cannot_read(format_of(name)) for name in tokens.layer.formats)


def extend(tokens: CachedTokens, query: torch.Tensor, **options: Any) -> torch.Tensor:
    """`extend_attention` of all new columns; appends them. query: [batch, num_q_heads, new columns, head_dim]. Returns
    [batch, new columns, num_q_heads, head_dim], 0 for padding."""
    columns, is_first = tokens.columns, tokens.new == tokens.columns.count
    fresh = columns.fresh
    if is_first:
        operands = _new_as_cache(tokens, fresh)
    else:
        operands = tokens.layer.operands()
    tokens.append()
    q = token_major(query)
    counts = torch.full((columns.batch,), tokens.new, device=q.device) if fresh is None else fresh.sum(1)
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    packed = q.flatten(0, 1) if fresh is None else q[fresh]
    out = extend_attention(packed.contiguous(), seq_lens=columns.seq_lens, cu_seqlens_q=ends, **operands, **options)
    if fresh is None:
        return out.view(q.shape)
    return q.new_zeros(q.shape).masked_scatter_(fresh[:, :, None, None], out)


def _new_as_cache(tokens: CachedTokens, fresh: torch.Tensor | None) -> dict[str, Any]:
    """The new keys and values as a contiguous cache of their own dtype, each request's tokens first."""
    k, v = token_major(tokens.new_k).contiguous(), token_major(tokens.new_v).contiguous()
    if fresh is not None:
        order = (~fresh).to(torch.uint8).argsort(dim=1, stable=True)[:, :, None, None]
        k, v = (x.gather(1, order.expand(-1, -1, *x.shape[2:])) for x in (k, v))
    return {"k_cache": k, "v_cache": v, "kv_format": _DENSE_FORMATS[k.dtype]}
