"""The store warp, which adds up the consumer warps' accumulators of a work tile and stores the results. Each lane has
one feature."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.gemm.activate import Activate
from cute_kernels.gemm.layer import instructions
from cute_kernels.gemm.layer.config import GROUP, PART_BYTES, TILE_N, LayerProductsConfig
from cute_kernels.gemm.layer.exchange import Exchange, empty_other, exchange_of, leave, load_result
from cute_kernels.gemm.layer.memory import LayerMemory, Product, Sizes, receive

UPPER_HALF = 0xFFFF0000


class Storer:
    """The code of the store warp."""

    def __init__(self, config: LayerProductsConfig):
        self.config, self.activate = config, Activate(config.activation)

    @cute.jit
    def run(self, sizes: Sizes, memory: LayerMemory, lane):
        """Stores the results of all work tiles of the CTA."""
        slot, running, before = memory.tiles.consumer_state(), Int32(1), Int32(-1)
        part = memory.results.consumer_state()
        factor = Float32(1.0)
        exchange = exchange_of(sizes)
        empty_other(sizes, exchange, lane)
        while running != 0:
            tile = receive(memory, slot, lane)
            slot = memory.tiles.next(slot)
            if tile >= sizes.num_tiles:
                running = Int32(0)
            else:
                number = sizes.product_of(tile)
                product = memory.product(number)
                feature = (tile - product.begin) * TILE_N + lane
                added = self.load_added(sizes, product, exchange, number, feature)
                memory.results.consumer_wait(part)
                if number != before:
                    factor = self.make_factor(sizes, memory, product, lane)
                    before = number
                total = self.add(added, factor, memory, part.stage, lane)
                cute.arch.sync_warp()
                if lane == 0:
                    memory.results.consumer_release(part)
                part = memory.results.next(part)
                waited_for = tile < sizes.waited_for
                self.store(total, product, exchange, waited_for, feature, lane)
        if lane == 0:
            leave(sizes, exchange)

    @cute.jit
    def load_added(self, sizes: Sizes, product: Product, exchange: Exchange, number, feature):
        """Loads the value to add to a lane's feature: the residual, the first product's result, or 0."""
        added, place = Float32(0.0), Int64(feature) * 2
        if (number == 0) & (sizes.residual != 0):
            added = (ptx.load_relaxed_part(sizes.residual + place, 2) << 16).bitcast(Float32)
        if product.adds != 0:
            word = load_result(exchange.address + (place & ~3))
            half = cutlass.select_(feature % 2 == 0, word << 16, word & Uint32(UPPER_HALF))
            added = Uint32(half).bitcast(Float32)
        return added

    @cute.jit
    def make_factor(self, sizes: Sizes, memory: LayerMemory, product: Product, lane):
        """Returns the factor of the results that applies the RMSNorm of the product's row; 1 without a norm."""
        factor = Float32(1.0)
        if product.norm != 0:
            total = Float32(0.0)
            for group in cutlass.range(lane, product.k // GROUP, 32, unroll=1):
                total = total + ptx.load_shared(memory.squares + group * 4, 0).bitcast(Float32)
            total = lanes.lane_sum(total, lanes.neighbours(32))
            factor = numbers.reciprocal_root(total * ptx.reciprocal(numbers.to_float(product.k)) + sizes.eps)
        return factor

    def add(self, added, factor, memory: LayerMemory, buffer, lane):
        """Adds up the consumer warps' accumulators in order, multiplies by the row's factor, and adds ``added``."""
        start = memory.parts + buffer * (self.config.consumer_warps * PART_BYTES) + lane * 4
        parts = [
            ptx.load_shared(start, warp * PART_BYTES).bitcast(Float32) for warp in range(self.config.consumer_warps)
        ]
        return ptx.fma(lanes.in_pairs(operator.add, parts), factor, added)

    @cute.jit
    def store(self, value, product: Product, exchange: Exchange, waited_for, feature, lane):
        """Stores a work tile's results as pairs of bf16 numbers. The results go to the exchange if CTAs wait for them,
        and to the product's output if the product has one."""
        other = cute.arch.shuffle_sync_bfly(value, 1)
        gated = self.activate.of_pair(value, other)  # in even lanes: gate and up are in turn
        third = cute.arch.shuffle_sync_bfly(gated, 2)
        is_gated = product.gated != 0
        word = cutlass.select_(is_gated, ptx.pack_bf16x2(gated, third), ptx.pack_bf16x2(value, other))
        column = cutlass.select_(is_gated, feature >> 1, feature)
        if lane % cutlass.select_(is_gated, Int32(4), Int32(2)) == 0:
            place = Int64(column) * 2
            if waited_for:
                instructions.store_relaxed(exchange.address + product.place + place, word)
            if product.out != 0:
                ptx.store_global(product.out + place, [word])
