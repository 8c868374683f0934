"""Random calls of append, on any device, and how far what it wrote is from the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_kernels.formats.kv import FORMATS, KvFormat, format_of, format_pair
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.config import LANE_ELEMENTS, AppendConfig
from cute_kernels.kv_cache.reference import append_kv_reference, places, shaped_scale, transform
from cute_kernels.kv_cache.rope import Rope

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON = 0xA5  # what caches hold before the append
WOBBLE = 4e-6  # of a rotated value, relative to the row: sines, and sums in another order


@dataclass(frozen=True)
class Shape:
    """What a call looks like; `make_call` fills it with numbers.

    Args:
        new: new tokens of each request.
        lengths: tokens of each request after the append; default: what is new, and 0 to 56 tokens before.
        place: "table", "contiguous" or "slots".
        fused: q, k and v are views of one tensor.
        style: of the position ids: "none", "int32" or "int64".
    """

    kv_format: str | tuple[str, str] = "bf16"
    dtype: str = "bf16"
    new: tuple[int, ...] = (1, 1, 1, 1)
    lengths: tuple[int, ...] | None = None
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    v_head_dim: int | None = None
    place: str = "table"
    page_size: int = 16
    layout: str = "NHD"
    rope: Rope | None = None
    bias: bool = False
    norm: bool = False
    positions: str = "none"
    fused: bool = True
    seed: int = 0

    def with_(self, **changes: Any) -> Shape:
        return replace(self, **changes)


def make_call(shape: Shape, device: str | torch.device = "cpu") -> AppendCall:
    """A call of this shape: standard normal q, k, v, pages in random order, caches full of `POISON`."""
    generator = torch.Generator(device).manual_seed(shape.seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(DTYPES[shape.dtype])

    tokens = sum(shape.new)
    k_dim, v_dim = shape.head_dim, shape.v_head_dim or shape.head_dim
    k_format, v_format = format_pair(shape.kv_format)
    sizes = (shape.num_q_heads * k_dim, shape.num_kv_heads * k_dim, shape.num_kv_heads * v_dim)
    # Four times as large in places: quantisers must cope with outliers.
    parts = (normal(tokens, sum(sizes)) * (1 + 3 * (normal(sum(sizes)) > 1.5))).split(sizes, dim=1)
    if not shape.fused:
        parts = [part.contiguous() for part in parts]
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads)
    dims = (k_dim, k_dim, v_dim)
    q, k, v = (part.view(tokens, *size) for part, *size in zip(parts, heads, dims, strict=True))

    lengths = shape.lengths or tuple(count + 7 * (i % 9) for i, count in enumerate(shape.new))
    decode = all(count == 1 for count in shape.new)
    where, num_pages, page_size = _where(shape, lengths, generator, device)
    inner = (page_size, shape.num_kv_heads) if shape.layout == "NHD" else (shape.num_kv_heads, page_size)
    k_cache, v_cache = (
        _cache(format_of(name), (num_pages, *inner), dim, device)
        for name, dim in ((k_format, k_dim), (v_format, v_dim))
    )
    position_ids = None
    if shape.positions != "none":
        position_ids = torch.randint(0, 200_000, (tokens,), generator=generator, device=device)
        position_ids = position_ids.to(getattr(torch, shape.positions))
    return AppendCall(
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        k_format=k_format,
        v_format=v_format,
        cache_layout=shape.layout,
        rope=shape.rope,
        q=q if shape.num_q_heads else None,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        cu_seqlens=None if decode else torch.tensor([0, *shape.new], device=device).cumsum(0).to(torch.int32),
        position_ids=position_ids,
        q_bias=normal(sizes[0]) if shape.bias and shape.num_q_heads else None,
        k_bias=normal(sizes[1]) if shape.bias else None,
        v_bias=normal(sizes[2]) if shape.bias else None,
        q_norm=normal(k_dim) if shape.norm and shape.num_q_heads else None,
        k_norm=normal(k_dim) if shape.norm else None,
        k_scale=_scale(format_of(k_format), k, generator),
        v_scale=_scale(format_of(v_format), v, generator),
        **where,
    )


def without_requests(call: AppendCall) -> AppendCall:
    """The same tokens, all of which belong to no request."""
    assert call.seq_lens is not None and call.cu_seqlens is not None
    changes: dict[str, Any] = {"seq_lens": call.seq_lens[:0], "cu_seqlens": call.cu_seqlens[:1]}
    if call.block_table is None:
        changes |= {"k_cache": call.k_cache[:0], "v_cache": call.v_cache[:0]}
    else:
        changes["block_table"] = call.block_table[:0]
    return call._replace(**changes)


def _where(shape: Shape, lengths: tuple[int, ...], generator: torch.Generator, device: Any) -> tuple[dict, int, int]:
    """(block_table or slots, pages of the cache, tokens of a page)."""
    batch, longest = len(lengths), max(lengths, default=1)
    if shape.place == "contiguous":
        return {}, batch, longest + 3
    max_pages = max(1, -(-longest // shape.page_size))
    pages = torch.randperm(batch * max_pages + 2, generator=generator, device=device)[: batch * max_pages]
    table = pages.view(batch, max_pages).to(torch.int32)
    if shape.place == "table":
        return {"block_table": table}, batch * max_pages + 2, shape.page_size
    slots = [
        int(table[request, position // shape.page_size]) * shape.page_size + position % shape.page_size
        for request, (length, count) in enumerate(zip(lengths, shape.new, strict=True))
        for position in range(length - count, length)
    ]
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    return {"slot_mapping": mapping}, batch * max_pages + 2, shape.page_size


def _cache(form: KvFormat, places: tuple[int, ...], head_dim: int, device: Any) -> torch.Tensor:
    cache = torch.empty((*places, form.row_elements(head_dim)), dtype=form.cache_dtype, device=device)
    cache.view(torch.uint8).fill_(POISON)
    return cache


def _scale(form: KvFormat, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """A scale as calibration would give it, so that a few values saturate."""
    if form.given_scale is None:
        return None
    shape = {"tensor": (), "head": x.shape[1:2], "channel": x.shape[1:]}[form.given_scale]
    assert form.code_max is not None
    step = 4.0 / form.code_max
    return step * (0.5 + torch.rand(shape, generator=generator, device=x.device))


def clone_caches(call: AppendCall) -> AppendCall:
    return call._replace(k_cache=call.k_cache.clone(), v_cache=call.v_cache.clone())


def assert_appended(call: AppendCall, before: AppendCall, q_out: torch.Tensor | None) -> None:
    """``call``'s caches and ``q_out`` are what appending to ``before``'s caches gives.

    What is not a token's row is untouched, to the bit. Rows decode to the transformed values within the format's own
    error plus `WOBBLE`; where no value was transformed, rows are those of the format bit for bit.
    """
    want_call = clone_caches(before)
    want_q = append_kv_reference(want_call)
    exact = call.rope is None and call.k_norm is None
    positions, pages, rows = places(call)
    _, k, v = transform(call, positions, torch.float64)
    for name, form, x, scale in (
        ("k_cache", call.formats[0], k, call.k_scale),
        ("v_cache", call.formats[1], v, call.v_scale),
    ):
        got, want = _raw(getattr(call, name)), _raw(getattr(want_call, name))
        if exact or name == "v_cache":
            assert torch.equal(got, want), f"{name}: rows differ from the reference's"
            continue
        written = _written(call, got, pages, rows)
        assert torch.equal(got[~written], want[~written]), f"{name}: something else than the tokens' rows was written"
        _assert_rows_close(name, form, _rows(call, getattr(call, name), pages, rows), x[pages >= 0], scale)
    if call.q is None:
        assert q_out is None and want_q is None
        return
    assert q_out is not None and want_q is not None and q_out.dtype == call.q.dtype
    precise, _, _ = transform(call, positions, torch.float64)
    assert precise is not None
    assert_rounded(q_out, precise)


def assert_rounded(got: torch.Tensor, want: torch.Tensor) -> None:
    """16-bit values are ``want`` (fp64) rounded, up to `WOBBLE` of the row before the rounding."""
    slack = WOBBLE * want.abs().amax(-1, keepdim=True)
    low, high = (want - slack).to(got.dtype), (want + slack).to(got.dtype)
    assert ((got >= low) & (got <= high)).all(), f"off by {(got.double() - want).abs().max():.2e}"


def _raw(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)


def _written(call: AppendCall, raw: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Which bytes of a cache belong to the tokens' rows."""
    written = torch.zeros_like(raw, dtype=torch.bool)
    view = written if call.cache_layout == "NHD" else written.transpose(1, 2)
    view[pages[pages >= 0], rows[pages >= 0]] = True
    return written


def _rows(call: AppendCall, cache: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    cache = cache if call.cache_layout == "NHD" else cache.transpose(1, 2)
    return cache[pages[pages >= 0], rows[pages >= 0]]


def _assert_rows_close(
    name: str, form: KvFormat, rows: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Rows are a quantisation of x, up to `WOBBLE` of the row: the error that the format states, and no more."""
    slack = WOBBLE * x.abs().amax(-1, keepdim=True)
    head_dim = x.shape[-1]
    if not form.is_coded:
        assert_rounded(rows, x)
        return
    back = form.dequantize(rows, head_dim, torch.float64, shaped_scale(form, scale))
    bound = form.row(head_dim).error_bound(x, shaped_scale(form, scale))
    excess = (back - x).abs() - bound - 2 * slack
    assert (excess <= 0).all(), f"{name}: off by {float(excess.max()):.2e} more than {form.name} allows"


ALL_FORMATS = tuple(FORMATS)


def general_of(config: AppendConfig) -> AppendConfig:
    """The configuration for all calls: the inverse of `AppendConfig.for_decode`."""
    return replace(config, decode=False, lane_columns=2 * LANE_ELEMENTS)
