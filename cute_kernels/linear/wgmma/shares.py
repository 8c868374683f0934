"""Parts of K in global memory, of which each CTA adds up and stores its share of the rows: `.shares_config`."""

from __future__ import annotations

from dataclasses import replace

import os

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.exchange import EMPTY_WORD
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.epilogue import Store, TileEpilogue
from cute_kernels.linear.wgmma.kernel import WgmmaKernel, launch_options
from cute_kernels.linear.wgmma.places import Corner, DensePlaces, Places, corner_of
from cute_kernels.linear.wgmma.reduction import VECTOR_STRIDE
from cute_kernels.linear.wgmma.results import WorkspaceSplitK
from cute_kernels.linear.wgmma.shares_config import SharedSplitK
from cute_kernels.linear.wgmma.tiles import TileSizes, dense_grid, dense_sizes
from cute_kernels.linear.work import operands_of

PDL, COOPERATIVE = (bool(int(one)) for one in os.environ.get("CK_SHARES", "01"))


class ShareReduction:
    """Of tiles that are cut each CTA has a share of the rows; others are whole: `.reduction.TileReduction`."""

    def __init__(self, config: WgmmaConfig, epilogue: TileEpilogue, places: Places):
        assert isinstance(config.reduction, SharedSplitK)
        self.config, self.epilogue, self.places = config, epilogue, places
        self.prepares = epilogue.dense
        self.parts = config.reduction.parts
        self.own_m = config.tile_m // self.parts
        self.own_vectors = config.thread_vectors // self.parts
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
        """Makes accumulators[: own rows / 2] those of all of K.

        Every thread stores the others' shares and finds the same thread's, in the order of the registers. For each
        share there is a place for every part but its own.
        """
        config, rank = self.config, work_tile.split
        partial_bytes = 4 * config.block_rows * config.tile_m
        place = operands.workspace + Int64(work_tile.number * (self.parts - 1)) * partial_bytes
        place = place + (store.warpgroup * (partial_bytes // config.warpgroups) + store.tid * 16)
        for share in cutlass.range_constexpr(self.parts):
            if rank != share:
                target = place + Int64(rank - cutlass.select_(rank > share, Int32(1), Int32(0))) * partial_bytes
                for i in cutlass.range_constexpr(self.own_vectors):
                    vector = share * self.own_vectors + i
                    values = [acc[4 * vector + j] for j in range(4)]
                    ptx.store_global(target, values, offset=vector * VECTOR_STRIDE)
        self.keep_share(acc, rank)
        self.add_others(place + rank * (self.own_vectors * VECTOR_STRIDE), partial_bytes, acc)

    def keep_share(self, acc, rank):
        """Moves the CTA's own share to the front."""
        own = self.own_m // 2
        for share in range(1, self.parts):
            for i in range(own):
                acc[i] = cutlass.select_(rank == share, acc[share * own + i], acc[i])

    @cute.jit
    def add_others(self, place, partial_bytes: int, acc):
        """Adds the other parts' in their order, once all have come, and puts EMPTY back."""
        others, count = self.parts - 1, self.own_vectors
        words = cute.make_rmem_tensor(4 * others * count, Uint32)
        missing = Int32(1)
        while missing != 0:
            missing = Int32(0)
            for other in cutlass.range_constexpr(others):
                for i in cutlass.range_constexpr(count):
                    loaded = ptx.load_relaxed(place, 4, offset=other * partial_bytes + i * VECTOR_STRIDE)
                    for j in cutlass.range_constexpr(4):
                        words[4 * (other * count + i) + j] = loaded[j]
            for i in cutlass.range_constexpr(4 * others * count):
                missing = cutlass.select_(words[i] == Uint32(EMPTY_WORD), Int32(1), missing)
        for other in cutlass.range_constexpr(others):
            for i in cutlass.range_constexpr(count):
                for j in cutlass.range_constexpr(4):
                    at = 4 * i + j
                    acc[at] = acc[at] + words[4 * (other * count + i) + j].bitcast(Float32)
                ptx.store_global(place, [Uint32(EMPTY_WORD)] * 4, offset=other * partial_bytes + i * VECTOR_STRIDE)


class SharesKernel(WgmmaKernel):
    """One compiled variant of a dense product whose CTAs all run at once."""

    def __init__(self, config: WgmmaConfig):
        super().__init__(config)
        self.consumers.reduction = ShareReduction(config, self.epilogue, DensePlaces(config))

    def launch(self, given, stream):
        """As `WgmmaKernel.launch`, cooperative."""
        config = self.config
        copy_x, x_view = self.activations.tma(given.x)
        shape = TileSizes(*dense_sizes(config, given), grid=dense_grid(config, given))
        operands = operands_of(self.operands, given, x=Int64(0))
        options = launch_options(config, given.num_ctas, stream, use_pdl=PDL) | {"cooperative": COOPERATIVE}
        self.kernel(operands, shape, copy_x, x_view).launch(**options)
