"""Random calls of extend attention, on any device, and how far a result is from the fp64 reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cute_kernels.attention.extend import extend_attention, pack_tree_mask
from cute_kernels.attention.extend_policies import has_channel_scales, has_token_scale
from cute_kernels.attention.reference import extend_attention_reference
from cute_kernels.formats.kv import KvFormat, format_of
from cute_kernels.kv_cache.append_and_extend import append_and_extend
from tests.attention import cases as decode_cases
from tests.attention.cases import LSE_TOLERANCE, TOLERANCE, UNMAPPED

ROUNDED_LSE_TOLERANCE = 1e-3  # of scores of some 5: keys are rounded to fp16
TWICE_ROUNDED_LSE_TOLERANCE = 2.5e-3  # the same: rows' scales are, too, where the cache is read as it is
FP8_TOLERANCE, FP8_LSE_TOLERANCE = 8e-2, 0.15  # queries and probabilities have 4 significant bits; of the worst score
FORMATS = ("bf16", "fp16", "int8_token_head", "int8_tensor", "e4m3_token_head", "e4m3_tensor", "e4m3_head", "e5m2")
FORMATS += ("int4_g1", "int4_g2", "int4_g4", "int4_g8", "int8_channel")
UNPACKED = tuple(name for name in FORMATS if format_of(name).is_coded)
FORMATS += ("int8_g2", "int8_g4", "int8_g8")  # which are read as they lie, however many queries there are


@dataclass(frozen=True)
class Call:
    """The tensors of one call, and its options: what `extend_attention` takes by keyword besides these."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    kv_format: Any
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k_cache, self.v_cache, self.seq_lens

    @property
    def keywords(self) -> dict[str, Any]:
        return {"cu_seqlens_q": self.cu_seqlens_q, "kv_format": self.kv_format, **self.options}

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [blocks, tokens, num_kv_heads, row], whatever their layout: views to write through."""
        head_major = self.options.get("cache_layout") == "HND"
        k, v = ((cache.transpose(1, 2) if head_major else cache) for cache in (self.k_cache, self.v_cache))
        return k, v

    def run(self, **options: Any) -> Any:
        """The public call."""
        return extend_attention(*self.tensors, **(self.keywords | options))

    def reference(self, compute_dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse)."""
        return extend_attention_reference(*self.tensors, **self.keywords, compute_dtype=compute_dtype)


def make_call(
    kv_format: str | tuple[str, str],
    q_lens: Sequence[int],
    lengths: Sequence[int],
    *,
    num_kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 128,
    q_dtype: str = "bf16",
    page_size: int | None = 64,
    cache_layout: str = "NHD",
    max_seq_len: int | None = None,
    causal: bool = True,
    window_size: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
    new: bool = False,
    tree: bool = False,
    num_splits: int | None = None,
    unpack: bool | None = None,
    fp8_products: bool = False,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Call:
    """Standard normal q, k, v, made on the device; what no query sees is poisoned, as decode attention's calls are.

    q_lens: queries of each request. new: whether their own tokens come beside the cache, in which they are poison.
    tree: whether a random mask says which of them a query sees, and itself. Others: as
    `tests.attention.cases.make_call`.
    """
    base = decode_cases.make_call(
        kv_format,
        lengths,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        q_dtype=q_dtype,
        page_size=page_size,
        cache_layout=cache_layout,
        sinks=sinks,
        alibi=alibi,
        device=device,
        seed=seed,
        poison=False,
    )
    options = dict(base.options)
    if not causal:
        options["causal"] = False
    if window_size is not None:
        options["window_size"] = window_size
    if softcap is not None:
        options["softcap"] = softcap
    generator = torch.Generator(device).manual_seed(seed + 1)
    shape = (sum(q_lens), num_kv_heads * group, head_dim)
    q = torch.randn(shape, generator=generator, device=device).to(base.q.dtype)
    ends = torch.tensor([0, *q_lens]).cumsum(0).to(device=device, dtype=torch.int32)
    if new:
        for name in ("new_k", "new_v"):
            rows = torch.randn((len(q), num_kv_heads, head_dim), generator=generator, device=device)
            options[name] = rows.to(q.dtype)
    if tree:
        seen = torch.rand((len(q), max(q_lens)), generator=generator, device=device) < 0.5
        own = torch.cat([torch.arange(q_len) for q_len in q_lens]).to(device)
        options["tree_mask"] = pack_tree_mask(seen.scatter(1, own[:, None], True))
    if num_splits is not None:
        options["num_splits"] = num_splits
    if unpack is not None:
        options["unpack"] = unpack
    if fp8_products:
        options["fp8_products"] = True
    call = Call(q, base.k_cache, base.v_cache, base.seq_lens, ends, kv_format, options)
    poison_unseen(call, q_lens)
    return call


def fused(call: Call, pad: int = 0) -> Call:
    """The same call, its q (and new tokens) parts of one tensor, as a fused projection makes them; what else this holds
    is NaN. pad: elements between tokens."""
    names = [name for name in ("new_k", "new_v") if name in call.options]
    parts = [call.q, *(call.options[name] for name in names)]
    counts, (total, _, dim) = [part.shape[1] for part in parts], call.q.shape
    width = (sum(counts) + 2) * dim + pad
    rows = torch.full((total, width), torch.nan, dtype=call.q.dtype, device=call.q.device)
    views, first = [], dim
    for part, count in zip(parts, counts, strict=True):
        views.append(rows[:, first : first + count * dim].unflatten(1, (count, dim)))
        views[-1].copy_(part)
        first += count * dim
    return replace(call, q=views[0], options=call.options | dict(zip(names, views[1:], strict=True)))


def writable(call: Call) -> Call:
    """The same call, pages for its new tokens, too."""
    table = call.options.get("block_table")
    if table is None:
        return call
    pages = torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table)
    k, v = (cache.new_zeros(table.numel(), *cache.shape[1:]) for cache in (call.k_cache, call.v_cache))
    for mine, cache in ((k, call.k_cache), (v, call.v_cache)):
        known = (table >= 0) & (table < len(cache))
        mine[pages[known].long()] = cache[table[known].long()]
    return replace(call, k_cache=k, v_cache=v, options=call.options | {"block_table": pages})


