"""Where the tokens of a block lie: named by indices, or in order in the pages of a request.

An entry is what has to be read to know it: an index, or a page number. It is asked for well before its token is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.mla.config import BLOCK_TOKENS
from cute_kernels.mla.work import blocks_of

NO_ENTRY = -1
BEHIND_BYTES = 8  # of a token, behind the data of all tokens of a split page


@dataclass(frozen=True)
class Pages:
    """A paged cache; run-time values, strides in bytes. Of split pages token_stride is that of the data."""

    base: Any
    page_stride: Any
    token_stride: Any
    page_size: Any

    def address(self, page, offset):
        """Address of a token; page and offset Uint32."""
        return self.base + Int64(page) * self.page_stride + Int64(offset) * self.token_stride

    def token(self, page, offset, valid) -> Token:
        """The token of a page; valid: a run-time truth."""
        address = self.address(page, offset)
        behind = self.address(page, self.page_size) + Int64(offset) * BEHIND_BYTES
        return Token(address, cutlass.select_(valid, Int32(1), Int32(0)), behind)


@dataclass(frozen=True)
class Chosen:
    """Indices into a cache; run-time values."""

    pages: Any
    num_tokens: Any  # indices below it exist
    indices: Any  # int32 [rows, topk]
    topk: Any
    lengths: Any  # int32 [batch], or 0: topk for all


@dataclass(frozen=True)
class SparseSource:
    """The tokens of a row: those of the cache, then those of the extra one in blocks of their own."""

    main: Any
    extra: Any


@dataclass(frozen=True)
class PagedSource:
    """The first tokens of a request by its block table; run-time values."""

    pages: Any
    num_pages: Any
    table: Any  # int32 [batch, table_stride]
    table_stride: Any
    max_pages: Any
    lengths: Any  # int32 [batch]


@dataclass(frozen=True)
class Token:
    """Where a token lies and whether there is one; run-time values. One that does not exist must not be read."""

    address: Any
    valid: Any  # 1 or 0
    behind: Any = None  # where its scales lie in a split page


def load_int(address) -> Int32:
    """A read-only int32."""
    return ptx.load_global_words(address, 0, 1)[0].to(Int32)


class SparseLocator:
    """Tokens named by indices."""

    @cute.jit
    def lengths(self, source, request):
        """(tokens of the cache, tokens of the extra cache) of a request's rows."""
        return self.length(source.main, request), self.length(source.extra, request)

    @cute.jit
    def length(self, chosen, request) -> Int32:
        length = chosen.topk
        if chosen.lengths != 0:
            length = load_int(chosen.lengths + Int64(request) * 4)
        return cutlass.max(cutlass.min(length, chosen.topk), Int32(0))

    @cute.jit
    def load_entry(self, work, source, block, position) -> Int32:
        """The index of a block's ``position``-th token; NO_ENTRY where none counts."""
        in_extra = block >= work.main_blocks
        place = cutlass.select_(in_extra, block - work.main_blocks, block) * BLOCK_TOKENS + position
        length = cutlass.select_(in_extra, work.extra_length, work.length)
        base = cutlass.select_(in_extra, source.extra.indices, source.main.indices)
        topk = cutlass.select_(in_extra, source.extra.topk, source.main.topk)
        index = Int32(NO_ENTRY)
        if (block < work.end) & (place < length):
            index = load_int(base + (Int64(work.row) * topk + place) * 4)
        return index

    def locate(self, work, source, entry, block, position) -> Token:
        """The token of an entry."""
        in_extra = block >= work.main_blocks

        def of(name: str, part: str | None = None):
            sides = [getattr(side.pages if part else side, name) for side in (source.extra, source.main)]
            return cutlass.select_(in_extra, *sides)

        pages = Pages(*(of(name, "pages") for name in ("base", "page_stride", "token_stride", "page_size")))
        valid = (entry >= 0) & (entry < of("num_tokens"))
        page = Uint32(entry) // Uint32(pages.page_size)
        offset = Uint32(entry) - page * Uint32(pages.page_size)
        return pages.token(page, offset, valid)


class PagedLocator:
    """Tokens in order."""

    @cute.jit
    def lengths(self, source, request):
        """(tokens of a request, 0)."""
        length = load_int(source.lengths + Int64(request) * 4)
        most = source.max_pages * source.pages.page_size
        return cutlass.max(cutlass.min(length, most), Int32(0)), Int32(0)

    @cute.jit
    def load_entry(self, work, source, block, position) -> Int32:
        """The page of a block's ``position``-th token; NO_ENTRY where there is none."""
        place = block * BLOCK_TOKENS + position
        page = Int32(NO_ENTRY)
        if (block < work.end) & (place < work.length):
            index = Int32(Uint32(place) // Uint32(source.pages.page_size))
            page = load_int(source.table + (Int64(work.row) * source.table_stride + index) * 4)
        return page

    def locate(self, work, source, entry, block, position) -> Token:
        """The token of an entry; of a page that does not exist it counts, but as zeros."""
        place = Uint32(block * BLOCK_TOKENS + position)
        offset = place % Uint32(source.pages.page_size)
        valid = (entry >= 0) & (entry < source.num_pages)
        return source.pages.token(Uint32(entry), offset, valid)


def make_locator(tokens: str) -> SparseLocator | PagedLocator:
    """The locator of `MlaConfig.tokens`."""
    return {"sparse": SparseLocator, "paged": PagedLocator}[tokens]()


def count_blocks(length, extra_length):
    """(blocks of the cache, blocks in all)."""
    return blocks_of(length), blocks_of(length) + blocks_of(extra_length)
