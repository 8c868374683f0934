"""Reduction policies: how parts of K are added up, and which CTA stores the result.

`.cluster_reduction` has the reduction of single tiles through a cluster's shared memory, `.ranges` has the reduction of
work ranges. Each policy has three methods. `begin` runs before the first work tile, `prepare` before a work tile's
products, and `finish` after the products, with their accumulators.
"""

from __future__ import annotations

from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.exchange import Poll, Published, publish, reset
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.epilogue import Store
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS
from cute_kernels.gemm.wgmma.places import Corner, Places, corner_of
from cute_kernels.gemm.wgmma.tiles import DenseRounds

VECTOR_STRIDE = 16 * WARPGROUP_THREADS  # bytes from a vector of a thread to its next, of a part of K


class TileReduction(Protocol):
    """The reduction of a work tile's accumulators in a consumer warpgroup.

    Attributes:
        first_tile: the warpgroup's first tile in the block.
        k_rank: the warpgroup's rank among the warpgroups that interleave k blocks.
        prepares: whether `prepare` loads anything.

    In reductions of dense products, ``rounds`` is the `DenseRounds` that distributes tiles to CTAs.
    """

    @property
    def prepares(self) -> bool: ...

    def begin(self) -> None: ...

    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank) -> None: ...

    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank) -> None: ...


class TileStore(Protocol):
    """The interface of store policies, which write a tile of finished accumulators to the output: see
    `.epilogue.TileEpilogue`."""

    @property
    def dense(self) -> bool: ...

    def prepare(self, operands, shape, store, corner, ordinal: int) -> None: ...

    def run(self, operands, shape, store, corner, acc, first: int, ordinal: int) -> None: ...


