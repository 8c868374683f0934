"""Loads bare elements of swizzled tiles. bf16 and fp16 elements are MMA operands without decoding. See
:mod:`layouts.kv.swizzled_tile`."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64

from cute_kernels.attention.decode_config import DecodeConfig, tiles_of
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.attention.readers.common import Query, State, ValueReader, load_queries
from cute_kernels.device import ptx
from layouts.kv.swizzled_tile import CHUNK_BYTES, LOAD_CHUNKS, MATRIX, SwizzledTile
from layouts.kv.tile import BLOCK_TOKENS

K_STEP = 16  # contraction of one MMA
_MMA_DTYPES = {"bf16": "bf16", "fp16": "f16"}


class SwizzledLoads:
    """The ldmatrix loads of a block's rows. Each load takes two chunks of 16 tokens' rows."""

    config: DecodeConfig
    tile: SwizzledTile
    transposed: bool

    def _take_tile(self, config: DecodeConfig, operand: int):
        tile = tiles_of(config)[operand]
        assert isinstance(tile, SwizzledTile)
        self.config, self.tile, self.transposed = config, tile, operand == 1
        self.num_loads = -(-tile.num_chunks // LOAD_CHUNKS)  # per 16 tokens
        self.panel_loads = tile.row_chunks // LOAD_CHUNKS

    def block_offset(self, block: int) -> int:
        """Returns the offset in bytes of the ``block``-th block of tokens in a slice."""
        return block * BLOCK_TOKENS * self.tile.row_bytes

    def lane_offsets(self, lane: Int32, head: Int32, slice_index: Int32) -> list[Any]:
        """Returns a lane's ldmatrix addresses, as offsets in bytes from the tile. There is one offset for each load of
        a panel, since the swizzle makes the distances between loads unequal. If queries are shared, there is only the
        offset of the first load, from which `load` computes the others.
        """
        tile = self.tile
        token, chunk = (tile.v_row if self.transposed else tile.k_row)(lane)
        base = Int32(head * tile.head_bytes) + slice_index * (self.config.slice_tokens * tile.row_bytes)
        row = base + token * tile.row_bytes
        loads = range(1 if self.config.shares_queries else min(self.panel_loads, self.num_loads))
        return [ptx.pinned(row + ((chunk + LOAD_CHUNKS * i) ^ tile.swizzle(token)) * CHUNK_BYTES) for i in loads]

    def load(self, lane_offsets, tile_address: Int32, block_offset: int, pair: int, load: int) -> list[Any]:
        """Loads four 8 x 8 matrices of 16-bit units: two chunks of 16 tokens, which are row halves 2 * pair and 2 *
        pair + 1."""
        offset = block_offset + self.tile.load_offset(pair, load)
        place = load % self.panel_loads
        if place < len(lane_offsets):
            address = lane_offsets[place] + tile_address
        else:
            # Rows are aligned to panels: chunks of a row differ in bits of the address, swizzled or not.
            address = (lane_offsets[0] + tile_address) ^ (place * LOAD_CHUNKS * CHUNK_BYTES)
        return ptx.load_matrix_x4(address, offset, transpose=self.transposed)


class DenseKeyReader(SwizzledLoads):
    """The key reader of 16-bit rows. Queries and keys are MMA operands as they are loaded."""

    def __init__(self, config: DecodeConfig):
        self._take_tile(config, 0)
        self.dtype = _MMA_DTYPES[config.k.format]

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32) -> State:
        """Makes the registers that a warp keeps throughout a unit: lane offsets of ldmatrix. ``take_query`` adds the
        queries.
        """
        state = State(lane)
        state.lane_offsets = self.lane_offsets(lane, head, slice_index)
        return state

    def fetch_query(self, addresses, given_scale: Int64, lane: Int32) -> Query:
        """Starts loading the lane's B operands, in every block of queries. addresses: for each block, the address of
        the lane's query head.
        """
        column = 2 * (lane % 4)
        places = range(2 * self.num_loads)

        def load(address, place: int):
            return load_queries(self.config, address + 2 * column, 2 * MATRIX * place, 1)[0]

        return Query([[load(address, place) for place in places] for address in addresses])

    def take_query(self, state: State, query: Query, softmax_scale: Float32):
        """Keeps the queries. The loaded words already are B operands."""
        state.score_scale = softmax_scale * ptx.LOG2_E
        state.query = query.words

    def scores(self, state: State, tile_address: Int32, block_offset: int):
        """Returns the lane's scores in a block of 32 tokens, as [4 tokens][column]. The caller multiplies them by
        ``state.score_scale``.
        """
        result = []
        for pair in range(2):
            dots = [[Float32(0.0)] * 4 for _ in state.query]
            for step in range(self.num_loads):
                a = self.load(state.lane_offsets, tile_address, block_offset, pair, step)
                dots = [
                    ptx.mma_m16n8k16(dot, a, query[2 * step : 2 * step + 2], dtype=self.dtype)
                    for dot, query in zip(dots, state.query, strict=True)
                ]
            result += [[value for dot in dots for value in dot[2 * half : 2 * half + 2]] for half in range(2)]
        return result


class DenseValueReader(SwizzledLoads, ValueReader):
    """The value reader of 16-bit rows: probabilities are rounded to the rows' dtype."""

    def __init__(self, config: DecodeConfig):
        self._take_tile(config, 1)
        self.dtype = _MMA_DTYPES[config.v.format]
        self.pack = of_name(config.v.format).pack
        self.num_accumulators = 4 * self.num_loads

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32, given_scale: Int64, keys: State) -> State:
        """Makes the registers that a warp keeps throughout a unit: lane offsets of ldmatrix, accumulators."""
        state = State(lane)
        state.lane_offsets = self.lane_offsets(lane, head, slice_index)
        state.accumulators = self.make_accumulators()
        return state

    def accumulate(self, state: State, tile_address: Int32, block_offset: int, probabilities, headers):
        """Adds P V of 32 tokens to the accumulators. probabilities: the lane's, fp32 [4 tokens][column]."""
        blocks = range(self.config.mainloop.blocks_per_warp)
        operands = [[ptx.transpose_8x8(self.pack(*row[2 * b : 2 * b + 2])) for row in probabilities] for b in blocks]
        for pair in range(2):
            for step in range(self.num_loads):
                a = self.load(state.lane_offsets, tile_address, block_offset, pair, step)
                self.multiply_add(state, step, a, [rows[2 * pair : 2 * pair + 2] for rows in operands], self.dtype)

    def outputs(self, state: State):
        """Returns the warp's sums P V: a list of (column of accumulators, first column of V, fp32 values of consecutive
        columns of V). The column of accumulators stands for a query.
        """
        return [
            (column, K_STEP * step + MATRIX * half + state.g, [state.accumulators[self.place(step, half, column)]])
            for step in range(self.num_loads)
            for half in range(2)
            for column in range(self.config.columns)
        ]
