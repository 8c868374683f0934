"""Stores of products around a deferred RMSNorm; `.deferred_config` says what that is.

`GivingStore`: a tile's sums with the residual lie in the staging buffer, rounded. Eight lanes that store a row's 64
features take them once more: times the norm's weight to a second output, and squared, added up, to a third, in which
each tile of 64 features has a place of its own in each row. So nobody adds to what others wrote, and sums are the same
each time.

`TakingStore`: a warpgroup that will store a tile adds up its rows' sums before the products, while the first weights
are on their way: all loads of up to 128 rows at once, out of L2. Where CTAs make limbs of x, sums are asked for before
x is, and come with it. The factor of each row lies in shared memory until the accumulators are complete.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.linear.wgmma.deferred_config import (
    FACTOR_BYTES,
    GIVES,
    IN_FLIGHT,
    SQUARES_N,
    SQUARES_VECTOR,
    DeferredNormConfig,
)
from cute_kernels.linear.wgmma.epilogue import Store, TileEpilogue
from cute_kernels.linear.wgmma.mainloops import WARPGROUP_THREADS
from cute_kernels.linear.wgmma.places import Corner
from cute_kernels.linear.wgmma.residual import ROW_BYTES, ROW_VECTORS, VECTOR, ResidualChunks, vector_offset
from cute_kernels.linear.work import Operands

VECTOR_BYTES = 16
TOKENS_AT_ONCE = WARPGROUP_THREADS // ROW_VECTORS


@dataclass(frozen=True)
class GivingOperands(Operands):
    """Addresses of a launch that gives a norm's parts. offset: added to weights."""

    norm: Int64  # weights [n], bf16
    scaled: Int64  # [m, n], bf16
    squares: Int64  # [m, n / 64], fp32
    offset: Float32


class Piece(NamedTuple):
    """Eight neighbouring results of a thread: whether they exist, where they belong (bytes), themselves and times the
    norm's weights, and where the sum of their row's 64 squares belongs, and it."""

    there: Boolean
    place: Int64
    words: list[Uint32]
    scaled: list[Uint32]
    sum_place: Int64
    total: Float32


@dataclass(frozen=True)
class TakingOperands(Operands):
    """Addresses of a launch that takes a norm's parts."""

    squares: Int64  # [m, parts], fp32
    parts: Int32  # a multiple of 4
    inverse_k: Float32  # 1 / k
    eps: Float32


