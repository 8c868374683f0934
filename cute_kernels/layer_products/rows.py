"""Rows of a product as limbs where MMAs read them: made once a CTA, by its consumer warps.

Eight lanes take 128 inputs of a row; their limbs are those of :mod:`..linear.wgmma.limb_rows`. In memory a group of 128
inputs is [two halves][column][4 lanes][4 steps of 16 inputs] words: a lane's B operands of four steps are 16 bytes. A
column is one limb of a row, the high one first.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import lanes, ptx
from cute_kernels.layer_products.config import GROUP, LayerProductsConfig
from cute_kernels.layer_products.exchange import Exchange, load_results
from cute_kernels.layer_products.memory import LayerMemory, Product, Sizes
from cute_kernels.linear.wgmma.resident_rows import MAGNITUDES, ResidentRows, RowsRoom

GROUP_LANES, WARP_GROUPS = 8, 4
BLOCK = GROUP // GROUP_LANES  # inputs of a step of MMAs, and of a lane
LANE_WORDS = BLOCK // 2
HALF_STEPS = GROUP_LANES // 2  # of half a group
COLUMN_BYTES = 64  # of half a group
PLACES = (0, 16)  # bytes of a lane's vectors
CONSUMER_BARRIER = 1


class Rows:
    """What the consumer warps do with rows of x."""

    def __init__(self, config: LayerProductsConfig):
        self.config = config
        self.limbs = ResidentRows(RowsRoom(config.dtype, 8, config.consumer_warps, config.groups))

    @cute.jit
    def make(self, sizes: Sizes, memory: LayerMemory, product: Product, exchange: Exchange, number, warp, lane):
        """Limbs of a product's rows, as they come. Nobody still reads those of the product before."""
        self.meet()
        groups = product.k // GROUP
        step = WARP_GROUPS * self.config.consumer_warps
        for row in cutlass.range_constexpr(self.config.rows):
            if row < sizes.m:
                for first in cutlass.range(warp * WARP_GROUPS, groups, step, unroll=1):
                    self.make_groups(sizes, memory, product, exchange, number, row, first, lane)
        self.meet()

    @cute.jit
    def make_groups(
        self, sizes: Sizes, memory: LayerMemory, product: Product, exchange: Exchange, number, row: int, first, lane
    ):
        """Of some groups of a row."""
        groups = product.k // GROUP
        group = first + lane // GROUP_LANES
        element = cutlass.min(group, groups - 1) * GROUP + lane % GROUP_LANES * BLOCK
        words, weights = (cute.make_rmem_tensor(LANE_WORDS, Uint32) for _ in range(2))
        if product.norm != 0:  # asked for before the rows are there
            start = product.norm + Int64(element) * 2
            self.keep(weights, [word for at in PLACES for word in ptx.load_global_words(start, at, 4)])
        place = (Int64(row) * product.k + element) * 2
        if number > 0:
            load_results(words, exchange.address + product.rows + place, PLACES)
        else:
            self.keep(words, [word for at in PLACES for word in ptx.load_relaxed(sizes.x + place, 4, offset=at)])
        if product.norm != 0:
            values, factors = (self.to_floats([each[i] for i in range(LANE_WORDS)]) for each in (words, weights))
            scaled = [value * (factor + sizes.offset) for value, factor in zip(values, factors, strict=True)]
            self.keep(words, [ptx.pack_bf16x2(scaled[i], scaled[i + 1]) for i in range(0, len(scaled), 2)])
            own = lanes.in_pairs(operator.add, [value * value for value in values])
            total = lanes.lane_sum(own, lanes.neighbours(GROUP_LANES))
            if group < groups:  # all of a group's lanes have it, and store the same
                ptx.store_shared(memory.squares + (row * self.config.groups + group) * 4, 0, [total])
        scale, limbs = self.split([words[i] for i in range(LANE_WORDS)])
        if group < groups:
            self.store(memory, row, group, lane, limbs)
            ptx.store_shared(memory.x_scales + (group * self.config.rows + row) * 4, 0, [scale])

    def split(self, words) -> tuple[Any, list[Any]]:
        """(bits of what a code's byte times a limb counts, words of a lane's high limbs, then of its low ones)."""
        rows, limbs = self.limbs, self.limbs.limb_rows
        packed = lanes.over_lanes(rows.greater, lanes.in_pairs(rows.greater, words), lanes.neighbours(GROUP_LANES))
        pair = [Int32(value.bitcast(Uint32)) for value in limbs.to_floats(packed & Uint32(MAGNITUDES))]
        factor, scale = limbs.scales_of(cutlass.max(*pair))
        return scale, rows.limbs(rows.fixed(words, factor))

    def store(self, memory: LayerMemory, row: int, group, lane, limbs) -> None:
        """Puts a lane's limbs of a step where MMAs read them."""
        half_bytes, step = self.config.columns * COLUMN_BYTES, lane % GROUP_LANES
        start = memory.limbs + (group * 2 + step // HALF_STEPS) * half_bytes + step % HALF_STEPS * 4
        for limb in range(2):
            for i, word in enumerate(limbs[4 * limb : 4 * limb + 4]):
                ptx.store_shared(start, (2 * row + limb) * COLUMN_BYTES + i * 16, [word])

    def to_floats(self, words) -> list[Any]:
        return [half(word) for word in words for half in (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float)]

    @staticmethod
    def keep(registers, values) -> None:
        for i, value in enumerate(values):
            registers[i] = value

    def meet(self) -> None:
        """Waits for all consumer warps."""
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=32 * self.config.consumer_warps)
