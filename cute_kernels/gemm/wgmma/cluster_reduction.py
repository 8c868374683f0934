"""The DSMEM reduction for tiles of few rows: CTAs of a cluster publish partials to the CTA that adds them up.

The CTAs of a cluster compute equal parts of K for one block of output features. Each CTA stores some of the block's
tiles of 64 features. A warpgroup writes its accumulators of a tile into the shared memory of the CTA that stores the
tile. A barrier there counts the bytes that arrive. So a partial is moved once. Through the workspace, it would be
written to L2, and the storing CTA would poll it there. Each barrier is used once, since a CTA of a cluster has one work
tile.

If warpgroups interleave k blocks, their accumulators are first added up in their CTA's own shared memory. The CTA then
sends a single partial. Sending takes some hundred clocks for each 4 KB.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.pipeline import Barrier
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS
from cute_kernels.gemm.wgmma.places import Places, corner_of
from cute_kernels.gemm.wgmma.reduction import StoringReduction, TileStore

JOIN = 9  # number of the first barrier of warpgroups that interleave k blocks, after those of kernels and epilogues
VECTOR_WORDS = 4
VECTOR_STRIDE = 16 * WARPGROUP_THREADS  # bytes from a vector of a thread to its next


class Partials:
    """Publishes and loads partial sums of tiles of 64 features, in the shared memory of the CTA that stores the
    tile."""

    def __init__(self, config: WgmmaConfig):
        self.config = config

    def exists(self, tile, i: int) -> Any:
        """Returns whether ``tile``, the ``i``-th tile of a warpgroup, exists. The last warpgroup may have fewer tiles
        than the others."""
        return True if i < self.config.last_tiles else tile < self.config.block_tiles

    def owner(self, tile) -> Any:
        """Returns the CTA that stores a tile.

        With more than two CTAs, the last CTA stores the first tile. If a block has one tile, its parts of K are then
        added in the order of `WorkspaceReduction`: the last part, the first, the second and so on.
        """
        owner = tile % self.config.cluster
        return owner if self.config.cluster <= 2 else self.config.cluster - 1 - owner

    def vectors(self, acc, i: int) -> list[list[Any]]:
        """Returns a thread's accumulators of its warpgroup's ``i``-th tile, as vectors of four numbers."""
        count = self.config.tile_m // 2
        return [[acc[i * count + j + k] for k in range(VECTOR_WORDS)] for j in range(0, count, VECTOR_WORDS)]

    def add(self, acc, i: int, address) -> None:
        """Adds the partial at ``address`` to a thread's accumulators of its warpgroup's ``i``-th tile."""
        first = i * (self.config.tile_m // 2)
        for number, vector in enumerate(self.vectors(acc, i)):
            words = ptx.load_shared_vector(address, number * VECTOR_STRIDE, VECTOR_WORDS)
            for j, (value, word) in enumerate(zip(vector, words, strict=True)):
                acc[first + VECTOR_WORDS * number + j] = value + word.bitcast(Float32)

    def partial_address(self, memory, store, tile, number) -> Any:
        """Returns the address at which a thread publishes a tile's ``number``-th partial, in the memory of the CTA that
        stores the tile."""
        place = tile // self.config.cluster * (self.config.cluster - 1) + number
        return memory.partials + place * self.config.partial_bytes + store.tid * 16

    def publish(self, memory, store, rank, tile, acc, i: int) -> None:
        """Publishes a thread's accumulators of a tile to the CTA that stores it."""
        owner = Int32(self.owner(tile))
        number = rank - cutlass.select_(owner < rank, Int32(1), Int32(0))
        barrier = Int32((memory.partial_barriers + tile // self.config.cluster).toint())
        target = numbers.address_in(self.partial_address(memory, store, tile, number), owner)
        there = numbers.address_in(barrier, owner)
        for place, vector in enumerate(self.vectors(acc, i)):
            words = [numbers.bits(value) for value in vector]
            numbers.store_async(target + place * VECTOR_STRIDE, words, there)

    @cute.jit
    def load(self, memory, store, tile, acc, i: int):
        """Waits until all other CTAs' partials of a tile have arrived, then adds them in the order of the CTAs'
        ranks."""
        Barrier(memory.partial_barriers + tile // self.config.cluster).wait()
        for number in cutlass.range_constexpr(self.config.cluster - 1):
            self.add(acc, i, self.partial_address(memory, store, tile, number))


class InterleavedReduction:
    """The reduction of warpgroups that interleave the k blocks of a tile, through their CTA's own shared memory."""

    def __init__(self, config: WgmmaConfig, partials: Partials):
        self.config, self.partials = config, partials

    @cute.jit
    def reduce(self, memory, store, rank, k_rank, acc, first_tile):
        """Adds up, tile by tile, the accumulators of all warpgroups that interleave the tile's k blocks.

        The first warpgroup adds up the tiles that this CTA stores. The last warpgroup, which computes the last k block,
        adds up the tiles that other CTAs store, so that each partial is published once.
        """
        config = self.config
        for i in cutlass.range_constexpr(config.n_tiles):
            tile = first_tile + i
            if self.partials.exists(tile, i) & (self.reducing_k_rank(tile, rank) != k_rank):
                self.publish_locally(memory, store, rank, k_rank, tile, acc, i)
        groups = config.warpgroups // config.k_warpgroups
        threads = config.k_warpgroups * WARPGROUP_THREADS
        cute.arch.barrier(barrier_id=JOIN + store.warpgroup % groups, number_of_threads=threads)
        for i in cutlass.range_constexpr(config.n_tiles):
            tile = first_tile + i
            if self.partials.exists(tile, i) & (self.reducing_k_rank(tile, rank) == k_rank):
                for number in cutlass.range_constexpr(config.k_warpgroups - 1):
                    self.partials.add(acc, i, self.local_partial_address(memory, store, tile, number))

    def reducing_k_rank(self, tile, rank) -> Any:
        """Returns the ``k_rank`` of the warpgroup that adds up the accumulators of a tile."""
        return cutlass.select_(self.partials.owner(tile) == rank, Int32(0), Int32(self.config.k_warpgroups - 1))

    def local_partial_address(self, memory, store, tile, number) -> Any:
        """Returns the address at which a thread publishes the ``number``-th partial of a tile for the warpgroup that
        adds up the tile."""
        config = self.config
        place = tile * (config.k_warpgroups - 1) + number
        return memory.partials + config.reduction.received_bytes(config) + place * config.partial_bytes + store.tid * 16

    def publish_locally(self, memory, store, rank, k_rank, tile, acc, i: int) -> None:
        """Publishes a thread's accumulators of a tile to the warpgroup that adds up the tile."""
        before = cutlass.select_(self.reducing_k_rank(tile, rank) < k_rank, Int32(1), Int32(0))
        place = self.local_partial_address(memory, store, tile, k_rank - before)
        for number, vector in enumerate(self.partials.vectors(acc, i)):
            ptx.store_shared(place, number * VECTOR_STRIDE, vector)


class ClusterReduction(StoringReduction):
    """The reduction of parts of K through a cluster's shared memory. Each tile of 64 features has one CTA that adds up
    and stores it."""

    def __init__(self, config: WgmmaConfig, epilogue: TileStore, places: Places):
        super().__init__(config, epilogue, places)
        self.partials = Partials(config)
        self.interleaved = InterleavedReduction(config, self.partials)

    def begin(self) -> None:
        """Waits until all CTAs of the cluster have initialised their barriers, before anything is published."""
        cute.arch.cluster_wait()

    @cute.jit
    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank):
        """Starts the store policy's loads for the tiles that the CTA stores."""
        for i in cutlass.range_constexpr(self.config.n_tiles):
            tile = first_tile + i
            if self.partials.exists(tile, i) & (self.partials.owner(tile) == work_tile.split) & (k_rank == 0):
                corner = corner_of(self.config, self.places, shape, work_tile, tile)
                self.epilogue.prepare(operands, shape, store, corner, i // self.config.cluster)

    @cute.jit
    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank):
        """Adds up the partials of the CTA's warpgroups, and publishes the sums of tiles that other CTAs store. Then
        loads the other CTAs' partials of the tiles that this CTA stores, and stores these tiles."""
        config, rank = self.config, work_tile.split
        if const_expr(config.k_warpgroups > 1):
            self.interleaved.reduce(memory, store, rank, k_rank, acc, first_tile)
        for i in cutlass.range_constexpr(config.n_tiles):
            tile = first_tile + i
            if (
                self.partials.exists(tile, i)
                & (self.partials.owner(tile) != rank)
                & (k_rank == config.k_warpgroups - 1)
            ):
                self.partials.publish(memory, store, rank, tile, acc, i)
        for i in cutlass.range_constexpr(config.n_tiles):
            tile = first_tile + i
            if self.partials.exists(tile, i) & (self.partials.owner(tile) == rank) & (k_rank == 0):
                self.partials.load(memory, store, tile, acc, i)
                corner = corner_of(config, self.places, shape, work_tile, tile)
                self.epilogue.run(operands, shape, store, corner, acc, i * (config.tile_m // 2), i // config.cluster)
