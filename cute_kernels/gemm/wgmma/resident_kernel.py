"""Weight-only GEMM for few rows of x, in one launch. CTAs make limbs of x once, and keep them in shared memory.

The first weights arrive two microseconds after the start. Until then the consumer warps make limbs of the part of x
that the CTA needs (:mod:`.resident_rows`). The producer warp does not wait for limbs. A separate launch for limbs would
take a microsecond. Making limbs in the pipeline would limit its rate.

Warpgroups may interleave k blocks: one warpgroup decodes while another waits for its MMAs. :mod:`.cluster_reduction`
adds up the accumulators of these warpgroups, and the partials of the CTAs of a cluster.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import cutlass.cute as cute

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.device_operands import Operands, operands_of
from cute_kernels.gemm.wgmma.cluster_reduction import ClusterReduction
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, ResidentConfig
from cute_kernels.gemm.wgmma.consumers import Consumers
from cute_kernels.gemm.wgmma.epilogue import Store, TileEpilogue
from cute_kernels.gemm.wgmma.kernel import launch_options
from cute_kernels.gemm.wgmma.loads import ELEMENTS, WeightLoads, prefetch_biases, prefetch_k_blocks, tma_tiles_layout
from cute_kernels.gemm.wgmma.memory import allocate, init_barriers
from cute_kernels.gemm.wgmma.places import DensePlaces
from cute_kernels.gemm.wgmma.reading import Channel, StageReader
from cute_kernels.gemm.wgmma.reduction import TileStore
from cute_kernels.gemm.wgmma.resident_mainloop import ResidentMainloop
from cute_kernels.gemm.wgmma.resident_rows import K_BLOCK_TMA_TILES, ResidentLimbLoads
from cute_kernels.gemm.wgmma.tiles import TileSizes, dense_grid, dense_scheduler, dense_sizes

START_BARRIER = 15  # of the CTA, before the first stage is waited for


class RowStore(TileStore, Protocol):
    """The interface of stores that load values for rows of x, such as sums of squares of a norm."""

    def ask(self, operands, tid, end) -> list[list[Any]]:
        """Starts loading a thread's values for rows before ``end``, and returns the registers that will hold them."""
        ...

    def keep_asked(self, operands, store, asked) -> None:
        """Moves loaded numbers to shared memory."""
        ...


class ResidentKernel:
    """The kernel of few rows with resident limbs, as one `.config.ResidentConfig` compiles it.

    | role | warps | waits | arrives |
    |---|---|---|---|
    | loads of weights | 1 | stage empty: warps of the warpgroups that take it | stage full, with its bytes |
    | consumers | 4 a warpgroup | x, if TMA loads it | x: each warp, with its share of the bytes |
    | | | stage full | stage empty, one lane a warp |

    Partials in a cluster use the barriers that `WgmmaKernel` describes.

    store: the store policy; default `TileEpilogue`. Any other store starts its loads while x is being loaded
    (:mod:`.deferred_norm`).
    """

    def __init__(self, config: ResidentConfig, store: RowStore | None = None, operands: type[Operands] = Operands):
        self.config, self.store, self.operands = config, store, operands
        self.places, stages = DensePlaces(config), StageReader(config)
        epilogue: TileStore = TileEpilogue(config) if store is None else store
        self.weights = WeightLoads(config, self.places, asks_first=True)
        reduction = ClusterReduction(config, epilogue, self.places)
        self.limbs = ResidentLimbLoads(config)
        mainloop = ResidentMainloop(config, self.limbs, stages, Channel(config, stages, self.places))
        self.consumers = Consumers(config, stages, self.places, mainloop, reduction)

    def launch(self, given, stream):
        """Launches the kernel for at most one tile of rows of x.

        ``given`` has the arguments `TILES` of :mod:`cute_kernels.gemm.arguments`. The workspace is not used.
        """
        config = self.config
        operands = operands_of(self.operands, given)
        layout = tma_tiles_layout(config, config.tile_m, K_BLOCK_TMA_TILES)
        copy_x, x_view = self.limbs.rows.k_block_copy(given.x, layout)
        shape = TileSizes(*dense_sizes(config, given), grid=dense_grid(config, given))
        options = launch_options(config, given.num_ctas, stream, use_pdl=True)
        self.kernel(operands, shape, copy_x, x_view).launch(**options)

    @cute.kernel
    def kernel(self, operands, shape, copy_x, x_view):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        layout = tma_tiles_layout(config, config.tile_m, K_BLOCK_TMA_TILES * config.mainloop.k_blocks)
        memory = allocate(config, layout, ELEMENTS[config.dtype], 0)
        scheduler = dense_scheduler(config, shape, cta, num_ctas)
        self.limbs.attach(operands, shape, memory, copy_x, x_view)
        if warp == config.consumer_warps:
            # All of a launch waits for the first weights: they are asked for before anybody else is told of barriers.
            if lane == 0:
                cute.arch.griddepcontrol_launch_dependents()
                prefetch_k_blocks(config, self.places, operands, shape, scheduler)
                init_barriers(config, memory)
                cute.arch.griddepcontrol_wait()
                self.weights.copy_first(operands, shape, memory, scheduler)
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=config.num_threads)
            # For whoever publishes. Barriers are all that was written, and have had their fence.
            cute.arch.cluster_arrive_relaxed()
            prefetch_biases(config, self.places, operands, shape, scheduler, WARP_THREADS - 1 - lane)
            self.weights.copy(operands, shape, memory, scheduler)
        else:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.griddepcontrol_wait()  # for whoever makes x
            store, asked = self.ask(operands, shape, memory, warp, lane)
            fits = self.limbs.make_first(shape, memory, scheduler, warp, lane)
            self.keep(operands, store, asked)
            cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=config.num_threads)
            self.consumers.multiply(
                operands, shape, memory, scheduler, replace(self.consumers.lane(shape, warp, lane), fits=fits)
            )

    def ask(self, operands, shape, memory, warp, lane) -> tuple[Store | None, Any]:
        """Starts the store's loads while x is being loaded. Returns (the thread's `Store`, the registers of the loads),
        or (None, None) if the kernel has the default store.
        """
        if self.store is None:
            return None, None
        group, row_warp = warp // WARPGROUP_WARPS, warp % WARPGROUP_WARPS
        staging = memory.staging + group * self.config.staging_bytes
        store = Store(staging, group, row_warp * WARP_THREADS + lane, row_warp, lane)
        return store, self.store.ask(operands, store.tid, shape.m)

    def keep(self, operands, store: Store | None, asked) -> None:
        """Moves what `ask` loaded to the shared memory where the store reads it."""
        if self.store is not None:
            self.store.keep_asked(operands, store, asked)
