"""The store warp: it adds up the consumer warps' accumulators of a work tile, a feature a lane, and stores the
results."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.gemm.activate import Activate
from cute_kernels.gemm.layer import instructions
from cute_kernels.gemm.layer.config import GROUP, TILE_N, LayerProductsConfig
from cute_kernels.gemm.layer.exchange import Exchange, empty_other, exchange_of, leave, load_result
from cute_kernels.gemm.layer.memory import LayerMemory, Product, Sizes, receive

UPPER_HALF = 0xFFFF0000


class Storer:
    """The code of the store warp."""

    def __init__(self, config: LayerProductsConfig):
        self.config, self.activate = config, Activate(config.activation)

    @cute.jit
    def run(self, sizes: Sizes, memory: LayerMemory, lane):
        """All work tiles of the CTA."""
        slot, running, before = memory.tiles.consumer_state(), Int32(1), Int32(-1)
        part = memory.results.consumer_state()
        factors = cute.make_rmem_tensor(self.config.rows, Float32)
        factors.fill(1.0)
        sums = cute.make_rmem_tensor(self.config.rows, Float32)
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
                sums.fill(0.0)
                self.load_added(sums, sizes, product, exchange, number, feature)
                memory.results.consumer_wait(part)
                if number != before:
                    self.make_factors(factors, sizes, memory, product, lane)
                    before = number
                self.add(sums, factors, memory, part.stage, lane)
                cute.arch.sync_warp()
                if lane == 0:
                    memory.results.consumer_release(part)
                part = memory.results.next(part)
                waited_for = tile < sizes.waited_for
                self.store(sums, sizes, product, exchange, waited_for, feature, lane)
        if lane == 0:
            leave(sizes, exchange)

    @cute.jit
    def load_added(self, sums, sizes: Sizes, product: Product, exchange: Exchange, number, feature):
        """Loads what is added to a lane's feature: the residual, or the first product's result."""
        for row in cutlass.range_constexpr(self.config.rows):
            if row < sizes.m:
                place = (Int64(row) * product.n + feature) * 2
                if (number == 0) & (sizes.residual != 0):
                    sums[row] = (ptx.load_relaxed_part(sizes.residual + place, 2) << 16).bitcast(Float32)
                if product.adds != 0:
                    word = load_result(exchange.address + (place & ~3))
                    half = cutlass.select_(feature % 2 == 0, word << 16, word & Uint32(UPPER_HALF))
                    sums[row] = Uint32(half).bitcast(Float32)

    @cute.jit
    def make_factors(self, factors, sizes: Sizes, memory: LayerMemory, product: Product, lane):
        """Makes the factor of each row that completes a deferred norm."""
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
        """Adds the consumer warps' accumulators in order, applies the rows' factors, and adds the residual."""
        start = memory.parts + buffer * (self.config.consumer_warps * self.config.part_bytes) + lane * 4
        for row in range(self.config.rows):
            parts = [
                ptx.load_shared(start, warp * self.config.part_bytes + row * (TILE_N * 4)).bitcast(Float32)
                for warp in range(self.config.consumer_warps)
            ]
            sums[row] = ptx.fma(lanes.in_pairs(operator.add, parts), factors[row], sums[row])

    @cute.jit
    def store(self, sums, sizes: Sizes, product: Product, exchange: Exchange, waited_for, feature, lane):
        """Stores a work tile's results, two of a lane's and its neighbours' at a time, where they are read."""
        for row in cutlass.range_constexpr(self.config.rows):
            value = sums[row]
            other = cute.arch.shuffle_sync_bfly(value, 1)
            gated = self.activate.of_pair(value, other)  # in even lanes: gate and up are in turn
            third = cute.arch.shuffle_sync_bfly(gated, 2)
            is_gated = product.gated != 0
            word = cutlass.select_(is_gated, ptx.pack_bf16x2(gated, third), ptx.pack_bf16x2(value, other))
            columns = cutlass.select_(is_gated, product.n >> 1, product.n)
            column = cutlass.select_(is_gated, feature >> 1, feature)
            own = lane % cutlass.select_(is_gated, Int32(4), Int32(2)) == 0
            place = (Int64(row) * columns + column) * 2
            if own & (row < sizes.m):
                if waited_for:
                    instructions.store_relaxed(exchange.address + product.place + place, word)
                if product.out != 0:
                    ptx.store_global(product.out + place, [word])
