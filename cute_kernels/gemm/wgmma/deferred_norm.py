"""Stores of products around a deferred RMSNorm; `.deferred_config` explains it.

`GivingStore` belongs to the product before the norm. The staging buffer holds a tile's results, after the residual has
been added and the sums rounded. Eight lanes store the 64 features of a row. They read the row's results again, and
write two more outputs: the results times the norm's weight, and the sum of the results' squares. The output of sums has
one element for each row and tile of 64 features. So no CTA adds to other CTAs' sums, and sums are reproducible.

`TakingStore` belongs to the product after the norm. The two spare producer warps add up each row's sums of squares
while the consumer warps multiply. If consumer warps did so, the tensor cores would wait 1 to 2 us. CTAs that make limbs
of x load the sums before x. The factor of each row stays in shared memory until the accumulators are complete.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.pipeline import Barrier
from cute_kernels.gemm.device_operands import Operands
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.deferred_config import (
    FACTOR_BYTES,
    FACTOR_WARPS,
    IN_FLIGHT,
    SQUARES_N,
    SQUARES_VECTOR,
    norm_of,
)
from cute_kernels.gemm.wgmma.epilogue import Store, TileEpilogue
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS
from cute_kernels.gemm.wgmma.places import Corner
from cute_kernels.gemm.wgmma.residual import ROW_BYTES, ROW_VECTORS, VECTOR, ResidualChunks, vector_offset

VECTOR_BYTES = 16
TOKENS_AT_ONCE = WARPGROUP_THREADS // ROW_VECTORS


@dataclass(frozen=True)
class GivingOperands(Operands):
    """Operands of the product that makes the rows to be normed. offset: a number added to the norm's weights."""

    norm: Int64  # weights [n], bf16
    scaled: Int64  # [m, n], bf16
    squares: Int64  # [m, n / 64], fp32
    offset: Float32


class Piece(NamedTuple):
    """Eight neighbouring results that a thread stores, and the sum of the squares of their row's 64 results.

    Attributes:
        there: whether the results exist.
        place, sum_place: offsets in bytes of the results and of the sum in their outputs.
        words: the results.
        scaled: the results times the norm's weights.
        total: the sum of squares.
    """

    there: Boolean
    place: Int64
    words: list[Uint32]
    scaled: list[Uint32]
    sum_place: Int64
    total: Float32


@dataclass(frozen=True)
class TakingOperands(Operands):
    """Operands of the product that applies a deferred norm: the sums of squares of its rows, and the numbers that turn
    them into factors."""

    squares: Int64  # [m, parts], fp32
    parts: Int32  # a multiple of 4
    inverse_k: Float32  # 1 / k
    eps: Float32


