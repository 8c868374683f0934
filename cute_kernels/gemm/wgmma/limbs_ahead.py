"""K blocks of a tile of few rows by MMAs of bytes, one decoded while another is multiplied.

As :mod:`.limbs`, but for when things are done. A warpgroup that waits for its MMAs, scales their accumulators, then
decodes the next codes, leaves the tensor cores alone for most of a k block. Here the next k block's codes are fetched
while the last MMAs of this one run, which leaves their decoding alone between two k blocks; and those MMAs'
accumulators are scaled while the first ones of the next k block run. Registers hold what is between two k blocks: the
next one's codes and first operands, the last tile's products and their scales.

ptxas puts MMAs one after the other where accumulators are read in the next round of a loop while others run. So each
round ends with a wait for all of its MMAs, and hands on products that are joined already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.device import wgmma
from cute_kernels.device.ring import advance
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.limbs import LimbProducts, LimbReader, Shift
from cute_kernels.gemm.wgmma.reading import StageReader, nothing

STAGE_WORDS = 8  # of a thread's codes of a tile,
CHUNK_WORDS = 4  # that are loaded at a time
OPERAND_WORDS = 2 * STAGE_WORDS  # of a tile's A operands


@dataclass(frozen=True)
class Between:
    """What a thread keeps from one k block to the next; tensors of registers."""

    words: Any  # codes of the k block that is next
    operands: Any  # those of its first tile, decoded
    products: Any  # of the last tile of the k block before,
    scales: Any  # and what they count: its rows'
    x_scales: Any  # and x's


class AheadSteps:
    """The steps of a mainloop that decodes one k block ahead."""

    def __init__(self, config: WgmmaConfig, stages: StageReader, x_scale_shift: Shift | None = None):
        self.config = config
        self.reader = LimbReader(config, stages, x_scale_shift, in_pairs=True)
        self.products = LimbProducts(config.n_tiles, config.tile_m, stages.decoder.steps, config.k_block_groups)

    def multiply_but_last(
        self, acc, memory, stage, place, x_place, between: Between, tile_m: int
    ) -> tuple[Any, Any, Any, Any]:
        """Starts the MMAs of the k block that was taken; adds the products that were kept, and those of all of its
        tiles but the last.

        Returns the accumulators of the MMAs that are still running, the scales of their rows and those of x, and zero
        points as `LimbReader.load_zeros` has them.
        """
        tiles, x = self.config.n_tiles, self.reader.descriptor(memory, stage)
        started = self.products.start(self.of(between.operands), x, tile_m)
        self.add_kept(acc, between)
        scales = [self.reader.load_scales(memory, stage, place, i) for i in range(tiles)]
        x_scales = self.reader.load_x_scales(memory, stage, x_place, tile_m)
        zeros = self.reader.load_zeros(memory, stage, place, x_place, tile_m) or [None] * tiles
        for i in range(1, tiles):
            following = self.products.start(self.products.operands(self.words_of(between, i), place.masks), x, tile_m)
            joined = self.products.join(wgmma.wait_for_dots(started, 1), zeros[i - 1])
            self.products.add(acc, i - 1, joined, scales[i - 1], x_scales)
            started = following
        return started, scales[-1], x_scales, zeros[-1]

    def nothing_yet(self, tile_m: int) -> Between:
        """What is kept before the first k block: products of 0."""
        between = Between(
            words=cute.make_rmem_tensor(self.config.n_tiles * STAGE_WORDS, Uint32),
            operands=cute.make_rmem_tensor(OPERAND_WORDS, Uint32),
            products=cute.make_rmem_tensor(self.config.k_block_groups * (tile_m // 2), Int32),
            scales=cute.make_rmem_tensor(2 * self.config.k_block_groups, Float32),
            x_scales=cute.make_rmem_tensor(tile_m // 4, Float32),
        )
        between.products.fill(0)
        between.scales.fill(0.0)
        between.x_scales.fill(0.0)
        return between

    def take(self, memory, stage, place, between: Between) -> None:
        """Loads a stage's codes, and decodes those of the first tile."""
        found = self.reader.load_codes(memory, stage, place)
        self.put(between.words, [word for tile in found for chunk in tile for word in chunk])
        self.put(between.operands, self.products.operands(found[0], place.masks))

    def words_of(self, between: Between, tile: int) -> list[list[Any]]:
        """[chunk of a tile's codes] words that were loaded."""
        words = self.of(between.words)[tile * STAGE_WORDS : (tile + 1) * STAGE_WORDS]
        return [words[i : i + CHUNK_WORDS] for i in range(0, STAGE_WORDS, CHUNK_WORDS)]

    def keep(self, between: Between, dots, scales, x_scales, zeros) -> None:
        """Keeps the products of a k block's last tile."""
        self.put(between.products, self.products.join(dots, zeros))
        self.put(between.scales, scales)
        self.put(between.x_scales, x_scales)

    def add_kept(self, acc, between: Between) -> None:
        """Adds the products that were kept to the accumulators of the last tile."""
        kept = (self.of(between.products), self.of(between.scales), self.of(between.x_scales))
        self.products.add(acc, self.config.n_tiles - 1, *kept)

    @staticmethod
    def of(registers) -> list[Any]:
        """The values of a tensor of registers."""
        return [registers[i] for i in range(cute.size(registers))]

    @staticmethod
    def put(registers, values) -> None:
        """Puts values into a tensor of registers."""
        for i, value in enumerate(values):
            registers[i] = value


class AheadMainloop:
    """MMAs of int8 limbs, stage by stage, one k block decoded ahead."""

    def __init__(self, config: WgmmaConfig, stages: StageReader, x_scale_shift: Shift | None = None):
        self.config, self.stages = config, stages
        self.steps = AheadSteps(config, stages, x_scale_shift)

    def masks(self, shape, lane):
        return self.steps.products.masks(nothing(shape, lane))

    @cute.jit
    def multiply(self, acc, memory, work_tile, place, channel, state, teller, tile_m: int):
        """As `RegisterMainloop.multiply`; waits for all MMAs, and releases every stage itself."""
        stage, phase, last = state
        x_place = self.steps.reader.x_scale_place(work_tile)
        between = self.steps.nothing_yet(tile_m)
        cute.arch.mbarrier_wait(memory.full + stage, phase)
        self.steps.take(memory, stage, place, between)
        for k_block in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
            started, scales, x_scales, zeros = self.steps.multiply_but_last(
                acc, memory, stage, place, x_place, between, tile_m
            )
            last = stage
            stage, phase = advance(stage, phase, self.config.num_stages)
            if k_block + 1 < work_tile.end:
                cute.arch.mbarrier_wait(memory.full + stage, phase)
            # Behind the work tile's last k block these are bytes of some other, and not used.
            self.steps.take(memory, stage, place, between)
            self.steps.keep(between, wgmma.wait_for_dots(started, 0), scales, x_scales, zeros)
            cute.arch.sync_warp()
            self.stages.release(memory, last, teller)
        self.steps.add_kept(acc, between)
        return stage, phase, last

    def finish(self, acc, memory, work_tile, place, channel, last, teller) -> None:
        """Nothing: accumulators are finished and scaled."""
