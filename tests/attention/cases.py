"""Random calls of decode attention, on any device, and how far a result is from the fp64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cute_kernels import decode_attention
from cute_kernels.attention.checks import BIAS_DTYPES
from cute_kernels.attention.reference import decode_attention_reference
from cute_kernels.formats import kv as kv_formats
from cute_kernels.formats.kv import format_of

FORMATS = ("bf16", "fp16", "int4_g1", "int4_g2", "int4_g4", "int4_g8")
ALL_FORMATS = tuple(kv_formats.FORMATS)
Q_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}  # of a request's output, in the 2-norm
LSE_TOLERANCE = 1e-4  # absolute
UNMAPPED = (-1, 2**31 - 1, -(2**31))  # what the entries of a block table hold that must not be followed


@dataclass(frozen=True)
class Call:
    """The tensors of one call, and its options: what `decode_attention` takes by keyword besides the format."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor
    kv_format: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k_cache, self.v_cache, self.seq_lens

    @property
    def format_names(self) -> tuple[str, str]:
        """K's and V's."""
        return (self.kv_format, self.kv_format) if isinstance(self.kv_format, str) else self.kv_format

    @property
    def head_major(self) -> bool:
        return self.options.get("cache_layout") == "HND"

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [blocks, tokens, num_kv_heads, row], whatever their layout: views to write through."""
        k, v = ((cache.transpose(1, 2) if self.head_major else cache) for cache in (self.k_cache, self.v_cache))
        return k, v

    def run(self, **options: Any) -> Any:
        """The public call."""
        return decode_attention(*self.tensors, kv_format=self.kv_format, **(self.options | options))

    def reference(self, softmax_scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in fp64."""
        return decode_attention_reference(
            *self.tensors,
            kv_format=self.kv_format,
            softmax_scale=softmax_scale,
            compute_dtype=torch.float64,
            **self.options,
        )

    def row(self, index: int) -> Call:
        """One request alone; a paged one keeps all pages."""
        part, options = slice(index, index + 1), dict(self.options)
        bias = options.get("attn_bias")
        if bias is not None and bias.dim() == 4 and bias.shape[0] > 1:
            options["attn_bias"] = bias[part]
        caches = (self.k_cache, self.v_cache)
        if "block_table" in options:
            options["block_table"] = options["block_table"][part]
        else:
            caches = (self.k_cache[part], self.v_cache[part])
        return Call(self.q[part], *caches, self.seq_lens[part], self.kv_format, options)

    def with_lengths(self, lengths: Sequence[int]) -> Call:
        return replace(self, seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.q.device))

    def with_options(self, **options: Any) -> Call:
        return replace(self, options=self.options | options)


