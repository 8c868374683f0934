"""bf16 and fp16 rows to MMA operands: ldmatrix from swizzled tiles, nothing to decode."""

from __future__ import annotations

from cutlass import Float32, Int32, Int64

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.readers.common import Query, State, ValueReader, load_queries
from cute_kernels.attention.readers.swizzled import SwizzledLoads
from cute_kernels.device import ptx
from layouts.kv.swizzled_tile import MATRIX

K_STEP = 16  # contraction of one MMA
_MMA_DTYPES = {"bf16": "bf16", "fp16": "f16"}


class DenseKeyReader(SwizzledLoads):
    """Scores of 16-bit rows: queries and keys are operands as they come."""

    def __init__(self, config: DecodeConfig):
        self._take_tile(config, 0)
        self.dtype = _MMA_DTYPES[config.k_format]

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32) -> State:
        """Registers that live as long as the warp: lane offsets of ldmatrix; ``take_query`` adds the queries."""
        state = State(lane)
        state.lane_offsets = self.lane_offsets(lane, head, slice_index)
        return state

    def fetch_query(self, addresses, given_scale: Int64, lane: Int32) -> Query:
        """Starts loading the lane's B operands of its query head in every block; addresses: of those heads."""
        column = 2 * (lane % 4)
        places = range(2 * self.num_loads)

        def load(address, place: int):
            return load_queries(self.config, address + 2 * column, 2 * MATRIX * place, 1)[0]

        return Query([[load(address, place) for place in places] for address in addresses])

    def take_query(self, state: State, query: Query, softmax_scale: Float32):
        """The queries are B operands as they come."""
        state.score_scale = softmax_scale * ptx.LOG2_E
        state.query = query.words

    def scores(self, state: State, tile_address: Int32, block_offset: int):
        """Scores of 32 tokens without ``state.score_scale``: [j][column]."""
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
    """P V of 16-bit rows: the probabilities are rounded to the rows' dtype."""

    def __init__(self, config: DecodeConfig):
        self._take_tile(config, 1)
        self.dtype = _MMA_DTYPES[config.v_format]
        self.pack = {"bf16": ptx.pack_bf16x2, "fp16": ptx.pack_f16x2}[config.v_format]
        self.num_accumulators = 4 * self.num_loads

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32, given_scale: Int64, keys: State) -> State:
        """Registers that live as long as the warp: lane offsets of ldmatrix, accumulators."""
        state = State(lane)
        state.lane_offsets = self.lane_offsets(lane, head, slice_index)
        state.accumulators = self.make_accumulators()
        return state

    def accumulate(self, state: State, tile_address: Int32, block_offset: int, probabilities, headers):
        """Adds P V of 32 tokens; probabilities [j][column] in fp32."""
        blocks = range(self.config.blocks_per_warp)
        operands = [[ptx.transpose_8x8(self.pack(*row[2 * b : 2 * b + 2])) for row in probabilities] for b in blocks]
        for pair in range(2):
            for step in range(self.num_loads):
                a = self.load(state.lane_offsets, tile_address, block_offset, pair, step)
                self.multiply_add(state, step, a, [rows[2 * pair : 2 * pair + 2] for rows in operands], self.dtype)

    def outputs(self, state: State):
        """The warp's sums P V: a list of (column, first column of head_dim, consecutive fp32 values)."""
        return [
            (column, K_STEP * step + MATRIX * half + state.g, [state.accumulators[self.place(step, half, column)]])
            for step in range(self.num_loads)
            for half in range(2)
            for column in range(self.config.columns)
        ]