class StoringReduction:
    """The base of reductions that store tiles, of dense products or experts, through a store policy."""

    rounds: type[DenseRounds] = DenseRounds

    def __init__(self, config: WgmmaConfig, epilogue: TileStore, places: Places):
        self.config, self.epilogue, self.places = config, epilogue, places
        self.prepares = epilogue.dense

    def begin(self) -> None:
        """Does nothing: most reductions have nothing to set up."""

    def prepare_tiles(self, operands, shape, store: Store, work_tile, first_tile) -> None:
        """Starts the store policy's loads for a warpgroup's tiles."""
        for i in range(self.config.n_tiles):
            corner = corner_of(self.config, self.places, shape, work_tile, first_tile + i)
            self.epilogue.prepare(operands, shape, store, corner, i)

    def store_tiles(self, operands, shape, store: Store, work_tile, acc, first_tile) -> None:
        """Stores a warpgroup's tiles."""
        for i in range(self.config.n_tiles):
            corner = corner_of(self.config, self.places, shape, work_tile, first_tile + i)
            self.epilogue.run(operands, shape, store, corner, acc, i * (self.config.tile_m // 2), i)


class WorkspaceReduction(StoringReduction):
    """The reduction through global memory. The CTA with the last part of K adds the other CTAs' partials, and stores
    the tile. A work tile that has all of K needs no partials and is stored at once.
    """

    @cute.jit
    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank):
        """Prepares the store of the tiles that the CTA stores."""
        if (work_tile.split == work_tile.splits - 1) | const_expr(self.config.reduction.cuts_rows):
            self.prepare_tiles(operands, shape, store, work_tile, first_tile)

    @cute.jit
    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank):
        """If the work tile has the last part of K, adds the other parts' partials and stores the warpgroup's tiles.
        Otherwise publishes the accumulators. See `TileReduction`."""
        if const_expr(self.config.reduction.splits_k):
            self.combine(operands, store, work_tile, acc)
        if (work_tile.split == work_tile.splits - 1) | const_expr(self.config.reduction.cuts_rows):
            self.store_tiles(operands, shape, store, work_tile, acc, first_tile)

    @cute.jit
    def combine(self, operands, store: Store, work_tile, acc):
        """If the work tile has the last part of K, adds the other parts' partials to the accumulators. Otherwise
        publishes the accumulators.

        A thread loads only what the same thread of another CTA has stored, so partials lie in the order of registers.
        """
        if work_tile.splits > 1:
            partial_bytes = 4 * self.config.block_rows * self.config.tile_m
            place = operands.workspace + Int64(work_tile.number * (work_tile.splits - 1)) * partial_bytes
            place = place + (store.warpgroup * (partial_bytes // self.config.warpgroups) + store.tid * 16)
            if work_tile.split < work_tile.splits - 1:
                place = place + Int64(work_tile.split) * partial_bytes
                publish_acc(acc, place, self.config.thread_vectors)
            else:
                for _ in cutlass.range(work_tile.splits - 1, unroll=1):
                    for first in cutlass.range_constexpr(0, self.config.thread_vectors, self.config.combine_batch):
                        self.add_part(place, acc, first)
                    place = place + partial_bytes

    @cute.jit
    def add_part(self, place, acc, first: int):
        """Waits for a batch of published vectors, adds them to the accumulators from vector ``first`` on, and resets
        the published vectors to EMPTY."""
        add_published(acc, 4 * first, place, self.config.combine_batch, first * VECTOR_STRIDE)


def publish_acc(acc, place, count: int) -> None:
    """Publishes the first ``count`` vectors of a thread's accumulators, in the order of the registers."""
    for i in range(count):
        publish(place, [acc[4 * i + j] for j in range(4)], offset=i * VECTOR_STRIDE)


@cute.jit
def add_published(acc, first: cutlass.Constexpr, place, count: cutlass.Constexpr, offset: cutlass.Constexpr):
    """Adds ``count`` vectors that `publish_acc` has stored, from ``offset`` bytes on, to acc[first:]. Then resets these
    vectors to EMPTY."""
    words = cute.make_rmem_tensor(4 * count, Uint32)
    offsets = [offset + i * VECTOR_STRIDE for i in range(count)]
    Poll([Published(place, offset=offset) for offset in offsets]).load(words)
    for i in cutlass.range_constexpr(count):
        for j in cutlass.range_constexpr(4):
            acc[first + 4 * i + j] = acc[first + 4 * i + j] + words[4 * i + j].bitcast(Float32)
        reset(place, offset=offsets[i])


class SequentialReduction(StoringReduction):
    """The reduction of parts of K that one CTA computes one after the other. A second set of accumulators holds the sum
    of the parts. Parts are added in the order of `WorkspaceReduction`: the last part, then the first, the second and so
    on.
    """

    def begin(self) -> None:
        """Makes the second set of accumulators."""
        self.sums = cute.make_rmem_tensor(self.config.thread_acc, Float32)
        self.sums.fill(0.0)

    @cute.jit
    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank):
        """Starts the store policy's loads, before the part of K that is computed last."""
        if work_tile.split == work_tile.splits - 1:
            self.prepare_tiles(operands, shape, store, work_tile, first_tile)

    @cute.jit
    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank):
        """Adds a part's accumulators to the second set. After the last part, stores the tile. See `TileReduction`."""
        begins = work_tile.split == 0
        for i in cutlass.range_constexpr(self.config.thread_acc):
            self.sums[i] = cutlass.select_(begins, acc[i], self.sums[i] + acc[i])
        if work_tile.split == work_tile.splits - 1:
            self.store_tiles(operands, shape, store, work_tile, self.sums, first_tile)


