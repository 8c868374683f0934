"""Weight-only GEMM of tiles around a deferred norm: `.kernel` and `.resident_kernel`, whose results leave as
`.deferred_norm` says."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64

from cute_kernels.linear.wgmma.consumers import Consumers
from cute_kernels.linear.wgmma.deferred_config import GIVES, DeferredNormConfig
from cute_kernels.linear.wgmma.deferred_norm import GivingOperands, TakingOperands, make_store
from cute_kernels.linear.wgmma.kernel import TileRoles, launch_options, make_mainloop, make_reduction
from cute_kernels.linear.wgmma.loads import TmaLoads, WeightLoads
from cute_kernels.linear.wgmma.places import DensePlaces
from cute_kernels.linear.wgmma.reading import StageReader
from cute_kernels.linear.wgmma.resident_kernel import ResidentKernel, for_reductions
from cute_kernels.linear.wgmma.tiles import TileSizes, dense_grid, dense_scheduler, dense_sizes
from cute_kernels.linear.work import operands_of


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
    """The same of few rows, whose limbs each CTA makes."""

    def __init__(self, config: DeferredNormConfig):
        self.operands = GivingOperands if config.kind == GIVES else TakingOperands
        self.resident = ResidentKernel(config.tiles, make_store(config))

    def launch(self, given, stream):
        """Of at most a tile of rows of x; ``given`` has the arguments of `.deferred_compile`."""
        self.resident.launch_over(given, operands_of(self.operands, given), stream)
