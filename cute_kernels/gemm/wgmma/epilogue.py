"""The store of a warpgroup's accumulators to the output, transposed through shared memory, a few tokens at a time.

The rows of an MMA are output features. In the output, the features of a token are contiguous. Each warpgroup stores its
own tiles of 64 features through its own staging buffer, while other warpgroups go on multiplying.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_kernels.device import ptx
from cute_kernels.gemm.epilogue import VECTOR, Results
from cute_kernels.gemm.out_kinds import BF16, FP16, FP32
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS
from cute_kernels.gemm.wgmma.places import Corner
from cute_kernels.gemm.wgmma.residual import BUFFERS, ResidualChunks
from layouts.weights.hopper import TILE_N

ROW_BYTES = 2 * TILE_N  # of a token's results of a tile in 16 bits
PACKED_PITCH = ROW_BYTES + 16  # bytes from token to token: the padding puts eight tokens' pieces in different banks
PACKED_VECTOR = 8  # results of 16 bytes
GATED_PITCH = ROW_BYTES // 2 + 16  # of a token's results where two rows of W make one


@dataclass(frozen=True)
class Store:
    """A thread's position among the threads that store a tile; run-time integers."""

    staging: Int32  # shared memory of its warpgroup
    warpgroup: Int32
    tid: Int32  # in its warpgroup
    row_warp: Int32  # its 16 rows of the MMA
    lane: Int32


