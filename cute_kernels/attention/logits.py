"""From raw scores to the softmax's logits: shift, soft cap, ALiBi, bias, and which keys a query sees.

A request's queries are its last tokens: query ``place`` of q_len stands at position length - q_len + place. Logits are
in powers of two (times log2 e), since the softmax uses exp2 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.config import DecodeConfig
from cute_kernels.attention.readers.common import load_float
from cute_kernels.device import numbers, ptx
from cute_kernels.device.types import RegisterTensor

if TYPE_CHECKING:
    from cute_kernels.attention.place import Place, Roles

BIAS_BYTES = {"fp32": 4, "bf16": 2}
BLOCK_ROWS = 4  # of scores that a lane has of a block


@dataclass(frozen=True)
class FeatureValues:
    """Run-time values of the features that a variant has.

    window: keys that a query sees, itself included. soft_cap: natural units. sinks, alibi_slopes: addresses of fp32
    [num_q_heads]. bias: address; bias_strides: elements from one request, query, head and key position to the next.
    Addresses of fp32 shift [batch, q_len, num_q_heads] and out_factor [num_kv_heads, v_head_dim], None where nothing is
    transformed.
    """

    window: Int32
    soft_cap: Float32
    sinks: Int64
    alibi_slopes: Int64
    bias: Int64
    bias_strides: tuple[Int64, Int64, Int64, Int64]
    shift: Int64 | None = None
    out_factor: Int64 | None = None


@dataclass(frozen=True)
class QueryColumn:
    """The query of an accumulator column: its place among the request's queries, and its head; run-time integers."""

    place: Int32
    head: Int32


