"""Appends of MLA tokens to poisoned caches, and what must come of them."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.kv_cache.rope import Rope
from cute_kernels.mla.cache.call import AppendMlaCall
from cute_kernels.mla.cache.reference import tokens_of
from cute_kernels.mla.formats import format_of
from layouts.kv.mla import ROPE_DIM

# Every format with every width that it has.
TOKENS = (
    ("mla_fp8", 576), ("mla_model1", 512), ("mla_bf16", 576), ("mla_bf16", 512), ("mla_fp16", 576), ("mla_fp16", 512),
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROPES = {None: None, "interleaved": Rope(64, interleaved=True), "half": Rope(64, theta=1e5)}


def awkward(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, head_dim]: Gaussians of many sizes, zeros, NaN, infinities, the largest and smallest numbers, and tiles whose
    greatest magnitude lies at, below and above a power of two times 448."""
    generator = torch.Generator().manual_seed(11)
    rows = [torch.randn(head_dim, generator=generator) * 10.0**power for power in range(-9, 5)]
    rows += [torch.zeros(head_dim), -torch.zeros(head_dim)]
    for power in (-15, -14, -13, -1, 0, 3):
        for factor in (1.0, 1 - 2.0**-8, 1 + 2.0**-7, 1 + 2.0**-24, 1 - 2.0**-24):
            row = torch.randn(head_dim, generator=generator) * 2.0**power
            row[::16] = 448.0 * 2.0**power * factor
            row[::32] *= -1
            rows.append(row)
    special = torch.randn(head_dim, generator=generator)
    info = torch.finfo(dtype)
    extremes = [torch.nan, torch.inf, -torch.inf, info.max, info.min, info.tiny, info.smallest_normal / 4]
    special[::73] = torch.tensor([*extremes, 0.0][: len(special[::73])])
    rows += [special, special.roll(5), torch.full((head_dim,), torch.nan), torch.full((head_dim,), -torch.inf)]
    return torch.stack(rows).to(dtype)


def make_call(
    kv_format: str,
    head_dim: int,
    x: torch.Tensor,
    *,
    rope: Rope | None = None,
    positions: torch.dtype = torch.int64,
    page_size: int = 3,
    padding: int = 0,
    lost: int = 2,
    seed: int = 0,
) -> AppendMlaCall:
    """An append of x [n, head_dim], a view of which is its latent and another its RoPE columns, to random slots.

    padding: elements between pages; lost: tokens whose slot is -1. The cache is filled with 0xA5.
    """
    generator = torch.Generator().manual_seed(seed)
    form, tokens = format_of(kv_format), x.shape[0]
    num_pages = tokens // page_size + 2
    slots = torch.randperm(num_pages * page_size, generator=generator)[:tokens]
    slots[torch.randperm(tokens, generator=generator)[:lost]] = -1
    width = page_size * form.row_elements(head_dim)
    memory = torch.full((num_pages, (width + padding) * form.cache_dtypes[0].itemsize), 0xA5, dtype=torch.uint8).view(
        form.cache_dtypes[0]
    )
    cache = memory[:, :width].unflatten(1, (page_size, -1))
    where = None
    if rope is not None:
        where = torch.randint(0, 200_000, (tokens,), generator=generator).to(positions)
        where[0] = 0
    latent, k_rope = x[:, :-ROPE_DIM], x[:, -ROPE_DIM:]
    return AppendMlaCall(latent, k_rope, cache, slots, kv_format, rope, where)


def assert_appended(call: AppendMlaCall, before: torch.Tensor) -> None:
    """The cache holds each token at its slot, bit for bit but for rotated columns, and all else as it was.

    Rotated columns are compared with exact ones: within a rounding of their dtype and the errors of fp32 sines.
    """
    form, head_dim = call.form, call.head_dim
    written = call.slot_mapping >= 0
    expected = before.clone()
    form.scatter(expected, call.slot_mapping[written], form.quantize(tokens_of(call))[written])
    if call.rope is None:
        assert torch.equal(bytes_of(call.cache), bytes_of(expected))
        return
    found, wanted = (
        form.fetch(cache, call.slot_mapping[written], head_dim, torch.float64) for cache in (call.cache, expected)
    )
    latent = slice(0, head_dim - ROPE_DIM)
    assert torch.equal(found[:, latent], wanted[:, latent])
    exact = tokens_of(call, torch.float64)[written][:, -ROPE_DIM:]
    token: Any = form.token(head_dim)
    bound = token.error_bound(torch.nn.functional.pad(exact, (head_dim - ROPE_DIM, 0)))[:, -ROPE_DIM:]
    sizes = torch.nn.functional.pad(call.k_rope[written].double().abs().amax(-1, keepdim=True), (0, 0))
    assert ((found[:, -ROPE_DIM:] - exact).abs() <= bound + sizes * 2.0**-18).all()
    # Every byte that is no token's is as it was.
    assert torch.equal(_but_tokens(call, call.cache), _but_tokens(call, before))


def _but_tokens(call: AppendMlaCall, cache: torch.Tensor) -> torch.Tensor:
    copy = cache.clone()
    slots = call.slot_mapping[call.slot_mapping >= 0]
    rows = torch.zeros(slots.shape[0], cache.shape[2], dtype=call.form.cache_dtypes[0])
    call.form.scatter(copy, slots, rows)
    return bytes_of(copy)


def bytes_of(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().view(torch.uint8)
