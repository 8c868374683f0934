"""`Pages`, which finds the page of a request's token in a block table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor


@dataclass(frozen=True)
class Pages:
    """A block table; run-time values.

    Attributes:
        table: address of the int32 entries, 0 for a cache that is not paged. stride: entries from a request's row to
            the next request's.
        num_pages: pages of the cache.
        page_size: tokens of a page, as a divisor.
    """

    table: Int64
    stride: Int32
    num_pages: Int32
    page_size: Divisor

    def ask(self, request, token):
        """Starts loading the table's entry for a token, which must exist. Returns (entry, row of the token in its
        page)."""
        index, place = self.page_size.divide_int(token)
        address = self.table + (Int64(request) * self.stride + index) * 4
        return Int32(ptx.load_global_words(address, 0, 1)[0]), place

    def of_head(self, head, batch) -> Pages:
        """Returns the pages of a KV head, for tables [heads, batch, entries] in which each head has its own rows."""
        return replace(self, table=self.table + Int64(head * batch) * self.stride * 4)

    def existing(self, entry):
        """Clamps an entry to the pages of the cache. So a wrong table yields wrong numbers, but no illegal access.

        It is not part of :meth:`ask`, so that no thread waits for an entry before its use.
        """
        return cutlass.max(cutlass.min(entry, self.num_pages - 1), 0)
