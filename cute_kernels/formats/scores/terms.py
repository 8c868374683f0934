"""The device code of score options. A term keeps values for each of a lane's queries, and changes scores.

Logits are multiplied by log2 e, since the softmax uses exp2 alone. Decode and extend attention call the terms of a
configuration in the order in which they act on scores. In both, a lane's accumulators are keys (rows) times queries
(columns). ``features`` are `cute_kernels.formats.scores.features.Features`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.device.loads import load_float
from cute_kernels.device.types import RegisterTensor
from cute_kernels.formats.kv import load_code
from cute_kernels.formats.scores import options_in
from cute_kernels.formats.scores.base import Features

BIAS_BYTES = {"fp32": 4, "bf16": 2}
BLOCK_ROWS = 4  # of scores that a lane of decode attention has of a block


@dataclass(frozen=True)
class QueryColumn:
    """The query of an accumulator column: the index among the request's queries, and the head; run-time integers."""

    place: Int32
    head: Int32


class ScoreState:
    """The run-time state of score terms: values of the launch, and of a lane's queries.

    Attributes:
        values: values of the launch: window, soft_cap, the addresses alibi_slopes and sinks, and ``tensors`` of
            registered options by name. With a bias or a shift, also its fields of
            :class:`cute_kernels.attention.cta.FeatureValues`.
        length: the position of the last query, plus 1.
        positions: for each column, the position of its query in the request; None unless a term needs it.
        kept: for each option's name, a list of the values that its term keeps, one for each column.
    """

    values: Any
    length: Int32
    positions: list[Int32] | None = None
    kept: dict[str, list[object]]
    bias: RegisterTensor[Uint32]  # of variants that have one


class ScoreTerm:
    """The base of terms. In this class, no method changes a score or hides a key.

    Attributes:
        features: the variant's features.
        columns: number of a lane's queries.
        rows: number of a lane's keys in a block.
    """

    changes_scores = False
    """Whether the term changes single scores. If no term does, scores stay unscaled and the softmax scales them."""

    needs_positions = False
    """Whether the term needs ``state.positions``."""

    def __init__(self, features: Features, columns: int, rows: int = BLOCK_ROWS):
        self.features, self.columns, self.rows = features, columns, rows

    def start(self, state: ScoreState) -> None:
        """Prepares the state for new queries, before `open` is called for each of them."""

    def open(self, state: ScoreState, work, query: QueryColumn, softmax_scale: Float32) -> Any:
        """Returns the value that the term keeps for a query; it is passed to `change` as ``kept``. ``work.request`` is
        the index of the query's request.
        """
        return None

    def change(self, state: ScoreState, kept: object, place: tuple[int, int], x: Float32, token: Int32) -> Float32:
        """Returns the changed score. x: the score times log2 e, after earlier terms. place: (row of the block, column)
        of the score.
        """
        return x

    def ask(self, state: ScoreState, kept: list[object], tokens: list[Int32]) -> None:
        """Starts loading the inputs that `change` needs for the keys at ``tokens``. Decode attention calls it one block
        ahead; extend attention calls it before the block's first `change`.

        kept: the values that the term keeps, by column.
        """

    def reach(self, values, queries: Int32 | int) -> Any:
        """Returns how far back the term lets ``queries`` consecutive queries see, as a number of tokens; None if they
        see all tokens. A token at least that many tokens before the last of these queries is hidden from all of them.

        Tiles with only such tokens are skipped, and rows of such tokens may hold anything. values: values of the
        launch, which in extend attention do not include the tensors of registered options.
        """
        return None

    def may_hide(self, state: ScoreState, token: Int32) -> Any:
        """Returns whether the term hides at least one key of a tile from at least one query. token: the tile's first
        token. Returns None if the term never hides a key.
        """
        return None

    def hides(self, state: ScoreState, position: Int32, token: Int32) -> Any:
        """Returns whether the term hides the key at ``token`` from the query at ``position``; None if the term never
        hides a key."""
        return None


class ShiftTerm(ScoreTerm):
    """Keeps a query's shift, which the mainloop adds to scores before a soft cap. Without a cap, the shift is not
    added: it is the same for all scores of a query, so the softmax does not depend on it."""

    def open(self, state, work, query, softmax_scale):
        if not self.features.soft_cap:
            return None
        row = work.output_row(query.place * work.place.shape.num_q_heads + query.head)
        return load_shift(state.values.shift, row) * (softmax_scale * ptx.LOG2_E)


class SoftCapTerm(ScoreTerm):
    """Computes cap tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)): finite at both ends."""

    changes_scores = True

    def change(self, state, kept, place, x, token):
        cap = state.values.soft_cap * ptx.LOG2_E
        e = ptx.exp2(x * (2.0 * ptx.LOG2_E * ptx.reciprocal(cap)))
        return ptx.fma(ptx.reciprocal(e + 1.0), -2.0 * cap, cap)


class AlibiTerm(ScoreTerm):
    """Adds the query head's slope times (key position - query position); keeps the slope of each query."""

    changes_scores = needs_positions = True

    def open(self, state, work, query, softmax_scale):
        slope = load_float(state.values.alibi_slopes + Int64(query.head) * 4)
        return slope * ptx.LOG2_E

    def change(self, state, kept, place, x, token):
        assert state.positions is not None
        return ptx.fma(Float32(token - state.positions[place[1]]), kept, x)


