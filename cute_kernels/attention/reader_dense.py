"""bf16 and fp16 rows to MMA operands: ldmatrix from swizzled tiles, nothing to decode."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.attention.config import DecodeConfig
from cute_kernels.attention.tiles import dense_tile
from cute_kernels.device import ptx
from layouts.kv.dense_tile import CHUNK_BYTES, MATRIX, PANEL_COLUMNS, ROW_BYTES
from layouts.kv.tile import BLOCK_TOKENS

K_STEP = 16  # contraction of one MMA
CHUNKS_PER_STEP = K_STEP // MATRIX
STEPS_PER_PANEL = PANEL_COLUMNS // K_STEP


class DenseReader:
    """Per-warp operations on 16-bit tiles, with the same methods as :class:`reader_int4.Int4Reader`."""

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.tile = dense_tile(config)
        self.dtype = {"bf16": "bf16", "fp16": "f16"}[config.kv_format]
        self.pack = {"bf16": ptx.pack_bf16x2, "fp16": ptx.pack_f16x2}[config.kv_format]
        self.steps = config.head_dim // K_STEP
        self.num_accumulators = 4 * self.steps

    # -- setup ----------------------------------------------------------------------------------------------------

    def make_state(self, lane: Int32, head: Int32, slice_index: Int32):
        """Registers that live as long as the warp: lane offsets of ldmatrix, queries, accumulators."""
        state = _State()
        base = Int32(head * self.tile.head_bytes) + slice_index * (self.config.slice_tokens * ROW_BYTES)
        state.base, state.lane, state.g, state.t = base, lane, lane // 4, lane % 4
        place: Any = lane  # the tile's rules take Python ints and run-time ones alike
        k_token, k_chunk = self.tile.k_row(place)
        v_token, v_chunk = self.tile.v_row(place)
        state.k_lane = self._lane_offsets(base, k_token, k_chunk)
        state.v_lane = self._lane_offsets(base, v_token, v_chunk)
        state.accumulators = cute.make_rmem_tensor(self.num_accumulators, Float32)
        state.accumulators.fill(0.0)
        return state

    def _lane_offsets(self, base: Int32, token: Any, chunk: Any):
        """A lane's ldmatrix address per MMA step of a panel; the swizzle makes it more than a sum."""
        return [
            ptx.pinned(base + token * ROW_BYTES + ((chunk + CHUNKS_PER_STEP * step) ^ (token % MATRIX)) * CHUNK_BYTES)
            for step in range(STEPS_PER_PANEL)
        ]

    def fetch_query(self, q: Int64, row: Int32, first_query: Int32, group: Int32, lane: Int32):
        """Starts loading the lane's B operands of its query head: one word per register.

        q: address of the queries; row: first query head of the KV head among all of them. Lanes past the last query
        head take that one: their results are never stored.
        """
        head = row + cutlass.min(first_query + lane // 4, group - 1)
        address = q + (Int64(head) * self.config.head_dim + 2 * (lane % 4)) * 2
        return [ptx.load_global_words(address, 2 * MATRIX * i, 1)[0] for i in range(2 * self.steps)]

    def take_query(self, state, words, softmax_scale: Float32):
        """The queries are B operands as they come."""
        state.score_scale = softmax_scale * ptx.LOG2_E
        state.query = words

    def block_offset(self, block: int) -> int:
        """Bytes from a slice's first block of tokens to another."""
        return block * BLOCK_TOKENS * ROW_BYTES

    def token(self, state, j: int):
        """Place within its block of the token that the lane holds in row half j of the scores."""
        return state.g + MATRIX * j

    # -- scores ---------------------------------------------------------------------------------------------------

    def scores(self, state, tile_address: Int32, block_offset: int):
        """Raw scores of 32 tokens x 8 heads: [j][column], token g + 8 j, head 2t + column."""
        result = []
        for pair in range(2):
            dot = [Float32(0.0)] * 4
            for step in range(self.steps):
                a = self._load(state.k_lane, tile_address, block_offset, pair, step, transpose=False)
                dot = ptx.mma_m16n8k16(dot, a, state.query[2 * step : 2 * step + 2], dtype=self.dtype)
            result += [dot[0:2], dot[2:4]]
        return result

    def _load(self, lane_offsets, tile_address: Int32, block_offset: int, pair: int, step: int, *, transpose: bool):
        panel, within = divmod(step, STEPS_PER_PANEL)
        offset = block_offset + pair * K_STEP * ROW_BYTES + panel * self.tile.panel_bytes
        return ptx.load_matrix_x4(lane_offsets[within] + tile_address, offset, transpose=transpose)

    # -- values ---------------------------------------------------------------------------------------------------

    def load_value_scales(self, state, tile_address: Int32, block_offset: int):
        """16-bit rows have no scales."""

    def log_scale(self, headers, j: int):
        return None

    @cute.jit
    def mask_values(self, state, tile_address: Int32, block_offset: int, headers, remaining: Int32):
        """Zeroes the rows of tokens from ``remaining`` on in shared memory: 0 * NaN would be NaN."""
        chunks = ROW_BYTES // CHUNK_BYTES
        for i in cutlass.range_constexpr(BLOCK_TOKENS * chunks // 32):
            token, chunk = i * (32 // chunks) + state.lane // chunks, state.lane % chunks
            if token >= remaining:
                address = tile_address + state.base + token * ROW_BYTES + chunk * CHUNK_BYTES
                for panel in cutlass.range_constexpr(self.tile.num_panels):
                    ptx.store_shared_zero16(address, block_offset + panel * self.tile.panel_bytes)
        cute.arch.sync_warp()

    def rescale(self, state, factors):
        """Multiplies everything accumulated by a factor per head column."""
        for i in range(0, self.num_accumulators, 2):
            for column in range(2):
                state.accumulators[i + column] = state.accumulators[i + column] * factors[column]

    def recentre(self, state):
        """Values of both signs need no centring."""

    def accumulate(self, state, tile_address: Int32, block_offset: int, probabilities, headers):
        """Adds P V of 32 tokens; probabilities [j][column] in fp32."""
        operand = [ptx.transpose_8x8(self.pack(*row)) for row in probabilities]
        for pair in range(2):
            for step in range(self.steps):
                a = self._load(state.v_lane, tile_address, block_offset, pair, step, transpose=True)
                total = [state.accumulators[4 * step + i] for i in range(4)]
                total = ptx.mma_m16n8k16(total, a, operand[2 * pair : 2 * pair + 2], dtype=self.dtype)
                for i in range(4):
                    state.accumulators[4 * step + i] = total[i]

    # -- results --------------------------------------------------------------------------------------------------

    def outputs(self, state):
        """The warp's sums P V: a list of (head column, first column of head_dim, consecutive fp32 values)."""
        result = []
        for step in range(self.steps):
            for half in range(2):
                for column in range(2):
                    value = state.accumulators[4 * step + 2 * half + column]
                    result.append((column, K_STEP * step + MATRIX * half + state.g, [value]))
        return result


class _State:
    """Registers of one warp; a plain namespace filled by :meth:`DenseReader.make_state` and ``take_query``."""

    base: Any
    lane: Any
    g: Any
    t: Any
    k_lane: list[Any]
    v_lane: list[Any]
    accumulators: Any
    score_scale: Any
    query: list[Any]
