"""Turns INT8, E4M3 and E5M2 rows into MMA operands. Rows have scales in front, or are bare codes in swizzled tiles.

Every code is a number that fp16 holds exactly, so bytes become operands without loss:

- E4M3: the hardware converts pairs of neighbouring bytes.
- E5M2 is the upper byte of an fp16: a permute or a mask puts it there.
- INT8: a byte with its sign bit flipped, alone in a 16-bit half, is the fp16 subnormal (128 + code) * 2**-24. Tensor
  cores multiply it exactly (see :mod:`.int4`). For V one packed addition subtracts the 128, so sums have no bias. For K
  no addition is needed. Every dot product is 128 * sum(Q) too large, so accumulators begin at -128 * sum(Q). The usual
  magic number (a byte 0x64 in front, FasterTransformer) costs a register, or a move for each use.

Elements are not multiplied by their row's scale. Instead, scores are multiplied by the scales of K's rows, and
probabilities by the scales of V's rows. The softmax reference bounds the product of probability and scale (see
:mod:`.int4`). Other scales lie beside the cache. A scale of a head, or of the whole tensor, only changes the score
scale and the outputs. Scales of columns only change the queries and the outputs.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.readers.common import CodeKeyReader, Query, State, ValueReader
from cute_kernels.attention.readers.dense import SwizzledLoads
from cute_kernels.attention.readers.rows import RowKeyReader, RowValueReader
from cute_kernels.device import ptx
from cute_kernels.device.loads import load_float, load_floats
from cute_kernels.formats.kv import KvFormat
from layouts.kv.swizzled_tile import LOAD_CHUNKS

ODD_BYTES = 0xFF00FF00
SIGN_BITS = 0x80808080
LOW_SIGN_BITS = 0x00800080
ZERO_OF_CODES = 0x80808080  # fp16 -128 * 2**-24 in each half
SUBNORMAL_UNIT = 2.0**24  # 1 / value of the fp16 subnormal whose bits are 1
CHUNK_COLUMNS = 16  # columns (bytes) that one MMA contracts
LANE_COLUMNS = 4  # columns of a chunk that a lane has: a word


class Codes:
    """The base of decoders from words of bytes to packed fp16 pairs."""

    key_pairs: tuple[tuple[int, int], ...] = ((0, 2), (1, 3))  # bytes of a word that :meth:`keys` pairs up
    unit = 1.0  # 1 / value of the operand that stands for code 1
    key_offset = 0.0  # what operands of keys have too much, in codes
    selector = 0x5410  # prmt: columns 0 and 1 of two tokens, as :meth:`columns` wants them

    def keys(self, word) -> list[Any]:
        """Decodes the four bytes of a word to two pairs. ``key_pairs`` says which two bytes form each pair."""
        raise NotImplementedError

    def columns(self, word) -> list[Any]:
        """Decodes a word that has the codes of two tokens in two columns. In the word, a token's two columns are
        neighbours. Returns a pair for each column, with the numbers of both tokens.
        """
        return self.keys(word)

    def align(self, word):
        """Returns a word from a transposed load with its four codes in the order that :meth:`columns` takes. The load
        brings both codes of the first token, then both codes of the second. In this class :meth:`columns` takes this
        order, so the word stays as it is.
        """
        return word


class Int8Codes(Codes):
    """INT8 codes, whose operands are subnormal numbers. Operands of keys stand for code + 128."""

    unit, key_offset = SUBNORMAL_UNIT, 128.0

    def keys(self, word) -> list[Any]:
        positive = word ^ SIGN_BITS
        return [ptx.prmt(positive, Uint32(0), Uint32(select)) for select in (0x4240, 0x4341)]

    def half_keys(self, word, t: Int32):
        """Decodes the lower half of a word to a pair if t is even, the upper half if t is odd."""
        return ptx.prmt(word, Uint32(0), Uint32(0x4140) + Uint32(t % 2) * 0x0202) ^ LOW_SIGN_BITS

    def columns(self, word) -> list[Any]:
        return [ptx.add_f16x2(pair, Uint32(ZERO_OF_CODES)) for pair in self.keys(word)]


class E4m3Codes(Codes):
    """E4M3 codes. The hardware converts neighbouring bytes, so in words for :meth:`columns` the tokens of a column are
    neighbours."""

    key_pairs = ((0, 1), (2, 3))
    selector = 0x5140

    def keys(self, word) -> list[Any]:
        return [ptx.e4m3x2_low_to_f16x2(word), ptx.e4m3x2_high_to_f16x2(word)]

    def align(self, word):
        return ptx.prmt(word, word, Uint32(0x3120))


class E5m2Codes(Codes):
    """E5M2 codes, which are the upper bytes of fp16 numbers."""

    def keys(self, word) -> list[Any]:
        return [ptx.prmt(word, Uint32(0), Uint32(0x2404)), word & ODD_BYTES]


def codes_of(form: KvFormat) -> Codes:
    """Returns the decoder of a byte format's codes."""
    return {"int8": Int8Codes, "e4m3": E4m3Codes, "e5m2": E5m2Codes}[form.codes]()


