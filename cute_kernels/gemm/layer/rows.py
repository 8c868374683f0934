"""Makes int8 limbs of a product's row in shared memory, in the order of MMA operands. The consumer warps of every CTA
do so once for each product.

Eight lanes make the limbs of 128 inputs. The limbs have the same bits as those of `cute_kernels.gemm.wgmma.limb_rows`.
In memory, the limbs of 128 inputs are 32-bit words [two halves][column][4 lanes][4 steps of 16 inputs]. So a lane's B
operands of four steps are 16 neighbouring bytes. Column 0 is the high limbs, column 1 the low limbs.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import lanes, ptx
from cute_kernels.gemm.layer.config import GROUP, LayerProductsConfig
from cute_kernels.gemm.layer.exchange import Exchange, load_results
from cute_kernels.gemm.layer.memory import LayerMemory, Product, Sizes
from cute_kernels.gemm.wgmma.resident_rows import MAGNITUDES, ResidentRows, RowsRoom

GROUP_LANES, WARP_GROUPS = 8, 4
BLOCK = GROUP // GROUP_LANES  # inputs of an MMA step, and of a lane
LANE_WORDS = BLOCK // 2
HALF_STEPS = GROUP_LANES // 2  # MMA steps of half a group
COLUMN_BYTES = 64  # bytes of one limb of half a group
HALF_BYTES = 2 * COLUMN_BYTES  # bytes of both limbs of half a group
PLACES = (0, 16)  # bytes of a lane's vectors
PASSES = 3  # groups whose loads a warp issues together: 14336 inputs by twelve warps
CONSUMER_BARRIER = 1


class Row:
    """The code by which consumer warps make limbs of a product's row."""

    def __init__(self, config: LayerProductsConfig):
        self.config = config
        self.limbs = ResidentRows(RowsRoom(config.dtype, 8, config.consumer_warps, config.groups))

    @cute.jit
    def make(self, sizes: Sizes, memory: LayerMemory, product: Product, exchange: Exchange, number, warp, lane):
        """Makes limbs of a product's row as the row's words arrive. The consumer warps wait for each other twice:
        before they overwrite the previous product's limbs, and after all limbs are made."""
        self.meet()
        total = product.k // GROUP
        for first in cutlass.range(warp * WARP_GROUPS, total, PASSES * self.pass_groups, unroll=1):
            self.make_groups(sizes, memory, product, exchange, number, first, lane)
        self.meet()

    @property
    def pass_groups(self) -> int:
        """The number of groups that all consumer warps together convert at a time."""
        return WARP_GROUPS * self.config.consumer_warps

    @cute.jit
    def make_groups(self, sizes: Sizes, memory: LayerMemory, product: Product, exchange: Exchange, number, first, lane):
        """Makes limbs of a warp's groups in `PASSES` passes, from group ``first`` on. The inputs of all passes are
        loaded at once.

        Lanes whose group would lie after the row's last group make the limbs of the last group again.
        """
        total = product.k // GROUP
        there = [first + i * self.pass_groups < total for i in range(PASSES)]
        groups = [cutlass.min(first + i * self.pass_groups + lane // GROUP_LANES, total - 1) for i in range(PASSES)]
        words, weights = (cute.make_rmem_tensor(PASSES * LANE_WORDS, Uint32) for _ in range(2))
        for i in cutlass.range_constexpr(PASSES):
            if there[i] & (product.norm != 0):  # asked for before the row is there
                start = product.norm + Int64(groups[i] * GROUP + lane % GROUP_LANES * BLOCK) * 2
                self.keep(weights, i, [word for at in PLACES for word in ptx.load_global_words(start, at, 4)])
        offsets = [Int64(group * GROUP + lane % GROUP_LANES * BLOCK) * 2 for group in groups]
        if number > 0:
            load_results(words, [exchange.address + product.rows + at for at in offsets], there, PLACES)
        else:
            for i in cutlass.range_constexpr(PASSES):
                if there[i]:
                    start = sizes.x + offsets[i]
                    self.keep(words, i, [word for at in PLACES for word in ptx.load_relaxed(start, 4, offset=at)])
        for i in cutlass.range_constexpr(PASSES):
            if there[i]:
                self.make_group(sizes, memory, product, groups[i], words, weights, i, lane)

    @cute.jit
    def make_group(self, sizes: Sizes, memory: LayerMemory, product: Product, group, words, weights, number: int, lane):
        """Makes limbs of a lane's inputs in pass ``number``, and stores the limbs and the group's scale. If the row has
        a norm, also stores the group's sum of squares.
        """
        if product.norm != 0:
            values, factors = (self.to_floats(self.kept(each, number)) for each in (words, weights))
            scaled = [value * (factor + sizes.offset) for value, factor in zip(values, factors, strict=True)]
            self.keep(words, number, [ptx.pack_bf16x2(scaled[i], scaled[i + 1]) for i in range(0, len(scaled), 2)])
            own = lanes.in_pairs(operator.add, [value * value for value in values])
            total = lanes.lane_sum(own, lanes.neighbours(GROUP_LANES))
            # All of a group's lanes have it, and store the same.
            ptx.store_shared(memory.squares + group * 4, 0, [total])
        scale, limbs = self.split(self.kept(words, number))
        self.store(memory, group, lane, limbs)
        ptx.store_shared(memory.x_scales + group * 4, 0, [scale])

    def to_floats(self, words) -> list[Any]:
        return [half(word) for word in words for half in (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float)]

    @staticmethod
    def keep(registers, number: int, values) -> None:
        """Puts a pass's words into registers."""
        for i, value in enumerate(values):
            registers[number * LANE_WORDS + i] = value

    @staticmethod
    def kept(registers, number: int) -> list[Any]:
        return [registers[number * LANE_WORDS + i] for i in range(LANE_WORDS)]

    def split(self, words) -> tuple[Any, list[Any]]:
        """Returns (scale, limbs) of a lane's inputs. scale: bits of an fp32 factor for the products of limbs and codes.
        limbs: words of the high limbs, then words of the low limbs.
        """
        rows, limbs = self.limbs, self.limbs.limb_rows
        packed = lanes.over_lanes(rows.greater, lanes.in_pairs(rows.greater, words), lanes.neighbours(GROUP_LANES))
        pair = [Int32(value.bitcast(Uint32)) for value in limbs.to_floats(packed & Uint32(MAGNITUDES))]
        factor, scale = limbs.scales_of(cutlass.max(*pair))
        return scale, rows.limbs(rows.fixed(words, factor))

    def store(self, memory: LayerMemory, group, lane, limbs) -> None:
        """Stores a lane's limbs in shared memory, where MMAs read them as operands of one step."""
        step = lane % GROUP_LANES
        start = memory.limbs + (group * 2 + step // HALF_STEPS) * HALF_BYTES + step % HALF_STEPS * 4
        for limb in range(2):
            for i, word in enumerate(limbs[4 * limb : 4 * limb + 4]):
                ptx.store_shared(start, limb * COLUMN_BYTES + i * 16, [word])

    def meet(self) -> None:
        """Waits for all consumer warps."""
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=32 * self.config.consumer_warps)