class GivingStore:
    """The store policy of a warpgroup whose results, with a residual, are normed next: see `.epilogue.TileEpilogue`.

    Results are in bf16 with a residual, without an activation; addresses of residual and outputs are multiples of 16
    bytes.
    """

    dense = True

    def __init__(self, config: DeferredNormConfig):
        self.config, self.tiles = config, config.tiles
        self.plain, self.residuals = TileEpilogue(config.tiles), ResidualChunks(config.tiles)

    def weights_of(self, store: Store, ordinal: int) -> Any:
        """Shared memory of the norm's weights of the ``ordinal``-th tile that is stored."""
        return store.staging + (self.config.extra_offset + ordinal * ROW_BYTES)

    def ask(self, operands: GivingOperands, tid, end) -> list[list[Any]]:
        """Nothing: its norm is of rows that it makes."""
        return []

    def keep_asked(self, operands: GivingOperands, store: Store, asked: list[list[Any]]) -> None:
        """Nothing."""

    def prepare(self, operands: GivingOperands, shape, store: Store, corner: Corner, ordinal: int) -> None:
        """Asks for a tile's norm weights and residual. Nobody has used their memory: a CTA has one work tile."""
        self.bring_weights(operands, shape, store, corner, ordinal)
        self.residuals.bring_first(operands, shape, store, corner, ordinal, early=True)

    def bring_weights(self, operands: GivingOperands, shape, store: Store, corner: Corner, ordinal: int) -> None:
        """Asks for them, eight a thread; they come with the first chunk of the residual, which ends a group of
        copies."""
        row = corner.row + store.tid * VECTOR
        there = cutlass.select_((store.tid < ROW_VECTORS) & (row < shape.n), Int32(1), Int32(0))
        target = self.weights_of(store, ordinal) + store.tid * VECTOR_BYTES
        numbers.copy_async_if(there, target, operands.norm + Int64(row) * 2, Int32(VECTOR_BYTES))

    @cute.jit
    def run(self, operands: GivingOperands, shape, store: Store, corner: Corner, acc, first: int, ordinal: int):
        """Stores the tile whose accumulators are accumulators[first : first + tokens / 2], and what its norm needs."""
        self.plain.add_bias(operands, shape, store, corner, acc, first)
        for chunk in cutlass.range_constexpr(len(self.tiles.chunks)):
            self.residuals.wait(chunk)
            self.plain.wait(store)
            self.residuals.add(store, acc, first + self.tiles.chunks[chunk][0] // 2, ordinal, chunk)
            self.plain.wait(store)
            self.store_chunk(operands, shape, store, corner, ordinal, chunk)

    @cute.jit
    def store_chunk(self, operands: GivingOperands, shape, store: Store, corner: Corner, ordinal: int, chunk: int):
        """Stores a chunk's rows, what they are times the norm's weights, and sums of squares: 8 features a thread."""
        factors = self.factors_of(operands, store, ordinal)
        for i in cutlass.range_constexpr(-(-self.tiles.chunks[chunk][1] // TOKENS_AT_ONCE)):
            piece = self.piece(shape, store, corner, factors, ordinal, chunk, i)
            if piece.there:
                ptx.store_global(operands.out + piece.place, piece.words)
                ptx.store_global(operands.scaled + piece.place, piece.scaled)
                if store.tid % ROW_VECTORS == 0:
                    ptx.store_global(operands.squares + piece.sum_place, [piece.total])

    def factors_of(self, operands: GivingOperands, store: Store, ordinal: int) -> list[Any]:
        """What a thread's 8 features are multiplied with."""
        address = self.weights_of(store, ordinal) + store.tid % ROW_VECTORS * VECTOR_BYTES
        return [weight + operands.offset for weight in self.to_floats(ptx.load_shared_vector(Int32(address), 0, 4))]

    def piece(self, shape, store: Store, corner: Corner, factors, ordinal: int, chunk: int, i: int) -> Piece:
        """The ``i``-th 8 results of a chunk that a thread stores. All lanes of a row have its sum."""
        done, tile_m = self.tiles.chunks[chunk]
        buffer, vector = self.residuals.buffer(store, ordinal, chunk), store.tid % ROW_VECTORS
        token = store.tid // ROW_VECTORS + i * TOKENS_AT_ONCE
        address = buffer + vector_offset(cutlass.min(token, tile_m - 1), vector)
        words = ptx.load_shared_vector(Int32(address), 0, 4)
        values = self.to_floats(words)
        own = lanes.in_pairs(operator.add, [value * value for value in values])
        scaled = [value * factor for value, factor in zip(values, factors, strict=True)]
        row, column = corner.token + done + token, corner.row + vector * VECTOR
        return Piece(
            there=(token < tile_m) & (row < corner.end) & (column < shape.n),
            place=(Int64(row) * shape.n + column) * 2,
            words=words,
            scaled=[self.residuals.pack(scaled[j], scaled[j + 1]) for j in range(0, VECTOR, 2)],
            sum_place=(Int64(row) * (shape.n // SQUARES_N) + corner.row // SQUARES_N) * FACTOR_BYTES,
            total=lanes.lane_sum(own, lanes.neighbours(ROW_VECTORS)),
        )

    def to_floats(self, words) -> list[Any]:
        return [half(word) for word in words for half in self.residuals.halves]

    def finish(self) -> None:
        """Behind the last work tile: nothing."""


class TakingStore:
    """The store policy of a warpgroup whose rows of x lack their norm's factor: see `.epilogue.TileEpilogue`.

    Results go no way that stages them in fp32, whose memory is the factors': they are in bf16, in whole pieces of 16
    bytes, or in fp32 without a residual or a gate.
    """

    dense = True

    def __init__(self, config: DeferredNormConfig):
        self.config, self.tiles = config, config.tiles
        self.plain = TileEpilogue(config.tiles)

    def factors_of(self, store: Store) -> Any:
        """Shared memory of the factors of the rows that the CTA stores."""
        return store.staging + self.config.extra_offset

    @cute.jit
    def prepare(self, operands: TakingOperands, shape, store: Store, corner: Corner, ordinal: int):
        """Before the products: makes the factors of the rows of the first tile, which are those of all tiles, unless
        `ask` and `keep` do; asks for the residual."""
        if const_expr(ordinal == 0 and not self.config.in_limbs):
            self.make_factors(operands, store, corner.token, corner.end)
        self.plain.prepare(operands, shape, store, corner, ordinal)

    @cute.jit
    def make_factors(self, operands: TakingOperands, store: Store, token, end):
        """Adds up the sums of some rows at a time. Those of rows that do not exist are 0."""
        vectors = operands.parts // SQUARES_VECTOR
        sums = cute.make_rmem_tensor(len(self.first_rows), Float32)
        sums.fill(0.0)
        for first in cutlass.range(0, vectors, self.config.row_lanes * IN_FLIGHT, unroll=1):
            words = self.load_sums(operands, store.tid, token, end, first)
            for i in cutlass.range_constexpr(len(self.first_rows)):
                sums[i] = sums[i] + self.added(words[i])
        self.keep(operands, store, [sums[i] for i in range(len(self.first_rows))])

    def ask(self, operands: TakingOperands, tid, end) -> list[list[Any]]:
        """A thread's sums of the first rows, of rows in limbs, which `keep_asked` makes factors of: all there are."""
        return self.load_sums(operands, tid, Int32(0), end, Int32(0))

    def keep_asked(self, operands: TakingOperands, store: Store, asked: list[list[Any]]) -> None:
        """Makes factors of what `ask` has asked for."""
        self.keep(operands, store, [self.added(words) for words in asked])

    @property
    def first_rows(self) -> range:
        """The first of the rows that are added up at a time."""
        return range(0, self.tiles.own_m, self.config.rows_at_once)

    def load_sums(self, operands: TakingOperands, tid, token, end, first) -> list[list[Any]]:
        """[rows that are added up at a time] a thread's words of their sums, from the ``first``-th vector on."""
        lane_count = self.config.row_lanes
        own, lane = tid // lane_count, tid % lane_count
        return [self.load_vectors(operands, token + row + own, end, first + lane) for row in self.first_rows]

    def load_vectors(self, operands: TakingOperands, row, end, first) -> list[Any]:
        """Words of a row's sums, of some vectors a thread for each lane apart; zeros behind the row's last and for no
        row."""
        start = operands.squares + Int64(row) * operands.parts * FACTOR_BYTES
        words = []
        for i in range(IN_FLIGHT):
            vector = first + i * self.config.row_lanes
            there = (vector < operands.parts // SQUARES_VECTOR) & (row < end)
            address = start + Int64(vector) * VECTOR_BYTES
            # Not as constant memory: the launch before wrote them.
            words += numbers.load_global_if(
                cutlass.select_(there, Int32(1), Int32(0)), address, 0, SQUARES_VECTOR, constant=False
            )
        return words

    def added(self, words) -> Any:
        return lanes.in_pairs(operator.add, [word.bitcast(Float32) for word in words])

    def keep(self, operands: TakingOperands, store: Store, sums: list[Any]) -> None:
        """Leaves the factors of rows in shared memory. sums: a thread's, of the rows that are added up at a time."""
        own = store.tid // self.config.row_lanes
        for row, value in zip(self.first_rows, sums, strict=True):
            total = lanes.lane_sum(value, lanes.neighbours(self.config.row_lanes))
            factor = numbers.reciprocal_root(total * operands.inverse_k + operands.eps)
            # All lanes of a row have it, and store the same.
            ptx.store_shared(Int32(self.factors_of(store) + (row + own) * FACTOR_BYTES), 0, [factor])

    @cute.jit
    def run(self, operands: TakingOperands, shape, store: Store, corner: Corner, acc, first: int, ordinal: int):
        """Stores the tile whose accumulators are accumulators[first : first + tokens / 2], times their factors."""
        if const_expr(ordinal == 0):
            self.plain.wait(store)
        self.scale(store, acc, first)
        self.plain.run(operands, shape, store, corner, acc, first, ordinal)

    def scale(self, store: Store, acc, first: int) -> None:
        """Multiplies accumulators with the factors of their rows: two of each eight are a thread's."""
        address = Int32(self.factors_of(store) + store.lane % 4 * (2 * FACTOR_BYTES))
        for block in range(self.tiles.own_m // 8):
            pair = ptx.load_shared_vector(address, block * (8 * FACTOR_BYTES), 2)
            for i in range(4):
                place = first + 4 * block + i
                acc[place] = acc[place] * pair[i % 2].bitcast(Float32)

    def finish(self) -> None:
        """Behind the last work tile."""
        self.plain.finish()


def make_store(config: DeferredNormConfig) -> GivingStore | TakingStore:
    """The store that a configuration names."""
    return (GivingStore if config.kind == GIVES else TakingStore)(config)
