"""From a warpgroup's accumulators to the output: transposed through shared memory, a few tokens at a time.

Accumulators have output features along the rows of the MMA, the output has them side by side. Each warpgroup stores its
own tiles of 64 features, through a buffer of its own, so that the others go on multiplying.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.linear import epilogue
from cute_kernels.linear.config import BF16, FP16, NO_ACTIVATION, SWIGLU
from cute_kernels.linear.wgmma.config import WARPGROUP_THREADS, WgmmaConfig
from cute_kernels.linear.wgmma.tma_store import TmaStore
from cute_kernels.sm90 import EMPTY_WORD
from layouts.weights.hopper import TILE_N

VECTOR = epilogue.VECTOR
ROW_BYTES = 2 * TILE_N  # of a token's results of a tile in 16 bits
PACKED_PITCH = ROW_BYTES + 16  # so that eight rows of 16 bytes are in different banks
PACKED_VECTOR = 8  # results of 16 bytes
GATED_PITCH = ROW_BYTES // 2 + 16  # of a token's results where two rows of W make one
VECTOR_STRIDE = 16 * WARPGROUP_THREADS  # bytes from a vector of a thread to its next, of a part of K


@dataclass(frozen=True)
class Corner:
    """Where a warpgroup's tile of 64 features begins; run-time integers."""

    row: Any  # of W
    token: Any
    end: Any  # behind the last token
    bias: Any  # of its first row among the biases, elements


@dataclass(frozen=True)
class Store:
    """Where a thread stands among those that store a tile; run-time integers."""

    staging: Any  # shared memory of its warpgroup
    warpgroup: Any
    tid: Any  # in its warpgroup
    row_warp: Any  # its 16 rows of the MMA
    lane: Any


