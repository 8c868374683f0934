"""Keys with a scale and a shift for each channel of 32 tokens: :class:`layouts.kv.channel_blocks.ChannelBlocks`.

A key is k_tc = scale_c q_tc + shift_c, for tokens t of a block and codes q_tc. So with queries Q_c the scores are

    S_t = sum_c q_tc (scale_c Q_c) + sum_c shift_c Q_c

Queries are multiplied by scales once a block of tokens. For each B register of the codes' MMAs, one instruction
multiplies two fp16 numbers. An MMA computes the second sum: all rows of its A operand are the shifts. All rows of its
accumulators are equal, and the codes' MMAs start from them. For 32 tokens and 128 columns this takes 16 packed products
(8 more for the shifts) and 8 MMAs. With scales per row and four groups, it would take a conversion, a product and a sum
for each group, row and query.

The range of fp16: scales are at most 2 * 4094 / 15 = 546 (`LIMIT`), so queries are first scaled to below 2**6.
Registers of high nibbles hold a 16th of their queries (see `.int4`); 16 times a shift is an fp16 number, too.

**The tail.** The block that is not full yet is kept in 16 bits outside the cache, in a ring of 64 rows a sequence. Its
rows are A operands without a change; the pairs of the queries are put in the same order.
"""

from __future__ import annotations

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.readers.common import State
from cute_kernels.attention.readers.int4 import LOW_NIBBLE_UNIT, Int4KeyReader
from cute_kernels.device import ptx
from layouts.kv.channel_blocks import TAIL_TOKENS, UNIT_COLUMNS
from layouts.kv.tile import BLOCK_TOKENS, WORD_BYTES, block_token

SIXTEEN = 0x4C004C00  # 16.0 as a pair of fp16
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # prmt selectors: the low, or the high, halves of two words
QUERY_EXPONENT = 5
LINE_BYTES = 128  # bytes of a line of the L1 cache
RUN_WORDS = 4  # words of parameters side by side, one for each lane of four


