"""Weight-only GEMM of tiles around a deferred norm: `.kernel` and `.resident_kernel` with the stores of
`.deferred_norm`."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, const_expr

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.wgmma.cluster_reduction import Partials
from cute_kernels.gemm.wgmma.deferred_config import GIVES, DeferredNormConfig
from cute_kernels.gemm.wgmma.deferred_norm import GivingOperands, TakingOperands, TakingStore, make_store
from cute_kernels.gemm.wgmma.kernel import ALL_WARPS, WgmmaKernel
from cute_kernels.gemm.wgmma.places import DensePlaces
from cute_kernels.gemm.wgmma.resident_kernel import ResidentKernel


class FactorWarps:
    """Make the factors of rows: `.kernel.SpareWarps`."""

    def __init__(self, config: DeferredNormConfig, store: TakingStore):
        self.tiles, self.store, self.registers = config.tiles, store, config.registers
        self.places = DensePlaces(config.tiles)

    def init_barrier(self, memory) -> None:
        self.store.init_barrier(memory)

    @cute.jit
    def run(self, operands, shape, memory, scheduler, warp, lane):
        """Makes the factors of the rows of the CTA's first work tile, if it stores any. All its work tiles have the
        same rows."""
        tid = (warp - (self.tiles.consumer_warps + 2)) * WARP_THREADS + lane
        tiles, work_tile = self.tiles, scheduler.work_tile(scheduler.first)
        first, end = self.places.rows_of(shape, work_tile)
        if const_expr(tiles.own_m < tiles.tile_m):
            first = first + work_tile.split * tiles.own_m
        factors = memory.staging + self.store.config.extra_offset
        if self.stores(work_tile):
            self.store.make_factors(operands, factors, tid, first, end)
            self.store.barrier_of(factors).arrive()

    def stores(self, work_tile) -> Boolean:
        """Whether the CTA stores a tile of a block."""
        if not self.tiles.dsmem_reduction:
            return Boolean(True)
        partials, found = Partials(self.tiles), Boolean(False)
        for tile in range(self.tiles.block_tiles):
            found = found | (work_tile.split == partials.owner(tile))
        return found


def deferred_kernel(config: DeferredNormConfig) -> WgmmaKernel | ResidentKernel:
    """The kernel of a configuration: of tiles, or of few rows whose limbs each CTA makes."""
    operands = GivingOperands if config.kind == GIVES else TakingOperands
    store = make_store(config)
    if config.in_limbs:
        return ResidentKernel(config.tiles, store, operands)
    spare = FactorWarps(config, store) if isinstance(store, TakingStore) else None
    return WgmmaKernel(config.tiles, None, store, operands, ALL_WARPS, spare)
