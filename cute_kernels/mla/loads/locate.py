"""The locators, which find the tokens of a block. Either indices name the tokens, or the tokens lie in order in the
pages of a request.

An entry is an index or a page number: it says where a token lies. Entries are loaded well before their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.device.division import Divisor
from cute_kernels.mla.config import BLOCK_TOKENS
from cute_kernels.mla.work import blocks_of

NO_ENTRY = -1
BEHIND_BYTES = 8  # of a token, after the data of all tokens of a split page


@dataclass(frozen=True)
class Pages:
    """A paged cache; run-time values, strides in bytes. With split pages, token_stride is the distance between the data
    of two tokens.
    """

    base: Int64
    page_stride: Int64
    token_stride: Int32
    page_size: Divisor  # tokens

    @staticmethod
    def of(base, page_stride, token_stride, page_size) -> Pages:
        """Describes pages for a kernel, on the host. page_size: Int32."""
        return Pages(base, page_stride, token_stride, Divisor.of(page_size))

    def address(self, page, offset):
        """Returns the address of a token; page and offset are Uint32."""
        return self.base + Int64(page) * self.page_stride + Int64(offset) * self.token_stride

    def token(self, page, offset, valid) -> Token:
        """Returns the token at an offset of a page. valid: whether it exists, a run-time Boolean."""
        address = self.address(page, offset)
        behind = self.address(page, self.page_size.value) + Int64(offset) * BEHIND_BYTES
        return Token(address, cutlass.select_(valid, Int32(1), Int32(0)), behind)


@dataclass(frozen=True)
class Chosen:
    """The indices that queries choose from a cache; run-time values."""

    pages: Pages
    num_tokens: Int32  # indices below it exist
    indices: Int64  # int32 [rows, topk]
    topk: Int32
    lengths: Int64  # int32 [batch], or 0: topk for all


@dataclass(frozen=True)
class SparseSource:
    """The tokens of a row: tokens of the cache, then tokens of the extra cache. No block has tokens of both caches."""

    main: Chosen
    extra: Chosen


@dataclass(frozen=True)
class PagedSource:
    """The first tokens of each request, by its block table; run-time values."""

    pages: Pages
    num_pages: Int32
    table: Int64  # int32 [batch, table_stride]
    table_stride: Int32
    max_pages: Int32
    lengths: Int64  # int32 [batch]


@dataclass(frozen=True)
class Token:
    """The address of a token, and whether the token exists; run-time values. A token that does not exist must not be
    read.
    """

    address: Int64
    valid: Int32  # 1 or 0
    behind: Int64  # where its scales lie in a split page


def load_int(address) -> Int32:
    """Loads an int32 that the kernel does not write."""
    return ptx.load_global_words(address, 0, 1)[0].to(Int32)


class Locator:
    """The base of both locators. A token is located by two integers: its entry, and its block's mark. A mark says where
    the block's tokens lie: in which cache, or at which positions of the row.
    """

    def entry_place(self, work, source, block, position) -> tuple[Any, Any]:
        """Returns (address of the entry of a block's ``position``-th token, 1 if the entry is used, else 0)."""
        raise NotImplementedError

    @cute.jit
    def load_entry(self, work, source, block, position) -> Int32:
        """Loads the entry of a block's ``position``-th token; NO_ENTRY if the token is not used."""
        place, exists = self.entry_place(work, source, block, position)
        entry = Int32(NO_ENTRY)
        if exists != 0:
            entry = load_int(place)
        return entry

    @cute.jit
    def copy_entry(self, target, work, source, block, position):
        """Starts copying the entry of a block's ``position``-th token to shared memory; NO_ENTRY if the token is not
        used.
        """
        place, exists = self.entry_place(work, source, block, position)
        numbers.copy_word_async_or(exists, target, place, NO_ENTRY)


class SparseLocator(Locator):
    """The locator of tokens named by indices. A block's mark is 1 if its tokens are in the extra cache, else 0."""

    @cute.jit
    def lengths(self, source, request):
        """Returns the numbers of valid entries of a request's rows of indices: (in the cache, in the extra cache)."""
        return self.length(source.main, request), self.length(source.extra, request)

    @cute.jit
    def length(self, chosen, request) -> Int32:
        length = chosen.topk
        if chosen.lengths != 0:
            length = load_int(chosen.lengths + Int64(request) * 4)
        return cutlass.max(cutlass.min(length, chosen.topk), Int32(0))

    def entry_place(self, work, source, block, position):
        """Returns (address of the index of a block's ``position``-th token, 1 if the index is used, else 0)."""
        in_extra = block >= work.main_blocks
        place = cutlass.select_(in_extra, block - work.main_blocks, block) * BLOCK_TOKENS + position
        length = cutlass.select_(in_extra, work.extra_length, work.length)
        base = cutlass.select_(in_extra, source.extra.indices, source.main.indices)
        topk = cutlass.select_(in_extra, source.extra.topk, source.main.topk)
        exists = cutlass.select_((block < work.end) & (place < length), Int32(1), Int32(0))
        return base + (Int64(work.row) * topk + place) * 4, exists

    def mark(self, work, block):
        """Returns a block's mark: 1 if its tokens are in the extra cache, else 0."""
        return cutlass.select_(block >= work.main_blocks, Int32(1), Int32(0))

    def marked(self, mark):
        """Returns a mark in the form that :meth:`token` takes."""
        return mark != 0

    def locate(self, work, source, entry, block, position) -> Token:
        """Returns the token of an entry of a block."""
        return self.token(source, entry, block >= work.main_blocks, position)

    def token(self, source, entry, in_extra, position) -> Token:
        """Returns the token of an entry. in_extra: whether the entry's block is in the extra cache."""

        def of(name: str, part: str | None = None):
            path = f"{part}.{name}" if part else name
            return cutlass.select_(in_extra, *map(attrgetter(path), (source.extra, source.main)))

        page_size = Divisor(*(of(name, "pages.page_size") for name in ("value", "multiplier", "shift")))
        pages = Pages(of("base", "pages"), of("page_stride", "pages"), of("token_stride", "pages"), page_size)
        valid = (entry >= 0) & (entry < of("num_tokens"))
        return pages.token(*page_size.divide(Uint32(entry)), valid)


class PagedLocator(Locator):
    """The locator of tokens in order. A block's mark is its index in the row."""

    @cute.jit
    def lengths(self, source, request):
        """Returns (number of a request's tokens, 0). Paged decode has no extra cache, hence the 0."""
        length = load_int(source.lengths + Int64(request) * 4)
        most = source.max_pages * source.pages.page_size.value
        return cutlass.max(cutlass.min(length, most), Int32(0)), Int32(0)

    def entry_place(self, work, source, block, position):
        """Returns (address of the page number of a block's ``position``-th token, 1 if the token exists, else 0)."""
        place = block * BLOCK_TOKENS + position
        exists = cutlass.select_((block < work.end) & (place < work.length), Int32(1), Int32(0))
        index, _ = source.pages.page_size.divide(Uint32(place))
        return source.table + (Int64(work.row) * source.table_stride + Int64(index)) * 4, exists

    def mark(self, work, block):
        """Returns a block's mark: its index in the row."""
        return block

    def marked(self, mark):
        """Returns a mark in the form that :meth:`token` takes."""
        return mark

    def locate(self, work, source, entry, block, position) -> Token:
        """Returns the token of an entry of a block."""
        return self.token(source, entry, block, position)

    def token(self, source, entry, block, position) -> Token:
        """Returns the token with entry ``entry`` at a position of a block. If the entry is no page of the cache, the
        token is not valid: its row becomes zeros, and is scored all the same."""
        place = Uint32(block * BLOCK_TOKENS + position)
        _, offset = source.pages.page_size.divide(place)
        valid = (entry >= 0) & (entry < source.num_pages)
        return source.pages.token(Uint32(entry), offset, valid)


def make_locator(tokens: str) -> SparseLocator | PagedLocator:
    """Makes the locator for `MlaConfig.tokens`."""
    return {"sparse": SparseLocator, "paged": PagedLocator}[tokens]()


def count_blocks(length, extra_length):
    """Returns (number of blocks of a row's tokens in the cache, number of its blocks in both caches)."""
    return blocks_of(length), blocks_of(length) + blocks_of(extra_length)