class _ByteKeys(CodeKeyReader):
    """The base of key readers of bytes, for raw rows and for swizzled tiles. It prepares queries."""

    lane_codes = LANE_COLUMNS  # of a unit of columns

    def _take_codes(self, form: KvFormat):
        self.codes = codes_of(form)
        self.pairs = self.codes.key_pairs if self.lane_codes == LANE_COLUMNS else ((0, 1),)
        self.factors = (1.0,) * len(self.pairs)
        self.code_unit = self.codes.unit
        self.sum_factor = -self.codes.key_offset / self.codes.unit if self.codes.key_offset else None

    def _fetch_words(self, addresses, num_units: int, lane: Int32):
        """Starts loading the query columns that a lane's codes are multiplied by: four neighbouring columns of each
        unit, or two if an MMA contracts 8 columns. Returns words [block][unit]."""
        column_bytes = 2 * self.lane_codes
        count = self.lane_codes // 2
        first = lane % 4 * column_bytes
        return [
            [self.load_queries(address + first, unit * 4 * column_bytes, count) for unit in range(num_units)]
            for address in addresses
        ]

    def first_dots(self, query_sums) -> list[list[Any]]:
        """Returns initial accumulators for the dot products of a group of columns, for each block of queries. They
        subtract the offset of the codes. query_sums: the group's sums of queries, [column].
        """
        if self.sum_factor is None:
            return [[Float32(0.0)] * 4 for _ in range(self.config.mainloop.blocks_per_warp)]
        return [2 * query_sums[2 * block : 2 * block + 2] for block in range(self.config.mainloop.blocks_per_warp)]


class RowKeyByteReader(_ByteKeys, RowKeyReader):
    """The key reader of raw rows of bytes, with one fp32 scale per group of columns."""

    def __init__(self, config: DecodeConfig):
        RowKeyReader.__init__(self, config)
        self.lane_codes = self.tile.k_unit // 4
        self._take_codes(config.formats[0])

    def fetch_query(self, addresses, given_scale: Int64, lane: Int32) -> Query:
        """Starts loading the query columns of a lane, in every block of queries. addresses: for each block, the address
        of the lane's query head.
        """
        return Query(self._fetch_words(addresses, self.tile.k_units, lane))

    def unit_operands(self, state: State, low_row, high_row):
        if self.lane_codes == LANE_COLUMNS:
            (low0, low1), (high0, high1) = self.codes.keys(low_row), self.codes.keys(high_row)
            return [[low0, high0, low1, high1]]
        assert isinstance(self.codes, Int8Codes)  # alone has groups of columns
        return [[self.codes.half_keys(row, state.t) for row in (low_row, high_row)]]


class RowValueByteReader(RowValueReader):
    """The value reader of raw rows of bytes."""

    def __init__(self, config: DecodeConfig):
        super().__init__(config)
        self.codes = codes_of(config.formats[1])

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32, given_scale: Int64, keys: State) -> State:
        state = super().make_state(lane, head, slice_index, given_scale, keys)
        if self.lane_codes == 2:
            state.select = Uint32(self.codes.selector) + Uint32(state.g % 2) * 0x2222
        elif self.lane_codes == 1:
            state.select = Uint32(0x4400) + Uint32(state.g % 4) * 0x1111
        return state

    def code_pairs(self, state: State, even, odd):
        if self.lane_codes == LANE_COLUMNS:
            selectors = [Uint32(self.codes.selector), Uint32(self.codes.selector + 0x2222)]
            return [pair for select in selectors for pair in self.codes.columns(ptx.prmt(even, odd, select))]
        return self.codes.columns(ptx.prmt(even, odd, state.select))[: self.lane_codes]

    def output(self, value, unit: int, code: int, column: int, terms):
        return value if self.codes.unit == 1.0 else value * self.codes.unit


