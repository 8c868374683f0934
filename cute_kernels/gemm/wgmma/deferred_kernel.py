"""The kernels of products before and after a deferred norm. They are the kernels of `.kernel` and `.resident_kernel`
with the stores of `.deferred_norm`.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, const_expr

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.wgmma.cluster_reduction import Partials
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.deferred_config import FACTOR_REGISTERS, GIVES, norm_of
from cute_kernels.gemm.wgmma.deferred_norm import GivingOperands, GivingStore, TakingOperands, TakingStore
from cute_kernels.gemm.wgmma.kernel import ALL_WARPS, WgmmaKernel
from cute_kernels.gemm.wgmma.places import DensePlaces
from cute_kernels.gemm.wgmma.resident_kernel import ResidentKernel


class FactorWarps:
    """The spare producer warps of the product after a norm. They compute the factors by which rows are multiplied. See
    `.kernel.SpareWarps`.
    """

    def __init__(self, config: WgmmaConfig[Any], store: TakingStore):
        self.tiles, self.store, self.registers = config, store, FACTOR_REGISTERS[config.warpgroups]
        self.places = DensePlaces(config)

    def init_barrier(self, memory) -> None:
        self.store.init_barrier(memory)

    @cute.jit
    def run(self, operands, shape, memory, scheduler, warp, lane):
        """Computes the factors of the rows of the CTA's first work tile, if the CTA stores any tile. All work tiles of
        a CTA have the same rows."""
        tid = (warp - (self.tiles.consumer_warps + 2)) * WARP_THREADS + lane
        tiles, work_tile = self.tiles, scheduler.work_tile(scheduler.first)
        first, end = self.places.rows_of(shape, work_tile)
        if const_expr(tiles.own_m < tiles.tile_m):
            first = first + work_tile.split * tiles.own_m
        factors = memory.staging + self.store.extra_offset
        if self.stores(work_tile):
            self.store.make_factors(operands, factors, tid, first, end)
            self.store.barrier_of(factors).arrive()

    def stores(self, work_tile) -> Boolean:
        """Returns whether the CTA stores any tile of the work tile's block."""
        if not self.tiles.reduction.dsmem:
            return Boolean(True)
        partials, found = Partials(self.tiles), Boolean(False)
        for tile in range(self.tiles.block_tiles):
            found = found | (work_tile.split == partials.owner(tile))
        return found


def deferred_kernel(config: WgmmaConfig[Any]) -> WgmmaKernel | ResidentKernel:
    """Returns the kernel of a configuration with a `DeferredNorm`: a `ResidentKernel` if x is in limbs, else a
    `WgmmaKernel`."""
    gives = norm_of(config).kind == GIVES
    operands, store = (GivingOperands, GivingStore(config)) if gives else (TakingOperands, TakingStore(config))
    if config.limbs:
        return ResidentKernel(config, store, operands)
    spare = FactorWarps(config, store) if isinstance(store, TakingStore) else None
    return WgmmaKernel(config, None, store, operands, ALL_WARPS, spare)