class RowReduction(StoringReduction):
    """The reduction of whole tiles through a cluster's shared memory. Each CTA adds up and stores its share of the
    tile's rows of x."""

    def corner(self, shape, work_tile, first_tile) -> Corner:
        """Returns where, in the output, the CTA's share of the rows of x begins."""
        token = work_tile.split * self.config.own_m
        return corner_of(self.config, self.places, shape, work_tile, first_tile, token)

    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank) -> None:
        """Starts the store policy's loads for the CTA's share."""
        self.epilogue.prepare(operands, shape, store, self.corner(shape, work_tile, first_tile), 0)

    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank) -> None:
        """Adds up the CTA's share of the rows over the cluster, and stores this share. See `TileReduction`."""
        self.join(store, memory.x_address, work_tile.split, acc)
        self.epilogue.run(operands, shape, store, self.corner(shape, work_tile, first_tile), acc, 0, 0)
        cute.arch.cluster_wait()  # until nobody reads this CTA's accumulators any more

    @cute.jit
    def join(self, store: Store, state, rank, acc):
        """Adds up the ``rank``-th share of the tile's tokens over all of K, in acc[: own_m / 2].

        Each CTA writes the shares that other CTAs will store into its own shared memory, and reads its own share from
        the other CTAs' memory. So one CTA computes each sum, in an order that does not depend on which CTA comes first.

        state: the address of the activations, whose memory the shares overwrite. The caller must wait for the cluster
        before the CTA ends, as other CTAs may still read its memory.
        """
        config = self.config
        math_threads = config.warpgroups * WARPGROUP_THREADS
        # The barrier after the warpgroups' own of the epilogue: no MMA of the CTA reads the activations any more.
        cute.arch.barrier(barrier_id=config.warpgroups + 1, number_of_threads=math_threads)
        place = self.shares_place(store, state)
        for share in cutlass.range_constexpr(config.cluster):
            if rank != share:
                self.publish_share(place, acc, share)
        self.keep_share(acc, rank)
        cute.arch.sync_warp()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()  # all CTAs have published
        self.load_shares(place, acc, rank)
        cute.arch.cluster_arrive()  # this CTA has read; `finish` waits for the others

    def shares_place(self, store: Store, state):
        """Returns the address of a thread's first share. All shares of a warpgroup lie before those of the next
        warpgroup."""
        return state + (store.warpgroup * (self.config.cluster * self.config.share_bytes) + store.tid * 16)

    def publish_share(self, place, acc, share: int):
        """Stores a share of a thread's accumulators in this CTA's memory, in the order of the registers."""
        own = self.config.own_m // 2
        for i in range(own // 4):
            vector = [acc[share * own + 4 * i + j] for j in range(4)]
            ptx.store_shared(place, share * self.config.share_bytes + i * VECTOR_STRIDE, vector)

    def keep_share(self, acc, rank):
        """Moves the CTA's own share to the front of the accumulators."""
        own = self.config.own_m // 2
        for share in range(1, self.config.cluster):
            for i in range(own):
                acc[i] = cutlass.select_(rank == share, acc[share * own + i], acc[i])

    def load_shares(self, place, acc, rank):
        """Adds the other CTAs' partials of this CTA's share."""
        if self.config.cluster > 2:
            self.load_in_order(place, acc, rank)
            return
        own = self.config.own_m // 2
        for step in range(1, self.config.cluster):
            other = numbers.address_in(place + rank * self.config.share_bytes, (rank + step) % self.config.cluster)
            words = [numbers.load_in_cluster(other + i * VECTOR_STRIDE, 4) for i in range(own // 4)]
            for i in range(own):
                acc[i] = acc[i] + words[i // 4][i % 4].bitcast(Float32)

    def load_in_order(self, place, acc, rank):
        """Adds the partials of more than two CTAs in the order of `WorkspaceReduction`: the last, then the first, the
        second and so on. The CTA's own partial comes from ``acc``; it is not in shared memory, so the words loaded for
        it are ignored.
        """
        own, total = self.config.own_m // 2, []
        for part in (self.config.cluster - 1, *range(self.config.cluster - 1)):
            other = numbers.address_in(place + rank * self.config.share_bytes, Int32(part))
            words = [numbers.load_in_cluster(other + i * VECTOR_STRIDE, 4) for i in range(own // 4)]
            found = [cutlass.select_(rank == part, acc[i], words[i // 4][i % 4].bitcast(Float32)) for i in range(own)]
            total = [one + more for one, more in zip(total, found, strict=True)] if total else found
        for i, value in enumerate(total):
            acc[i] = value
