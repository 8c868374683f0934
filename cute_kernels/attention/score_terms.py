"""Device code of score options: what a lane keeps of each of its queries, and what becomes of a score.

Logits are in powers of two (times log2 e), since the softmax uses exp2 alone. :mod:`.logits` calls the terms of a
configuration in the order in which scores meet them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.attention.features import Features
from cute_kernels.attention.readers.common import load_float
from cute_kernels.device import numbers, ptx

if TYPE_CHECKING:
    from cute_kernels.attention.logits import LogitState, QueryColumn
    from cute_kernels.attention.place import Work

BIAS_BYTES = {"fp32": 4, "bf16": 2}
BLOCK_ROWS = 4  # of scores that a lane has of a block


class ScoreTerm:
    """Does nothing; an option's term is one that does more.

    ``state`` is a :class:`cute_kernels.attention.logits.LogitState`; a query, that of a lane's accumulator column, a
    :class:`cute_kernels.attention.logits.QueryColumn`.
    """

    changes_scores = False
    """Whether scores are changed one by one; those that are not stay raw, and the softmax scales them."""

    needs_positions = False
    """Whether it needs ``state.positions``, where the columns' queries stand in their requests."""

    def __init__(self, features: Features, columns: int):
        self.features, self.columns = features, columns

    def start(self, state: LogitState) -> None:
        """Before any column is opened."""

    def open(self, state: LogitState, work: Work, query: QueryColumn, softmax_scale: Float32) -> Any:
        """What is kept of a query: `change` gets it back."""
        return None

    def change(self, state: LogitState, kept: object, place: tuple[int, int], x: Float32, token: Int32) -> Float32:
        """A score that may have been changed already, times log2 e; ``place``: (row of the block, column) of it."""
        return x

    def ask(self, state: LogitState, kept: list[object], tokens: list[Int32]) -> None:
        """Starts loading what the next block wants, whose keys stand at ``tokens``; ``kept`` by column."""

    def may_hide(self, state: LogitState, token: Int32) -> Any:
        """Whether it hides keys of a tile that begins with ``token`` from some query; None for never."""
        return None

    def hides(self, state: LogitState, position: Int32, token: Int32) -> Any:
        """Whether the query at ``position`` does not see a key; None for never."""
        return None


class ShiftTerm(ScoreTerm):
    """A softmax is the same whatever is added to all scores of a query: only a cap needs the shift at once."""

    def open(self, state, work, query, softmax_scale):
        if not self.features.soft_cap:
            return None
        row = work.output_row(query.place * work.place.shape.num_q_heads + query.head)
        return load_shift(state.values.shift, row) * (softmax_scale * ptx.LOG2_E)


class SoftCapTerm(ScoreTerm):
    """cap tanh(x / cap) = cap - 2 cap / (1 + exp(2 x / cap)): finite at both ends."""

    changes_scores = True

    def change(self, state, kept, place, x, token):
        cap = state.values.soft_cap * ptx.LOG2_E
        e = ptx.exp2(x * (2.0 * ptx.LOG2_E * ptx.reciprocal(cap)))
        return ptx.fma(ptx.reciprocal(e + 1.0), -2.0 * cap, cap)


class AlibiTerm(ScoreTerm):
    """Keeps each query's slope."""

    changes_scores = needs_positions = True

    def open(self, state, work, query, softmax_scale):
        slope = load_float(state.values.alibi_slopes + Int64(query.head) * 4)
        return slope * ptx.LOG2_E

    def change(self, state, kept, place, x, token):
        assert state.positions is not None
        return ptx.fma(Float32(token - state.positions[place[1]]), kept, x)


class SinksTerm(ScoreTerm):
    """The sink is added by :mod:`.merge`."""

    def open(self, state, work, query, softmax_scale):
        # Wanted at the end, in a chain of other waits: it is in the L1 cache by then.
        ptx.prefetch_line(state.values.sinks + Int64(query.head) * 4)


class BiasTerm(ScoreTerm):
    """Keeps where each query's biases begin, and the biases of the next block."""

    changes_scores = True

    @property
    def num_bytes(self) -> int:
        return BIAS_BYTES[self.features.bias or ""]

    def start(self, state):
        state.bias = cute.make_rmem_tensor(BLOCK_ROWS * self.columns, Uint32)

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
        """The bias of a key, its bits; of the last one for tokens past the request's end, which are hidden."""
        token = cutlass.max(cutlass.min(token, state.length - 1), 0)
        size = self.num_bytes
        address = row + Int64(token) * (state.values.bias_strides[3] * size)
        return numbers.load_global_part(address, 0, 2) if size == 2 else ptx.load_global_words(address, 0, 1)[0]

    def number(self, word: Uint32):
        """A bias in fp32. Where it is used and not where it is loaded: what computes with a load waits for it."""
        return (word << 16 if self.features.bias == "bf16" else word).bitcast(Float32)


class WindowTerm(ScoreTerm):
    """Tiles that no query sees are left out by :mod:`.assignment`."""

    def may_hide(self, state, token):
        # The last query is the first to lose sight of a key.
        return token < state.length - state.values.window

    def hides(self, state, position, token):
        return token <= position - state.values.window


def load_shift(base, row):
    """The shift of a query; the kernel before this one may have written it."""
    return ptx.load_global_words(base + row * 4, 0, 1, constant=False)[0].bitcast(Float32)
