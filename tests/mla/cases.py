"""Calls of MLA decode with everything that nobody sees poisoned, and their results by the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cute_kernels.mla.formats import format_of
from layouts.kv.mla import MlaModel1
from tests.mla.oracle import Bytes, attend

FORMATS = ("mla_bf16", "mla_fp16", "mla_fp8", "mla_model1")
LARGE_PAGE = 2147480000  # what FlashMLA's tests put where no page is


def head_dim_of(kv_format: str) -> int:
    return 512 if kv_format == "mla_model1" else 576


def make_cache(
    kv_format: str,
    num_pages: int,
    page_size: int,
    used: torch.Tensor,
    generator: torch.Generator,
    *,
    head_dim: int | None = None,
    padding: int = 0,
    deviation: float = 1.0,
) -> torch.Tensor:
    """A cache [num_pages, page_size, row] of random tokens whose slots that are not ``used`` hold NaN.

    used: bool [num_pages * page_size]; padding: elements between pages, NaN too; deviation: the numbers' standard one.
    """
    form, head_dim = format_of(kv_format), head_dim or head_dim_of(kv_format)
    token = form.token(head_dim)
    numbers = torch.randn(num_pages * page_size, head_dim, generator=generator) * deviation
    if form.is_dense:
        rows = numbers.to(form.q_dtype)
        rows[~used] = torch.nan
        pages = rows.view(num_pages, page_size * head_dim)
    else:
        rows = token.quantize(numbers)
        rows[~used] = 0xFF  # NaN in E4M3, in bf16, fp32 and UE8M0
        rows = rows.view(num_pages, page_size, token.row_bytes)
        pages = token.to_pages(rows) if isinstance(token, MlaModel1) else rows.flatten(1)
    memory = torch.nn.functional.pad(pages, (0, padding), value=255 if not form.is_dense else math.nan)
    return memory[:, : pages.shape[1]].unflatten(1, (page_size, -1))


@dataclass(frozen=True)
class DenseCall:
    """Arguments of `mla_decode`."""

    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    kv_format: Any

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.cache, self.block_table, self.seq_lens

    def oracle(self, scale: float | None = None, causal: bool = True) -> tuple[np.ndarray, np.ndarray]:
        memory = Bytes.of(self.kv_format, self.cache)
        factor = self.q.shape[3] ** -0.5 if scale is None else scale
        batch, q_len, heads, _ = self.q.shape
        out, lse = np.zeros((batch, q_len, heads, 512)), np.zeros((batch, q_len, heads))
        queries, size = self.q.double().numpy(), memory.page_size
        for b in range(batch):
            length, table = int(self.seq_lens[b]), self.block_table[b].tolist()
            tokens = [memory.token(table[t // size] * size + t % size) for t in range(length)]
            for i in range(q_len):
                last = length - q_len + i if causal else length - 1
                for h in range(heads):
                    out[b, i, h], lse[b, i, h], _ = attend(queries[b, i, h], tokens[: max(last + 1, 0)], factor)
        return out, lse


def make_dense(
    kv_format: str,
    lengths: list[int],
    *,
    q_len: int = 1,
    num_heads: int = 4,
    page_size: int = 4,
    head_dim: int | None = None,
    padding: int = 0,
    spare_pages: int = 2,
    deviation: float = 1.0,
    seed: int = 0,
) -> DenseCall:
    """Requests of these lengths with their pages in random order; what no request uses is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    form, head_dim = format_of(kv_format), head_dim or head_dim_of(kv_format)
    pages_of = [-(-length // page_size) for length in lengths]
    num_pages, max_pages = sum(pages_of) + spare_pages, max([*pages_of, 0]) + 1
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.full((len(lengths), max_pages), LARGE_PAGE, dtype=torch.int32)
    used = torch.zeros(num_pages * page_size, dtype=torch.bool)
    for request, (length, count) in enumerate(zip(lengths, pages_of, strict=True)):
        for entry in range(count):
            page = order.pop()
            table[request, entry] = page
            tokens = min(length - entry * page_size, page_size)
            used[page * page_size : page * page_size + tokens] = True
    cache = make_cache(
        kv_format, num_pages, page_size, used, generator, head_dim=head_dim, padding=padding, deviation=deviation
    )
    q = torch.randn(len(lengths), q_len, num_heads, head_dim, generator=generator).to(form.q_dtype)
    return DenseCall(q, cache, table, torch.tensor(lengths, dtype=torch.int32), kv_format)


@dataclass(frozen=True)
class SparseCall:
    """Arguments of `sparse_mla_decode`; ``options`` are those with defaults."""

    q: torch.Tensor
    cache: torch.Tensor
    indices: torch.Tensor
    kv_format: Any
    options: dict[str, Any]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.cache, self.indices

    def oracle(self, scale: float | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        factor = self.q.shape[3] ** -0.5 if scale is None else scale
        sources = [(self.cache, self.indices, self.options.get("topk_length"))]
        if self.options.get("extra_cache") is not None:
            sources.append(tuple(self.options.get(f"extra_{n}") for n in ("cache", "indices", "topk_length")))  # type: ignore[arg-type]
        batch, q_len, heads, _ = self.q.shape
        out, lse = np.zeros((batch, q_len, heads, 512)), np.zeros((batch, q_len, heads))
        top, queries, sinks = np.zeros_like(lse), self.q.double().numpy(), self.options.get("sinks")
        for b in range(batch):
            for i in range(q_len):
                tokens = [token for source in sources for token in _chosen(self.kv_format, source, b, i)]
                for h in range(heads):
                    sink = None if sinks is None else float(sinks[h])
                    found = attend(queries[b, i, h], tokens, factor, sink)
                    out[b, i, h], lse[b, i, h], top[b, i, h] = found
        return out, lse, top


def _chosen(kv_format: str, source: tuple[Any, ...], b: int, i: int) -> list[np.ndarray]:
    cache, indices, length = source
    memory = Bytes.of(kv_format, cache)
    count = indices.shape[2] if length is None else min(max(int(length[b]), 0), indices.shape[2])
    slots = [slot for slot in indices[b, i, :count].tolist() if 0 <= slot < cache.shape[0] * cache.shape[1]]
    return [memory.token(slot) for slot in slots]


def make_sparse(
    kv_format: str,
    *,
    batch: int = 3,
    q_len: int = 2,
    num_heads: int = 4,
    topk: int = 7,
    num_pages: int = 5,
    page_size: int = 3,
    head_dim: int | None = None,
    padding: int = 0,
    length: bool = False,
    sinks: bool = False,
    extra: tuple[int, int, int] | None = None,
    extra_length: bool = False,
    deviation: float = 1.0,
    seed: int = 0,
) -> SparseCall:
    """Random choices, a third of them -1 or outside; duplicates happen. extra: (topk, num_pages, page_size).

    Slots that no index that counts points to are poisoned.
    """
    generator = torch.Generator().manual_seed(seed)
    form, head_dim = format_of(kv_format), head_dim or head_dim_of(kv_format)

    def source(topk: int, pages: int, size: int, with_length: bool):
        slots = pages * size
        indices = torch.randint(0, slots, (batch, q_len, topk), dtype=torch.int32, generator=generator)
        lost = torch.tensor([-1, -1, slots, 2**31 - 1, -(2**31)], dtype=torch.int32)
        which = torch.randint(0, 5, indices.shape, generator=generator)
        indices = torch.where(torch.rand(indices.shape, generator=generator) < 1 / 3, lost[which], indices)
        lengths = torch.randint(0, topk + 1, (batch,), dtype=torch.int32, generator=generator) if with_length else None
        counted = indices if lengths is None else indices.masked_fill(torch.arange(topk) >= lengths[:, None, None], -1)
        used = torch.zeros(slots, dtype=torch.bool)
        used[counted[(counted >= 0) & (counted < slots)].long()] = True
        cache = make_cache(
            kv_format, pages, size, used, generator, head_dim=head_dim, padding=padding, deviation=deviation
        )
        return cache, indices, lengths

    cache, indices, lengths = source(topk, num_pages, page_size, length)
    options: dict[str, Any] = {"topk_length": lengths}
    if sinks:
        values = torch.randn(num_heads, generator=generator)
        values[:2] = torch.tensor([math.inf, -math.inf])[: min(num_heads, 2)]
        options["sinks"] = values
    if extra is not None:
        found = source(*extra, extra_length)
        options |= dict(zip(("extra_cache", "extra_indices", "extra_topk_length"), found, strict=True))
    q = torch.randn(batch, q_len, num_heads, head_dim, generator=generator).to(form.q_dtype)
    return SparseCall(q, cache, indices, kv_format, options)


def moved(call: Any, device: str) -> Any:
    """A call with its tensors on another device; caches keep the gaps between their pages."""

    def pages(cache: torch.Tensor) -> torch.Tensor:
        shape = cache.shape
        whole = torch.as_strided(cache, (shape[0], cache.stride(0)), (cache.stride(0), 1)).to(device)
        return whole[:, : shape[1] * shape[2]].unflatten(1, shape[1:])

    if isinstance(call, DenseCall):
        table, lengths = call.block_table.to(device), call.seq_lens.to(device)
        return DenseCall(call.q.to(device), pages(call.cache), table, lengths, call.kv_format)
    options = {
        name: None if x is None else pages(x) if name == "extra_cache" else x.to(device)
        for name, x in call.options.items()
    }
    return SparseCall(call.q.to(device), pages(call.cache), call.indices.to(device), call.kv_format, options)


def as_flash_mla(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a public call returns, with the reference's (and FlashMLA's) +inf where a query sees nothing."""
    assert not (lse == torch.inf).any(), "lse is +inf"
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def assert_as_close_as_flash_mla(
    out: torch.Tensor, lse: torch.Tensor, wanted_out: torch.Tensor, wanted_lse: torch.Tensor
) -> None:
    """What FlashMLA's own tests ask of a decode: out within 1e-3 or 2.01 / 128 of it, and 5e-6 in direction; lse within
    8.01 / 65536 of it, infinite where it must be. Near 0, where FlashMLA's lse never are, within 1e-5."""
    assert not out.isnan().any(), "NaN in out"
    _assert_within("out", out.double(), wanted_out.double(), 1e-3, 2.01 / 128)
    a, b = out.double(), wanted_out.double()
    size = float((a * a + b * b).sum())
    if size > 1e-12:
        assert 1 - 2 * float((a * b).sum()) / size <= 5e-6, "out points elsewhere"
    infinite = wanted_lse == torch.inf
    assert torch.equal(lse == torch.inf, infinite), "lse is not +inf exactly where nothing is seen"
    _assert_within("lse", lse[~infinite].double(), wanted_lse[~infinite].double(), 1e-5, 8.01 / 65536)


def _assert_within(name: str, found: torch.Tensor, wanted: torch.Tensor, absolute: float, relative: float) -> None:
    error = (found - wanted).abs()
    wrong = ~((error < absolute) | (error < relative * (wanted.abs() + 1e-6)))  # NaN is wrong, too
    if wrong.any():
        worst = torch.nonzero(wrong)[0].tolist()
        came, want = (float(x[tuple(worst)]) for x in (found, wanted))
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {worst}: {came}, want {want}"
        )


def assert_near(found: torch.Tensor, wanted: np.ndarray, tolerance: float) -> None:
    """Equal infinities, and elsewhere within ``tolerance`` of the wanted, relative above 1."""
    expected = torch.from_numpy(np.asarray(wanted, dtype=np.float64))
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