class SwizzledKeyByteReader(_ByteKeys, SwizzledLoads):
    """The key reader of bare bytes. An MMA contracts a chunk of a row; each lane has 4 of the chunk's columns."""

    num_groups = 1

    def __init__(self, config: DecodeConfig):
        self._take_tile(config, 0)
        self._take_codes(config.formats[0])
        self.given_scale = config.formats[0].given_scale
        self.units_per_group = self.tile.num_chunks

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32) -> State:
        """Makes the registers that a warp keeps throughout a unit: lane offsets of ldmatrix. ``take_query`` adds the
        queries.
        """
        state = State(lane)
        state.lane_offsets = self.lane_offsets(lane, head, slice_index)
        return state

    def fetch_query(self, addresses, given_scale: Int64, lane: Int32) -> Query:
        """Starts loading the query columns of a lane, in every block of queries, and the scales of these columns.

        addresses: for each block, the address of the lane's query head. given_scale: address of the KV head's scale, or
        of its columns' scales.
        """
        words = self._fetch_words(addresses, self.tile.num_chunks, lane)
        if self.given_scale is None:
            return Query(words)
        if self.given_scale != "channel":
            return Query(words, head_scale=load_float(given_scale))
        first = given_scale + Int64(lane % 4 * (4 * LANE_COLUMNS))
        chunks = range(self.tile.num_chunks)
        return Query(words, column_scales=[load_floats(first, 4 * CHUNK_COLUMNS * i, LANE_COLUMNS) for i in chunks])

    def scores(self, state: State, tile_address: Int32, block_offset: int):
        """Returns the lane's scores in a block of 32 tokens, as [4 tokens][column]. The caller multiplies them by
        ``state.score_scale``.
        """
        blocks = range(self.config.mainloop.blocks_per_warp)
        result = []
        for pairs in self.pairs_at_once():
            query_sums = self.sums_of_group(state, 0)
            dots = {pair: self.first_dots(query_sums) for pair in pairs}
            for load in range(self.num_loads):
                rows = {p: self.load(state.lane_offsets, tile_address, block_offset, p, load) for p in pairs}
                for half in range(min(LOAD_CHUNKS, self.tile.num_chunks - LOAD_CHUNKS * load)):
                    query = self.query_operands(state, 2 * (LOAD_CHUNKS * load + half), 2)
                    for pair in pairs:
                        low, high = (self.codes.keys(row) for row in rows[pair][2 * half : 2 * half + 2])
                        a = [low[0], high[0], low[1], high[1]]
                        dots[pair] = [ptx.mma_m16n8k16(dots[pair][b], a, query[b], dtype="f16") for b in blocks]
            for pair in pairs:
                result += [[value for dot in dots[pair] for value in dot[2 * half : 2 * half + 2]] for half in range(2)]
        return result


class SwizzledValueByteReader(SwizzledLoads, ValueReader):
    """The value reader of bare bytes. Transposed loads give a lane two neighbouring columns of V, which become rows g
    and g + 8 of the MMA's output.
    """

    def __init__(self, config: DecodeConfig):
        self._take_tile(config, 1)
        self.codes = codes_of(config.formats[1])
        self.given_scale = config.formats[1].given_scale
        self.num_accumulators = 4 * self.tile.num_chunks

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32, given_scale: Int64, keys: State) -> State:
        """Makes the registers that a warp keeps throughout a unit: lane offsets of ldmatrix, accumulators, the given
        scale."""
        state = State(lane)
        state.lane_offsets = self.lane_offsets(lane, head, slice_index)
        state.accumulators = self.make_accumulators()
        if self.given_scale == "channel":
            state.output_scales = given_scale + Int64(state.g * 8)  # columns 2g and 2g + 1
        elif self.given_scale is not None:
            state.output_scale = load_float(given_scale) * self.codes.unit
        return state

    def accumulate(self, state: State, tile_address: Int32, block_offset: int, probabilities, headers):
        """Adds P V of 32 tokens to the accumulators. probabilities: the lane's, fp32 [4 tokens][column]."""
        blocks = range(self.config.mainloop.blocks_per_warp)
        operands = [
            [ptx.transpose_8x8(ptx.pack_f16x2(*row[2 * block : 2 * block + 2])) for row in probabilities]
            for block in blocks
        ]
        for pair in range(2):
            probability = [rows[2 * pair : 2 * pair + 2] for rows in operands]
            for load in range(self.num_loads):
                words = self.load(state.lane_offsets, tile_address, block_offset, pair, load)
                for half in range(min(LOAD_CHUNKS, self.tile.num_chunks - LOAD_CHUNKS * load)):
                    # Words: the first 8 tokens of both chunks, then the last 8.
                    first, last = (self.codes.columns(self.codes.align(word)) for word in words[half::LOAD_CHUNKS])
                    self.multiply_add(state, LOAD_CHUNKS * load + half, [*first, *last], probability, "f16")

    def outputs(self, state: State):
        """Returns the warp's sums P V: a list of (column of accumulators, first column of V, fp32 values of consecutive
        columns of V). The column of accumulators stands for a query.
        """
        result = []
        for chunk in range(self.tile.num_chunks):
            scales = self._output_scales(state, chunk)
            for column in range(self.config.columns):
                values = [state.accumulators[self.place(chunk, half, column)] for half in range(2)]
                if scales is not None:
                    values = [value * scale for value, scale in zip(values, scales, strict=True)]
                result.append((column, CHUNK_COLUMNS * chunk + 2 * state.g, values))
        return result

    def _output_scales(self, state: State, chunk: int):
        """Returns the scales by which the lane's two columns of a chunk are multiplied; None if outputs need no
        scale.
        """
        if self.given_scale is None:
            return None if self.codes.unit == 1.0 else [self.codes.unit] * 2
        if self.given_scale != "channel":
            return [state.output_scale] * 2
        return [scale * self.codes.unit for scale in load_floats(state.output_scales, 4 * CHUNK_COLUMNS * chunk, 2)]
