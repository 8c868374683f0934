"""`.kernel.WgmmaKernel` behind a launch that makes its rows of x: weights are asked for while that one is running."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int64

from cute_kernels.linear.wgmma.kernel import TileRoles, WgmmaKernel, launch_options
from cute_kernels.linear.wgmma.loads import TmaLoads, WeightLoads, prefetch_biases
from cute_kernels.linear.wgmma.tiles import TileSizes, dense_grid, dense_sizes
from cute_kernels.linear.work import Operands, operands_of
from cute_kernels.linear.wgmma.places import DensePlaces
from cute_kernels.linear.wgmma.prepared_config import REGISTERS, THREADS_OF_REGISTERS, PreparedWgmma
from cute_kernels.linear.wgmma.config import WgmmaConfig


class PreparedWgmmaKernel(WgmmaKernel):
    """One compiled variant."""

    def __init__(self, config: WgmmaConfig[PreparedWgmma]):
        super().__init__(config)
        places = DensePlaces(config)
        self.activations = TmaLoads(config, places, waits=not config.mainloop.all_wait)
        weights = WeightLoads(config, places, asks_first=config.one_m_tile)
        roles = LeanRoles if config.mainloop.lean else TileRoles
        self.roles = roles(config, places, weights, self.activations, self.consumers, dense=True, waits=config.mainloop.all_wait)

    def launch(self, given, stream):
        config = self.config
        copy_x, x_view = self.activations.tma(given.x)
        shape = TileSizes(*dense_sizes(config, given), grid=dense_grid(config, given))
        operands = operands_of(Operands, given, x=Int64(0))
        if config.store.by_tma:
            operands = self.epilogue.tma_store.operands(operands, shape.m, given.n)
        options = launch_options(config, given.num_ctas, stream, use_pdl=True)
        if config.mainloop.lean:
            options["max_number_threads"] = (THREADS_OF_REGISTERS[config.warpgroups], 1, 1)
        self.kernel(operands, shape, copy_x, x_view).launch(**options)


class LeanRoles(TileRoles):
    @cute.jit
    def take(self, operands, shape, memory, scheduler, copy_x, x_view, warp, lane):
        config = self.config
        if warp == self.weight_warp:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            self.weights.copy(operands, shape, memory, scheduler)
        elif warp >= config.consumer_warps:
            cute.arch.setmaxregister_decrease(config.producer_registers)
            if warp == config.consumer_warps:
                self.activations.copy(shape, memory, scheduler, copy_x, x_view)
            else:
                prefetch_biases(config, self.places, operands, shape, scheduler, lane)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[config.warpgroups])
            self.consumers.multiply(operands, shape, memory, scheduler, self.consumers.lane(shape, warp, lane))
