"""What a paged cache holds and what attention over it means, token by token: no fast way, no features."""

from __future__ import annotations

import torch

from cute_kernels.formats.kv import format_of


def attend(q, keys, values, softmax_scale=None):
    """One query [num_q_heads, head_dim] over fp32 [tokens, num_kv_heads, dim]; out and lse."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,thd->ht", q.float(), keys) * (softmax_scale or q.shape[-1] ** -0.5)
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


def gather(cache, table, length, name, head_dim, scale, cache_layout="NHD"):
    """A sequence's elements, fp32 [length, num_kv_heads, head_dim]."""
    tokens = cache if cache_layout == "NHD" else cache.transpose(1, 2)
    page_size = tokens.shape[1]
    rows = [tokens[int(table[t // page_size]), t % page_size] for t in range(length)]
    if not rows:
        return torch.zeros(0, tokens.shape[2], head_dim)
    return format_of(name).dequantize(torch.stack(rows).contiguous(), head_dim, torch.float32, scale)
