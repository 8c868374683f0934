"""KV caches of engines in this package's formats: the formats, the bytes of a row, and why a layer cannot use them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.arguments import strides_of
from cute_kernels.attention.extend_policies import EXTEND_HEAD_DIMS
from cute_kernels.attention.extend_policies import cannot_read as cannot_extend
from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import ALIASES, CHANNEL_BLOCKS, FORMATS, KvFormat
from cute_kernels.names import CacheLayout
from cute_kernels.runtime.plans import ALIGNMENT


@dataclass(frozen=True)
class Formats:
    """K's and V's formats.

    Attributes:
        name: the formats as the argument ``kv_format`` takes them.
        cache_layout: the order of a page's dimensions.
    """

    k: KvFormat
    v: KvFormat
    cache_layout: CacheLayout = "NHD"

    @property
    def name(self) -> Any:
        return self.k.name if self.k is self.v else (self.k.name, self.v.name)

    def __str__(self) -> str:
        return self.k.name if self.k is self.v else f"{self.k.name},{self.v.name}"


def formats_named(text: str, variable: str) -> Formats:
    """Returns the formats that an environment variable names: one for both K and V, or two with a comma between them.

    Raises:
        ValueError: the format is unknown, or it needs data that engines do not store: scales outside the rows that are
            not one per tensor, or keys that wait until their block is full.
    """
    names = [name.strip() for name in text.split(",")]
    if CHANNEL_BLOCKS.name in names:
        raise ValueError(
            f"{variable}: got {text!r}: the newest keys of {CHANNEL_BLOCKS.name} wait beside the pages, where "
            f"engines have no place; want rows, say int8_token_head,int4_g4 (cute_kernels.kv_cache.KVCache serves it)"
        )
    known = {name: form for name, form in FORMATS.items() if form.given_scale in (None, "tensor")}
    known |= {alias: known[name] for alias, name in ALIASES.items() if name in known}
    if len(names) > 2 or not all(name in known for name in names):
        raise ValueError(f"{variable}: got {text!r}, want one or two (K's, V's) of {', '.join(known)}")
    return Formats(known[names[0]], known[names[-1]])


def reason_against(formats: Formats, head_size: int, dtype: torch.dtype) -> str | None:
    """Returns why a layer's cache cannot have rows of these formats; None if it can."""
    if head_size not in EXTEND_HEAD_DIMS:  # engines' prompts are extend attention's
        return f"head size {head_size}; supported: {', '.join(map(str, EXTEND_HEAD_DIMS))}"
    for form in (formats.k, formats.v):
        if not form.fits(dtype):
            return f"a {form.name} cache with queries in {dtype}"
        # Engines' other kernels of prompts end at 256 columns.
        if reason := cannot_read(form, head_size) or (cannot_extend(form) if head_size > 256 else None):
            return reason
    return None


def row_bytes(formats: Formats, head_size: int) -> tuple[int, int]:
    """Returns the bytes of a row of K and of V; a row is one token of one KV head."""
    return formats.k.row_bytes(head_size), formats.v.row_bytes(head_size)


def paged(buffers: Iterable[torch.Tensor], formats: Formats, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K's and V's pages [pages, page_size, KV heads, row] as views of buffers [slots, KV heads, bytes of a
    row]."""
    k, v = (
        buffer.view(form.cache_dtype).unflatten(0, (-1, page_size))
        for buffer, form in zip(buffers, (formats.k, formats.v), strict=True)
    )
    return k, v


def rows_of(queries: torch.Tensor) -> torch.Tensor:
    """Returns queries [..., num_heads, head_size] as kernels take them, without a copy if possible.

    Parts of a fused projection need no copy. Queries are copied if a token's heads are not adjacent, or if some token
    does not start at a multiple of 16 bytes.
    """
    if queries.is_contiguous():
        return queries
    *apart, head, column = strides_of(queries)
    together = column == 1 and head == queries.shape[-1]
    places = queries.data_ptr(), *(stride * queries.element_size() for stride in apart)
    return queries if together and not any(place % ALIGNMENT for place in places) else queries.contiguous()
