"""`Pages`, which finds the page of a request's token in a block table.

With chosen blocks (:mod:`.lists`), a token's index is its position in a KV head's list. The loads depend on one another
in four steps. The request's length is loaded in step 1, too:

    1                            2                               3                   4
    list[request, head, place]   block_table[request, page]      rows of K and V
    counts[request, head]        list[request, head, count - 1]  tokens of the list  masks of scores

A contiguous cache has no table, so there is no load of it. Without lists, the table is loaded in step 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor
from cute_kernels.device.lists import Lists


@dataclass(frozen=True)
class Pages:
    """A block table; run-time values.

    Attributes:
        table: address of the int32 entries, 0 for a cache that is not paged.
        stride: number of entries from one request's row to the next request's row.
        num_pages: number of pages of the cache.
        page_size: number of tokens of a page, as a divisor.
        lists: the blocks that KV heads read; None for all tokens.
    """

    table: Int64
    stride: Int32
    num_pages: Int32
    page_size: Divisor
    lists: Lists | None = None

    def ask(self, request, token):
        """Starts loading the block table's entry for a token, which must exist. Returns (entry, row of the token in its
        page). With ``lists``, first waits for the list's entry. With ``lists`` and a contiguous cache, returns
        (request, row of the token in the request) instead."""
        index, place = self.page_size.divide_int(token)
        if self.lists is None:
            address = self.table + (Int64(request) * self.stride + index) * 4
            return Int32(ptx.load_global_words(address, 0, 1)[0]), place
        page, paged = self.lists.page(index), self.table != 0
        address = self.table + (Int64(request) * self.stride + page) * 4
        entry = ptx.load_global_or(cutlass.select_(paged, Int32(1), Int32(0)), address, request)
        return Int32(entry), cutlass.select_(paged, place, page * self.page_size.value + place)

    def of_row(self, request, head) -> Pages:
        """Narrows ``lists``, which must be given, to one KV head of a request."""
        assert self.lists is not None
        return replace(self, lists=self.lists.of_row(request, head))

    def existing(self, entry):
        """Clamps an entry of the table to the pages of the cache. So a wrong table causes wrong results, but no illegal
        access.

        :meth:`ask` does not clamp, so that no thread waits for an entry before its use.
        """
        return cutlass.max(cutlass.min(entry, self.num_pages - 1), 0)