def make_call(
    kv_format: Any,
    lengths: Sequence[int],
    *,
    num_kv_heads: int = 1,
    group: int = 8,
    head_dim: int = 128,
    v_head_dim: int | None = None,
    q_len: int = 1,
    max_seq_len: int | None = None,
    q_dtype: str = "bf16",
    page_size: int | None = None,
    cache_layout: str = "NHD",
    causal: bool = True,
    window_size: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
    attn_bias: str | None = None,
    bias_dims: str = "bihj",
    device: str | torch.device = "cpu",
    seed: int = 0,
    poison: bool = True,
    blank: bool = False,
) -> Call:
    """Standard normal q, k, v, made on the device; what no query sees is poisoned (see `poison_unseen`).

    Args:
        kv_format: a name or a pair; scales that lie beside the cache are made from the values.
        max_seq_len: default the greatest length. With pages, rounded up to whole ones.
        q_dtype: "bf16" or "fp16"; a 16-bit cache's own where there is one.
        page_size: None for contiguous caches. Pages are in random order, and there are some that nobody owns.
        sinks, alibi: whether there are any; standard normal sinks, the usual slopes.
        attn_bias: "fp32" or "bf16": standard normal, one in eight of its elements -inf; `bias_dims` says which of
            [batch, q_len, num_q_heads, max_seq_len] do not repeat, as letters of "bihj".
        blank: rows are zeros, for calls of which only the shapes matter: making rows takes seconds on a CPU.
        others: as `decode_attention`.
    """
    names = (kv_format, kv_format) if isinstance(kv_format, str) else kv_format
    batch, tokens = len(lengths), max(lengths, default=0) if max_seq_len is None else max_seq_len
    num_q_heads = num_kv_heads * group
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    dense = [name for name in names if name in Q_DTYPES]
    q = normal(batch, q_len, num_q_heads, head_dim).to(Q_DTYPES[dense[0] if dense else q_dtype])
    caches, scales = [], []
    for name, dim in zip(names, (head_dim, v_head_dim or head_dim), strict=True):
        shape = (batch, tokens, num_kv_heads, dim)
        if blank:
            form, scale = format_of(name), given_scale(torch.ones(1, num_kv_heads, dim, device=device), name)
            caches.append(torch.zeros((*shape[:3], form.row_elements(dim)), dtype=form.cache_dtype, device=device))
        else:
            values = normal(*shape)
            scale = given_scale(values, name)
            caches.append(store(values, name, scale))
        scales.append(scale)
    given: dict[str, Any] = {"k_scale": scales[0], "v_scale": scales[1], "window_size": window_size, "softcap": softcap}
    if sinks:
        given["sinks"] = normal(num_q_heads)
    if alibi:
        given["alibi_slopes"] = 2.0 ** (-8.0 * torch.arange(1, num_q_heads + 1, device=device) / num_q_heads)
    if page_size is not None:
        tokens = -(-tokens // page_size) * page_size
        given["block_table"], caches = into_pages(caches, page_size, generator)
    if attn_bias is not None:
        full = dict(zip("bihj", (batch, q_len, num_q_heads, tokens), strict=True))
        values = normal(*(full[dim] if dim in bias_dims else 1 for dim in "bihj"))
        values[torch.rand(values.shape, generator=generator, device=device) < 0.125] = -torch.inf
        given["attn_bias"] = values.to({short: dtype for dtype, short in BIAS_DTYPES.items()}[attn_bias])
    options = {name: value for name, value in given.items() if value is not None}
    if not causal:
        options["causal"] = False
    if cache_layout == "HND":
        options["cache_layout"] = "HND"
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    call = Call(q, caches[0], caches[1], lens, kv_format, options)
    if poison and not blank:
        poison_unseen(call)
    return call


def given_scale(x: torch.Tensor, kv_format: str) -> torch.Tensor | None:
    """What a format wants beside a cache of these values [..., num_kv_heads, head_dim]; None if nothing."""
    form = format_of(kv_format)
    if form.given_scale is None:
        return None
    size = x.abs().flatten(0, -3)
    size = torch.cat((size, size.new_ones(1, *size.shape[1:])))  # also of no tokens
    dims = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[form.given_scale]
    return size.amax(dims) / (448.0 if kv_format.startswith("e4m3") else 127.0)


def store(x: torch.Tensor, kv_format: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Floating [..., num_kv_heads, head_dim] as cache rows; ``scale`` as `given_scale`."""
    form = format_of(kv_format)
    if scale is not None and form.given_scale == "head":
        scale = scale.reshape(-1, 1)
    return form.quantize(x, scale)


def into_pages(
    caches: Sequence[torch.Tensor], page_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(block table, pages of each cache) of contiguous caches [batch, tokens, ...]; three pages belong to nobody."""
    batch, tokens = caches[0].shape[:2]
    columns = -(-tokens // page_size)
    order = torch.randperm(batch * columns + 3, generator=generator, device=generator.device)
    table = order[: batch * columns].reshape(batch, columns)
    paged = []
    for cache in caches:
        padded = cache.new_zeros(batch, columns * page_size, *cache.shape[2:])
        padded[:, :tokens] = cache
        pages = cache.new_zeros(len(order), page_size, *cache.shape[2:])
        pages[table.flatten()] = padded.reshape(-1, page_size, *cache.shape[2:])
        paged.append(pages)
    return table.to(torch.int32), paged


def poison_unseen(call: Call) -> None:
    """Makes every row of the caches that no query sees count as much as it can, and unmaps pages without seen rows.

    That is NaN in 16-bit rows, and in all others whose bytes 0xFF are one, in codes or scales. INT8 codes whose scale
    lies beside the cache become -127.
    """
    k, v = call.caches
    page_size = k.shape[1]
    table, window = call.options.get("block_table"), call.options.get("window_size")
    seen = torch.zeros(k.shape[:2], dtype=torch.bool, device=k.device)
    for request, length in enumerate(call.seq_lens.tolist()):
        first = 0 if window is None else max(0, length - call.q.shape[1] - window + 1)
        if table is None:
            seen[request, first:length] = True
            continue
        at = torch.arange(first, length, device=k.device)
        seen[table[request, at // page_size].long(), at % page_size] = True
        for entry in range(table.shape[1]):
            if entry < first // page_size or entry * page_size >= length:
                table[request, entry] = UNMAPPED[entry % len(UNMAPPED)]
    for cache, name in zip((k, v), call.format_names, strict=True):
        form = format_of(name)
        nan_bytes = form.given_scale is None or not name.startswith("int8")
        cache[~seen] = torch.nan if not form.is_coded else 0xFF if nan_bytes else 0x81


def relative_errors(out: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Per request: norm of the difference over norm of the reference; a reference of 0 allows 0 only (error inf)."""
    difference = (out.double() - want).flatten(1).norm(dim=1)
    size = want.flatten(1).norm(dim=1)
    return torch.where(difference == 0, 0.0, difference / size)


def assert_close(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    lse_slack: float = 0.0,
) -> None:
    """``out`` (and ``lse``) are what the fp64 reference gives, within the tolerance of q's dtype; see `assert_is`."""
    assert_is(call, out, lse, call.reference(softmax_scale), lse_slack=lse_slack)


def assert_is(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    reference: tuple[torch.Tensor, torch.Tensor],
    *,
    lse_slack: float = 0.0,
) -> None:
    """``out`` (and ``lse``) are the reference's (out, lse) in fp64, within the tolerance of q's dtype.

    The error of a call is the root mean square of its requests' relative errors: a request of few tokens has few
    roundings, which may all go one way. lse_slack: relative to the LSE, for scores so large that fp32 itself is coarser
    than the absolute tolerance.
    """
    want, want_lse = reference
    empty = want_lse == -torch.inf
    assert not out[empty].any(), "the output of a query without keys is 0"
    errors = relative_errors(out, want)[~empty.flatten(1).all(dim=1)]
    error = float(errors.square().mean().sqrt()) if errors.numel() else 0.0
    assert error <= TOLERANCE[call.q.dtype], f"relative error {error:.2e}, of the requests: {errors.tolist()}"
    if lse is not None:
        assert torch.all(lse[empty] == -torch.inf), "the LSE of a query without keys is -inf"
        excess = ((lse.double() - want_lse).abs() - lse_slack * want_lse.abs())[~empty]
        worst = float(excess.max()) if excess.numel() else 0.0
        assert worst <= LSE_TOLERANCE, f"LSE is off by {worst:.2e}"
