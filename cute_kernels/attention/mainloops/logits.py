"""Turns raw scores into the softmax's logits. Score options change scores by their terms
(`cute_kernels.formats.scores.terms`), and masks hide keys from a query.

A request's queries are its last tokens: query ``place`` of q_len has position length - q_len + place. Logits are
multiplied by log2 e, since the softmax uses exp2 alone.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.attention.cta import FeatureValues, Place, Roles
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.device import ptx
from cute_kernels.formats.scores.terms import QueryColumn, ScoreState, ScoreTerms


class Logits:
    """The conversion of a block's raw scores to logits, for the features of a configuration."""

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.features = config.features
        self.columns = config.columns
        self.terms = ScoreTerms(config.features, config.columns)
        self.transforms, self.asks = self.terms.change_scores, self.terms.load
        self.shifts = self.features.shift and self.features.soft_cap

    def open(self, values: FeatureValues, work, roles, t, softmax_scale):
        """Makes the state that a warp keeps for a unit: the inputs that score terms need for each query. roles, t:
        identify the lane's queries.
        """
        state = LogitState()
        state.values, state.length, state.q_len = values, work.length, work.place.shape.q_len
        state.place, state.roles, state.t = work.place, roles, t
        if self.terms.need_positions:
            state.positions = self.positions(state)
        self.terms.open(state, work, self.query_columns(state), softmax_scale)
        return state

    def query_columns(self, state) -> list[QueryColumn]:
        """Returns the queries of the lane's columns."""
        # Computed where they are needed, on the way to a few tiles: no registers hold them through the loop.
        t = ptx.pinned(state.t) if self.features.queries else state.t
        return [state.place.column(self.config, state.roles, t, column) for column in range(self.columns)]

    def positions(self, state) -> list[Int32]:
        """Returns the position in the request of each column's query."""
        columns = self.query_columns(state)
        return state.positions or [state.length - state.q_len + column.place for column in columns]

    def is_masked(self, state, token, tile_tokens: int):
        """Returns whether some query does not see some key of the tile that begins with ``token``."""
        stop = state.length - (state.q_len - 1) if self.features.causal else state.length
        return self.terms.may_hide(state, token, token + tile_tokens > stop)

    @cute.jit
    def apply(self, state, s, score_scale: Float32, tokens, masked):
        """Turns raw scores s [rows x columns] into logits, in place, except for a factor. Returns the factor, by which
        the caller has to multiply s; it is 1 if score options have been applied.

        tokens: the key position of each row. masked: whether some key of the tile is hidden from some query.
        """
        if const_expr(self.transforms):
            for j in cutlass.range_constexpr(len(tokens)):
                for column in cutlass.range_constexpr(self.columns):
                    place = self.columns * j + column
                    if const_expr(self.shifts):
                        x = ptx.fma(s[place], score_scale, state.kept["shift"][column])
                    else:
                        x = s[place] * score_scale
                    s[place] = self.terms.change(state, (j, column), x, tokens[j])
        if masked:
            self.hide(state, s, tokens)
        return Float32(1.0) if const_expr(self.transforms) else score_scale

    @cute.jit
    def hide(self, state, s, tokens):
        """Sets logits to -inf where the column's query does not see the row's key."""
        positions = self.positions(state)
        for j in cutlass.range_constexpr(len(tokens)):
            for column in cutlass.range_constexpr(self.columns):
                if self.is_hidden(state, positions[column], tokens[j]):
                    s[self.columns * j + column] = Float32(-Float32.inf)

    def ask(self, state, tokens):
        """Starts loading the inputs that score options need for keys at positions ``tokens``."""
        self.terms.ask(state, tokens)

    def is_hidden(self, state, position, token):
        """Returns whether the key at position ``token`` is hidden from the query at ``position``."""
        hidden = token > position if const_expr(self.features.causal) else token >= state.length
        return self.terms.hides(state, position, token, hidden)


class LogitState(ScoreState):
    """The state of score options for the lane's queries."""

    values: FeatureValues
    q_len: Int32
    place: Place
    roles: Roles
    t: Int32
