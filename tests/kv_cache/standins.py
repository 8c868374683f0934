"""What `append_kv` and `decode_attention` do for a paged cache, token by token: no fast way, no features."""

from __future__ import annotations

import inspect

import pytest
import torch

from cute_kernels import attention, kv_cache
from cute_kernels.kv_formats import format_of


def install(patch: pytest.MonkeyPatch) -> None:
    """Puts these in the place of what this checkout does not have yet."""
    if not hasattr(kv_cache, "append_kv"):
        patch.setattr(kv_cache, "append_kv", append_kv, raising=False)
    if "block_table" not in inspect.signature(attention.decode_attention).parameters:
        patch.setattr(attention, "decode_attention", decode_attention)


def append_kv(
    k, v, k_cache, v_cache, *, kv_format, seq_lens, cu_seqlens=None, block_table, cache_layout="NHD",
    q=None, k_scale=None, v_scale=None,
):  # fmt: skip
    formats = (kv_format, kv_format) if isinstance(kv_format, str) else kv_format
    starts = list(range(len(seq_lens) + 1)) if cu_seqlens is None else cu_seqlens.tolist()
    assert starts[-1] == len(k) == len(v)
    for row, length in enumerate(seq_lens.tolist()):
        count = starts[row + 1] - starts[row]
        for number in range(count):
            position = length - count + number
            page = int(block_table[row, position // k_cache.shape[_PAGE_DIM[cache_layout]]]) if position >= 0 else -1
            if page < 0:
                continue
            token = starts[row] + number
            operands = zip((k, v), (k_cache, v_cache), formats, (k_scale, v_scale), strict=True)
            for x, cache, name, scale in operands:
                tokens = cache if cache_layout == "NHD" else cache.transpose(1, 2)
                tokens[page, position % tokens.shape[1]] = format_of(name).quantize(x[token].float(), scale)
    return None if q is None else q.clone()


def decode_attention(
    q, k_cache, v_cache, seq_lens, *, kv_format, block_table, cache_layout="NHD", k_scale=None, v_scale=None,
    softmax_scale=None, return_lse=False,
):  # fmt: skip
    formats = (kv_format, kv_format) if isinstance(kv_format, str) else kv_format
    batch, q_len, num_q_heads, head_dim = q.shape
    v_head_dim = next(
        d for d in (64, 80, 96, 128, 192, 256) if format_of(formats[1]).row_elements(d) == v_cache.shape[-1]
    )
    out = q.new_zeros(batch, q_len, num_q_heads, v_head_dim)
    lse = torch.full(q.shape[:3], -torch.inf)
    for row, length in enumerate(seq_lens.tolist()):
        operands = ((k_cache, formats[0], head_dim, k_scale), (v_cache, formats[1], v_head_dim, v_scale))
        keys, values = (
            gather(cache, block_table[row], length, name, dim, scale, cache_layout)
            for cache, name, dim, scale in operands
        )
        for i in range(q_len):
            seen = length - q_len + i + 1
            if seen > 0:
                out[row, i], lse[row, i] = attend(q[row, i], keys[:seen], values[:seen], softmax_scale)
    return (out, lse) if return_lse else out


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


_PAGE_DIM = {"NHD": 1, "HND": 2}
