"""Parts of K in global memory, of which each CTA adds up and stores its share of the rows: `.shares_config`."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.exchange import EMPTY_WORD
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.epilogue import Store, TileEpilogue
from cute_kernels.gemm.wgmma.kernel import WgmmaKernel
from cute_kernels.gemm.wgmma.places import Corner, DensePlaces, Places, corner_of
from cute_kernels.gemm.wgmma.reduction import VECTOR_STRIDE
from cute_kernels.gemm.wgmma.results import WorkspaceSplitK
from cute_kernels.gemm.wgmma.shares_config import SharedSplitK


class ShareReduction:
    """Of tiles that are cut each CTA has a share of the rows; others are whole: `.reduction.TileReduction`."""

    def __init__(self, config: WgmmaConfig, epilogue: TileEpilogue, places: Places):
        assert isinstance(config.reduction, SharedSplitK)
        self.config, self.epilogue, self.places = config, epilogue, places
        self.prepares = epilogue.dense
        self.parts = config.reduction.parts
        self.own_m = config.tile_m // self.parts
        self.own_vectors = config.thread_vectors // self.parts
        self.partial_bytes = 4 * config.block_rows * config.tile_m
        self.of_share = TileEpilogue(replace(config, tile_m=self.own_m, reduction=WorkspaceSplitK()))

    def begin(self) -> None:
        """Nothing."""

    def corner(self, shape, work_tile, first_tile) -> Corner:
        """Of the CTA's share; of a whole tile, whose ``split`` is 0, of all of it."""
        return corner_of(self.config, self.places, shape, work_tile, first_tile, work_tile.split * self.own_m)

    @cute.jit
    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank):
        """Of what is stored here."""
        corner = self.corner(shape, work_tile, first_tile)
        if work_tile.splits > 1:
            self.of_share.prepare(operands, shape, store, corner, 0)
        else:
            self.epilogue.prepare(operands, shape, store, corner, 0)

    @cute.jit
    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank):
        """See `TileReduction`."""
        corner = self.corner(shape, work_tile, first_tile)
        if work_tile.splits > 1:
            self.exchange(operands, store, work_tile, acc)
            self.of_share.run(operands, shape, store, corner, acc, 0, 0)
        else:
            self.epilogue.run(operands, shape, store, corner, acc, 0, 0)

    def end(self) -> None:
        """Waits for the store."""
        self.epilogue.finish()

    @cute.jit
    def exchange(self, operands, store: Store, work_tile, acc):
        """Makes accumulators[: own rows / 2] those of all of K: what others want is stored before anybody waits."""
        place, rank = self.place(operands, store, work_tile.number), work_tile.split
        for share in cutlass.range_constexpr(self.parts):
            if rank != share:
                self.publish_share(place, acc, share, rank)
        self.keep_share(acc, rank)
        self.add_others(place + rank * (self.own_vectors * VECTOR_STRIDE), acc)

    def place(self, operands, store: Store, number):
        """Where a thread's first accumulators of the first part of a tile are, in the order of the registers.

        Each share has a place for every part but its own.
        """
        size = self.partial_bytes
        start = Int64(number * (self.parts - 1)) * size
        return operands.workspace + start + (store.warpgroup * (size // self.config.warpgroups) + store.tid * 16)

    def publish_share(self, place, acc, share: int, rank) -> None:
        """Stores the accumulators of another's share where the same thread of that CTA looks for them."""
        other = rank - cutlass.select_(rank > share, Int32(1), Int32(0))
        target = place + Int64(other) * self.partial_bytes
        for i in range(share * self.own_vectors, (share + 1) * self.own_vectors):
            ptx.store_global(target, [acc[4 * i + j] for j in range(4)], offset=i * VECTOR_STRIDE)

    def keep_share(self, acc, rank) -> None:
        """Moves the CTA's own share to the front."""
        own = self.own_m // 2
        for share in range(1, self.parts):
            for i in range(own):
                acc[i] = cutlass.select_(rank == share, acc[share * own + i], acc[i])

    @cute.jit
    def add_others(self, place, acc):
        """Adds the other parts in their order, once all have come, and puts EMPTY back."""
        places = [(other, i) for other in range(self.parts - 1) for i in range(self.own_vectors)]
        words = cute.make_rmem_tensor(4 * len(places), Uint32)
        missing = Int32(1)
        while missing != 0:
            missing = Int32(0)
            for vector in cutlass.range_constexpr(len(places)):
                loaded = ptx.load_relaxed(place, 4, offset=self.offset(*places[vector]))
                for j in cutlass.range_constexpr(4):
                    words[4 * vector + j] = loaded[j]
            for i in cutlass.range_constexpr(4 * len(places)):
                missing = cutlass.select_(words[i] == Uint32(EMPTY_WORD), Int32(1), missing)
        for vector in cutlass.range_constexpr(len(places)):
            first = 4 * places[vector][1]
            for j in cutlass.range_constexpr(4):
                acc[first + j] = acc[first + j] + words[4 * vector + j].bitcast(Float32)
            ptx.store_global(place, [Uint32(EMPTY_WORD)] * 4, offset=self.offset(*places[vector]))

    def offset(self, other: int, vector: int) -> int:
        """Of a vector of a share of the ``other``-th of the other parts."""
        return other * self.partial_bytes + vector * VECTOR_STRIDE


class SharesKernel:
    """One compiled variant of a dense product whose CTAs have shares."""

    def __init__(self, config: WgmmaConfig):
        self.product = WgmmaKernel(config)
        self.product.consumers.reduction = ShareReduction(config, self.product.epilogue, DensePlaces(config))

    def launch(self, given, stream):
        """As `WgmmaKernel.launch`."""
        self.product.launch(given, stream)
