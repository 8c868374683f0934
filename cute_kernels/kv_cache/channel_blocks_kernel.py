"""The kernel that fills blocks of keys. It adds new keys to the keys that wait outside the cache, and writes the rows
of each block that becomes full.

A CTA takes one block of 32 tokens of one request's KV head; a thread takes two neighbouring columns of the block. Older
keys come from the ring (64 rows per sequence, kept outside the cache). New keys come from the append's temporary
tensor. Only the first two blocks with a request's new tokens may need rows of the ring. The CTAs of these two blocks
also write the newest rows into the ring. Each CTA writes only the half of the ring that it reads, so it overwrites no
rows that another CTA still has to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import in_pairs
from cute_kernels.kv_cache.config import WrittenRows
from cute_kernels.kv_cache.rows import encode_nibbles, pack_nibbles
from layouts.kv.channel_blocks import BLOCK_TOKENS, RUN_COLUMNS, TAIL_TOKENS, UNIT_COLUMNS


@dataclass(frozen=True)
class Cache:
    """The cache to which rows are written; run-time values. table: address of int32 [batch, max_pages], or 0 if each
    request has one page (contiguous caches).
    """

    base: Int64
    strides: tuple[Int64, Int64, Int64]  # bytes from page to page, token to token, head to head
    num_pages: Int32
    page_size: Int32
    table: Int64
    table_stride: Int64
    max_pages: Int32


@dataclass(frozen=True)
class Keys:
    """Addresses of the new keys, the ring and its slots, and the number of KV heads; run-time values."""

    new: Int64
    tail: Int64
    slots: Int64
    num_heads: Int32


@dataclass(frozen=True)
class Requests:
    """Addresses of two int32 arrays.

    Attributes:
        seq_lens: [batch], new tokens included.
        cu_seqlens: [batch + 1], the bounds of the new tokens; address 0 if each request has one new token.
    """

    seq_lens: Int64
    cu_seqlens: Int64


class ColumnPair:
    """Encodes two neighbouring columns of a block, and says where their scales and shifts are written."""

    def __init__(self, head_dim: int):
        self.header_words = head_dim // BLOCK_TOKENS
        self.units = head_dim // UNIT_COLUMNS

    def encode(self, words) -> tuple[list[Uint32], list[Any]]:
        """Encodes the words of 32 tokens; a word has the fp16 numbers of both columns. Returns (for each token a byte
        with two codes, for each column a word with scale and shift).
        """
        halves = (ptx.half2_low_to_float, ptx.half2_high_to_float)
        columns = [[half(words[i]) for i in range(BLOCK_TOKENS)] for half in halves]
        found = [
            encode_nibbles(values, in_pairs(numbers.fmin, values), in_pairs(ptx.fmax, values)) for values in columns
        ]
        (low, low_header), (high, high_header) = found
        return [pack_nibbles(list(pair)) for pair in zip(low, high, strict=True)], [low_header, high_header]

    def place(self, column):
        """Returns (row of the block, byte of the row) of a column's scale. The column's shift lies 16 rows later."""
        unit, place = column // UNIT_COLUMNS, column % RUN_COLUMNS
        run = column % UNIT_COLUMNS // RUN_COLUMNS
        word = (unit * 4 + place % 4) * 4 + run
        return word // self.header_words, 4 * (word % self.header_words) + 2 * (place // 4)


class FillKernel:
    """One compiled variant of the kernel that fills blocks, for a format and head_dim of keys."""

    def __init__(self, keys: WrittenRows):
        self.num_threads = keys.head_dim // 2  # of a CTA; each has two columns
        self.columns = ColumnPair(keys.head_dim)
        self.row_bytes = 2 * keys.head_dim

    def launch(self, given, stream):
        """Launches over (blocks of a request, KV heads, batch); ``given`` has the arguments of `FILL`."""
        cache: Any = given.k_cache
        pages, page_size, heads, _ = cache.shape
        target = Cache(
            base=ptx.address(cache),
            strides=(Int64(cache.stride[0]), Int64(cache.stride[1]), Int64(cache.stride[2])),
            num_pages=pages,
            page_size=page_size,
            table=given.block_table,
            table_stride=given.table_stride,
            max_pages=given.max_pages,
        )
        keys = Keys(ptx.address(given.k_new), ptx.address(given.k_tail), ptx.address(given.tail_slots), heads)
        batch: Any = given.seq_lens.shape[0]
        self.kernel(keys, Requests(ptx.address(given.seq_lens), given.cu_seqlens), target).launch(
            grid=(given.max_blocks, heads, batch), block=(self.num_threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, keys: Keys, requests: Requests, cache: Cache):
        block, head, request = cute.arch.block_idx()
        thread = cute.arch.warp_idx() * WARP_THREADS + cute.arch.lane_idx()
        length = _load(requests.seq_lens, request)
        first, count = request, Int32(1)
        if requests.cu_seqlens != 0:
            first = _load(requests.cu_seqlens, request)
            count = _load(requests.cu_seqlens, request + 1) - first
        start = cutlass.max(length - count, 0)
        base = (start // BLOCK_TOKENS + block) * BLOCK_TOKENS
        if (count > 0) & (base < length):
            token_bytes = keys.num_heads * self.row_bytes
            lane = Int64(head * self.row_bytes + thread * 4)
            # Of the token at position 0, were it new.
            new = keys.new + Int64(first - (length - count)) * token_bytes + lane
            slot = Int64(_load(keys.slots, request))
            tail = keys.tail + slot * (Int64(token_bytes) * TAIL_TOKENS) + lane
            if base + BLOCK_TOKENS <= length:
                words = cute.make_rmem_tensor(BLOCK_TOKENS, Uint32)
                for i in cutlass.range_constexpr(BLOCK_TOKENS):
                    old = tail + Int64((base + i) % TAIL_TOKENS * token_bytes)
                    source = cutlass.select_(base + i < start, old, new + Int64(base + i) * token_bytes)
                    words[i] = ptx.load_global_words(source, 0, 1, constant=False)[0]
                self.write(words, cache, request, head, base, thread)
            if block < TAIL_TOKENS // BLOCK_TOKENS:
                self.keep(new, tail, token_bytes, start, length, base)

    @cute.jit
    def keep(self, new, tail, token_bytes, start, length, base):
        """Writes new rows into the half of the ring that the block at position ``base`` uses; consecutive blocks
        alternate between the halves. The rows are those of the newest block that uses the same half. start: position of
        the first new token. length: the request's tokens, new ones included.
        """
        last = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        last = last - (last - base) % TAIL_TOKENS
        position = cutlass.max(last, start)
        stop = cutlass.min(last + BLOCK_TOKENS, length)
        for _ in cutlass.range(stop - position, unroll=1):
            word = ptx.load_global_words(new + Int64(position) * token_bytes, 0, 1, constant=False)[0]
            numbers.store_global_words(tail + Int64(position % TAIL_TOKENS * token_bytes), 0, [word])
            position = position + 1

    @cute.jit
    def write(self, words, cache, request, head, base, thread):
        """Quantises a thread's two columns of a full block, and stores them if the cache has a page for the block."""
        index = base // cache.page_size
        page, inside = request, index == 0
        if cache.table != 0:
            inside = index < cache.max_pages
            entry = Int64(request) * cache.table_stride + cutlass.min(index, cache.max_pages - 1)
            page = _load(cache.table + entry * 4, 0)
        row = base - index * cache.page_size
        if inside & (page >= 0) & (page < cache.num_pages) & (row + BLOCK_TOKENS <= cache.page_size):
            page_stride, token_stride, head_stride = cache.strides
            target = cache.base + Int64(page) * page_stride + Int64(row) * token_stride + Int64(head) * head_stride
            codes, headers = self.columns.encode(words)
            at = target + Int64(4 * self.columns.header_words + thread)
            for i in cutlass.range_constexpr(BLOCK_TOKENS):
                numbers.store_global_part(at + i * token_stride, 0, codes[i], 1)
            for c in cutlass.range_constexpr(2):
                row_of, byte = self.columns.place(2 * thread + c)
                for parameter in cutlass.range_constexpr(2):
                    rows = Int64(row_of + parameter * (BLOCK_TOKENS // 2)) * token_stride
                    half = headers[c] >> 16 if const_expr(parameter == 1) else headers[c]
                    numbers.store_global_part(target + rows + Int64(byte), 0, half, 2)


def _load(base: Int64, index) -> Int32:
    return ptx.load_global_words(base + Int64(index) * 4, 0, 1)[0].to(Int32)