class GivingStore:
    """The store policy of a product before the norm, with the methods of `.epilogue.TileEpilogue`. It adds the
    residual. It stores the results, the results times the norm's weights, and sums of squares.

    Results are bf16; there is always a residual and never an activation. Addresses of residual and outputs are
    multiples of 16 bytes.
    """

    dense = True

    def __init__(self, config: WgmmaConfig[Any]):
        self.tiles, self.extra_offset = config, norm_of(config).extra_offset(config)
        self.plain, self.residuals = TileEpilogue(config), ResidualChunks(config)

    def weights_of(self, store: Store, ordinal: int) -> Any:
        """Returns the shared memory address of the norm's weights for the ``ordinal``-th tile that the warpgroup
        stores."""
        return store.staging + (self.extra_offset + ordinal * ROW_BYTES)

    def ask(self, operands: GivingOperands, tid, end) -> list[list[Any]]:
        """Loads nothing, since this product does not apply a norm to its x."""
        return []

    def keep_asked(self, operands: GivingOperands, store: Store, asked: list[list[Any]]) -> None:
        """Stores nothing, as `ask` loads nothing."""

    def prepare(self, operands: GivingOperands, shape, store: Store, corner: Corner, ordinal: int) -> None:
        """Starts loading a tile's norm weights and residual. A CTA has only one work tile, so no earlier one still uses
        their memory."""
        self.bring_weights(operands, shape, store, corner, ordinal)
        self.residuals.bring_first(operands, shape, store, corner, ordinal, early=True)

    def bring_weights(self, operands: GivingOperands, shape, store: Store, corner: Corner, ordinal: int) -> None:
        """Starts loading the norm's weights, eight a thread. The weights and the residual's first chunk are one group
        of cp.async copies."""
        row = corner.row + store.tid * VECTOR
        there = cutlass.select_((store.tid < ROW_VECTORS) & (row < shape.n), Int32(1), Int32(0))
        target = self.weights_of(store, ordinal) + store.tid * VECTOR_BYTES
        numbers.copy_async_if(there, target, operands.norm + Int64(row) * 2, Int32(VECTOR_BYTES))

    @cute.jit
    def run(self, operands: GivingOperands, shape, store: Store, corner: Corner, acc, first: int, ordinal: int):
        """Stores a tile's results and the two outputs for the norm, after the tile's products. The tile's accumulators
        are acc[first : first + tile_m / 2]."""
        self.plain.add_bias(operands, shape, store, corner, acc, first)
        for chunk in cutlass.range_constexpr(len(self.tiles.chunks)):
            self.residuals.wait(chunk)
            self.plain.wait(store)
            self.residuals.add(store, acc, first + self.tiles.chunks[chunk][0] // 2, ordinal, chunk)
            self.plain.wait(store)
            self.store_chunk(operands, shape, store, corner, ordinal, chunk)

    @cute.jit
    def store_chunk(self, operands: GivingOperands, shape, store: Store, corner: Corner, ordinal: int, chunk: int):
        """Writes a chunk's three outputs: its rows, the rows times the norm's weights, and the sum of squares of each
        row's 64 features. Each thread stores 8 features at a time."""
        factors = self.factors_of(operands, store, ordinal)
        for i in cutlass.range_constexpr(-(-self.tiles.chunks[chunk][1] // TOKENS_AT_ONCE)):
            piece = self.piece(shape, store, corner, factors, ordinal, chunk, i)
            if piece.there:
                ptx.store_global(operands.out + piece.place, piece.words)
                ptx.store_global(operands.scaled + piece.place, piece.scaled)
                if store.tid % ROW_VECTORS == 0:
                    ptx.store_global(operands.squares + piece.sum_place, [piece.total])

    def factors_of(self, operands: GivingOperands, store: Store, ordinal: int) -> list[Any]:
        """Returns the norm's weights of a thread's 8 features, with the offset added."""
        address = self.weights_of(store, ordinal) + store.tid % ROW_VECTORS * VECTOR_BYTES
        return [weight + operands.offset for weight in self.to_floats(ptx.load_shared_vector(Int32(address), 0, 4))]

    def piece(self, shape, store: Store, corner: Corner, factors, ordinal: int, chunk: int, i: int) -> Piece:
        """Returns the ``i``-th `Piece`, of 8 results, that a thread stores of a chunk. All lanes of a row get the same
        ``total``, the sum of squares of the row's 64 features."""
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


class TakingStore:
    """The store policy of a product after the norm, with the methods of `.epilogue.TileEpilogue`. It multiplies
    accumulators by the factors of their rows.

    It does not stage results in fp32, as the factors use that memory. Results are bf16, in whole vectors of 16 bytes,
    or fp32 without a residual and without a gate.
    """

    dense = True

    def __init__(self, config: WgmmaConfig[Any]):
        norm = norm_of(config)
        self.tiles, self.plain = config, TileEpilogue(config)
        self.extra_offset, self.factor_bytes = norm.extra_offset(config), norm.factor_bytes(config)
        self.row_lanes, self.rows_at_once = norm.row_lanes(config), norm.rows_at_once(config)

    def factors_of(self, store: Store) -> Any:
        """Returns the shared memory address of the factors of the CTA's rows. With limbs each warpgroup has factors of
        its own; otherwise all warpgroups share one set."""
        first = 0 if self.tiles.limbs else store.warpgroup * self.tiles.staging_bytes
        return store.staging - first + self.extra_offset

    def barrier_of(self, factors) -> Barrier:
        """Returns the barrier on which the warps that make factors arrive. ``factors``: their address."""
        place = Int32(factors + self.factor_bytes)
        pointer = cute.make_ptr(cutlass.Int64, place, cute.AddressSpace.smem, assumed_align=8)
        return Barrier(pointer, FACTOR_WARPS * WARP_THREADS)

    def init_barrier(self, memory) -> None:
        """Initialises the barrier in one thread, before the barriers' fence."""
        factors = memory.staging + self.extra_offset
        self.barrier_of(factors).init()

    def prepare(self, operands: TakingOperands, shape, store: Store, corner: Corner, ordinal: int) -> None:
        """Starts loading the residual, before a work tile's products."""
        self.plain.prepare(operands, shape, store, corner, ordinal)

    @cute.jit
    def make_factors(self, operands: TakingOperands, factors, tid, token, end):
        """Computes the factors of rows of x from ``token`` on, some rows at a time. `FACTOR_WARPS` warps run it. For
        rows from ``end`` on, which do not exist, it uses sums of 0.
        """
        vectors, at_once = operands.parts // SQUARES_VECTOR, self.rows_at_once
        rows = range(0, at_once, FACTOR_WARPS * WARP_THREADS // self.row_lanes)
        own, lane = tid // self.row_lanes, tid % self.row_lanes
        for base in cutlass.range(0, self.tiles.own_m, at_once, unroll=1):
            sums = cute.make_rmem_tensor(len(rows), Float32)
            sums.fill(0.0)
            for first in cutlass.range(0, vectors, self.row_lanes * IN_FLIGHT, unroll=1):
                words = [self.load_vectors(operands, token + base + row + own, end, first + lane) for row in rows]
                for i in cutlass.range_constexpr(len(rows)):
                    sums[i] = sums[i] + self.added(words[i])
            for i in cutlass.range_constexpr(len(rows)):
                self.keep(operands, factors + (base + rows[i] + own) * FACTOR_BYTES, sums[i])

    def ask(self, operands: TakingOperands, tid, end) -> list[list[Any]]:
        """Starts loading the sums of squares from which `keep_asked` makes factors. Only kernels with limbs call this
        method; in other kernels `make_factors` loads the sums."""
        own, lane = tid // self.row_lanes, tid % self.row_lanes
        return [self.load_vectors(operands, row + own, end, lane) for row in self.first_rows]

    def keep_asked(self, operands: TakingOperands, store: Store, asked: list[list[Any]]) -> None:
        """Makes factors of rows from the sums that `ask` has loaded."""
        own = store.tid // self.row_lanes
        for row, words in zip(self.first_rows, asked, strict=True):
            self.keep(operands, self.factors_of(store) + (row + own) * FACTOR_BYTES, self.added(words))

    @property
    def first_rows(self) -> range:
        """The first row of each batch of rows whose sums of squares are added up together."""
        return range(0, self.tiles.own_m, self.rows_at_once)

    def load_vectors(self, operands: TakingOperands, row, end, first) -> list[Any]:
        """Loads a lane's vectors of a row's sums, from the row's ``first``-th vector on. Neighbouring lanes load
        neighbouring vectors. Vectors after the row's last one, and those of a missing row, are 0."""
        start = operands.squares + Int64(row) * operands.parts * FACTOR_BYTES
        words = []
        for i in range(IN_FLIGHT):
            vector = first + i * self.row_lanes
            there = (vector < operands.parts // SQUARES_VECTOR) & (row < end)
            address = start + Int64(vector) * VECTOR_BYTES
            # Not as constant memory: the launch before wrote them.
            words += numbers.load_global_if(
                cutlass.select_(there, Int32(1), Int32(0)), address, 0, SQUARES_VECTOR, constant=False
            )
        return words

    def added(self, words) -> Any:
        return lanes.in_pairs(operator.add, [word.bitcast(Float32) for word in words])

    def keep(self, operands: TakingOperands, place, value) -> None:
        """Computes a row's factor and stores it in shared memory. ``value``: a lane's part of the row's sum of
        squares."""
        total = lanes.lane_sum(value, lanes.neighbours(self.row_lanes))
        factor = numbers.reciprocal_root(total * operands.inverse_k + operands.eps)
        # All lanes of a row have it, and store the same.
        ptx.store_shared(Int32(place), 0, [factor])

    @cute.jit
    def run(self, operands: TakingOperands, shape, store: Store, corner: Corner, acc, first: int, ordinal: int):
        """Multiplies the accumulators acc[first : first + tile_m / 2] of a tile by their rows' factors, and stores the
        tile. First it waits for the factors."""
        if const_expr(ordinal == 0):
            if const_expr(self.tiles.limbs):
                self.plain.wait(store)
            else:
                self.barrier_of(self.factors_of(store)).wait()
        self.scale(store, acc, first)
        self.plain.run(operands, shape, store, corner, acc, first, ordinal)

    def scale(self, store: Store, acc, first: int) -> None:
        """Multiplies a thread's accumulators by the factors of their rows. A thread has two of every eight rows."""
        address = Int32(self.factors_of(store) + store.lane % 4 * (2 * FACTOR_BYTES))
        for block in range(self.tiles.own_m // 8):
            pair = ptx.load_shared_vector(address, block * (8 * FACTOR_BYTES), 2)
            for i in range(4):
                place = first + 4 * block + i
                acc[place] = acc[place] * pair[i % 2].bitcast(Float32)
