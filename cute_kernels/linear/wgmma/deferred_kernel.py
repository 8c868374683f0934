"""Weight-only GEMM of tiles around a deferred norm: `.kernel` and `.resident_kernel`, whose results leave as
`.deferred_norm` says."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int64, const_expr

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.linear.wgmma.cluster_reduction import Partials
from cute_kernels.linear.wgmma.consumers import Consumers
from cute_kernels.linear.wgmma.deferred_config import GIVES, DeferredNormConfig
from cute_kernels.linear.wgmma.deferred_norm import GivingOperands, TakingOperands, TakingStore, make_store
from cute_kernels.linear.wgmma.kernel import BEGIN, TileRoles, launch_options, make_mainloop, make_reduction
from cute_kernels.linear.wgmma.loads import TmaLoads, WeightLoads, prefetch_biases, prefetch_k_blocks
from cute_kernels.linear.wgmma.places import DensePlaces
from cute_kernels.linear.wgmma.reading import StageReader
from cute_kernels.linear.wgmma.resident_kernel import ResidentKernel, for_reductions
from cute_kernels.linear.wgmma.tiles import TileSizes, dense_grid, dense_scheduler, dense_sizes
from cute_kernels.linear.work import operands_of


class DeferredRoles(TileRoles):
    """As `TileRoles`, of products around a norm: each warp waits for the launch before by itself, so that x is asked
    for beside the first weights and not behind them; two warps make the factors of rows.

    Args:
        store: what makes factors; None where nobody takes any.
    """

    def __init__(self, config: DeferredNormConfig, *roles, store: TakingStore | None):
        super().__init__(config.tiles, *roles, dense=True, waits=True)
        self.registers, self.store = config.registers, store

    @cute.jit
    def begin(self, operands, shape, memory, scheduler, warp, lane):
        """See `TileRoles`."""
        config = self.config
        if warp == self.weight_warp:
            if lane == 0:
                cute.arch.griddepcontrol_launch_dependents()
                prefetch_k_blocks(config, self.places, operands, shape, scheduler)
                if const_expr(self.store is not None):
                    self.store.init_barrier(memory)
                self.init_barriers(memory)
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=BEGIN, number_of_threads=config.num_threads)
        else:
            cute.arch.barrier(barrier_id=BEGIN, number_of_threads=config.num_threads)
        if const_expr(config.dsmem_reduction):
            cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_wait()
        if const_expr(self.weights.asks_first):
            if warp == self.weight_warp:
                if lane == 0:
                    self.weights.copy_first(operands, shape, memory, scheduler)
                cute.arch.sync_warp()

    @cute.jit
    def take(self, operands, shape, memory, scheduler, copy_x, x_view, warp, lane):
        """See `TileRoles`."""
        config = self.config
        if warp == self.weight_warp:
            cute.arch.setmaxregister_decrease(self.registers[0])
            self.weights.copy(operands, shape, memory, scheduler)
        elif warp >= config.consumer_warps:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == config.consumer_warps:
                self.activations.copy(shape, memory, scheduler, copy_x, x_view)
            else:
                prefetch_biases(config, self.places, operands, shape, scheduler, lane)
                if const_expr(self.store is not None):
                    tid = (warp - (self.weight_warp + 1)) * WARP_THREADS + lane
                    self.make_factors(operands, shape, memory, scheduler, tid)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consumers.multiply(operands, shape, memory, scheduler, self.consumers.lane(shape, warp, lane))

    @cute.jit
    def make_factors(self, operands, shape, memory, scheduler, tid):
        """Of the rows of the CTA's first work tile, which are those of all of them, if it stores any."""
        config, work_tile = self.config, scheduler.work_tile(scheduler.first)
        first, end = self.places.rows_of(shape, work_tile)
        if const_expr(config.own_m < config.tile_m):
            first = first + work_tile.split * config.own_m
        factors = memory.staging + self.store.config.extra_offset
        if self.stores(work_tile):
            self.store.make_factors(operands, factors, tid, first, end)
            cute.arch.mbarrier_arrive(self.store.barrier_of(factors))

    def stores(self, work_tile) -> Boolean:
        """Whether the CTA stores a tile of a block."""
        if not self.config.dsmem_reduction:
            return Boolean(True)
        partials, found = Partials(self.config), Boolean(False)
        for tile in range(self.config.block_tiles):
            found = found | (work_tile.split == partials.owner(tile))
        return found


class DeferredNormKernel:
    """One compiled variant; :class:`DeferredNormConfig` says which."""

    def __init__(self, config: DeferredNormConfig):
        self.config, tiles = config.tiles, config.tiles
        self.operands = GivingOperands if config.kind == GIVES else TakingOperands
        places, stages = DensePlaces(tiles), StageReader(tiles)
        mainloop = make_mainloop(tiles, stages, places)
        store = make_store(config)
        reduction = make_reduction(tiles, for_reductions(store), places)
        self.consumers = Consumers(tiles, stages, places, mainloop, reduction)
        self.activations = TmaLoads(tiles, places)
        weights = WeightLoads(tiles, places, asks_first=tiles.one_m_tile)
        takes = store if isinstance(store, TakingStore) else None
        self.roles = DeferredRoles(config, places, weights, self.activations, self.consumers, store=takes)

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
    """The same of few rows, whose limbs each CTA makes."""

    def __init__(self, config: DeferredNormConfig):
        self.operands = GivingOperands if config.kind == GIVES else TakingOperands
        self.resident = ResidentKernel(config.tiles, make_store(config))

    def launch(self, given, stream):
        """Of at most a tile of rows of x; ``given`` has the arguments of `.deferred_compile`."""
        self.resident.launch_over(given, operands_of(self.operands, given), stream)
