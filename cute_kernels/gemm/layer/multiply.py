"""The consumer warps. Each multiplies its own pipeline stages by int8 MMAs. A stage has 32 features and 256 inputs.

A warp's sums over 128 inputs are exact in int32. They are multiplied by scales and added to fp32 accumulators. A
stage's memory always belongs to the same warp, so the phase parity of its barriers is never ambiguous. A warp does not
have the same stages of every work tile: that depends on the number of stages before the tile. So a warp publishes its
accumulators under a rank, the index of its first stage in the tile, and ranks are added in order. The order of a sum is
then the same in every CTA.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.formats.weights.integer_decode import SIGNS, NibbleBytes
from cute_kernels.gemm.layer import instructions
from cute_kernels.gemm.layer.config import (
    CODE_TILE_K,
    GROUP,
    PART_BYTES,
    STAGE_BYTES,
    STAGE_CODES,
    STAGE_K,
    TILE_N,
    LayerProductsConfig,
)
from cute_kernels.gemm.layer.exchange import exchange_of
from cute_kernels.gemm.layer.loads import HALF_CODES
from cute_kernels.gemm.layer.memory import LayerMemory, Sizes, receive, turn
from cute_kernels.gemm.layer.rows import COLUMN_BYTES, HALF_BYTES, Row
from cute_kernels.gemm.wgmma.limbs import LIMB_BASE

FRAGMENT_N = 16  # features of an MMA
FRAGMENTS = TILE_N // FRAGMENT_N
WARP_CODES = HALF_CODES // FRAGMENTS  # bytes of codes of 64 inputs that a warp loads
SUMS = FRAGMENTS * 2  # accumulators of a thread, [fragment][feature]


class Multiplier:
    """The code of the consumer warps."""

    def __init__(self, config: LayerProductsConfig):
        self.config, self.row = config, Row(config)

    @cute.jit
    def run(self, sizes: Sizes, memory: LayerMemory, warp, lane):
        """Multiplies all work tiles of the CTA."""
        weights, results = memory.weights, memory.results
        base, slot, running = Int32(0), memory.tiles.consumer_state(), Int32(1)
        before, part = Int32(-1), results.producer_state()
        masks, exchange = ptx.pinned(Uint32(SIGNS)), exchange_of(sizes)
        acc = cute.make_rmem_tensor(SUMS, Float32)
        while running != 0:
            tile = receive(memory, slot, lane)
            slot = memory.tiles.next(slot)
            if tile >= sizes.num_tiles:
                running = Int32(0)
            else:
                number = sizes.product_of(tile)
                own = memory.product(number)
                if number != before:
                    self.row.make(sizes, memory, own, exchange, number, warp, lane)
                    before = number
                acc.fill(0.0)
                stages = own.k // STAGE_K
                rank = turn(warp, base, self.config.consumer_warps)
                for j in cutlass.range(rank, stages, self.config.consumer_warps, unroll=1):
                    here = weights.consumer_state_of(base + j)
                    weights.consumer_wait(here)
                    self.multiply_stage(acc, memory, here.stage, j, masks, lane)
                    cute.arch.sync_warp()
                    if lane == 0:
                        weights.consumer_release(here)
                base = base + stages
                results.producer_acquire(part)
                self.publish(acc, memory, part.stage, rank, lane)
                cute.arch.sync_warp()
                if lane == 0:
                    results.producer_commit(part)
                part = results.next(part)

    def multiply_stage(self, acc, memory: LayerMemory, stage, j, masks, lane) -> None:
        """Adds a stage's products to ``acc``. Column 0 of an MMA's B operand is the high limb of x; all other columns
        are the low limb. Only columns 0 and 1 of the product are used."""
        place = memory.stages + stage * STAGE_BYTES
        codes = place + lane * 16
        scales = place + STAGE_CODES + lane // 4 * 2
        column, groups = cutlass.min(lane // 4, 1), range(STAGE_K // GROUP)
        parts = [(i, fragment) for i in groups for fragment in range(FRAGMENTS)]
        limbs = memory.limbs + j * (len(groups) * 2 * HALF_BYTES) + column * COLUMN_BYTES + lane % 4 * 16
        x_scales = memory.x_scales + j * (len(groups) * 4)
        b, a = {}, {}
        for i in groups:
            for half in range(2):
                b[i, half] = ptx.load_shared_vector(limbs, (2 * i + half) * HALF_BYTES, 4)
                for fragment in range(FRAGMENTS):
                    at = (i * (GROUP // CODE_TILE_K) + half) * HALF_CODES + fragment * WARP_CODES
                    a[i, fragment, half] = ptx.load_shared_vector(codes, at, 4)
        of_row = [ptx.load_shared(x_scales, i * 4).bitcast(Float32) for i in groups]
        of_features = {
            (i, fragment, k): (
                ptx.load_shared_part(scales, i * (TILE_N * 2) + fragment * (FRAGMENT_N * 2) + 16 * k, 2) << 16
            ).bitcast(Float32)
            for i in groups
            for fragment in range(FRAGMENTS)
            for k in range(2)
        }
        dots = {part: [Int32(0)] * 4 for part in parts}
        for step in range(4):  # all groups and fragments in turn: MMAs that do not wait for each other
            half, first = step // 2, step % 2 * 2
            for i in groups:
                for fragment in range(FRAGMENTS):
                    words = a[i, fragment, half]
                    operands = self.operands(words[first], words[first + 1], masks)
                    pair = b[i, half][first : first + 2]
                    dots[i, fragment] = instructions.multiply_bytes(dots[i, fragment], operands, pair)
        for i, fragment in parts:
            for k in range(2):
                high, low = dots[i, fragment][2 * k : 2 * k + 2]
                exact, index = numbers.to_float(high * LIMB_BASE + low), fragment * 2 + k
                acc[index] = ptx.fma(exact * of_row[i], of_features[i, fragment, k], acc[index])

    def operands(self, first, second, masks) -> list:
        """Returns the A operand of an MMA, decoded from the codes of two steps. Each byte of the operand is (code - 8)
        * 16."""
        return [byte for word in (first, second) for byte in NibbleBytes().fragment([word], masks)]

    @cute.jit
    def publish(self, acc, memory: LayerMemory, buffer, rank, lane):
        """Publishes a rank's accumulators to the store warp. Only lanes that hold columns 0 and 1, the products of both
        limbs, store."""
        start = memory.parts + (buffer * self.config.consumer_warps + rank) * PART_BYTES + lane // 4 * 4
        if lane % 4 == 0:
            for fragment in cutlass.range_constexpr(FRAGMENTS):
                for k in cutlass.range_constexpr(2):
                    ptx.store_shared(start, (fragment * FRAGMENT_N + 8 * k) * 4, [acc[fragment * 2 + k]])