class Logits:
    """Turns a block's raw scores into logits, for the features of a configuration."""

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.features = config.features
        self.columns = config.columns
        # Scores that are not transformed stay raw: the softmax scales them in the same instruction that shifts them.
        self.transforms = self.features.soft_cap or self.features.alibi or self.features.bias is not None
        # A softmax is the same whatever is added to all scores of a query: only a cap needs the shift at once.
        self.shifts = self.features.shift and self.features.soft_cap

    def open(self, values: FeatureValues, work, roles, t, softmax_scale):
        """What a warp keeps of a unit: per column its query's slope and position, its shift, or where its bias begins,
        if needed for every score, and the bias of the next block. roles, t: which queries are the lane's."""
        state = LogitState()
        state.values, state.length, state.q_len = values, work.length, work.place.shape.q_len
        state.place, state.roles, state.t = work.place, roles, t
        if const_expr(self.features.alibi):
            state.positions = self.positions(state)
        state.slopes, state.bias_rows, state.shifts = [], [], []
        if const_expr(self.features.bias is not None):
            state.bias = cute.make_rmem_tensor(BLOCK_ROWS * self.columns, Uint32)
        for column in self.query_columns(state):
            if const_expr(self.features.alibi):
                slope = load_float(values.alibi_slopes + Int64(column.head) * 4)
                state.slopes.append(slope * ptx.LOG2_E)
            if const_expr(self.shifts):
                row = work.output_row(column.place * work.place.shape.num_q_heads + column.head)
                state.shifts.append(load_shift(values.shift, row) * (softmax_scale * ptx.LOG2_E))
            if const_expr(self.features.bias is not None):
                strides = values.bias_strides
                offset = Int64(work.request) * strides[0] + Int64(column.place) * strides[1]
                offset = offset + Int64(column.head) * strides[2]
                state.bias_rows.append(values.bias + offset * BIAS_BYTES[self.features.bias or ""])
        return state

    def query_columns(self, state) -> list[QueryColumn]:
        """The queries of the lane's columns."""
        # Computed where they are needed, on the way to a few tiles: no registers hold them through the loop.
        t = ptx.pinned(state.t) if self.features.queries else state.t
        return [state.place.column(self.config, state.roles, t, column) for column in range(self.columns)]

    def positions(self, state) -> list[Int32]:
        """Where the columns' queries stand in their request."""
        columns = self.query_columns(state)
        return state.positions or [state.length - state.q_len + column.place for column in columns]

    def is_masked(self, state, token, tile_tokens: int):
        """Whether some query does not see some key of the tile that begins with ``token``."""
        stop = state.length - (state.q_len - 1) if self.features.causal else state.length
        masked = token + tile_tokens > stop
        if self.features.window:
            # The last query is the first to lose sight of a key.
            masked = masked | (token < state.length - state.values.window)
        return masked

    @cute.jit
    def apply(self, state, s, score_scale: Float32, tokens, masked):
        """Logits in place of raw scores s [rows x columns]; ``tokens``: key position of each row.

        Returns the factor that is left to multiply. masked: whether some key of the tile is hidden from some query.
        """
        if const_expr(self.transforms):
            for j in cutlass.range_constexpr(len(tokens)):
                for column in cutlass.range_constexpr(self.columns):
                    place = self.columns * j + column
                    if const_expr(self.shifts):
                        x = ptx.fma(s[place], score_scale, state.shifts[column])
                    else:
                        x = s[place] * score_scale
                    s[place] = self.transform(state, j, column, x, tokens[j])
        if masked:
            self.hide(state, s, tokens)
        return Float32(1.0) if const_expr(self.transforms) else score_scale

    @cute.jit
    def hide(self, state, s, tokens):
        """Logits of -inf for the keys that their query does not see."""
        positions = self.positions(state)
        for j in cutlass.range_constexpr(len(tokens)):
            for column in cutlass.range_constexpr(self.columns):
                if self.is_hidden(state, positions[column], tokens[j]):
                    s[self.columns * j + column] = Float32(-Float32.inf)

    def transform(self, state, j: int, column: int, x, token):
        """Soft cap, then ALiBi, then bias, of a lane's row j."""
        if const_expr(self.features.soft_cap):
            # cap tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)): finite at both ends.
            cap = state.values.soft_cap * ptx.LOG2_E
            e = ptx.exp2(x * (2.0 * ptx.LOG2_E * ptx.reciprocal(cap)))
            x = ptx.fma(ptx.reciprocal(e + 1.0), -2.0 * cap, cap)
        if const_expr(self.features.alibi):
            x = ptx.fma(Float32(token - state.positions[column]), state.slopes[column], x)
        if const_expr(self.features.bias is not None):
            x = ptx.fma(self.bias_of(state.bias[self.columns * j + column]), Float32(ptx.LOG2_E), x)
        return x

    def ask_bias(self, state, tokens):
        """Starts loading the bias of a block's keys at positions ``tokens``."""
        for j, token in enumerate(tokens):
            for column in range(self.columns):
                state.bias[self.columns * j + column] = self.load_bias(state, column, token)

    def load_bias(self, state, column: int, token) -> Uint32:
        """The bias of a key, its bits; of the last one for tokens past the request's end, which are hidden."""
        token = cutlass.max(cutlass.min(token, state.length - 1), 0)
        size = BIAS_BYTES[self.features.bias or ""]
        address = state.bias_rows[column] + Int64(token) * (state.values.bias_strides[3] * size)
        return numbers.load_global_part(address, 0, 2) if size == 2 else ptx.load_global_words(address, 0, 1)[0]

    def bias_of(self, word: Uint32):
        """A bias in fp32. Where it is used and not where it is loaded: what computes with a load waits for it."""
        return (word << 16 if self.features.bias == "bf16" else word).bitcast(Float32)

    def is_hidden(self, state, position, token):
        """Whether the query at ``position`` does not see a key."""
        hidden = token > position if const_expr(self.features.causal) else token >= state.length
        if const_expr(self.features.window):
            hidden = hidden | (token <= position - state.values.window)
        return hidden


def load_shift(base, row):
    """The shift of a query; the kernel before this one may have written it."""
    return ptx.load_global_words(base + row * 4, 0, 1, constant=False)[0].bitcast(Float32)


class LogitState:
    values: FeatureValues
    bias: RegisterTensor[Uint32]  # of variants that have one: the next block's, as it is in memory
    length: Int32
    q_len: Int32
    place: Place
    roles: Roles
    t: Int32
    positions: list[Int32] | None = None
    slopes: list[Float32]
    shifts: list[Float32]
    bias_rows: list[Int64]