class TileEpilogue:
    """The store policy of a consumer warpgroup.

    Args:
        dense: whether the product is dense. Only dense products have fast code for residuals and fp32 results; products
            of experts store these by `store_any`.
    """

    def __init__(self, config: WgmmaConfig, *, dense: bool = True):
        self.config, self.dense = config, dense
        self.results = Results(config.dtype, config.store.activation)
        self.activate = self.results.activate
        # Experts rarely have a standard activation that is not gated: `store_any` computes those.
        self.in_registers = dense or config.store.activation is not None
        self.residuals = ResidualChunks(config)

    @cute.jit
    def prepare(self, operands, shape, store: Store, corner: Corner, ordinal: int):
        """Starts loading the residual of the ``ordinal``-th tile that the warpgroup stores. Runs before the work tile's
        products."""
        if const_expr(self.dense and self.residuals.is_early(ordinal, 0)):
            if self.adds_chunks(operands, shape):
                self.wait(store)
                self.residuals.bring_first(operands, shape, store, corner, ordinal, early=True)

    def adds_chunks(self, operands, shape):
        """Returns whether `store_sums` adds the residual, 16 bytes at a time. `store_any` adds all other residuals."""
        own_kind = FP16 if self.config.dtype == "fp16" else BF16
        plain = (shape.out_kind == own_kind) & self.activate.is_none(shape) & (shape.n % PACKED_VECTOR == 0)
        return plain & (operands.residual != 0) & ((operands.residual | operands.out) % 16 == 0)

    @cute.jit
    def run(self, operands, shape, store: Store, corner: Corner, acc, first: int, ordinal: int):
        """Stores a tile. A thread's accumulators of the tile are acc[first : first + tile_m / 2]. ordinal: the tile's
        index among the tiles of 64 features that the warpgroup stores of a work tile, as in `prepare`.
        """
        if const_expr(self.dense):
            if self.adds_chunks(operands, shape):
                self.add_bias(operands, shape, store, corner, acc, first)
                self.store_sums(operands, shape, store, corner, acc, first, ordinal)
            else:
                self.run_plain(operands, shape, store, corner, acc, first)
        else:
            self.run_plain(operands, shape, store, corner, acc, first)

    @cute.jit
    def run_plain(self, operands, shape, store: Store, corner: Corner, acc, first: int):
        """Stores a tile as `run` does. The tile has no residual, or one that `store_sums` does not add."""
        own_kind = FP16 if self.config.dtype == "fp16" else BF16
        plain = (shape.out_kind == own_kind) & (operands.residual == 0) & (operands.out % 16 == 0)
        if plain & self.is_by_feature(shape) & (shape.n % PACKED_VECTOR == 0):
            self.add_bias(operands, shape, store, corner, acc, first)
            if const_expr(self.in_registers):
                self.activate.features(shape, acc, first, self.config.own_m // 2)
            for chunk in cutlass.range_constexpr(len(self.config.chunks)):
                self.store_packed(operands, shape, store, corner, acc, first, chunk)
        elif plain & self.activate.is_gated(shape) & (shape.n % (2 * PACKED_VECTOR) == 0):
            self.add_bias(operands, shape, store, corner, acc, first)
            for chunk in cutlass.range_constexpr(len(self.config.chunks)):
                self.store_gated(operands, shape, store, corner, acc, first, chunk)
        elif self.is_floats(operands, shape):
            self.add_bias(operands, shape, store, corner, acc, first)
            self.activate.features(shape, acc, first, self.config.own_m // 2)
            self.store_floats(operands, shape, store, corner, acc, first)
        else:
            for chunk in cutlass.range_constexpr(len(self.config.chunks)):
                self.store_any(operands, shape, store, corner, acc, first, chunk)

    def wait(self, store: Store):
        """Waits for all threads of the warpgroup: before writes to the staging buffer, so that its old data have been
        read, and after the writes, so that the new data are complete.
        """
        cute.arch.barrier(barrier_id=store.warpgroup + 1, number_of_threads=WARPGROUP_THREADS)

    def is_by_feature(self, shape):
        """Returns whether there is one result for each output feature, and the activation, if any, is applied in
        registers.
        """
        return self.activate.leaves_features(shape) if self.in_registers else self.activate.is_none(shape)

    def is_floats(self, operands, shape):
        """Returns whether `store_floats` stores the results: fp32 results of a dense product, one for each feature,
        without a residual. There must be fewer than three warpgroups along K, as three would spill registers.
        """
        floats = (shape.out_kind == FP32) & (operands.residual == 0) & self.activate.leaves_features(shape)
        return floats if self.dense and self.config.k_warpgroups < 3 else Boolean(False)

    # -- with a residual ----------------------------------------------------------------------------------------------

    @cute.jit
    def store_sums(self, operands, shape, store: Store, corner: Corner, acc, first: int, ordinal: int):
        """Adds the residual to a tile's results, chunk by chunk, and stores the sums."""
        residuals = self.residuals
        if const_expr(not residuals.is_early(ordinal, 0)):
            self.wait(store)
        residuals.bring_first(operands, shape, store, corner, ordinal, early=False)
        for chunk in cutlass.range_constexpr(len(self.config.chunks)):
            residuals.wait(chunk)
            self.wait(store)
            residuals.add(store, acc, first + self.config.chunks[chunk][0] // 2, ordinal, chunk)
            self.wait(store)
            residuals.store(operands, shape, store, corner, ordinal, chunk)
            if const_expr(residuals.has_following(chunk)):
                self.wait(store)
                residuals.bring(operands, shape, store, corner, ordinal, chunk + BUFFERS)

    # -- 16 bytes at a time -------------------------------------------------------------------------------------------

    @cute.jit
    def add_bias(self, operands, shape, store: Store, corner: Corner, acc, first: int):
        if operands.bias != 0:
            for half in cutlass.range_constexpr(2):
                row = corner.row + (store.row_warp * 16 + store.lane // 4 + 8 * half)
                bias = Float32(0.0)
                if row < shape.n:
                    bias = self.results.load_bias(operands.bias + Int64(corner.bias + (row - corner.row)) * 2)
                self.add_to_row(acc, first + 2 * half, bias)

    def add_to_row(self, acc, first: int, bias):
        """Adds the bias of an output feature to a thread's accumulators of that feature: two of every four."""
        for i in range(0, self.config.own_m // 2, 4):
            for place in (first + i, first + i + 1):
                acc[place] = acc[place] + bias

    @cute.jit
    def store_packed(self, operands, shape, store: Store, corner: Corner, acc, first: int, chunk: int):
        """Rounds a chunk's accumulators and stores them, 8 neighbouring features at a time."""
        done, tile_m = self.config.chunks[chunk]
        self.wait(store)
        self.stage_packed(store, acc, first + done // 2, tile_m)
        self.wait(store)
        self.store_staged(operands, store, corner, shape.n, chunk, TILE_N, PACKED_PITCH)

    @cute.jit
    def store_staged(self, operands, store: Store, corner: Corner, columns, chunk: int, features: int, pitch: int):
        """Copies a chunk from the staging buffer to the output, 8 neighbouring results at a time.

        Args:
            features: number of staged results of a token.
            columns: number of results in a row of the output.
            pitch: bytes from a token to the next in the buffer.
        """
        done, tile_m = self.config.chunks[chunk]
        vectors, first = features // PACKED_VECTOR, corner.row // (TILE_N // features)
        start = corner.token + done
        for i in cutlass.range_constexpr(-(-tile_m * vectors // WARPGROUP_THREADS)):
            index = store.tid + i * WARPGROUP_THREADS
            token, vector = index // vectors, index % vectors
            column = first + vector * PACKED_VECTOR
            if (token < tile_m) & (start + token < corner.end) & (column < columns):
                words = ptx.load_shared_vector(store.staging + token * pitch + vector * 16, 0, 4)
                ptx.store_global(operands.out + (Int64(start + token) * columns + column) * 2, words)

    def stage_packed(self, store: Store, acc, first: int, tile_m: int):
        """Stores a chunk's accumulators to the staging buffer, [token][feature] in 16 bits, transposed by stmatrix."""
        pack = ptx.pack_bf16x2 if self.config.dtype == "bf16" else ptx.pack_f16x2
        lane = store.lane
        # Matrices: the first and the second eight features of eight tokens, then the same of the next eight; where a
        # tile has no more than eight, both are stored twice.
        few = tile_m == 8
        token, half = lane % 8 if few else lane // 16 * 8 + lane % 8, lane // 8 % 2
        address = store.staging + token * PACKED_PITCH + store.row_warp * 32 + half * 16
        for pair in range(-(-tile_m // 16)):
            place = first + 8 * pair
            words = [pack(acc[place + 2 * i], acc[place + 2 * i + 1]) for i in ((0, 1, 0, 1) if few else range(4))]
            ptx.store_matrix_x4(address, pair * 16 * PACKED_PITCH, words, transpose=True)

    # -- fp32 ---------------------------------------------------------------------------------------------------------

    @cute.jit
    def store_floats(self, operands, shape, store: Store, corner: Corner, acc, first: int):
        """Stores accumulators to the output without staging. Eight lanes write 32 bytes of a token, a whole sector of
        memory."""
        feature = corner.row + store.row_warp * 16 + store.lane // 4
        token = corner.token + store.lane % 4 * 2
        for pair in cutlass.range_constexpr(self.config.own_m // 8):
            for i in cutlass.range_constexpr(2):
                row, place = token + 8 * pair + i, first + 4 * pair + i
                address = operands.out + (Int64(row) * shape.n + feature) * 4
                for half in cutlass.range_constexpr(2):
                    if (row < corner.end) & (feature + 8 * half < shape.n):
                        ptx.store_global(address, [acc[place + 2 * half]], offset=32 * half)

    # -- gate and up interleaved, 16 bytes at a time -----------------------------------------------------------------

    @cute.jit
    def store_gated(self, operands, shape, store: Store, corner: Corner, acc, first: int, chunk: int):
        """Activates and rounds a chunk's gates and ups, then stores the results, 8 neighbouring ones at a time. Rows of
        W are interleaved gate and up rows."""
        done, tile_m = self.config.chunks[chunk]
        self.wait(store)
        self.stage_gated(store, acc, first + done // 2, tile_m)
        self.wait(store)
        self.store_staged(operands, store, corner, shape.n // 2, chunk, TILE_N // 2, GATED_PITCH)

    def stage_gated(self, store: Store, acc, first: int, tile_m: int):
        """Stores a chunk's results to the staging buffer, [token][feature] in 16 bits.

        Two lanes that are four apart have values of the same two tokens: one lane the gates, the other lane the ups.
        The lanes exchange values, so that each computes the results of one token. For an activation without a gate, no
        code is emitted, as the branch is never taken.
        """
        if not self.activate.gated:
            return
        pack = ptx.pack_bf16x2 if self.config.dtype == "bf16" else ptx.pack_f16x2
        g, t = store.lane // 4, store.lane % 4
        odd = g % 2 == 1
        token = 2 * t + g % 2
        address = store.staging + token * GATED_PITCH + (store.row_warp * 8 + g // 2) * 2
        for block in range(tile_m // 8):
            for half in range(2):
                place = first + 4 * block + 2 * half
                low, high = acc[place], acc[place + 1]
                other = cute.arch.shuffle_sync_bfly(cutlass.select_(odd, low, high), offset=4)
                gate, up = cutlass.select_(odd, other, low), cutlass.select_(odd, high, other)
                result = self.activate.of_pair(gate, up)
                ptx.store_shared_half(address, 8 * block * GATED_PITCH + 8 * half, pack(result, result))

    # -- any kind of output -------------------------------------------------------------------------------------------

    @cute.jit
    def store_any(self, operands, shape, store: Store, corner: Corner, acc, first: int, chunk: int):
        """Applies bias, activation and residual to a chunk in fp32, and stores it, four neighbouring features at a
        time."""
        (done, tile_m), row_vectors = self.config.chunks[chunk], TILE_N // VECTOR
        self.wait(store)
        self.stage_acc(store, acc, first + done // 2, tile_m)
        self.wait(store)
        start = corner.token + done
        results = cute.make_rmem_tensor(VECTOR, Float32)
        extras = cute.make_rmem_tensor(2 * VECTOR, Float32)
        end = cutlass.min(corner.end - start, tile_m) * row_vectors
        for index in cutlass.range(store.tid, end, WARPGROUP_THREADS, unroll=1):
            token, vector = index // row_vectors, index % row_vectors
            words = ptx.load_shared_vector(store.staging + token * self.config.staging_pitch + vector * 16, 0, VECTOR)
            for i in cutlass.range_constexpr(VECTOR):
                results[i] = words[i].bitcast(Float32)
            offset = vector * VECTOR
            target = self.results.target(shape, start + token, corner.row + offset, corner.bias + offset)
            self.results.load_extras(operands, shape, target, extras)
            self.results.store(operands, shape, target, results, extras)

    def stage_acc(self, store: Store, acc, first: int, tile_m: int):
        """Stores a chunk's accumulators to the staging buffer, [token][feature] in fp32."""
        pitch = self.config.staging_pitch
        g, t = store.lane // 4, store.lane % 4
        address = store.staging + t * (2 * pitch) + (store.row_warp * 16 + g) * 4
        for block in range(tile_m // 8):
            for i in range(4):
                offset = (8 * block + i % 2) * pitch + 32 * (i // 2)
                ptx.store_shared(address, offset, [acc[first + 4 * block + i]])
