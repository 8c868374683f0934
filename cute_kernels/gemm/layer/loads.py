"""Loader warps, which load the weights of a CTA's work tiles into pipeline stages. They never wait for results."""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.exchange import reset
from cute_kernels.gemm.layer import instructions
from cute_kernels.gemm.layer.config import (
    CODE_TILE_BYTES,
    CODE_TILE_K,
    GROUP,
    STAGE_BYTES,
    STAGE_CODES,
    STAGE_K,
    TILE_N,
    LayerProductsConfig,
)
from cute_kernels.gemm.layer.exchange import TICKETS, draw
from cute_kernels.gemm.layer.memory import LayerMemory, Sizes, receive, turn

HALF_CODES = TILE_N * CODE_TILE_K // 2  # a work tile's part of a tile of codes
GROUP_SCALES = 2 * 2 * TILE_N  # of a tile of codes


class Loader:
    """The loader warps, of which the first draws work tiles."""

    def __init__(self, config: LayerProductsConfig):
        self.config = config

    @cute.jit
    def run(self, sizes: Sizes, memory: LayerMemory, rank, lane, drawn):
        """Loads the weights of all work tiles of the CTA. drawn: index of the first work tile, in lane 0 of the first
        loader warp.
        """
        base, slot, running, drawn = Int32(0), memory.tiles.consumer_state(), Int32(1), Int32(drawn)
        while running != 0:
            if rank == 0:
                memory.tiles.producer_acquire(replace(slot, phase=slot.phase ^ 1))
                if lane == 0:
                    ptx.store_shared(memory.slots + slot.stage * 4, 0, [Uint32(drawn)])
                    memory.tiles.producer_commit(slot)
            tile = receive(memory, slot, lane)
            slot = memory.tiles.next(slot)
            if tile >= sizes.num_tiles:
                running = Int32(0)
            else:
                number = sizes.product_of(tile)
                stages, drawn = self.copy_tile(sizes, memory, number, tile, base, drawn, rank, lane)
                base = base + stages
        if rank == 0:
            if lane == 0:
                self.leave(sizes, drawn)

    @cute.jit
    def leave(self, sizes: Sizes, drawn):
        """Ends the CTA's draws. The last index that a CTA draws belongs to a tile of the last product, or is even
        higher. The CTA that draws the highest index resets the counter to EMPTY. Only then may the next launch begin,
        since CTAs draw as soon as they begin.
        """
        if (drawn - sizes.waited_for) % sizes.num_ctas == sizes.num_ctas - 1:
            reset(sizes.exchange + TICKETS, 1)
        instructions.fence()
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def copy_tile(self, sizes: Sizes, memory: LayerMemory, number, tile, base, drawn, rank, lane):
        """Loads a loader warp's stages of a work tile, as they become free. Returns (number of the tile's stages, index
        of the next tile, in lane 0 of the first loader warp).

        The first loader warp draws the next tile when it loads one of its last stages of this tile. If a CTA drew
        earlier, it would hold a tile that another CTA could already begin.
        """
        config, loaders, weights = self.config, self.config.loader_warps, memory.weights
        product = memory.product(number)
        own = tile - product.begin
        half, whole = own & 1, Int64(own >> 1)
        k = cute.arch.shuffle_sync(product.k, 0)
        codes = product.codes + whole * (k * (CODE_TILE_BYTES // CODE_TILE_K)) + half * HALF_CODES
        scales = product.scales + whole * (k * GROUP_SCALES // GROUP) + half * (GROUP_SCALES // 2)
        # Marked as the same in all lanes: otherwise each copy would ask which lanes have which address, 100 clocks.
        codes, scales = uniform(codes), uniform(scales)
        stages = k // STAGE_K
        first, window = turn(rank, base, loaders), self.window_of(sizes, tile)
        if (rank == 0) & (first >= stages) & (lane == 0):
            drawn = self.following(sizes, tile)
        for j in cutlass.range(first, stages, loaders, unroll=1):
            position = base + j
            here = weights.producer_state_of(position)
            weights.producer_acquire(here)
            if position >= window:  # limits this warp's copies in flight
                weights.consumer_wait(weights.consumer_state_of(position - window))
            if lane == 0:
                weights.producer_expect(here, STAGE_BYTES)
            cute.arch.sync_warp()
            self.copy_stage(memory, here, codes, scales, j)
            near = j + loaders * config.draw_ahead >= stages
            not_yet = (j == first) | (j + loaders * (config.draw_ahead - 1) < stages)
            if (rank == 0) & near & not_yet & (lane == 0):
                drawn = self.following(sizes, tile)
        return stages, drawn

    @cute.jit
    def following(self, sizes: Sizes, tile):
        """Returns the index of the CTA's next work tile; one lane calls it.

        Tiles of the last product are not drawn but distributed evenly: no CTA waits for their results. The numbers of
        tiles of two CTAs differ by at most one.
        """
        number = tile + sizes.num_ctas
        if tile < sizes.waited_for:
            number = draw(sizes)
        return number

    def window_of(self, sizes: Sizes, tile):
        """Returns how many stages are in flight for a work tile. The window is wider for work tiles of the second
        product, except its first and its last ``num_ctas`` tiles. The first tiles wait for rows, and other CTAs wait
        for the results of the last tiles.
        """
        middle = (tile >= sizes.first_end + sizes.num_ctas) & (tile < sizes.second_end - sizes.num_ctas)
        return cutlass.select_(middle, Int32(self.config.wide_window), Int32(self.config.window))

    def copy_stage(self, memory: LayerMemory, here, codes, scales, j) -> None:
        """Issues the copies of a stage; all lanes of the warp call it."""
        address, target = memory.weights.full_address(here), memory.stages + here.stage * STAGE_BYTES
        code_tiles, groups = STAGE_K // CODE_TILE_K, STAGE_K // GROUP
        first = codes + Int64(j) * (code_tiles * CODE_TILE_BYTES)
        for i in range(code_tiles):
            instructions.copy_elected(target + i * HALF_CODES, first + i * CODE_TILE_BYTES, HALF_CODES, address)
        first = scales + Int64(j) * (groups * GROUP_SCALES)
        for i in range(groups):
            place = target + (STAGE_CODES + i * (GROUP_SCALES // 2))
            instructions.copy_elected(place, first + i * GROUP_SCALES, GROUP_SCALES // 2, address)


def uniform(address: Int64) -> Int64:
    """Returns an address, marked for the compiler as the same in all lanes."""
    low, high = (cute.arch.shuffle_sync(Int32(part), 0) for part in (address, address >> 32))
    return (Int64(high) << 32) | Int64(Uint32(low))
