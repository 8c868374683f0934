"""New keys for caches of keys in blocks: what tests of their appends share, on a CPU and on a GPU."""

from __future__ import annotations

import torch

from cute_kernels.formats.kv import format_of
from cute_kernels.kv_cache import channel_blocks as host
from layouts.kv.channel_blocks import TAIL_TOKENS

KEYS = format_of("int4_channel32")
HEADS, PAGE = 2, 64
CASES = [
    ((1, 1, 1, 1), (31, 0, 63, 40)),  # decode: a block that becomes full, the first token, another, one in between
    ((5, 0, 3, 40), (30, 9, 93, 0)),
    ((130, 64), (17, 33)),  # more than the ring holds
]


def fill_of(counts, starts, head_dim=128, layout="NHD", paged=True, seed=0) -> host.Fill:
    """New keys for requests that have ``starts`` tokens already, whose newest keys are in the ring."""
    generator = torch.Generator().manual_seed(seed)
    batch, lengths = len(counts), [start + count for start, count in zip(starts, counts, strict=True)]
    k_new = torch.randn(sum(counts), HEADS, head_dim, generator=generator).mul(3).half()
    tail = torch.randn(batch + 1, TAIL_TOKENS, HEADS, head_dim, generator=generator).half()
    slots = torch.randperm(batch + 1, generator=generator)[:batch].to(torch.int32)
    pages = -(-max(lengths) // PAGE)
    table = torch.randperm(batch * pages + 1, generator=generator)[1:].view(batch, pages).to(torch.int32)
    shape = (batch * pages + 1, PAGE) if paged else (batch, pages * PAGE)
    inner = (shape[1], HEADS) if layout == "NHD" else (HEADS, shape[1])
    cache = torch.randint(0, 255, (shape[0], *inner, KEYS.row_bytes(head_dim)), generator=generator).to(torch.uint8)
    bounds = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    one_each = all(count == 1 for count in counts)
    return host.Fill(
        k_new, tail, slots, cache, torch.tensor(lengths, dtype=torch.int32), None if one_each else bounds,
        table if paged else None, layout, KEYS.name,
    )  # fmt: skip


def clone(fill: host.Fill) -> host.Fill:
    return fill._replace(k_tail=fill.k_tail.clone(), k_cache=fill.k_cache.clone())
