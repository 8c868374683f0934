"""Append in plain PyTorch: the definition of the operator, and the implementation for CPU tensors."""

from __future__ import annotations

import torch

from cute_kernels.attention.reference import shaped_scale
from cute_kernels.formats.kv import KvFormat
from cute_kernels.kv_cache.call import AppendCall


def append_kv_reference(call: AppendCall, compute_dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """Writes the call's k and v into its caches. Returns the rotated q in ``compute_dtype``, None without q.

    compute_dtype: float32, or float64 for a more exact comparison. The result is not rounded to q's dtype, so that a
    kernel's error can be measured. K and V of tokens that have no place in the cache (see `places`) are not written.
    """
    positions, pages, rows = places(call)
    q, k, v = transform(call, positions, compute_dtype)
    if call.q_shift is not None:
        given = call._replace(transform=None)
        call.q_shift.copy_(shifts(call, transform(given, positions, compute_dtype)[0]))
    k_format, v_format = call.formats
    k_places = pages, rows
    if k_format.by_token:
        k_places = torch.where(pages >= 0, torch.arange(len(pages), device=pages.device), -1), torch.zeros_like(rows)
    scatter(call, call.k_cache, quantize(k_format, k, call.k_scale), *k_places)
    scatter(call, call.v_cache, quantize(v_format, v, call.v_scale), pages, rows)
    return q


def transform(
    call: AppendCall, positions: torch.Tensor, compute_dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Returns q (None without q), k and v after bias, norm, RoPE and the cache's transform."""
    v = _with_bias(call.v.to(compute_dtype), call.v_bias)
    results: list[torch.Tensor | None] = []
    for x, bias, weight in ((call.q, call.q_bias, call.q_norm), (call.k, call.k_bias, call.k_norm)):
        if x is not None:
            x = _with_bias(x.to(compute_dtype), bias)
            if weight is not None:
                x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.norm_eps) * weight.to(compute_dtype)
            if call.rope is not None:
                x = call.rope.apply(x, positions)
        results.append(x)
    q, k = results
    assert k is not None
    if call.transform is not None:
        q = None if q is None else call.transform.queries(q)
        k, v = call.transform.keys(k), call.transform.values(v)
    return q, k, v


def shifts(call: AppendCall, q: torch.Tensor | None) -> torch.Tensor:
    """Returns the dot products q . k_center, [tokens, num_q_heads]. q: [tokens, num_q_heads, head_dim], before the
    transform."""
    assert call.transform is not None and q is not None
    shift = call.transform.shift(q)
    assert shift is not None
    return shift


def _with_bias(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias.to(x.dtype).view(x.shape[1:])


def requests_of(call: AppendCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two int64 tensors [tokens]: each token's request, and the number of tokens from the token to the end of
    the request, the token included.

    Tokens outside ``cu_seqlens`` have request -1.
    """
    tokens = torch.arange(call.num_tokens, device=call.k.device)
    if call.cu_seqlens is None:
        return tokens, torch.ones_like(tokens)
    bounds = call.cu_seqlens.to(torch.int64)
    request = torch.searchsorted(bounds, tokens, right=True) - 1
    inside = (request >= 0) & (request < call.batch)
    ahead = bounds[request.clamp(0, call.batch - 1) + 1] - tokens
    return torch.where(inside, request, -1), torch.where(inside, ahead, 1)


def places(call: AppendCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns three int64 tensors [tokens]: each token's position for RoPE, its page, and its row within the page. The
    page is -1 for a token that is not written.

    A token is not written if its slot, position or page is negative, or outside the cache or the block table. A
    contiguous cache has one page per request.
    """
    positions = torch.zeros(call.num_tokens, dtype=torch.int64, device=call.k.device)
    inside = torch.ones_like(positions, dtype=torch.bool)
    request = positions
    if call.seq_lens is not None:
        request, ahead = requests_of(call)
        inside = request >= 0
        request = request.clamp(min=0)
        positions = call.seq_lens.to(torch.int64)[request] - ahead
        inside = inside & (positions >= 0)
    if call.slot_mapping is not None:
        inside = call.slot_mapping >= 0
        pages, rows = call.slot_mapping // call.page_size, call.slot_mapping % call.page_size
    else:
        index, rows = positions.clamp(min=0) // call.page_size, positions.clamp(min=0) % call.page_size
        if call.block_table is not None:
            last = call.block_table.shape[1] - 1
            inside = inside & (index <= last)
            pages = call.block_table[request, index.clamp(max=last)].to(torch.int64)
        else:
            inside = inside & (index == 0)
            pages = request
    inside = inside & (pages >= 0) & (pages < call.num_pages)
    if call.position_ids is not None:
        positions = call.position_ids.to(torch.int64)
    return positions, torch.where(inside, pages, -1), rows


def quantize(form: KvFormat, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Quantises numbers [..., num_kv_heads, head_dim] to rows. A scale for each head may have the shape
    [num_kv_heads]."""
    return form.quantize(x, shaped_scale(form, scale))


def scatter(
    call: AppendCall, cache: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor
) -> None:
    """Writes ``values``, rows [tokens, num_kv_heads, row], into a cache: token t at row ``rows[t]`` of page
    ``pages[t]``. Tokens with page -1 are not written."""
    if cache.element_size() == 1:
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    written = pages >= 0
    pages, rows = pages[written], rows[written]
    if call.cache_layout == "HND":
        cache = cache.transpose(1, 2)
    cache[pages, rows] = values[written]
