"""Parts of K of a tile of few rows, pushed to the CTA of a cluster that adds them up.

The CTAs of a cluster have equal parts of K of one block of output features. Its tiles of 64 features are shared out
among them: a warpgroup that has the sums of a tile which another CTA stores writes them into that CTA's shared memory,
each vector counted as bytes on a barrier there, and has done. So a part is on its way once, where through the workspace
it would be stored to L2 and asked for until it has come. The barriers hold for one tile: a CTA of a cluster has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device import numbers, ptx
from cute_kernels.linear.wgmma.config import WARPGROUP_THREADS, WgmmaConfig
from cute_kernels.linear.wgmma.epilogue import Corner, TileEpilogue

VECTOR_WORDS = 4
VECTOR_STRIDE = 16 * WARPGROUP_THREADS  # bytes from a vector of a thread to its next


class ClusterParts:
    """The end of an item of a configuration of digits with clusters."""

    def __init__(self, config: WgmmaConfig, epilogue: TileEpilogue, corner: Callable[..., Corner]):
        """corner: of (shape, item, tile of the block): where it belongs in the output."""
        self.config, self.epilogue, self.corner = config, epilogue, corner

    @cute.jit
    def finish(self, operands, shape, memory, store, item, sums, first_tile, part):
        """Sends the parts of tiles that others store, then adds up and stores those of the CTA's own.

        part: which of K's the sums are; a tile's owner has the first one of its CTA.

        Every CTA of the cluster has said, all of its threads, that its barriers are there.
        """
        cute.arch.cluster_wait()
        config = self.config
        for i in cutlass.range_constexpr(config.m_tiles):
            tile = first_tile + i
            if self.exists(tile, i) & (self.owner(tile) != part):
                self.send(memory, store, part, tile, sums, i)
        for i in cutlass.range_constexpr(config.m_tiles):
            tile = first_tile + i
            if self.exists(tile, i) & (self.owner(tile) == part):
                self.add_up(memory, store, part, tile, sums, i)
                corner = self.corner(shape, item, tile)
                self.epilogue.run(operands, shape, store, corner, sums, i * (config.tokens // 2))

    def exists(self, tile, i: int) -> Any:
        """Whether a tile, the ``i``-th of its warpgroup, is one of the block, of which the last one may have fewer."""
        return True if i < self.config.last_tiles else tile < self.config.block_tiles

    def owner(self, tile) -> Any:
        """The part of K whose warpgroup adds up a tile's."""
        return tile % self.config.cluster * (self.config.num_parts // self.config.cluster)

    def place(self, memory, store, tile, part) -> Any:
        """Where a thread's sums of a part of a tile are left, in the memory of the CTA that stores it."""
        number = tile // self.config.cluster * self.config.num_parts + part
        return memory.parts + number * self.config.part_bytes + store.tid * 16

    def vectors(self, sums, i: int) -> list[list[Any]]:
        """A thread's sums of the ``i``-th tile of its warpgroup, four at a time."""
        count = self.config.tokens // 2
        return [[sums[i * count + j + k] for k in range(VECTOR_WORDS)] for j in range(0, count, VECTOR_WORDS)]

    def send(self, memory, store, part, tile, sums, i: int) -> None:
        """Sends a thread's sums of a tile to the CTA that stores it."""
        owner = Int32(tile % self.config.cluster)
        barrier = Int32((memory.part_barriers + tile // self.config.cluster).toint())
        target = numbers.address_in(self.place(memory, store, tile, part), owner)
        there = numbers.address_in(barrier, owner)
        for number, vector in enumerate(self.vectors(sums, i)):
            words = [numbers.bits(value) for value in vector]
            numbers.store_async(target + number * VECTOR_STRIDE, words, there)

    def add_up(self, memory, store, own_part, tile, sums, i: int) -> None:
        """Adds up the parts of a tile, once all have come: the last one's first, as through the workspace."""
        config = self.config
        cute.arch.mbarrier_wait(memory.part_barriers + tile // config.cluster, 0)
        own, first = self.vectors(sums, i), i * (config.tokens // 2)
        for number, vector in enumerate(own):
            totals: list[Any] = []
            for part in (config.num_parts - 1, *range(config.num_parts - 1)):
                place = self.place(memory, store, tile, part)
                words = ptx.load_shared_vector(place, number * VECTOR_STRIDE, VECTOR_WORDS)
                values = [
                    cutlass.select_(own_part == part, mine, word.bitcast(Float32))
                    for mine, word in zip(vector, words, strict=True)
                ]
                totals = [total + value for total, value in zip(totals, values, strict=True)] if totals else values
            for j, total in enumerate(totals):
                sums[first + VECTOR_WORDS * number + j] = total
