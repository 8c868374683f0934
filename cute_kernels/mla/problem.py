"""The problem of a call: its shapes, formats and strides, without the tensors. It is hashable, and plans are made from
it.

Two calls with equal problems run the same compiled function with the same schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_kernels.mla.formats import V_DIM, MlaFormat


@dataclass(frozen=True)
class CacheShape:
    """A cache [num_pages, page_size, row].

    Attributes:
        form: the cache's format.
        num_pages: number of pages of the cache.
        page_size: number of tokens of a page, at least 1.
        page_stride: bytes from one page to the next; pages may be padded.
        token_stride: bytes from one token of a page to the next. 16-bit tokens may have gaps between them, other tokens
            have none. Split pages do not use it: their tokens' data always lie 576 bytes apart.
    """

    form: MlaFormat
    num_pages: int
    page_size: int
    page_stride: int
    token_stride: int

    @property
    def num_slots(self) -> int:
        """The number of tokens that the cache has room for; all indices are smaller."""
        return self.num_pages * self.page_size


@dataclass(frozen=True)
class Queries:
    """The queries of a call, and the cache that they read.

    Attributes:
        q_dtype: dtype of q and of the result.
        batch, q_len, num_heads, head_dim: q's shape.
        cache: the shape of the cache, which has all requests' tokens.
    """

    q_dtype: torch.dtype
    batch: int
    q_len: int
    num_heads: int
    head_dim: int
    device: torch.device
    cache: CacheShape

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.q_len, self.num_heads, V_DIM


@dataclass(frozen=True)
class DenseProblem(Queries):
    """Decode over whole contexts, found through a block table.

    Attributes:
        max_pages: columns of the block table.
        table_stride: elements from one row of the block table to the next.
        causal: whether queries do not see tokens after their own; False for q_len 1, which has no such tokens.
    """

    max_pages: int
    table_stride: int
    causal: bool

    @property
    def max_seq_len(self) -> int:
        """The number of tokens that a row of the block table has room for."""
        return self.max_pages * self.cache.page_size

    @property
    def is_empty(self) -> bool:
        """Whether the call has no queries, or none of them can see a token."""
        return 0 in (self.batch, self.q_len, self.max_pages, self.cache.num_pages)


class SparseExtras(NamedTuple):
    """The optional tensors of a sparse call; :func:`cute_kernels.mla.sparse_mla_decode` documents each."""

    topk_length: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    extra_cache: torch.Tensor | None = None
    extra_indices: torch.Tensor | None = None
    extra_topk_length: torch.Tensor | None = None


@dataclass(frozen=True)
class SparseProblem(Queries):
    """Decode over chosen tokens.

    Attributes:
        topk: number of indices of a query.
        extra: a second cache, of the same format, or None.
        extra_topk: number of indices of a query into ``extra``; 0 without ``extra``.
    """

    topk: int
    extra: CacheShape | None
    extra_topk: int

    @property
    def is_empty(self) -> bool:
        """Whether the call has no queries, or none of them can see a token."""
        first = self.topk and self.cache.num_pages
        second = self.extra_topk and self.extra is not None and self.extra.num_pages
        return not (self.batch and self.q_len and (first or second))
