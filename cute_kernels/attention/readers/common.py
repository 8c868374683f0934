"""The parts that all readers share: a warp's registers, and queries as fp16 operands for keys that are codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.attention.policies import BLOCK_QUERIES, QUERY_VECTOR_BYTES
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_max, lane_sum
from cute_kernels.device.softmax import MIN_SCORE_SCALE
from cute_kernels.device.types import RegisterTensor

# Queries are scaled so that the largest lies in [2**14, 2**15): fp16 keeps all bits of bf16 and fp16.
QUERY_EXPONENT = 14

assert BLOCK_QUERIES == 8  # the N of the MMA: a lane's columns of a block are query heads 2t and 2t + 1


class State:
    """The registers that a warp keeps from tile to tile of a unit. A reader's ``make_state`` sets the registers that
    the reader needs."""

    g: Int32
    t: Int32
    lane_offsets: Int32 | list[Int32]  # of the loads of codes, bytes
    header_offset: Int32  # of the loads of scales, bytes
    shift: Uint32  # where the lane's codes are in its words
    select: Uint32
    query: list[list[Uint32]]  # B operands: [block][register]
    query_sums: list[list[Any]]  # [column][group]
    shared_query: Int32  # the lane's address of both, where they are shared
    scale_offset: Int32  # of the loads of a block's scales, bytes
    tail: Int64  # address of the rows of 16 bits of a block that is not full
    tail_stride: Int32  # bytes from one of them to the next
    length: Int32  # of the request
    score_scale: Float32  # from scores to powers of 2
    accumulators: RegisterTensor[Float32]
    shift_sums: RegisterTensor[Float32]
    output_scale: Float32
    output_scales: Int64  # address of the lane's, where every column has one

    def __init__(self, lane: Int32):
        self.g, self.t = lane // 4, lane % 4


@dataclass(frozen=True)
class Query:
    """The queries of a unit, as a key reader loads them while the first tile is on its way.

    Attributes:
        words: [block][unit] raw words of the lane's query head.
        head_scale: the given scale of the KV head, or None.
        column_scales: [unit] the given scales of the columns in ``words``, or None.
    """

    words: list[list[Any]]
    head_scale: Float32 | None = None
    column_scales: list[list[Float32]] | None = None


def load_queries(config: DecodeConfig, address, offset: int, num_words: int) -> list[Any]:
    """Loads words of a query in one access. A 64-bit address is in global memory, a 32-bit address in shared memory.

    After an append, queries in global memory are not constants: another kernel writes them while this one runs.
    """
    if isinstance(address, Int32):
        return ptx.load_shared_vector(address, offset, num_words)
    return ptx.load_global_words(address, offset, num_words, constant=not config.after_append)


class CodeKeyReader:
    """The base of readers of keys that are codes. It multiplies the queries by a power of 2, so that they are fp16
    operands.

    A unit is the columns of one step through K, which four lanes share. Subclasses say which codes of a unit a lane
    holds, and which codes form pairs.

    Attributes:
        num_groups: number of groups of columns, each with its own sum of queries.
        units_per_group: number of units of columns in a group.
        pairs: for each B register of a unit, the indices of the two codes of the lane that are multiplied by the
            register's low half and by its high half.
        factors: for each B register of a unit, the factor by which its queries are multiplied. It is below 1 where the
            operands of codes are too large by 1 / factor.
        code_unit: 1 / v, where v is the operand that stands for code 1.
        sum_factor: the factor by which sums of queries are multiplied; None if the reader needs no such sums.
        query_exponent: queries are scaled so that the largest lies in [2**query_exponent, 2**(query_exponent + 1)).
    """

    config: DecodeConfig
    num_groups: int
    units_per_group: int
    pairs: tuple[tuple[int, int], ...]
    factors: tuple[float, ...]
    code_unit: float
    sum_factor: float | None
    query_exponent: int = QUERY_EXPONENT

    def load_queries(self, address, offset: int, num_words: int) -> list[Any]:
        """Loads words of a query by the function :func:`load_queries`."""
        return load_queries(self.config, address, offset, num_words)

    def unit_queries(self, state: State, words) -> list[Any]:
        """Returns the queries of one unit of columns in fp32, in the order of the lane's codes."""
        return self.floats(words)

    def floats(self, words) -> list[Any]:
        """Converts packed pairs of q's dtype to fp32."""
        return [half(word) for word in words for half in of_name(self.config.q_dtype).halves]

    def take_query(self, state: State, query: Query, softmax_scale: Float32):
        """Makes B operands of the queries, and adds up the queries of each group of columns. Stores both in
        ``state``."""
        blocks = [[self.unit_queries(state, words) for words in units] for units in query.words]
        if query.column_scales is not None:
            blocks = [[_products(*pair) for pair in zip(units, query.column_scales, strict=True)] for units in blocks]
        blocks = [[[_nan_if_infinite(value) for value in unit] for unit in units] for units in blocks]
        largest = Float32(0.0)
        for value in (value for units in blocks for unit in units for value in unit):
            largest = ptx.fmax(largest, ptx.absolute(value))
        to_fp16, from_fp16 = _query_scale(lane_max(largest, (1, 2, 4, 8, 16)), self.query_exponent)
        score_scale = from_fp16 * (softmax_scale * (ptx.LOG2_E * self.code_unit))
        if query.head_scale is not None:
            # A head of zeros has scale 0, but masked scores, -inf, must not be multiplied by 0.
            score_scale = ptx.fmax(score_scale * query.head_scale, MIN_SCORE_SCALE)
        state.score_scale = score_scale
        state.query, state.query_sums = [], []
        for units in blocks:
            registers, sums = self._make_registers(units, to_fp16, exact=query.column_scales is None)
            state.query.append(registers)
            state.query_sums += self._sums_of_columns(state, sums)

    def _load_vectors(self, state: State, first: int, count: int) -> list[list[Any]]:
        """Loads ``count`` vectors of the shared queries, from vector ``first`` on."""
        places = [_vector_offset(index) for index in range(first, first + count)]
        return [
            ptx.load_shared_vector(state.shared_query, place, self.config.mainloop.blocks_per_warp) for place in places
        ]

    def query_operands(self, state: State, first: int, count: int) -> list[Any]:
        """Returns, for every block of queries, the B operand of an MMA: ``count`` registers from register ``first``
        on."""
        if not self.config.shares_queries:
            return [block[first : first + count] for block in state.query]
        return [list(words) for words in zip(*self._load_vectors(state, first, count), strict=True)]

    def sums_of_group(self, state: State, group: int) -> list[Any]:
        """Returns the sum of a group's queries, times ``sum_factor``, for each column of the lane. Returns None for
        each column if no sums are needed.
        """
        if self.sum_factor is None:
            return [None] * self.config.columns
        if not self.config.shares_queries:
            return [sums[group] for sums in state.query_sums]
        vectors = self._load_vectors(state, self.config.head_dim // 8 + 2 * group, 2)
        return [word.bitcast(Float32) for words in zip(*vectors, strict=True) for word in words]

    def pairs_at_once(self) -> tuple[tuple[int, ...], ...]:
        """Returns groups of the two pairs of row halves, 0 and 1. Pairs of a group are scored together. If queries lie
        in shared memory, there is one group of both, so that queries are loaded once.
        """
        return ((0, 1),) if self.config.shares_queries else ((0,), (1,))

    def _make_registers(self, units, to_fp16: Float32, *, exact: bool):
        """Returns (B registers of one block of queries, sum of the queries of each group of columns). ``exact``:
        whether fp16 holds the queries exactly."""
        registers: list[Any] = []
        sums = [Float32(0.0) for _ in range(self.num_groups)]
        for index, unit in enumerate(units):
            group = index // self.units_per_group
            for (low, high), factor in zip(self.pairs, self.factors, strict=True):
                pair = [unit[low] * to_fp16, unit[high] * to_fp16]
                word = ptx.pack_f16x2(pair[0] * factor, pair[1] * factor)
                registers.append(word)
                if not exact:
                    pair = [ptx.half2_low_to_float(word), ptx.half2_high_to_float(word)]
                sums[group] = sums[group] + (pair[0] + pair[1])
        return registers, sums

    def _sums_of_columns(self, state: State, sums) -> list[Any]:
        """Exchanges sums of queries between lanes. Returns [c][group]: the sums for the query heads of the lane's
        columns c = 0 and 1. sums: for each group, the lane's own sum, which is for query head g.
        """
        if self.sum_factor is None:
            return []
        totals = [lane_sum(value, (1, 2)) * self.sum_factor for value in sums]
        return [[cute.arch.shuffle_sync(total, 8 * state.t + 4 * c) for total in totals] for c in range(2)]


class ValueReader:
    """The base of value readers. Manages the accumulators of P V.

    Attributes:
        num_accumulators: number of a lane's accumulators for one block of 8 query heads.
    """

    config: DecodeConfig
    num_accumulators: int

    def make_accumulators(self):
        """Makes the accumulators, all zeros."""
        accumulators = cute.make_rmem_tensor(self.config.mainloop.blocks_per_warp * self.num_accumulators, Float32)
        accumulators.fill(0.0)
        return accumulators

    def place(self, mma: int, half: int, column: int) -> int:
        """Returns the index of a lane's accumulator for row g + 8 * half and a column of an MMA's output."""
        return column // 2 * self.num_accumulators + 4 * mma + 2 * half + column % 2

    def multiply_add(self, state: State, mma: int, a, operands, dtype: str):
        """Adds the products of MMA ``mma`` to its accumulators. a: the A operand. operands: the B operand of each
        block."""
        for block in range(self.config.mainloop.blocks_per_warp):
            first = self.place(mma, 0, 2 * block)
            total = [state.accumulators[first + i] for i in range(4)]
            total = ptx.mma_m16n8k16(total, a, operands[block], dtype=dtype)
            for i in range(4):
                state.accumulators[first + i] = total[i]

    def rescale(self, state: State, factors):
        """Multiplies all accumulators by the factors of their columns."""
        for column, factor in enumerate(factors):
            for index in (self.place(i // 2, i % 2, column) for i in range(self.num_accumulators // 2)):
                state.accumulators[index] = state.accumulators[index] * factor

    def recentre(self, state: State):
        """Does nothing. Only readers whose codes all have one sign recentre their accumulators."""

    def load_scales(self, state: State, tile_address: Int32, block_offset: int):
        """Loads the headers of the block's rows for :meth:`log_scale` and ``accumulate``. Returns None in this class,
        whose rows have no headers."""

    def log_scale(self, headers, j: int):
        """Returns log2 of the largest scale of the lane's row in row half j. These scales multiply probabilities."""


def query_vectors(state: State) -> list[list[Any]]:
    """Returns the queries of a warp as vectors for shared memory. A vector has a word for each block of queries. There
    is a vector for each B register, then two vectors for each group's sums.
    """
    vectors = [list(words) for words in zip(*state.query, strict=True)]
    for group in range(len(state.query_sums[0]) if state.query_sums else 0):
        for c in range(2):
            vectors.append([sums[group].bitcast(Uint32) for sums in state.query_sums[c::2]])
    return vectors


def store_vectors(address: Int32, vectors):
    """Stores the result of :func:`query_vectors`.

    address: where the lane's first vector is stored. Vectors of neighbouring lanes are neighbours, so that no access
    has bank conflicts.
    """
    for index, words in enumerate(vectors):
        ptx.store_shared(address, _vector_offset(index), words)


def _vector_offset(index: int) -> int:
    """Returns the offset in bytes of a lane's ``index``-th vector of shared queries."""
    return index * WARP_THREADS * QUERY_VECTOR_BYTES


def _products(values, factors) -> list[Any]:
    return [value * factor for value, factor in zip(values, factors, strict=True)]


def _nan_if_infinite(value: Float32) -> Float32:
    """Returns the value, or NaN if it is infinite. All queries are scaled by a power of 2 that follows from their
    maximum, which ignores NaN. So an infinite query changes only the scores of its own row.
    """
    return ptx.fma(value, Float32(0.0), value)


def _query_scale(largest: Float32, wanted: int):
    """Returns (2**k, 2**-k). 2**k scales the largest query into [2**wanted, 2**(wanted + 1)). k is bounded, so that
    both results are normal numbers.
    """
    exponent = cutlass.max((Int32(largest.bitcast(Int32)) >> 23) - 127, -100)
    to_fp16 = ((127 + wanted - exponent) << 23).bitcast(Float32)
    from_fp16 = ((127 - wanted + exponent) << 23).bitcast(Float32)
    return to_fp16, from_fp16