class TileEpilogue:
    """The storing part of a consumer warpgroup."""

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.results = epilogue.Epilogue(config)  # pyright: ignore[reportArgumentType]
        self.tma_store = TmaStore(config)

    @cute.jit
    def run(self, operands, shape, store: Store, corner: Corner, acc, first: int):
        """Stores the tile whose accumulators are accumulators[first : first + tokens / 2]."""
        own_kind = FP16 if self.config.dtype == "fp16" else BF16
        plain = (shape.out_kind == own_kind) & (operands.residual == 0) & (operands.out % 16 == 0)
        if plain & (shape.activation == NO_ACTIVATION) & (shape.n % PACKED_VECTOR == 0):
            self.add_bias(operands, shape, store, corner, acc, first)
            if const_expr(self.config.bulk_stores):
                self.tma_store.store(operands, store, corner, acc, first)
            else:
                for chunk in cutlass.range_constexpr(len(self.config.chunks)):
                    self.store_packed(operands, shape, store, corner, acc, first, chunk)
        elif plain & (shape.activation == SWIGLU) & (shape.n % (2 * PACKED_VECTOR) == 0):
            self.add_bias(operands, shape, store, corner, acc, first)
            for chunk in cutlass.range_constexpr(len(self.config.chunks)):
                self.store_gated(operands, shape, store, corner, acc, first, chunk)
        else:
            for chunk in cutlass.range_constexpr(len(self.config.chunks)):
                self.store_any(operands, shape, store, corner, acc, first, chunk)

    def wait(self, store: Store):
        """For all threads of the warpgroup."""
        cute.arch.barrier(barrier_id=store.warpgroup + 1, number_of_threads=WARPGROUP_THREADS)

    # -- parts of K ---------------------------------------------------------------------------------------------------

    @cute.jit
    def combine(self, operands, store: Store, work_tile, acc):
        """Stores the accumulators of a part of K of a tile, or adds the others' to those of the last part.

        Every thread stores its own accumulators and finds the same thread's, so they lie in the order of the registers.
        """
        if work_tile.splits > 1:
            partial_bytes = 4 * self.config.block_rows * self.config.tile_m
            place = operands.workspace + Int64(work_tile.number * (work_tile.splits - 1)) * partial_bytes
            place = place + (store.warpgroup * (partial_bytes // self.config.warpgroups) + store.tid * 16)
            if work_tile.split < work_tile.splits - 1:
                place = place + Int64(work_tile.split) * partial_bytes
                for i in cutlass.range_constexpr(self.config.thread_vectors):
                    vector = [acc[4 * i + j] for j in range(4)]
                    ptx.store_global(place, vector, offset=i * VECTOR_STRIDE)
            else:
                for _ in cutlass.range(work_tile.splits - 1, unroll=1):
                    for first in cutlass.range_constexpr(0, self.config.thread_vectors, self.config.combine_batch):
                        self.add_part(place, acc, first)
                    place = place + partial_bytes

    @cute.jit
    def add_part(self, place, acc, first: int):
        """Adds some vectors of another part to the accumulators, once they have come, and puts EMPTY back."""
        batch = self.config.combine_batch
        words = cute.make_rmem_tensor(4 * batch, Uint32)
        missing = Int32(1)
        while missing != 0:
            missing = Int32(0)
            for i in cutlass.range_constexpr(batch):
                loaded = ptx.load_relaxed(place, 4, offset=(first + i) * VECTOR_STRIDE)
                for j in cutlass.range_constexpr(4):
                    words[4 * i + j] = loaded[j]
            for i in cutlass.range_constexpr(4 * batch):
                missing = cutlass.select_(words[i] == Uint32(EMPTY_WORD), Int32(1), missing)
        for i in cutlass.range_constexpr(batch):
            for j in cutlass.range_constexpr(4):
                place_of = 4 * (first + i) + j
                acc[place_of] = acc[place_of] + words[4 * i + j].bitcast(Float32)
            ptx.store_global(place, [Uint32(EMPTY_WORD)] * 4, offset=(first + i) * VECTOR_STRIDE)

    # -- parts of K of a cluster --------------------------------------------------------------------------------------

    @cute.jit
    def join(self, store: Store, state, rank, acc):
        """Makes accumulators[: own_tokens / 2] those of all of K, of the ``rank``-th share of the tile's tokens.

        Each CTA of the cluster leaves the others' shares in its own memory and reads its own share from theirs: a sum
        is added up by one CTA, in an order that does not depend on who came first. ``state``: where the activations
        were, which nobody needs any more. The caller waits for the cluster before it ends: until then others read.
        """
        config = self.config
        math_threads = config.warpgroups * WARPGROUP_THREADS
        cute.arch.barrier(barrier_id=config.warpgroups + 1, number_of_threads=math_threads)
        place = self.shares_place(store, state)
        for share in cutlass.range_constexpr(config.cluster):
            if rank != share:
                self.publish_share(place, acc, share)
        self.keep_share(acc, rank)
        cute.arch.sync_warp()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        self.load_shares(place, acc, rank)
        cute.arch.cluster_arrive()

    def shares_place(self, store: Store, state):
        """Where a thread leaves its first share: shares of a warpgroup lie one behind the other."""
        return state + (store.warpgroup * (self.config.cluster * self.config.share_bytes) + store.tid * 16)

    def publish_share(self, place, acc, share: int):
        """Puts a share of a thread's accumulators into this CTA's memory, in the order of the registers."""
        own = self.config.own_m // 2
        for i in range(own // 4):
            vector = [acc[share * own + 4 * i + j] for j in range(4)]
            ptx.store_shared(place, share * self.config.share_bytes + i * VECTOR_STRIDE, vector)

    def keep_share(self, acc, rank):
        """Moves the CTA's own share to the front."""
        own = self.config.own_m // 2
        for share in range(1, self.config.cluster):
            for i in range(own):
                acc[i] = cutlass.select_(rank == share, acc[share * own + i], acc[i])

    def load_shares(self, place, acc, rank):
        """Adds what the other CTAs left of the CTA's own share."""
        own = self.config.own_m // 2
        for step in range(1, self.config.cluster):
            other = numbers.address_in(place + rank * self.config.share_bytes, (rank + step) % self.config.cluster)
            words = [numbers.load_in_cluster(other + i * VECTOR_STRIDE, 4) for i in range(own // 4)]
            for i in range(own):
                acc[i] = acc[i] + words[i // 4][i % 4].bitcast(Float32)

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
        """Adds a row's bias to its accumulators: two of every four."""
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
        vectors = TILE_N // PACKED_VECTOR
        start = corner.token + done
        for i in cutlass.range_constexpr(-(-tile_m * vectors // WARPGROUP_THREADS)):
            index = store.tid + i * WARPGROUP_THREADS
            token, vector = index // vectors, index % vectors
            row = corner.row + vector * PACKED_VECTOR
            if (token < tile_m) & (start + token < corner.end) & (row < shape.n):
                words = ptx.load_shared_vector(store.staging + token * PACKED_PITCH + vector * 16, 0, 4)
                ptx.store_global(operands.out + (Int64(start + token) * shape.n + row) * 2, words)

    def stage_packed(self, store: Store, acc, first: int, tile_m: int):
        """Puts a chunk's accumulators into the staging buffer, [token][feature] in 16 bits: stmatrix turns them
        around."""
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

    # -- gate and up in turn, 16 bytes at a time --------------------------------------------------------------------

    @cute.jit
    def store_gated(self, operands, shape, store: Store, corner: Corner, acc, first: int, chunk: int):
        """silu(gate) * up of a chunk, rounded; rows of W are gate and up in turn. Stores 8 neighbouring results."""
        done, tile_m = self.config.chunks[chunk]
        self.wait(store)
        self.stage_gated(store, acc, first + done // 2, tile_m)
        self.wait(store)
        vectors = TILE_N // 2 // PACKED_VECTOR
        start, columns = corner.token + done, shape.n // 2
        for i in cutlass.range_constexpr(-(-tile_m * vectors // WARPGROUP_THREADS)):
            index = store.tid + i * WARPGROUP_THREADS
            token, vector = index // vectors, index % vectors
            column = corner.row // 2 + vector * PACKED_VECTOR
            if (token < tile_m) & (start + token < corner.end) & (column < columns):
                words = ptx.load_shared_vector(store.staging + token * GATED_PITCH + vector * 16, 0, 4)
                ptx.store_global(operands.out + (Int64(start + token) * columns + column) * 2, words)

    def stage_gated(self, store: Store, acc, first: int, tile_m: int):
        """Puts a chunk's results into the staging buffer, [token][feature] in 16 bits.

        Gate and up of two tokens are in lanes four apart. Each takes one of the tokens: they swap what they do not use.
        """
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
                result = epilogue.silu(gate) * up
                ptx.store_shared_half(address, 8 * block * GATED_PITCH + 8 * half, pack(result, result))

    # -- any kind of output -------------------------------------------------------------------------------------------

    @cute.jit
    def store_any(self, operands, shape, store: Store, corner: Corner, acc, first: int, chunk: int):
        """Bias, activation and residual of a chunk in fp32, four neighbouring features at a time."""
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
            target = self.target_of(shape, corner, start + token, vector * VECTOR)
            self.results.load_extras(operands, shape, target, extras)
            self.results.store(operands, shape, target, results, extras)

    def target_of(self, shape, corner: Corner, token, offset):
        """Where four neighbouring results of a token belong."""
        row = corner.row + offset
        halves = cutlass.select_(shape.activation == SWIGLU, Int32(1), Int32(0))
        count = cutlass.min(shape.n - row, VECTOR) >> halves
        place = Int64(token) * (shape.n >> halves) + (row >> halves)
        return epilogue.Target(row, place, count, corner.bias + offset)

    def stage_acc(self, store: Store, acc, first: int, tile_m: int):
        """Puts a chunk's accumulators into the staging buffer, [token][feature] in fp32."""
        pitch = self.config.staging_pitch
        g, t = store.lane // 4, store.lane % 4
        address = store.staging + t * (2 * pitch) + (store.row_warp * 16 + g) * 4
        for block in range(tile_m // 8):
            for i in range(4):
                offset = (8 * block + i % 2) * pitch + 32 * (i // 2)
                ptx.store_shared(address, offset, [acc[first + 4 * block + i]])