class SinksTerm(ScoreTerm):
    """Does nothing: `combine.merge` of attention loads the sink and adds it. A prefetch here would take more time than
    it saves."""


class BiasTerm(ScoreTerm):
    """Adds biases; keeps the address of each query's biases, and the biases of the next block."""

    changes_scores = True

    @property
    def num_bytes(self) -> int:
        return BIAS_BYTES[self.features.bias or ""]

    def start(self, state):
        state.bias = cute.make_rmem_tensor(self.rows * self.columns, Uint32)

    def open(self, state, work, query, softmax_scale):
        strides = state.values.bias_strides
        offset = Int64(work.request) * strides[0] + Int64(query.place) * strides[1]
        offset = offset + Int64(query.head) * strides[2]
        return state.values.bias + offset * self.num_bytes

    def change(self, state, kept, place, x, token):
        row, column = place
        return ptx.fma(self.number(state.bias[self.columns * row + column]), Float32(ptx.LOG2_E), x)

    def ask(self, state, kept, tokens):
        for j, token in enumerate(tokens):
            for column in range(self.columns):
                state.bias[self.columns * j + column] = self.load(state, kept[column], token)

    def load(self, state, row, token) -> Uint32:
        """Loads the bits of a key's bias. Tokens beyond the request's end are hidden and get the last key's bias."""
        token = cutlass.max(cutlass.min(token, state.length - 1), 0)
        size = self.num_bytes
        address = row + Int64(token) * (state.values.bias_strides[3] * size)
        return numbers.load_global_part(address, 0, 2) if size == 2 else ptx.load_global_words(address, 0, 1)[0]

    def number(self, word: Uint32):
        """Converts a bias to fp32, when the bias is used. A conversion right after the load would wait for the load."""
        return (word << 16 if self.features.bias == "bf16" else word).bitcast(Float32)


class WindowTerm(ScoreTerm):
    """Hides keys farther back than the window."""

    @staticmethod
    def reach_of(window, queries):
        """Returns the result of :meth:`reach` for a window of width ``window``. Kernels that take windows of any width
        call it."""
        return window + queries - 1

    def reach(self, values, queries):
        return self.reach_of(values.window, queries)

    def may_hide(self, state, token):
        # The last query is the first to lose sight of a key.
        return token < state.length - state.values.window

    def hides(self, state, position, token):
        return token <= position - state.values.window


def _nearer(reach, other):
    """Returns the smaller of two results of `ScoreTerm.reach`. None stands for all tokens."""
    if reach is None or other is None:
        return other if reach is None else reach
    return cutlass.min(reach, other)


def load_shift(base, row):
    """Loads the shift of a query, which the previous kernel may have written."""
    return ptx.load_global_words(base + row * 4, 0, 1, constant=False)[0].bitcast(Float32)


class ScoreTerms:
    """The terms of a variant, in the order in which they act on scores. The constructor's arguments are those of
    `ScoreTerm`."""

    def __init__(self, features: Features, columns: int, rows: int = BLOCK_ROWS):
        self.terms: dict[str, ScoreTerm] = {
            option.name: load_code(option.term)(features, columns, rows) for option in options_in(features)
        }
        terms = self.terms.values()
        # Scores that are not changed stay raw: the softmax scales them in the same instruction that shifts them.
        self.change_scores = any(term.changes_scores for term in terms)
        self.need_positions = any(term.needs_positions for term in terms)
        # Whether something is loaded for each block ahead of it.
        self.load = any(type(term).ask is not ScoreTerm.ask for term in terms)

    def open(self, state: ScoreState, work, queries: list[QueryColumn], softmax_scale: Float32) -> None:
        """Stores in ``state`` the values that the terms keep for the lane's queries."""
        state.kept = {name: [] for name in self.terms}
        for term in self.terms.values():
            term.start(state)
        for query in queries:
            for name, term in self.terms.items():
                state.kept[name].append(term.open(state, work, query, softmax_scale))

    def change(self, state: ScoreState, place: tuple[int, int], x, token):
        """Applies all terms to a scaled score. place: (row, column) of the score in the lane's block."""
        for name, term in self.terms.items():
            x = term.change(state, state.kept[name][place[1]], place, x, token)
        return x

    def ask(self, state: ScoreState, tokens: list[Int32]) -> None:
        """Starts loading the terms' inputs for the keys at ``tokens``."""
        for name, term in self.terms.items():
            term.ask(state, state.kept[name], tokens)

    def reach(self, values, queries) -> Any:
        """Returns the smallest `ScoreTerm.reach` of all terms; None if all keys can be seen."""
        reaches = (term.reach(values, queries) for term in self.terms.values())
        return functools.reduce(_nearer, reaches, None)

    def may_hide(self, state: ScoreState, token, masked):
        """Returns whether ``masked`` is True or a term may hide a key of a tile that begins with ``token``."""
        for hidden in (term.may_hide(state, token) for term in self.terms.values()):
            masked = masked if hidden is None else masked | hidden
        return masked

    def hides(self, state: ScoreState, position, token, hidden=None):
        """Returns whether ``hidden`` is True or a term hides the key at ``token`` from the query at ``position``.
        Returns None if ``hidden`` is None and no term ever hides a key."""
        for more in (term.hides(state, position, token) for term in self.terms.values()):
            if more is not None:
                hidden = more if hidden is None else hidden | more
        return hidden
