"""`Lists`, the blocks that each KV head of a request reads: attention finds a head's pages and its tokens by them.

A kernel reads a list's tokens as if there were no others: token t lies in the block at place t // block_tokens. So
blocks have to ascend: only the request's last one may hold fewer tokens. :mod:`.pages` has a picture of the loads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor


@dataclass(frozen=True)
class Lists:
    """The lists of chosen blocks; run-time values. Any number in a list is read as one of the request's blocks.

    Attributes:
        blocks, counts: addresses of int32 entries [batch, num_kv_heads, max_blocks] and [batch, num_kv_heads].
        strides, count_strides: elements from one request, KV head (and block) to the next.
        max_blocks: entries of a list. max_pages: pages that a request may have.
        block_tokens: tokens of a block. block_pages: pages of a block, as a divisor. A contiguous cache has pages too:
            parts of a request of a block each.
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
        """Makes the lists of a launch from its arguments, which include those of chosen blocks. Runs on the host."""
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
        """Returns the lists narrowed to the list and count of a request's KV head. All other methods need lists that
        are narrowed so."""
        blocks = Int64(request) * self.strides[0] + Int64(head) * self.strides[1]
        counts = Int64(request) * self.count_strides[0] + Int64(head) * self.count_strides[1]
        return replace(self, blocks=self.blocks + blocks * 4, counts=self.counts + counts * 4)

    def ask_count(self):
        """Starts loading the number of blocks; :meth:`tokens` has to clamp it."""
        return Int32(ptx.load_global_words(self.counts, 0, 1)[0])

    def ask_block(self, place):
        """Starts loading entry ``place`` of the list, which must exist."""
        return Int32(ptx.load_global_words(self.blocks + Int64(place) * self.strides[2] * 4, 0, 1)[0])

    def page(self, index):
        """Returns which of the request's pages is the list's page ``index``; waits for an entry.

        A block that the request does not have is clamped to its pages.
        """
        place, page = self.block_pages.divide_int(index)
        block = cutlass.max(cutlass.min(self.ask_block(place), self.max_pages), -1)
        return cutlass.max(cutlass.min(block * self.block_pages.value + page, self.max_pages - 1), 0)

    def tokens(self, count, length):
        """Returns the tokens of ``count`` blocks; waits for the count. length: tokens of the request.

        Only the last block may hold fewer tokens than the others do.
        """
        before_last = cutlass.max(cutlass.min(count, self.max_blocks), 0) - 1
        last = self.ask_block(cutlass.max(before_last, 0))
        in_last = cutlass.max(cutlass.min(length - last * self.block_tokens, self.block_tokens), 0)
        return cutlass.max(in_last + before_last * self.block_tokens, 0)