def appended(call: Call, **more: Any) -> Any:
    """`append_and_extend` of a call with new tokens."""
    options = dict(call.options)
    new = options.pop("new_k"), options.pop("new_v")
    return append_and_extend(
        call.q, *new, *call.tensors[1:], cu_seqlens_q=call.cu_seqlens_q, kv_format=call.kv_format, **(options | more)
    )


def poison_unseen(call: Call, q_lens: Sequence[int]) -> None:
    """As `tests.attention.cases.poison_unseen`: rows that no query of a request sees are NaN where they can be, and
    entries of the table without a token that some query sees are no pages."""
    k, v = call.caches
    page_size = k.shape[1]
    table, window = call.options.get("block_table"), call.options.get("window_size")
    seen = torch.zeros(k.shape[:2], dtype=torch.bool, device=k.device)
    for request, (q_len, length) in enumerate(zip(q_lens, call.seq_lens.tolist(), strict=True)):
        first = 0 if window is None else max(0, length - q_len - window + 1)
        first = length if q_len == 0 else first
        length -= q_len if "new_k" in call.options else 0
        first = min(first, length)
        if table is None:
            seen[request, first:length] = True
            continue
        at = torch.arange(first, length, device=k.device)
        seen[table[request, at // page_size].long(), at % page_size] = True
        for entry in range(table.shape[1]):
            if entry < first // page_size or entry * page_size >= length:
                table[request, entry] = UNMAPPED[entry % len(UNMAPPED)]
    names = (call.kv_format, call.kv_format) if isinstance(call.kv_format, str) else call.kv_format
    for cache, name in zip((k, v), names, strict=True):
        form = format_of(name)
        nan_bytes = form.given_scale is None or not name.startswith("int8")
        cache[~seen] = torch.nan if not form.is_coded else 0xFF if nan_bytes else 0x81


def assert_close(call: Call, out: torch.Tensor, lse: torch.Tensor | None = None, *, rounded: bool = True) -> float:
    """``out`` (and ``lse``) are what the fp64 reference gives, within the tolerance of q's dtype, or that of FP8
    products; the relative error of the worst request.

    rounded: whether FP8 products round anything of this call: not queries of zeros, whose probabilities are alike.
    """
    want, want_lse = call.reference()
    empty = want_lse == -torch.inf
    assert not out[empty].any(), "the output of a query without keys is 0"
    ends = call.cu_seqlens_q.tolist()
    worst, tolerance = 0.0, TOLERANCE[call.q.dtype]
    of_fp8 = rounded and call.q.is_cuda and call.options.get("fp8_products") is True
    for request, (start, stop) in enumerate(itertools.pairwise(ends)):
        size = float(want[start:stop].norm())
        difference = float((out[start:stop].double() - want[start:stop]).norm())
        if difference == 0:
            continue
        error = difference / size if size else float("inf")
        # Written so that NaN fails.
        assert error <= (FP8_TOLERANCE if of_fp8 else tolerance), f"request {request}: relative error {error:.2e}"
        worst = max(worst, error)
    if lse is not None:
        assert torch.all(lse[empty] == -torch.inf), "the LSE of a query without keys is -inf"
        excess = (lse.double() - want_lse).abs()[~empty]
        assert not torch.isnan(excess).any(), "LSE is NaN"
        off = float(excess.max()) if excess.numel() else 0.0
        if of_fp8:
            assert off <= FP8_LSE_TOLERANCE, f"LSE is off by {off:.2e}"
            return worst
        names = (call.kv_format,) if isinstance(call.kv_format, str) else call.kv_format
        assert off <= _lse_tolerance(call, format_of(names[0])), f"LSE is off by {off:.2e}"
    return worst


def _lse_tolerance(call: Call, keys: KvFormat) -> float:
    if call.q.is_cuda and has_channel_scales(keys):
        return ROUNDED_LSE_TOLERANCE  # queries are, once their columns' scales have met them
    if not call.q.is_cuda or not keys.has_header:
        return LSE_TOLERANCE
    twice = has_token_scale(keys) and call.options.get("unpack") is not True
    return TWICE_ROUNDED_LSE_TOLERANCE if twice else ROUNDED_LSE_TOLERANCE
