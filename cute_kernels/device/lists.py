"""`Lists`, the lists of blocks that each KV head of a request reads. A head's list says which pages and tokens the
head reads.

A kernel counts the tokens of a list from 0: token t is in block entry t // block_tokens of the list. So all blocks of
a list but its last entry must be full. The only block of a request that may be partly filled is the request's last. If
a list has that block, it must be the last entry; so lists must ascend.
:mod:`.pages` has a picture of the loads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor


@dataclass(frozen=True)
class Lists:
    """The lists of chosen blocks; run-time values. Block indices out of range are clamped to the request's pages.

    Attributes:
        blocks, counts: addresses of int32 entries [batch, num_kv_heads, max_blocks] and [batch, num_kv_heads].
        strides: distances in elements of ``blocks`` from one request, KV head and block to the next.
        count_strides: distances in elements of ``counts`` from one request and KV head to the next.
        max_blocks: number of entries of a list.
        max_pages: number of pages that a request may have.
        block_tokens: number of tokens of a block.
        block_pages: number of pages of a block, as a divisor. In a contiguous cache each block of a request counts as a
            page.
    """

    blocks: Int64
    counts: Int64
    strides: tuple[Int64, Int64, Int64]
    count_strides: tuple[Int64, Int64]
    max_blocks: Int32
    max_pages: Int32
    block_tokens: Int32
    block_pages: Divisor

    @staticmethod
    def of(given) -> Lists:
        """Makes the lists from the arguments of a launch with chosen blocks. Runs on the host."""
        return Lists(
            blocks=given.block_list,
            counts=given.block_counts,
            strides=(given.list_stride_request, given.list_stride_head, given.list_stride_block),
            count_strides=(given.count_stride_request, given.count_stride_head),
            max_blocks=given.max_blocks,
            max_pages=given.max_pages,
            block_tokens=given.block_tokens,
            block_pages=Divisor.of(given.block_tokens // given.page_size),
        )

    def of_row(self, request, head) -> Lists:
        """Narrows the lists to one KV head of a request. The other methods need the narrowed lists."""
        blocks = Int64(request) * self.strides[0] + Int64(head) * self.strides[1]
        counts = Int64(request) * self.count_strides[0] + Int64(head) * self.count_strides[1]
        return replace(self, blocks=self.blocks + blocks * 4, counts=self.counts + counts * 4)

    def ask_count(self):
        """Starts loading the number of blocks, and returns it. :meth:`tokens` clamps it."""
        return Int32(ptx.load_global_words(self.counts, 0, 1)[0])

    def ask_block(self, place):
        """Starts loading entry ``place`` of the list, which must exist."""
        return Int32(ptx.load_global_words(self.blocks + Int64(place) * self.strides[2] * 4, 0, 1)[0])

    def page(self, index):
        """Returns which of the request's pages is the list's page ``index``. Waits for the list's entry, and clamps it
        if it is out of range.
        """
        place, page = self.block_pages.divide_int(index)
        block = cutlass.max(cutlass.min(self.ask_block(place), self.max_pages), -1)
        return cutlass.max(cutlass.min(block * self.block_pages.value + page, self.max_pages - 1), 0)

    def tokens(self, count, length):
        """Returns the number of tokens of a list of ``count`` blocks. All blocks except the last are full. Waits for
        the count. length: number of tokens of the request.
        """
        before_last = cutlass.max(cutlass.min(count, self.max_blocks), 0) - 1
        last = self.ask_block(cutlass.max(before_last, 0))
        in_last = cutlass.max(cutlass.min(length - last * self.block_tokens, self.block_tokens), 0)
        return cutlass.max(in_last + before_last * self.block_tokens, 0)
