"""Loads a tile's residual into shared memory while the tile is multiplied, and adds it to the accumulators.

Before the tile's first k block, every thread starts all of its loads, of 16 bytes each. So nothing waits for the memory
when the accumulators are complete. The residual lies where the results will be staged, [token][feature] in 16 bits.
ldmatrix gives every thread the elements that its accumulators need, and stmatrix stores the sums at the same addresses.

There are two buffers, each for a chunk of tokens. If a tile has more chunks, a buffer is filled again when its chunk
has been stored.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device import numbers, ptx
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS
from layouts.weights.hopper import TILE_N

ROW_BYTES = 2 * TILE_N  # of a token's results of a tile: what 128-byte swizzling permutes
VECTOR = 8  # results of 16 bytes
ROW_VECTORS = TILE_N // VECTOR
BUFFERS = 2


def vector_offset(token, vector) -> Int32:
    """Returns the offset in bytes of a token's ``vector``-th 16 bytes in a buffer. As in TMA's swizzle, the
    ``vector``-th 16 bytes of eight consecutive tokens lie in different banks.
    """
    return token * ROW_BYTES + (vector ^ (token % 8)) * 16


class ResidualChunks:
    """The residual of the tiles that a consumer warpgroup stores.

    ``ordinal`` is the index of a tile among the tiles that a warpgroup stores of a work tile. ``chunk`` is the index of
    a chunk in its tile. `wait` counts groups of cp.async, so all threads must issue the same groups.
    """

    def __init__(self, config: WgmmaConfig):
        self.config = config
        if config.dtype == "bf16":
            self.halves, self.pack = (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float), ptx.pack_bf16x2
        else:
            self.halves, self.pack = (ptx.half2_low_to_float, ptx.half2_high_to_float), ptx.pack_f16x2

    def number(self, ordinal: int, chunk: int) -> int:
        return ordinal * len(self.config.chunks) + chunk

    def buffer(self, store, ordinal: int, chunk: int):
        """Returns the address of the shared memory into which the residual of a chunk is loaded."""
        return store.staging + self.number(ordinal, chunk) % BUFFERS * (self.config.chunk_m * ROW_BYTES)

    def is_early(self, ordinal: int, chunk: int) -> bool:
        """Returns whether a chunk has a buffer into which it can be loaded before the work tile's products."""
        return self.number(ordinal, chunk) < BUFFERS

    def bring_first(self, operands, shape, store, corner, ordinal: int, *, early: bool) -> None:
        """Starts loading some of a tile's first `BUFFERS` chunks. With ``early``, the call runs before the products and
        loads the chunks that already have a buffer (`is_early`). Without it, the call loads the other chunks."""
        for chunk in range(min(BUFFERS, len(self.config.chunks))):
            if self.is_early(ordinal, chunk) == early:
                self.bring(operands, shape, store, corner, ordinal, chunk)

    def bring(self, operands, shape, store, corner, ordinal: int, chunk: int) -> None:
        """Starts loading a chunk, 16 bytes at a time, as one group of cp.async."""
        done, tile_m = self.config.chunks[chunk]
        buffer, start = self.buffer(store, ordinal, chunk), corner.token + done
        for i in range(-(-tile_m * ROW_VECTORS // WARPGROUP_THREADS)):
            index = store.tid + i * WARPGROUP_THREADS
            token, vector = index // ROW_VECTORS, index % ROW_VECTORS
            row = corner.row + vector * VECTOR
            there = (token < tile_m) & (start + token < corner.end) & (row < shape.n)
            source = operands.residual + (Int64(start + token) * shape.n + row) * 2
            target = buffer + vector_offset(token, vector)
            numbers.copy_async_if(cutlass.select_(there, Int32(1), Int32(0)), target, source, Int32(16))
        cute.arch.cp_async_commit_group()

    def wait(self, chunk: int) -> None:
        """Waits for a thread's own copies of a chunk. It does not wait for the tile's next chunk."""
        cute.arch.cp_async_wait_group(1 if chunk + 1 < len(self.config.chunks) else 0)

    def add(self, store, acc, first: int, ordinal: int, chunk: int) -> None:
        """Adds acc[first:] to a chunk's residual, and overwrites the residual with the rounded sums.

        ldmatrix loads four matrices: features 0 to 7 and 8 to 15 of eight tokens, then the same features of the next
        eight tokens. If a chunk has only eight tokens, the second pair of matrices is the first pair.
        """
        tile_m, lane = self.config.chunks[chunk][1], store.lane
        few = tile_m == 8
        token = lane % 8 if few else lane // 16 * 8 + lane % 8
        address = self.buffer(store, ordinal, chunk) + vector_offset(token, store.row_warp * 2 + lane // 8 % 2)
        for pair in range(-(-tile_m // 16)):
            place, offset = first + 8 * pair, pair * 16 * ROW_BYTES
            others = ptx.load_matrix_x4(Int32(address), offset, transpose=True)
            words = [self.sum_of(acc, place + 2 * i, others[i]) for i in ((0, 1, 0, 1) if few else range(4))]
            ptx.store_matrix_x4(Int32(address), offset, words, transpose=True)

    def sum_of(self, acc, place: int, word):
        """Returns two neighbouring accumulators plus two elements of the residual, rounded."""
        low, high = (half(word) for half in self.halves)
        return self.pack(acc[place] + low, acc[place + 1] + high)

    @cute.jit
    def store(self, operands, shape, store, corner, ordinal: int, chunk: int):
        """Stores a chunk's sums, 8 neighbouring features at a time."""
        done, tile_m = self.config.chunks[chunk]
        buffer, start = self.buffer(store, ordinal, chunk), corner.token + done
        for i in cutlass.range_constexpr(-(-tile_m * ROW_VECTORS // WARPGROUP_THREADS)):
            index = store.tid + i * WARPGROUP_THREADS
            token, vector = index // ROW_VECTORS, index % ROW_VECTORS
            row = corner.row + vector * VECTOR
            if (token < tile_m) & (start + token < corner.end) & (row < shape.n):
                words = ptx.load_shared_vector(Int32(buffer + vector_offset(token, vector)), 0, 4)
                ptx.store_global(operands.out + (Int64(start + token) * shape.n + row) * 2, words)

    def has_following(self, chunk: int) -> bool:
        """Returns whether a chunk's buffer is filled again with a later chunk of the same tile."""
        return chunk + BUFFERS < len(self.config.chunks)
