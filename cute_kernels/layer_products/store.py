"""The store warp: adds up what the consumer warps have of a work tile, a feature a lane, and stores it."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.device.exchange import EMPTY_WORD
from cute_kernels.device.ring import advance
from cute_kernels.layer_products import instructions
from cute_kernels.layer_products.config import BUFFERS, GROUP, SLOTS, TILE_N, LayerProductsConfig
from cute_kernels.layer_products.memory import DONE, LEFT, LayerMemory, Product, Sizes, receive, wait_for_tiles
from cute_kernels.linear.epilogue import silu


class Storer:
    """What the store warp does."""

    def __init__(self, config: LayerProductsConfig):
        self.config = config

    @cute.jit
    def run(self, sizes: Sizes, memory: LayerMemory, lane):
        """All work tiles of the CTA."""
        slot, slot_phase, running, before = Int32(0), Int32(0), Int32(1), Int32(-1)
        buffer, buffer_phase = Int32(0), Int32(0)
        factors = cute.make_rmem_tensor(self.config.rows, Float32)
        factors.fill(1.0)
        sums = cute.make_rmem_tensor(self.config.rows, Float32)
        while running != 0:
            tile = receive(memory, slot, slot_phase, lane)
            slot, slot_phase = advance(slot, slot_phase, SLOTS)
            if tile >= sizes.num_tiles:
                running = Int32(0)
            else:
                number = sizes.product_of(tile)
                product = memory.product(number)
                if number != before:
                    if lane == 0:
                        wait_for_tiles(sizes, product.begin)
                    cute.arch.sync_warp()
                feature = (tile - product.begin) * TILE_N + lane
                sums.fill(0.0)
                if product.residual != 0:
                    self.load_residual(sums, sizes, product, feature)
                cute.arch.mbarrier_wait(memory.parts_full + buffer, buffer_phase)
                if number != before:
                    self.make_factors(factors, sizes, memory, product, lane)
                    before = number
                self.add(sums, factors, memory, buffer, lane)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(memory.parts_empty + buffer)
                buffer, buffer_phase = advance(buffer, buffer_phase, BUFFERS)
                self.store(sums, sizes, product, feature, lane)
                if tile < sizes.waited_for:
                    cute.arch.sync_warp()
                    if lane == 0:
                        instructions.add_released(sizes.counters + DONE, Int32(1))
        if lane == 0:
            self.leave(sizes)

    @cute.jit
    def leave(self, sizes: Sizes):
        """The last CTA to leave makes the counters EMPTY: nobody waits for work tiles any more, and who had some of the
        last product has seen all others counted."""
        left = ptx.atomic_add(sizes.counters + LEFT, Int32(1)) + 1
        if left == sizes.num_ctas - 1:
            instructions.fence()
            for counter in (DONE, LEFT):
                ptx.store_global(sizes.counters + counter, [Uint32(EMPTY_WORD)])

    @cute.jit
    def load_residual(self, sums, sizes: Sizes, product: Product, feature):
        """The residual of a lane's feature; this launch may have written it."""
        for row in cutlass.range_constexpr(self.config.rows):
            if row < sizes.m:
                place = product.residual + (Int64(row) * product.n + feature) * 2
                sums[row] = (ptx.load_relaxed_part(place, 2) << 16).bitcast(Float32)

    @cute.jit
    def make_factors(self, factors, sizes: Sizes, memory: LayerMemory, product: Product, lane):
        """What is left of a norm of rows: one number for each."""
        factors.fill(1.0)
        if product.norm != 0:
            inverse = ptx.reciprocal(numbers.to_float(product.k))
            for row in cutlass.range_constexpr(self.config.rows):
                total = Float32(0.0)
                for group in cutlass.range(lane, product.k // GROUP, 32, unroll=1):
                    place = memory.squares + (row * self.config.groups + group) * 4
                    total = total + ptx.load_shared(place, 0).bitcast(Float32)
                total = lanes.lane_sum(total, lanes.neighbours(32))
                factors[row] = numbers.reciprocal_root(total * inverse + sizes.eps)

    def add(self, sums, factors, memory: LayerMemory, buffer, lane) -> None:
        """The consumer warps' sums in order, times the rows' factors, and the residual."""
        start = memory.parts + buffer * (self.config.consumer_warps * self.config.part_bytes) + lane * 4
        for row in range(self.config.rows):
            parts = [
                ptx.load_shared(start, warp * self.config.part_bytes + row * (TILE_N * 4)).bitcast(Float32)
                for warp in range(self.config.consumer_warps)
            ]
            sums[row] = ptx.fma(lanes.in_pairs(operator.add, parts), factors[row], sums[row])

    @cute.jit
    def store(self, sums, sizes: Sizes, product: Product, feature, lane):
        """Stores a work tile's results, two of a lane's and its neighbours' at a time."""
        for row in cutlass.range_constexpr(self.config.rows):
            value = sums[row]
            other = cute.arch.shuffle_sync_bfly(value, 1)
            gated = silu(value) * other  # in even lanes: gate and up are in turn
            third = cute.arch.shuffle_sync_bfly(gated, 2)
            if row < sizes.m:
                if product.gated != 0:
                    if lane % 4 == 0:
                        place = product.out + (Int64(row) * (product.n >> 1) + (feature >> 1)) * 2
                        ptx.store_global(place, [ptx.pack_bf16x2(gated, third)])
                else:
                    if lane % 2 == 0:
                        place = product.out + (Int64(row) * product.n + feature) * 2
                        ptx.store_global(place, [ptx.pack_bf16x2(value, other)])
