"""Rows of a product as limbs where MMAs read them: made once a CTA, by its consumer warps.

Four lanes take 128 inputs of a row; their limbs are those of :mod:`..wgmma.limb_rows`. In memory a group of 128 inputs
is [two halves][column][4 lanes][4 steps of 16 inputs] words: a lane's B operands of four steps are 16 bytes. A column
is one limb of a row, the high one first.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64, Uint32

from cute_kernels.device import lanes, ptx
from cute_kernels.layer_products.config import GROUP, LayerProductsConfig
from cute_kernels.layer_products.exchange import Exchange, load_results
from cute_kernels.layer_products.memory import LayerMemory, Product, Sizes
from cute_kernels.linear.wgmma.resident_rows import ResidentRows, RowsRoom

GROUP_LANES, WARP_GROUPS = 4, 8
BLOCK = 16  # inputs of a step
LANE_WORDS = GROUP // GROUP_LANES // 2
COLUMN_BYTES = 64  # of half a group
PLACES = tuple(block * (GROUP_LANES * BLOCK * 2) + piece * 16 for block in range(2) for piece in range(2))
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
        for row in cutlass.range_constexpr(self.config.rows):
            if row < sizes.m:
                for first in cutlass.range(warp * WARP_GROUPS, groups, 8 * self.config.consumer_warps, unroll=1):
                    self.make_groups(sizes, memory, product, exchange, number, row, first, lane)
        self.meet()

    @cute.jit
    def make_groups(
        self, sizes: Sizes, memory: LayerMemory, product: Product, exchange: Exchange, number, row: int, first, lane
    ):
        """Of eight groups of a row."""
        groups = product.k // GROUP
        group = first + lane // GROUP_LANES
        element = cutlass.min(group, groups - 1) * GROUP + lane % GROUP_LANES * BLOCK
        words = cute.make_rmem_tensor(LANE_WORDS, Uint32)
        place = (Int64(row) * product.k + element) * 2
        if number > 0:
            load_results(words, exchange.address + product.rows + place, PLACES)
        else:
            self.keep(words, [w for at in PLACES for w in ptx.load_relaxed(sizes.x + place, 4, offset=at)])
        if product.norm != 0:
            values = self.to_floats([words[i] for i in range(LANE_WORDS)])
            start = product.norm + Int64(element) * 2
            weights = self.to_floats([w for at in PLACES for w in ptx.load_global_words(start, at, 4)])
            scaled = [value * (weight + sizes.offset) for value, weight in zip(values, weights, strict=True)]
            self.keep(words, [ptx.pack_bf16x2(scaled[i], scaled[i + 1]) for i in range(0, len(scaled), 2)])
            own = lanes.in_pairs(operator.add, [value * value for value in values])
            total = lanes.lane_sum(own, lanes.neighbours(GROUP_LANES))
            if group < groups:  # all four lanes have it, and store the same
                ptx.store_shared(memory.squares + (row * self.config.groups + group) * 4, 0, [total])
        scale, limbs = self.limbs.split([words[i] for i in range(LANE_WORDS)])
        if group < groups:
            self.store(memory, row, group, lane, limbs)
            ptx.store_shared(memory.x_scales + (group * self.config.rows + row) * 4, 0, [scale])

    def store(self, memory: LayerMemory, row: int, group, lane, limbs) -> None:
        """Puts a lane's limbs where MMAs read them."""
        size = self.config.columns * COLUMN_BYTES
        start = memory.limbs + group * (2 * size) + lane % GROUP_LANES * 4
        for block, words in enumerate(limbs):
            for limb in range(2):
                for i, word in enumerate(words[4 * limb : 4 * limb + 4]):
                    place = block * size + (2 * row + limb) * COLUMN_BYTES + i * 16
                    ptx.store_shared(start, place, [word])

    def to_floats(self, words) -> list[Any]:
        return [half(word) for word in words for half in (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float)]

    @staticmethod
    def keep(registers, values) -> None:
        for i, value in enumerate(values):
            registers[i] = value

    def meet(self) -> None:
        """Waits for all consumer warps."""
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=32 * self.config.consumer_warps)
