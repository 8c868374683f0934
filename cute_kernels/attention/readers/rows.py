"""Loads raw rows with headers: says which words a lane reads, for codes of any format. See :mod:`layouts.kv.tile`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.attention.decode_config import DecodeConfig, tiles_of
from cute_kernels.attention.readers.common import CodeKeyReader, State, ValueReader
from cute_kernels.device import ptx
from layouts.kv.tile import BLOCK_TOKENS, WORD_BYTES, RowTile


class RowLoads:
    """The loads of codes and headers of a block's rows."""

    config: DecodeConfig
    tile: RowTile

    def block_offset(self, block: int) -> int:
        """Returns the offset in bytes of the ``block``-th block of tokens in a slice."""
        return WORD_BYTES * self.tile.token_offset(BLOCK_TOKENS * block)

    def _warp_offset(self, head: Int32, slice_index: Int32):
        """Returns the offset in words at which the warp's rows begin in a tile."""
        return head * self.tile.row_words + slice_index * self.tile.token_offset(self.config.slice_tokens)

    def _row_g(self, state: State):
        """Returns the offset in words from the block's first row to row g, whose score the lane holds."""
        strides = self.tile.row_strides()
        return (state.g % 2) * strides[0] + (state.g // 2 % 2) * strides[1] + (state.g // 4) * strides[2]

    def _row_offset(self, j: int, parity: int = 0) -> int:
        """Returns the offset in words of row half j. parity: 0 for K. A lane reads V's rows in pairs: 0 for the even
        row of a pair, 1 for the odd row.
        """
        strides = self.tile.row_strides()
        return parity * strides[0] + (j % 2) * strides[3] + (j // 2) * strides[4]

    def _load_codes(self, address: Int32, offset: int) -> Any:
        """Loads the codes that a lane decodes at once. Returns a word, or a list of words if a run has several."""
        if self.tile.run_words == 1:
            return ptx.load_shared(address, offset)
        return [ptx.load_shared(address, offset + WORD_BYTES * i) for i in range(self.tile.run_words)]

    def _load_header(self, address: Int32, block_offset: int, j: int) -> list[Any]:
        """Loads the header of the row that the lane has in row half j: one word for each group."""
        words: list[Any] = []
        for first in range(0, self.tile.header_words, self.tile.header_vector):
            offset = block_offset + WORD_BYTES * (self._row_offset(j) + first)
            words += ptx.load_shared_vector(address, offset, self.tile.header_vector)
        return words


class RowKeyReader(RowLoads, CodeKeyReader):
    """The base of key readers of raw rows. For each group of columns, MMAs multiply codes with queries, and then the
    row's header is applied.

    Subclasses make operands of codes, and scale a group's product.
    """

    def __init__(self, config: DecodeConfig):
        tile = tiles_of(config)[0]
        assert isinstance(tile, RowTile)
        self.config, self.tile = config, tile
        self.num_groups = tile.num_groups
        self.units_per_group = tile.k_units // tile.num_groups

    def unit_operands(self, state: State, low_row, high_row) -> list[list[Any]]:
        """Makes the A operands of one unit of columns. low_row, high_row: codes of rows g and g + 8, as `_load_codes`
        returns them."""
        raise NotImplementedError

    def first_dots(self, query_sums) -> list[list[Any]]:
        """Returns initial accumulators for the dot products of a group of columns, for each block of queries; zeros in
        this class. query_sums: the group's sums of queries, [column].
        """
        return [[Float32(0.0)] * 4 for _ in range(self.config.mainloop.blocks_per_warp)]

    def add_group(self, score, header, dot, query_sum):
        """Returns ``score`` (None at first) plus the contribution of one group of columns. In this class the
        contribution is the dot product times the group's header, an fp32 scale."""
        product = header.bitcast(Float32) * dot
        return product if score is None else score + product

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32) -> State:
        """Makes the registers that a warp keeps throughout a unit: lane offsets; ``take_query`` adds the queries."""
        state = State(lane)
        k_word = self.tile.k_word(state.t)
        row = self._warp_offset(head, slice_index) + self._row_g(state)
        state.lane_offsets = ptx.pinned(Int32(WORD_BYTES * (row + k_word)))
        state.header_offset = state.lane_offsets - WORD_BYTES * k_word  # cheaper to compute again than to keep
        return state

    def scores(self, state: State, tile_address: Int32, block_offset: int):
        """Returns the lane's scores in a block of 32 tokens, as [4 tokens][column]. The caller multiplies them by
        ``state.score_scale``.
        """
        result = []
        for pairs in self.pairs_at_once():
            rows = [2 * pair + half for pair in pairs for half in range(2)]
            words = [
                [
                    self._load_codes(state.lane_offsets + tile_address, block_offset + self._code_offset(j, unit))
                    for unit in range(self.tile.k_units)
                ]
                for j in rows
            ]
            headers = [self._load_header(state.header_offset + tile_address, block_offset, j) for j in rows]
            result += self._score_rows(state, words, headers)
        return result

    def _code_offset(self, j: int, unit: int) -> int:
        words = self.tile.header_words + self.tile.k_unit_words * unit
        return WORD_BYTES * (self._row_offset(j) + words)

    def _score_rows(self, state: State, words, headers) -> list[list[Any]]:
        """Computes the scores of two or four row halves; two row halves are the 16 rows of an MMA. Returns [row
        half][column]."""
        scores: list[list[Any]] = [[None] * self.config.columns for _ in words]
        blocks, tiles = range(self.config.mainloop.blocks_per_warp), range(len(words) // 2)
        for group in range(self.num_groups):
            query_sums = self.sums_of_group(state, group)
            dots = [self.first_dots(query_sums) for _ in tiles]
            for unit in range(group * self.units_per_group, (group + 1) * self.units_per_group):
                register = unit * len(self.pairs)
                operands = [self.unit_operands(state, words[2 * i][unit], words[2 * i + 1][unit]) for i in tiles]
                for step in zip(*operands, strict=True):
                    used = len(step[0]) // 2
                    query = self.query_operands(state, register, used)
                    for tile in tiles:
                        dots[tile] = [_multiply(dots[tile][block], step[tile], query[block]) for block in blocks]
                    register += used
            for row, half in ((2 * tile + half, half) for tile in tiles for half in range(2)):
                for column in range(self.config.columns):
                    scores[row][column] = self.add_group(
                        scores[row][column],
                        headers[row][group],
                        dots[row // 2][column // 2][2 * half + column % 2],
                        query_sums[column],
                    )
        return scores


class RowValueReader(RowLoads, ValueReader):
    """The base of value readers of raw rows. The MMA's B operand is probabilities times the rows' scales.

    Subclasses make operands of codes and read headers.
    """

    def __init__(self, config: DecodeConfig):
        keys, tile = tiles_of(config)
        assert isinstance(tile, RowTile)
        self.alike = replace(tile, operand="k") == keys  # then headers of K and V lie alike, which saves a register
        self.config, self.tile = config, tile
        self.num_groups = tile.num_groups
        self.lane_codes = tile.v_unit // 8  # of a unit: output rows of a lane
        self.unit_mmas = max(self.lane_codes // 2, 1)
        self.num_accumulators = 4 * tile.v_units * self.unit_mmas

    min_scale: float = 2.0**-80
    """The least scale. It replaces smaller ones, so that log2 of a zero scale is finite; probabilities of 2**80 may
    still be added up."""

    def scale(self, header) -> Any:
        """Returns a header's scale as fp32. In this class the header itself is the scale."""
        return header.bitcast(Float32)

    def add_header(self, state: State, group: int, header, probabilities):
        """Adds to the outputs what a token's header contributes besides the scale. In this class that is nothing."""

    def code_pairs(self, state: State, even, odd) -> list[Any]:
        """Returns packed pairs (even token, odd token), one for each of the lane's neighbouring output rows. even, odd:
        both tokens' codes."""
        raise NotImplementedError

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32, given_scale: Int64, keys: State) -> State:
        """Makes the registers that a warp keeps throughout a unit: lane offsets, accumulators."""
        state = State(lane)
        state.lane_offsets = ptx.pinned(Int32(WORD_BYTES * self._codes_start(state, head, slice_index)))
        headers = self._warp_offset(head, slice_index) + self._row_g(state)
        state.header_offset = keys.header_offset if self.alike else Int32(WORD_BYTES * headers)
        state.accumulators = self.make_accumulators()
        return state

    def _codes_start(self, state: State, head: Int32, slice_index: Int32):
        """Returns the offset in words of the first codes that the lane reads in a tile. The words of the header before
        these codes are not counted.
        """
        return self._warp_offset(head, slice_index) + self._row_t(state) + self.tile.v_word(state.g)

    def _row_t(self, state: State):
        """Returns the offset in words from the block's first row to the even row of the pair that the lane reads."""
        strides = self.tile.row_strides()
        return (state.t % 2) * strides[1] + (state.t // 2) * strides[2]

    def load_scales(self, state: State, tile_address: Int32, block_offset: int):
        """Loads the headers of the lane's rows of a block. Returns [4 tokens][group]."""
        return [self._load_header(state.header_offset + tile_address, block_offset, j) for j in range(4)]

    def log_scale(self, headers, j: int):
        largest = Float32(self.min_scale)
        for header in headers[j]:
            largest = ptx.fmax(largest, self.scale(header))
        return ptx.log2(largest)

    def group_of(self, unit: int) -> int:
        """Returns the index of the group of columns that has a unit of the output."""
        return unit * self.tile.v_unit // self.tile.group_width

    def accumulator(self, unit: int, code: int, column: int) -> int:
        """Returns the index of the lane's accumulator for its ``code``-th output row of a unit."""
        return self.place(unit * self.unit_mmas + code // 2, code % 2, column)

    def accumulate(self, state: State, tile_address: Int32, block_offset: int, probabilities, headers):
        """Adds P V of 32 tokens. probabilities: the lane's, fp32 [4 tokens][column]. headers: the result of
        :meth:`load_scales`.
        """
        operands = self._probability_operands(state, probabilities, headers)
        for pair in range(2):
            for unit in range(self.tile.v_units):
                words = [
                    [
                        self._load_codes(
                            state.lane_offsets + tile_address,
                            block_offset + self._code_offset(2 * pair + half, parity, unit),
                        )
                        for parity in range(2)
                    ]
                    for half in range(2)
                ]
                self._accumulate_unit(state, unit, words, operands[pair][self.group_of(unit)])

    def _probability_operands(self, state: State, probabilities, headers):
        """Makes the B operands of P * scale, [pair][group][block]; the MMAs contract over tokens."""
        blocks = range(self.config.mainloop.blocks_per_warp)
        result = []
        for pair in range(2):
            groups = []
            for group in range(self.num_groups):
                operand: list[list[Any]] = [[] for _ in blocks]
                for j in (2 * pair, 2 * pair + 1):
                    scale = self.scale(headers[j][group])
                    self.add_header(state, group, headers[j][group], probabilities[j])
                    for block in blocks:
                        low, high = probabilities[j][2 * block : 2 * block + 2]
                        operand[block].append(ptx.transpose_8x8(ptx.pack_f16x2(low * scale, high * scale)))
                groups.append(operand)
            result.append(groups)
        return result

    def _code_offset(self, j: int, parity: int, unit: int) -> int:
        words = self.tile.header_words + self.tile.v_unit_words * unit
        return WORD_BYTES * (self._row_offset(j, parity) + words)

    def _accumulate_unit(self, state: State, unit: int, words, operands):
        """Adds P V of one unit of columns. words: the codes of four tokens, [half][parity]. operands: the B operand of
        each block of queries."""
        rows = [self.code_pairs(state, *pair) for pair in words]  # [half][output row of the lane]
        for mma in range(self.unit_mmas):
            if self.lane_codes == 1:
                a = [rows[0][0], Uint32(0), rows[1][0], Uint32(0)]
            else:
                a = [rows[0][2 * mma], rows[0][2 * mma + 1], rows[1][2 * mma], rows[1][2 * mma + 1]]
            self.multiply_add(state, unit * self.unit_mmas + mma, a, operands, "f16")

    def outputs(self, state: State):
        """Returns the warp's sums P V: a list of (column of accumulators, first column of V, fp32 values of consecutive
        columns of V). The column of accumulators stands for a query.
        """
        terms = self.output_terms(state)
        result = []
        for unit in range(self.tile.v_units):
            first_column = self.tile.v_column(unit, state.g, 0)
            for column in range(self.config.columns):
                values = [
                    self.output(state.accumulators[self.accumulator(unit, code, column)], unit, code, column, terms)
                    for code in range(self.lane_codes)
                ]
                result.append((column, first_column, values))
        return result

    def output_terms(self, state: State):
        """Returns terms that several calls of :meth:`output` share; none in this class."""

    def output(self, value, unit: int, code: int, column: int, terms):
        """Returns the output that an accumulator's value stands for."""
        return value


def _multiply(dot, a, b):
    """Issues one MMA over 16 columns, or over 8 columns if ``b`` has one register."""
    return (ptx.mma_m16n8k16 if len(b) == 2 else ptx.mma_m16n8k8)(dot, a, b, dtype="f16")
