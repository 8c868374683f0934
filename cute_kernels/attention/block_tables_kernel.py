"""Makes the tables of chosen blocks on the GPU: one thread per entry, nothing shared between threads.

A CTA has some entries of one KV head's row of pages for one request. Loads are two deep: the list, its count and the
request's length; then the request's page and the list's last block. All threads ask for the last block, so that it is
on its way with the pages; the row's first thread writes its number of tokens.

Bytes are few: 4 of each entry read and written, 4 of each block and 12 of each list. Time is two loads from memory. The
kernel waits for the launch before, which may make the list. The launch after it must wait for its end to read the
tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.attention.block_tables import BlockTablesConfig
from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor
from cute_kernels.device.types import extents


@dataclass(frozen=True)
class Lists:
    """The lists of chosen blocks and the block table that they are looked up in: int32 addresses; run-time values.

    strides: elements from one request, KV head and block of a list to the next; count_strides: elements from one
    request and KV head of the counts to the next. table: the block table; 0 for contiguous caches, where a request's
    ``pages`` pages lie one behind the other. table_stride: entries from row to row.
    """

    blocks: Int64
    counts: Int64
    seq_lens: Int64
    table: Int64
    strides: tuple[Int64, Int64, Int64]
    count_strides: tuple[Int64, Int64]
    table_stride: Int32
    pages: Int32
    block_tokens: Int32
    max_blocks: Int32
    per_block: Divisor  # pages of a block


class BlockTablesKernel:
    """The kernel that makes the tables of chosen blocks, see :class:`BlockTablesConfig`."""

    def __init__(self, config: BlockTablesConfig):
        self.config = config

    def launch(self, given, stream):
        """Launches over requests, KV heads and parts of rows; ``given`` has the arguments of
        :data:`cute_kernels.attention.arguments.BLOCK_TABLES`."""
        heads, batch, entries = extents(given.pages)
        max_blocks = extents(given.block_list)[2]
        strides, counts = given.block_list.stride, given.block_counts
        lists = Lists(
            blocks=ptx.address(given.block_list),
            counts=ptx.address(counts),
            seq_lens=ptx.address(given.seq_lens),
            table=given.block_table,
            strides=(Int64(strides[0]), Int64(strides[1]), Int64(strides[2])),
            count_strides=(Int64(counts.stride[0]), Int64(counts.stride[1])),
            table_stride=given.table_stride,
            pages=given.pages_of_request,
            block_tokens=given.block_tokens,
            max_blocks=max_blocks,
            per_block=Divisor.of(entries // max_blocks),
        )
        threads = self.config.cta_entries
        self.kernel(lists, ptx.address(given.pages), ptx.address(given.tokens), entries, batch).launch(
            grid=(batch, heads, cute.ceil_div(entries, threads)), block=(threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, lists, pages: Int64, tokens: Int64, entries: Int32, batch: Int32):
        request, head, part = cute.arch.block_idx()
        entry = part * self.config.cta_entries + cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        own = Int64(request) * lists.strides[0] + Int64(head) * lists.strides[1]
        count_at = Int64(request) * lists.count_strides[0] + Int64(head) * lists.count_strides[1]
        place, page_of_block = lists.per_block.divide_int(entry)
        block = self.load(lists.blocks, own + Int64(cutlass.min(place, lists.max_blocks - 1)) * lists.strides[2])
        count = self.load(lists.counts, count_at)
        length = self.load(lists.seq_lens, Int64(request))
        page = self.page_of(lists, request, Int64(block) * lists.per_block.value + page_of_block)
        before_last = cutlass.max(cutlass.min(count, lists.max_blocks), 0) - 1
        last = self.load(lists.blocks, own + Int64(cutlass.max(before_last, 0)) * lists.strides[2])
        row = Int64(head) * batch + request
        if entry < entries:
            ptx.store_global(pages + (row * entries + entry) * 4, [Uint32(page)])
        if entry == 0:
            ptx.store_global(tokens + row * 4, [Uint32(self.tokens_of(lists, length, last, before_last))])

    @cute.jit
    def page_of(self, lists, request, index):
        """Returns the cache page that is a request's ``index``-th; a wrong ``index`` is clamped to the request's
        pages."""
        known = Int32(cutlass.max(cutlass.min(index, Int64(lists.pages - 1)), Int64(0)))
        page = request * lists.pages + known
        if lists.table != 0:
            page = self.load(lists.table, Int64(request) * lists.table_stride + known)
        return page

    def tokens_of(self, lists, length, last, before_last):
        """Returns the tokens of a list. Only its ``last`` block may hold fewer tokens than the others do."""
        in_last = cutlass.max(cutlass.min(Int32(length - last * lists.block_tokens), lists.block_tokens), 0)
        return cutlass.max(in_last + before_last * lists.block_tokens, 0)

    def load(self, address, index):
        """Loads an int32, which the launch before may have written."""
        return Int32(ptx.load_global_words(address + index * 4, 0, 1, constant=False)[0])
