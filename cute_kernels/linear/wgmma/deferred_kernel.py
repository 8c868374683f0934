"""Weight-only GEMM of tiles around a deferred norm: `.kernel` and `.resident_kernel`, whose results leave as
`.deferred_norm` says."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.linear.wgmma.cluster_reduction import ClusterReduction
from cute_kernels.linear.wgmma.config import WARPGROUP_WARPS
from cute_kernels.linear.wgmma.consumers import Consumers
from cute_kernels.linear.wgmma.deferred_config import GIVES, DeferredNormConfig
from cute_kernels.linear.wgmma.deferred_norm import GivingOperands, TakingOperands, make_store
from cute_kernels.linear.wgmma.epilogue import Store, TileEpilogue
from cute_kernels.linear.wgmma.few_rows import few_rows_scheduler, few_rows_sizes
from cute_kernels.linear.wgmma.kernel import TileRoles, launch_options, make_mainloop, make_reduction
from cute_kernels.linear.wgmma.loads import (
    ELEMENTS,
    TmaLoads,
    WeightLoads,
    prefetch_biases,
    prefetch_k_blocks,
    tma_tiles_layout,
)
from cute_kernels.linear.wgmma.memory import allocate
from cute_kernels.linear.wgmma.places import DensePlaces
from cute_kernels.linear.wgmma.reading import StageReader
from cute_kernels.linear.wgmma.reduction import TileStore
from cute_kernels.linear.wgmma.resident_kernel import START_BARRIER, ResidentKernel, ResidentSizes
from cute_kernels.linear.wgmma.resident_rows import K_BLOCK_TMA_TILES
from cute_kernels.linear.wgmma.tiles import TileSizes, dense_grid, dense_scheduler, dense_sizes
from cute_kernels.linear.work import operands_of


def for_reductions(store: TileStore) -> TileEpilogue:
    """A store as reductions are declared to take it. They ask for no more than `TileStore` has."""
    return cast("TileEpilogue", store)


class DeferredNormKernel:
    """One compiled variant; :class:`DeferredNormConfig` says which."""

    def __init__(self, config: DeferredNormConfig):
        self.config, tiles = config.tiles, config.tiles
        self.operands = GivingOperands if config.kind == GIVES else TakingOperands
        places, stages = DensePlaces(tiles), StageReader(tiles)
        mainloop = make_mainloop(tiles, stages, places)
        reduction = make_reduction(tiles, for_reductions(make_store(config)), places)
        self.consumers = Consumers(tiles, stages, places, mainloop, reduction)
        self.activations = TmaLoads(tiles, places)
        weights = WeightLoads(tiles, places, asks_first=tiles.one_m_tile)
        self.roles = TileRoles(tiles, places, weights, self.activations, self.consumers, dense=True, waits=True)

    def launch(self, given, stream):
        """Launches ``num_ctas`` CTAs; ``given`` has the arguments of `.deferred_compile`."""
        config = self.config
        copy_x, x_view = self.activations.tma(given.x)
        shape = TileSizes(*dense_sizes(config, given), grid=dense_grid(config, given))
        operands = operands_of(self.operands, given, x=Int64(0))
        options = launch_options(config, given.num_ctas, stream, use_pdl=True)
        self.kernel(operands, shape, copy_x, x_view).launch(**options)

    @cute.kernel
    def kernel(self, operands, shape, copy_x, x_view):
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.roles.allocate()
        scheduler = dense_scheduler(self.config, shape, cta, num_ctas)
        self.roles.begin(operands, shape, memory, scheduler, warp, lane)
        self.roles.take(operands, shape, memory, scheduler, copy_x, x_view, warp, lane)


class DeferredResidentKernel:
    """The same of few rows, whose limbs each CTA makes: parts are `ResidentKernel`'s."""

    def __init__(self, config: DeferredNormConfig):
        self.config, product = config.tiles, ResidentKernel(config.tiles)
        self.operands = GivingOperands if config.kind == GIVES else TakingOperands
        self.store = make_store(config)
        self.places, self.limbs, self.weights = product.places, product.limbs, product.weights
        reduction = ClusterReduction(config.tiles, for_reductions(self.store), self.places)
        self.consumers = Consumers(
            config.tiles, StageReader(config.tiles), self.places, product.consumers.mainloop, reduction
        )

    def launch(self, given, stream):
        """Of at most a tile of rows of x; ``given`` has the arguments of `.deferred_compile`."""
        config = self.config
        layout = tma_tiles_layout(config, config.tile_m, K_BLOCK_TMA_TILES)
        copy_x, x_view = self.limbs.rows.k_block_copy(given.x, layout)
        shape = ResidentSizes(*few_rows_sizes(config, given), reserved=Int32(1))
        options = launch_options(config, given.num_ctas, stream, use_pdl=True)
        self.kernel(operands_of(self.operands, given), shape, copy_x, x_view).launch(**options)

    @cute.kernel
    def kernel(self, operands, shape, copy_x, x_view):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        layout = tma_tiles_layout(config, config.tile_m, K_BLOCK_TMA_TILES * config.mainloop.k_blocks)
        memory = allocate(config, layout, ELEMENTS[config.dtype], 0)
        scheduler = few_rows_scheduler(config, shape, cta, num_ctas)
        self.limbs.attach(operands, shape, memory, copy_x, x_view)
        if warp == config.consumer_warps:
            if lane == 0:
                work_tile = scheduler.work_tile(scheduler.first)
                cute.arch.griddepcontrol_launch_dependents()
                prefetch_k_blocks(config, self.places, operands, shape, scheduler)
                self.weights.init_barriers(memory)
                cute.arch.griddepcontrol_wait()
                self.weights.copy_first(operands, shape, memory, work_tile)
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=config.num_threads)
            cute.arch.cluster_arrive_relaxed()
            prefetch_biases(config, self.places, operands, shape, scheduler, WARP_THREADS - 1 - lane)
            self.weights.copy_following(operands, shape, memory, scheduler, lane)
        else:
            cute.arch.cluster_arrive_relaxed()
            factors = self.limbs.ask_factors(scheduler, warp, lane)
            cute.arch.griddepcontrol_wait()  # for whoever makes x, and its sums of squares
            store = self.place(memory, warp, lane)
            asked = self.store.ask(operands, store.tid, shape.m)
            fits = self.limbs.make_first(shape, memory, scheduler, warp, lane, factors)
            self.store.keep_asked(operands, store, asked)
            cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=config.num_threads)
            self.consumers.multiply(
                operands, shape, memory, scheduler, replace(self.consumers.lane(shape, warp, lane), fits=fits)
            )

    def place(self, memory, warp, lane) -> Store:
        """Where a consumer thread stands among those that store a tile."""
        group, row_warp = warp // WARPGROUP_WARPS, warp % WARPGROUP_WARPS
        staging = memory.staging + group * self.config.staging_bytes
        return Store(staging, group, row_warp * WARP_THREADS + lane, row_warp, lane)
