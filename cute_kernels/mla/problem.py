"""The part of a call that decides its plan: shapes, formats and strides, hashable, without the tensors.

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
        form: its format.
        num_pages, page_size: of the cache; a page may have any number of tokens from 1.
        page_stride: bytes from one page to the next; pages may be padded.
        token_stride: bytes from one token of a page to the next. More than a token has only where 16-bit tokens of
            several heads lie side by side. Of split pages it says nothing: their data lie 576 bytes apart.
    """

    form: MlaFormat
    num_pages: int
    page_size: int
    page_stride: int
    token_stride: int

    @property
    def num_slots(self) -> int:
        """Tokens that the cache has room for: indices go from 0 to one less."""
        return self.num_pages * self.page_size


@dataclass(frozen=True)
class Queries:
    """The queries of a call, and the cache that they read.

    Attributes:
        q_dtype: of q and of the result.
        batch, q_len, num_heads, head_dim: q's shape.
        cache: all requests' tokens.
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
        table_stride: elements from one of its rows to the next.
        causal: whether keys after a query's own are hidden; False for one query, which has none.
    """

    max_pages: int
    table_stride: int
    causal: bool

    @property
    def max_seq_len(self) -> int:
        """Tokens that a row of the table has room for."""
        return self.max_pages * self.cache.page_size

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries, or none that can see a token."""
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
        topk: indices of a query.
        extra: a second cache, of the same format, or None.
        extra_topk: indices of a query into it; 0 without it.
    """

    topk: int
    extra: CacheShape | None
    extra_topk: int

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries, or none that can see a token."""
        first = self.topk and self.cache.num_pages
        second = self.extra_topk and self.extra is not None and self.extra.num_pages
        return not (self.batch and self.q_len and (first or second))
