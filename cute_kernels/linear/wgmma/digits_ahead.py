"""Units of a tile of few rows by MMAs of bytes, one decoded while another is multiplied.

As :mod:`.digits`, but for when things are done. A warpgroup that waits for its MMAs, scales their sums, then decodes
the next codes, leaves the tensor cores alone for most of a unit. Here the next unit's codes are fetched while the last
MMAs of this one run, and decoded while others do; those MMAs' sums are scaled while the first ones of the next unit
run. Registers hold what is between two units: the next one's codes and first operands, the last tile's products and
their scales.

ptxas puts MMAs one after the other where sums are read in the next round of a loop while others run. So each round ends
with a wait for all of its MMAs, and hands on products that are joined already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.ring import advance
from cute_kernels.linear.wgmma.digits import DigitUnits

STAGE_WORDS = 8  # of a thread's codes of a tile,
CHUNK_WORDS = 4  # that are loaded at a time
OPERAND_SETS = 2
OPERAND_WORDS = 2 * STAGE_WORDS  # of a tile's A operands


@dataclass(frozen=True)
class Between:
    """What a thread keeps from one unit to the next; tensors of registers."""

    words: Any  # codes of the unit that is next
    operands: Any  # those of its first tile, decoded
    products: Any  # of the last tile of the unit before,
    scales: Any  # and what they count: its rows'
    x_scales: Any  # and x's


class AheadUnits(DigitUnits):
    """What a multiplying warpgroup does with the units of an item, for a configuration that says ``ahead``."""

    @property
    def round_units(self) -> int:
        """Units of a round of the loop: two sets of operands take turns, one for each tile of one unit, or of two."""
        return 1 if self.config.group_steps == 4 else OPERAND_SETS // self.config.m_tiles  # 4: an experiment

    @cute.jit
    def multiply(self, sums, memory, item, place, ring, teller, tokens: int):
        """As `WgmmaKernel.multiply_units`; waits for all MMAs, and gives back every stage itself."""
        stage, phase, last = ring
        x_place = self.x_scale_place(item)
        between = self.nothing_yet(tokens)
        cute.arch.mbarrier_wait(memory.full + stage, phase)
        self.take(memory, stage, place, between)
        units = self.round_units
        rounds = (item.end - item.begin) // units
        for number in cutlass.range(rounds, unroll=1):
            more = item.begin + (number + 1) * units < item.end
            stage, phase, last = self.multiply_round(
                sums, memory, place, x_place, between, (stage, phase), teller, more, tokens, units
            )
        if const_expr(units > 1):
            if item.begin + rounds * units < item.end:
                stage, phase, last = self.multiply_round(
                    sums, memory, place, x_place, between, (stage, phase), teller, False, tokens, 1
                )
        self.add_kept(sums, between)
        return stage, phase, last

    @cute.jit
    def multiply_round(
        self, sums, memory, place, x_place, between: Between, ring, teller, more, tokens: int, units: int
    ):
        """Multiplies the unit that was taken and the ``units`` - 1 behind it; takes the next if there are ``more``.

        Products of the last tile are kept, those kept before and of all other tiles added. Returns the next stage, its
        phase, and the stage before.
        """
        stage, phase = ring
        tiles = self.config.m_tiles
        x = self.descriptor(memory, stage)
        started = self.start(self.of(between.operands), x, tokens)
        self.add_kept(sums, between)
        scales, x_scales = self.load_all_scales(memory, stage, place, x_place, tokens)
        last = stage
        for number in cutlass.range_constexpr(1, units * tiles):
            if const_expr(number % tiles == 0):
                stage, phase = advance(stage, phase, self.config.num_stages)
                cute.arch.mbarrier_wait(memory.full + stage, phase)
                self.load_words(memory, stage, place, between)
                x = self.descriptor(memory, stage)
            following = self.start(self.operands(self.words_of(between, number % tiles), place.masks), x, tokens)
            done = self.join(wgmma.wait_for_dots(started, 1))
            self.add(sums, (number - 1) % tiles, done, scales[(number - 1) % tiles], x_scales)
            started = following
            if const_expr(number % tiles == 0):
                self.give_back(memory, last, teller)
                last = stage
                scales, x_scales = self.load_all_scales(memory, stage, place, x_place, tokens)
        stage, phase = advance(stage, phase, self.config.num_stages)
        if more:
            cute.arch.mbarrier_wait(memory.full + stage, phase)
        # Behind the item's last unit these are bytes of some other, and not used.
        self.take(memory, stage, place, between)
        self.keep(between, wgmma.wait_for_dots(started, 0), scales[-1], x_scales)
        self.give_back(memory, last, teller)
        return stage, phase, last

    def nothing_yet(self, tokens: int) -> Between:
        """What is kept before the first unit: products of 0."""
        between = Between(
            words=cute.make_rmem_tensor(self.config.m_tiles * STAGE_WORDS, Uint32),
            operands=cute.make_rmem_tensor(OPERAND_WORDS, Uint32),
            products=cute.make_rmem_tensor(tokens // 2, Int32),
            scales=cute.make_rmem_tensor(2, Float32),
            x_scales=cute.make_rmem_tensor(tokens // 4, Float32),
        )
        between.products.fill(0)
        between.scales.fill(0.0)
        between.x_scales.fill(0.0)
        return between

    def take(self, memory, stage, place, between: Between) -> None:
        """Loads a stage's codes, and decodes those of the first tile."""
        self.load_words(memory, stage, place, between)
        self.put(between.operands, self.operands(self.words_of(between, 0), place.masks))

    def load_words(self, memory, stage, place, between: Between) -> None:
        """Loads a stage's codes."""
        found = self.kernel.load_codes(memory.codes + stage * self.config.code_stage_bytes + place.code_offset)
        self.put(between.words, [word for tile in found for chunk in tile for word in chunk])

    def words_of(self, between: Between, tile: int) -> list[list[Any]]:
        """[chunk of a tile's codes] words that were loaded."""
        words = self.of(between.words)[tile * STAGE_WORDS : (tile + 1) * STAGE_WORDS]
        return [words[i : i + CHUNK_WORDS] for i in range(0, STAGE_WORDS, CHUNK_WORDS)]

    def load_all_scales(self, memory, stage, place, x_place, tokens: int) -> tuple[Any, Any]:
        """A stage's scales of the thread's rows, [tile], and those of its tokens."""
        scales = [self.load_scales(memory, stage, place, i) for i in range(self.config.m_tiles)]
        return scales, self.load_x_scales(memory, stage, x_place, tokens)

    def give_back(self, memory, stage, teller) -> None:
        """Gives back a stage whose MMAs have ended and that all lanes have read."""
        cute.arch.sync_warp()
        self.kernel.release(memory, stage, teller)

    def keep(self, between: Between, dots, scales, x_scales) -> None:
        """Keeps the products of a unit's last tile."""
        self.put(between.products, self.join(dots))
        self.put(between.scales, scales)
        self.put(between.x_scales, x_scales)

    def add_kept(self, sums, between: Between) -> None:
        """Adds the products that were kept to the sums of the last tile."""
        kept = (self.of(between.products), self.of(between.scales), self.of(between.x_scales))
        self.add(sums, self.config.m_tiles - 1, *kept)

    def load_x_scales(self, memory, stage, x_place, tokens: int) -> list[Any]:
        # A dense tile's first row is at a multiple of eight, so a thread's two scales of eight are at one of 8 bytes.
        address = memory.x_scales + stage * self.config.x_scale_stage_bytes + x_place
        pairs = [ptx.load_shared_vector(address, 4 * 8 * block, 2) for block in range(tokens // 8)]
        return [word.bitcast(Float32) for pair in pairs for word in pair]

    @staticmethod
    def of(registers) -> list[Any]:
        """The values of a tensor of registers."""
        return [registers[i] for i in range(cute.size(registers))]

    @staticmethod
    def put(registers, values) -> None:
        """Puts values into a tensor of registers."""
        for i, value in enumerate(values):
            registers[i] = value
