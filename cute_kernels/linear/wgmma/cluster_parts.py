"""Parts of K of a tile of few rows, pushed to the CTA of a cluster that adds them up.

The CTAs of a cluster have equal parts of K of one block of output features. Its tiles of 64 features are shared out
among them: a warpgroup that has the sums of a tile which another CTA stores writes them into that CTA's shared memory,
each vector counted as bytes on a barrier there, and has done. So a part is on its way once, where through the workspace
it would be stored to L2 and asked for until it has come. The barriers hold for one tile: a CTA of a cluster has one.

Where warpgroups take units in turn, their sums are joined before, through the CTA's own memory: what is sent is one
part of a CTA, as 16 bytes of a thread at a time are some hundred clocks on their way for each 4 KB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.linear.wgmma.config import WARPGROUP_THREADS, WgmmaConfig
from cute_kernels.linear.wgmma.epilogue import Corner, TileEpilogue

JOIN = 9  # number of the first barrier of warpgroups that take turns, behind those of kernels and their epilogues
VECTOR_WORDS = 4
VECTOR_STRIDE = 16 * WARPGROUP_THREADS  # bytes from a vector of a thread to its next


class ClusterParts:
    """The end of an item of a configuration of digits with clusters."""

    def __init__(self, config: WgmmaConfig, epilogue: TileEpilogue, corner: Callable[..., Corner]):
        """corner: of (shape, item, tile of the block): where it belongs in the output."""
        self.config, self.epilogue, self.corner = config, epilogue, corner

    @cute.jit
    def finish(self, operands, shape, memory, store, item, sums, first_tile, turn):
        """Joins the sums of all turns, sends those of tiles that others store, adds up and stores the CTA's own.

        turn: whose units the sums are of. Every CTA of the cluster has its barriers.
        """
        config, rank = self.config, item.split
        if const_expr(config.turns > 1):
            self.join_turns(memory, store, rank, turn, sums, first_tile)
        for i in cutlass.range_constexpr(config.m_tiles):
            tile = first_tile + i
            if self.exists(tile, i) & (self.owner(tile) != rank) & (turn == config.turns - 1):
                self.send(memory, store, rank, tile, sums, i)
        for i in cutlass.range_constexpr(config.m_tiles):
            tile = first_tile + i
            if self.exists(tile, i) & (self.owner(tile) == rank) & (turn == 0):
                self.add_up(memory, store, tile, sums, i)
                corner = self.corner(shape, item, tile)
                self.epilogue.run(operands, shape, store, corner, sums, i * (config.tokens // 2))

    def exists(self, tile, i: int) -> Any:
        """Whether a tile, the ``i``-th of its warpgroup, is one of the block, of which the last one may have fewer."""
        return True if i < self.config.last_tiles else tile < self.config.block_tiles

    def owner(self, tile) -> Any:
        """The CTA that stores a tile."""
        return tile % self.config.cluster

    def vectors(self, sums, i: int) -> list[list[Any]]:
        """A thread's sums of the ``i``-th tile of its warpgroup, four at a time."""
        count = self.config.tokens // 2
        return [[sums[i * count + j + k] for k in range(VECTOR_WORDS)] for j in range(0, count, VECTOR_WORDS)]

    def add(self, sums, i: int, address) -> None:
        """Adds the part that lies at an address to a thread's sums of the ``i``-th tile of its warpgroup."""
        first = i * (self.config.tokens // 2)
        for number, vector in enumerate(self.vectors(sums, i)):
            words = ptx.load_shared_vector(address, number * VECTOR_STRIDE, VECTOR_WORDS)
            for j, (value, word) in enumerate(zip(vector, words, strict=True)):
                sums[first + VECTOR_WORDS * number + j] = value + word.bitcast(Float32)

    # -- of the turns of a CTA ----------------------------------------------------------------------------------------

    @cute.jit
    def join_turns(self, memory, store, rank, turn, sums, first_tile):
        """Adds up the sums of all turns: of the CTA's own tiles in the first turn's warpgroup, which stores them; of
        others in the last turn's, which has the last unit, so that no part is sent twice."""
        config = self.config
        for i in cutlass.range_constexpr(config.m_tiles):
            tile = first_tile + i
            if self.exists(tile, i) & (self.joining_turn(tile, rank) != turn):
                self.leave(memory, store, rank, turn, tile, sums, i)
        groups = config.warpgroups // config.turns
        threads = config.turns * WARPGROUP_THREADS
        cute.arch.barrier(barrier_id=JOIN + store.warpgroup % groups, number_of_threads=threads)
        for i in cutlass.range_constexpr(config.m_tiles):
            tile = first_tile + i
            if self.exists(tile, i) & (self.joining_turn(tile, rank) == turn):
                for number in cutlass.range_constexpr(config.turns - 1):
                    self.add(sums, i, self.left(memory, store, tile, number))

    def joining_turn(self, tile, rank) -> Any:
        """Whose warpgroup joins the sums of a tile."""
        return cutlass.select_(self.owner(tile) == rank, Int32(0), Int32(self.config.turns - 1))

    def left(self, memory, store, tile, number) -> Any:
        """Where a thread leaves the ``number``-th part of a tile for the warpgroup that joins them."""
        config = self.config
        place = tile * (config.turns - 1) + number
        return memory.parts + config.sent_bytes + place * config.part_bytes + store.tid * 16

    def leave(self, memory, store, rank, turn, tile, sums, i: int) -> None:
        """Leaves a thread's sums of a tile to the warpgroup that joins them."""
        before = cutlass.select_(self.joining_turn(tile, rank) < turn, Int32(1), Int32(0))
        place = self.left(memory, store, tile, turn - before)
        for number, vector in enumerate(self.vectors(sums, i)):
            ptx.store_shared(place, number * VECTOR_STRIDE, vector)

    # -- of the CTAs of a cluster -------------------------------------------------------------------------------------

    def sent(self, memory, store, tile, number) -> Any:
        """Where a thread sends a tile's ``number``-th part, in the memory of the CTA that stores the tile."""
        place = tile // self.config.cluster * (self.config.cluster - 1) + number
        return memory.parts + place * self.config.part_bytes + store.tid * 16

    def send(self, memory, store, rank, tile, sums, i: int) -> None:
        """Sends a thread's sums of a tile to the CTA that stores it."""
        owner = Int32(self.owner(tile))
        number = rank - cutlass.select_(owner < rank, Int32(1), Int32(0))
        barrier = Int32((memory.part_barriers + tile // self.config.cluster).toint())
        target = numbers.address_in(self.sent(memory, store, tile, number), owner)
        there = numbers.address_in(barrier, owner)
        for place, vector in enumerate(self.vectors(sums, i)):
            words = [numbers.bits(value) for value in vector]
            numbers.store_async(target + place * VECTOR_STRIDE, words, there)

    @cute.jit
    def add_up(self, memory, store, tile, sums, i: int):
        """Adds the parts of the other CTAs to those of a tile, in their order, once all have come."""
        cute.arch.mbarrier_wait(memory.part_barriers + tile // self.config.cluster, 0)
        for number in cutlass.range_constexpr(self.config.cluster - 1):
            self.add(sums, i, self.sent(memory, store, tile, number))
