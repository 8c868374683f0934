"""Caches whose keys lie in blocks of tokens, built by PyTorch alone, and attention over their values in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.formats.kv import format_of
from layouts.kv.channel_blocks import BLOCK_TOKENS, TAIL_TOKENS, ChannelBlocks

KEYS = "int4_channel32"


@dataclass
class Cached:
    """Arguments of `decode_attention` but q, and what the rows stand for.

    keys, values: fp64 [batch, tokens, num_kv_heads, head_dim], as attention shall see them.
    """

    arguments: dict[str, Any]
    keys: torch.Tensor
    values: torch.Tensor
    lengths: list[int]

    def to(self, device: str) -> dict[str, Any]:
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.arguments.items()}


def scattered_keys(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Keys [..., head_dim] whose channels have offsets and ranges of their own."""
    spread, center = (torch.randn(shape[-2:], generator=generator) for _ in range(2))
    return torch.randn(shape, generator=generator) * spread.exp() + 2 * center


def make_cached(
    lengths: list[int],
    head_dim: int = 128,
    num_kv_heads: int = 2,
    v_format: str = "int4_g4",
    page_size: int | None = 64,
    layout: str = "NHD",
    seed: int = 0,
) -> Cached:
    """What lies behind a request's end, and in blocks that are not full, is whatever bytes there are."""
    generator = torch.Generator().manual_seed(seed)
    batch, size = len(lengths), page_size or 64
    pages = -(-max(max(lengths), 1) // size)
    tokens, form, values_form = pages * size, format_of(KEYS), format_of(v_format)
    shape = (batch, tokens, num_kv_heads, head_dim)
    keys = scattered_keys(shape, generator)
    values = torch.randn(shape, generator=generator).bfloat16().float()
    k_rows, v_rows = form.quantize(keys), values_form.quantize(values).view(torch.uint8)
    waiting = ChannelBlocks(head_dim).waiting(keys)
    seen = form.dequantize(k_rows, head_dim, torch.float64)
    tail = torch.randn(batch + 3, TAIL_TOKENS, num_kv_heads, head_dim, generator=generator).half()
    slots = torch.randperm(batch + 3, generator=generator)[:batch].to(torch.int32)
    for request, length in enumerate(lengths):
        full = length // BLOCK_TOKENS * BLOCK_TOKENS
        seen[request, full:] = waiting[request, full:].double()
        recent = torch.arange(max(full - BLOCK_TOKENS, 0), length)
        tail[slots[request], recent % TAIL_TOKENS] = waiting[request, recent]
        k_rows[request, full:] = 0xFF
        v_rows[request, length:] = 0xFF
    arguments: dict[str, Any] = {"seq_lens": torch.tensor(lengths, dtype=torch.int32)}
    if page_size is not None:
        order = torch.randperm(batch * pages, generator=generator)
        paged = [torch.empty_like(rows).view(batch * pages, size, *rows.shape[2:]) for rows in (k_rows, v_rows)]
        for pool, rows in zip(paged, (k_rows, v_rows), strict=True):
            pool[order] = rows.reshape(batch * pages, size, *rows.shape[2:])
        k_rows, v_rows = paged
        arguments["block_table"] = order.view(batch, pages).to(torch.int32)
    if layout == "HND":
        k_rows, v_rows = (rows.transpose(1, 2).contiguous() for rows in (k_rows, v_rows))
    read = values_form.dequantize(values_form.quantize(values), head_dim, torch.float64, None)
    arguments |= {"k_cache": k_rows, "v_cache": v_rows.view(values_form.cache_dtype), "kv_format": (KEYS, v_format)}
    arguments |= {"k_tail": tail, "tail_slots": slots, "cache_layout": layout}
    return Cached(arguments, seen, read, lengths)


def attention(q: torch.Tensor, cached: Cached, window: int | None = None) -> torch.Tensor:
    """fp64 [batch, q_len, num_q_heads, head_dim]: causal attention of the newest tokens, written out."""
    batch, q_len, num_q_heads, head_dim = q.shape
    out = torch.zeros(batch, q_len, num_q_heads, cached.values.shape[3], dtype=torch.float64)
    group = num_q_heads // cached.keys.shape[2]
    for request, length in enumerate(cached.lengths):
        for i in range(q_len):
            last = length - q_len + i
            if last < 0:
                continue
            first = 0 if window is None else max(last - window + 1, 0)
            for head in range(num_q_heads):
                keys = cached.keys[request, first : last + 1, head // group]
                values = cached.values[request, first : last + 1, head // group]
                weights = torch.softmax(keys @ q[request, i, head].double().cpu() * head_dim**-0.5, 0)
                out[request, i, head] = weights @ values
    return out