class ChannelBlockKeyReader(Int4KeyReader):
    """The key reader of blocks, whose rows have the block's scales and shifts in their headers. It also reads the
    tail."""

    query_exponent = QUERY_EXPONENT
    sum_factor = None

    def __init__(self, config: DecodeConfig):
        super().__init__(config)
        assert self.lane_codes == 8 and self.tile.k_unit == UNIT_COLUMNS
        self.sums = 2 if config.mainloop.blocks_per_warp == 1 else 1
        self.by_matrices = self.tile.header_words == RUN_WORDS

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32) -> State:
        state = super().make_state(lane, head, slice_index)
        # Of the first register's words, and of those of one matrix in eight lanes.
        row = lane // 8 if self.by_matrices else state.t // self.tile.header_words
        words = self._warp_offset(head, slice_index) + self.tile.token_offset(row)
        if not self.by_matrices:
            words = words + state.t % self.tile.header_words
        state.scale_offset = Int32(WORD_BYTES * words)
        return state

    def parameters(self, state: State, tile_address: Int32, block_offset: int, kind: int, unit: int) -> list[Any]:
        """Loads the lane's scales (kind 0) or shifts (kind 1) of a unit of columns. Returns words r = 0..3, each a pair
        for columns r and r + 4.

        The unit has four vectors of four words; lane t takes word t of each vector. If a row's header is one vector,
        ldmatrix loads each vector as an 8 x 8 matrix of equal rows, without bank conflicts.
        """
        address = state.scale_offset + tile_address
        rows = RUN_WORDS // self.tile.header_words  # that a vector lies in
        first = (kind * self.tile.k_units + unit) * len(self.pairs) * rows
        offsets = [block_offset + WORD_BYTES * self.tile.token_offset(first + r * rows) for r in range(len(self.pairs))]
        if self.by_matrices:
            return ptx.load_matrix_x4(address, offsets[0], transpose=False)
        return [ptx.load_shared(address, offset) for offset in offsets]

    def scores(self, state: State, tile_address: Int32, block_offset: int):
        blocks, units = range(self.config.mainloop.blocks_per_warp), range(self.tile.k_units)
        words = [
            [
                self._load_codes(state.lane_offsets + tile_address, block_offset + self._code_offset(j, unit))
                for unit in units
            ]
            for j in range(4)
        ]
        # Two sums side by side, where registers allow: in one all products would wait for one another.
        shifts = self._shift_dots(state, tile_address, block_offset)
        zeros = [[[Float32(0.0)] * 4 for _ in blocks] for _ in range(self.sums - 1)]
        dots = [[[shifts[block], *(zero[block] for zero in zeros)] for block in blocks] for _ in range(2)]
        for unit in units:
            scales = self.parameters(state, tile_address, block_offset, 0, unit)
            query = self.query_operands(state, len(self.pairs) * unit, len(self.pairs))
            scaled = [[ptx.mul_f16x2(*pair) for pair in zip(registers, scales, strict=True)] for registers in query]
            operands = [self.unit_operands(state, words[2 * i][unit], words[2 * i + 1][unit]) for i in range(2)]
            for step, tile, block in itertools.product(range(len(self.pairs) // 2), range(2), blocks):
                a, b, own = operands[tile][step], scaled[block][2 * step : 2 * step + 2], dots[tile][block]
                own[step % self.sums] = ptx.mma_m16n8k16(own[step % self.sums], a, b, dtype="f16")
        return self._by_token([[_added(parts) for parts in of_tile] for of_tile in dots])

    def _shift_dots(self, state: State, tile_address: Int32, block_offset: int) -> list[list[Any]]:
        """Returns the initial accumulators of the codes' products, for each block of queries: shifts times queries."""
        dots = [[[Float32(0.0)] * 4 for _ in range(self.sums)] for _ in range(self.config.mainloop.blocks_per_warp)]
        for unit in range(self.tile.k_units):
            shifts = self.parameters(state, tile_address, block_offset, 1, unit)
            query = self.query_operands(state, len(self.pairs) * unit, len(self.pairs))
            for step in range(len(self.pairs) // 2):
                low, high = shifts[2 * step], ptx.mul_f16x2(shifts[2 * step + 1], Uint32(SIXTEEN))
                for own, words in zip(dots, query, strict=True):
                    a, b = [low, low, high, high], words[2 * step : 2 * step + 2]
                    own[step % self.sums] = ptx.mma_m16n8k16(own[step % self.sums], a, b, dtype="f16")
        # Rows are alike: what a lane has of row g + 8 is what it has of row g.
        return [[value * (1.0 / LOW_NIBBLE_UNIT) for value in _added(parts)[:2] * 2] for parts in dots]

    def _by_token(self, dots) -> list[list[Any]]:
        """Reorders accumulators from [tile][block] to [4 tokens][column]."""
        return [
            [dots[j // 2][column // 2][2 * (j % 2) + column % 2] for column in range(self.config.columns)]
            for j in range(4)
        ]

    # -- the tail -----------------------------------------------------------------------------------------------------

    def open_tail(self, state: State, tail, work, head: Int32):
        """Starts loading the index of a request's slot of the tail, and computes from it the address of a KV head's
        rows in the tail. Does not wait."""
        slot = ptx.load_global_words(tail.slots + Int64(work.request) * 4, 0, 1)[0].to(Int32)
        state.tail_stride = work.place.shape.num_kv_heads * (2 * self.config.head_dim)
        rows = Int64(slot) * (Int64(state.tail_stride) * TAIL_TOKENS)
        state.tail = tail.rows + rows + Int64((work.place.first_head + head) * (2 * self.config.head_dim))
        state.length = work.length

    def in_tail(self, state: State, first_token: Int32):
        """Returns whether the block that begins with ``first_token`` is the request's unfinished block, whose keys lie
        in the tail.
        """
        return (first_token < state.length) & (first_token + BLOCK_TOKENS > state.length)

    @cute.jit
    def ask_tail(self, state: State, first_token: Int32):
        """Prefetches the block's rows if they are in the tail. Four lanes prefetch a row, which has at most two cache
        lines."""
        if self.in_tail(state, first_token):
            line = LINE_BYTES * (state.t % (2 * self.config.head_dim // LINE_BYTES))
            for j in cutlass.range_constexpr(4):
                row = block_token(self.config.token_bits, state.g, j) * state.tail_stride
                ptx.prefetch_line(self._ring(state, first_token) + Int64(row + line))

    def _ring(self, state: State, first_token: Int32):
        """Returns the address in the tail of the first row of the block that begins with ``first_token``."""
        return state.tail + Int64((first_token % TAIL_TOKENS) * state.tail_stride)

    def tail_scores(self, state: State, first_token: Int32):
        """Returns the scores of the block in the tail, in the form of :meth:`scores`. Scores of rows after the
        request's end may be anything."""
        blocks, units = range(self.config.mainloop.blocks_per_warp), range(self.tile.k_units)
        ring = self._ring(state, first_token) + Int64(16 * state.t)
        dots: list[list[Any]] = []
        for tile in range(2):
            places = [block_token(self.config.token_bits, state.g, 2 * tile + half) for half in range(2)]
            low, high = (
                [
                    ptx.load_global_words(ring + Int64(place * state.tail_stride), 2 * UNIT_COLUMNS * unit, 4)
                    for unit in units
                ]
                for place in places
            )
            of_tile: list[Any] = [[Float32(0.0)] * 4 for _ in blocks]
            for unit in units:
                query = self.query_operands(state, len(self.pairs) * unit, len(self.pairs))
                for block in blocks:
                    pairs = _in_order(query[block])
                    for step in range(2):
                        a = [rows[unit][2 * step + i] for i in range(2) for rows in (low, high)]
                        b = pairs[2 * step : 2 * step + 2]
                        of_tile[block] = ptx.mma_m16n8k16(of_tile[block], a, b, dtype="f16")
            dots.append([[value * (1.0 / LOW_NIBBLE_UNIT) for value in dot] for dot in of_tile])
        return self._by_token(dots)


def _added(parts: list[list[Any]]) -> list[Any]:
    """Adds up one or two sets of accumulators."""
    return parts[0] if len(parts) == 1 else [first + second for first, second in zip(*parts, strict=True)]


def _in_order(registers: list[Any]) -> list[Any]:
    """Reorders B registers. ``registers`` have pairs of columns r and r + 4, r = 0..3; the result has pairs of
    neighbouring columns. Odd ``registers`` hold queries divided by 16.
    """
    even = [registers[i] for i in (0, 2)]
    odd = [ptx.mul_f16x2(registers[i], Uint32(SIXTEEN)) for i in (1, 3)]
    return [ptx.prmt(even[i], odd[i], Uint32(half)) for half in (LOW_HALVES, HIGH_HALVES) for i in range(2)]
