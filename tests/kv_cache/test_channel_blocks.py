"""Appending keys in blocks: the reference, the kernel warp by warp, the refusals, and attention over what was written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.kv_cache import channel_blocks as host
from cute_kernels.kv_formats import format_of
from cute_kernels.runtime import native
from layouts.kv.channel_blocks import BLOCK_TOKENS, LIMIT, TAIL_TOKENS
from simulator import Gpu, Int32, Int64, running

KEYS, VALUES = format_of("int4_channel32"), format_of("int4_g4")
HEADS, PAGE = 2, 64
needs_dsl = pytest.mark.skipif(native.dsl_version() is None, reason="the kernels are written in nvidia-cutlass-dsl")


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


def simulate(fill: host.Fill) -> None:
    """The kernel, every warp of every CTA in turn, the blocks of a request last to first."""
    from cute_kernels.kv_cache import channel_blocks_kernel as device
    from cute_kernels.kv_cache.config import FillConfig

    gpu = Gpu()
    at = {name: gpu.put(value) for name, value in fill._asdict().items() if isinstance(value, torch.Tensor)}
    page, token, head = fill.k_cache.stride()[:3]
    token, head = (token, head) if fill.cache_layout == "NHD" else (head, token)
    table = fill.block_table
    cache = device.Cache(
        base=Int64(at["k_cache"]),
        strides=(Int64(page), Int64(token), Int64(head)),
        num_pages=Int32(fill.k_cache.shape[0]),
        page_size=Int32(fill.k_cache.shape[1 if fill.cache_layout == "NHD" else 2]),
        table=Int64(at.get("block_table", 0)),
        table_stride=Int64(0 if table is None else table.stride(0)),
        max_pages=Int32(0 if table is None else table.shape[1]),
    )
    keys = device.Keys(Int64(at["k_new"]), Int64(at["k_tail"]), Int64(at["tail_slots"]), Int32(HEADS))
    requests = device.Requests(Int64(at["seq_lens"]), Int64(at.get("cu_seqlens", 0)))
    config = FillConfig(fill.k_format, fill.k_new.shape[2])
    most = len(fill.k_new) if fill.cu_seqlens is not None else 1
    with running(gpu):
        kernel: Any = device.FillKernel(config)
        for request in range(len(fill.seq_lens)):
            for block in reversed(range((most + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1)):
                for h in range(HEADS):
                    for warp in range(config.num_threads // 32):
                        gpu.block, gpu.warp = (block, h, request), warp
                        kernel.kernel(keys, requests, cache)
    gpu.get(at["k_cache"], fill.k_cache)
    gpu.get(at["k_tail"], fill.k_tail)


CASES = [
    ((1, 1, 1, 1), (31, 0, 63, 40)),  # decode: a block that becomes full, the first token, another, one in between
    ((5, 0, 3, 40), (30, 9, 93, 0)),
    ((130, 64), (17, 33)),  # more than the ring holds
]


@needs_dsl
@pytest.mark.parametrize(("counts", "starts"), CASES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "layout", "paged"), [(128, "NHD", True), (64, "HND", True), (64, "NHD", False)], ids=str
)
def test_the_kernel_fills_blocks_as_the_reference(counts, starts, head_dim, layout, paged):
    fill = fill_of(counts, starts, head_dim, layout, paged)
    fill.k_new[0, 0, 3] = LIMIT
    own, want = clone(fill), clone(fill)
    simulate(own)
    host.reference(*want)
    assert torch.equal(own.k_tail, want.k_tail)
    assert torch.equal(own.k_cache, want.k_cache)
    assert not torch.equal(want.k_tail, fill.k_tail)
    full = any((s + c) // BLOCK_TOKENS > s // BLOCK_TOKENS for c, s in zip(counts, starts, strict=True))
    assert torch.equal(want.k_cache, fill.k_cache) != full
