"""Units of a tile of few rows by MMAs of bytes: x in two digits of 8 bits, sums in int32, exact.

A 4-bit code less 8, times 16, is a signed byte: a nibble at the upper end of its byte, with its first bit turned. Three
instructions make the bytes of 8 codes where bf16 takes 11, and none are left for scales, which meet the sums of a
group. x comes in 16-bit fixed point, with a power of two for each row and 128 inputs, as two signed digits to the base
256 (`cute_kernels.moe.digits`). All tokens' high digits and then all low ones are the columns of one operand, so a code
is decoded once and multiplied with both: twice the columns at twice the rate of bf16. 256 times the high digits' sum
and the low digits' are the exact sum of the group's products.

The k order of an operand is free if both have the same. A thread's nibbles of a k16 step, in the blob of
`layouts.weights.hopper`, are those of its row g in the lower halves of their bytes, of row g + 8 in the upper ones, for
inputs 2t, 2t + 8, 2t + 1, 2t + 9: so x takes the first and the second eight of 16 inputs in turn.

That integer products of weights in groups are scaled on the way from one accumulator to another is known from DeepGEMM
and QServe's W4A8; here activations keep 16 bits, which costs no more MMAs than bf16 would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma
from cute_kernels.device.ring import advance
from cute_kernels.linear.wgmma.config import WgmmaConfig
from layouts.weights.hopper import STEP_K, TILE_N

if TYPE_CHECKING:
    from cute_kernels.linear.wgmma.kernel import WgmmaKernel

MMA_K = 2 * STEP_K
DIGIT_BASE = 256
CODE_UNIT = 16  # by which bytes are larger than codes less 8; the scales of x make up for it
SIGNS, UPPER_HALVES = 0x80808080, 0xF0F0F0F0
TOGETHER_TOKENS = 40  # for which a thread has registers for two tiles' products at a time,
STAGE_WORDS = 8  # of a thread's codes of a tile
AHEAD_TOKENS = 32  # and to take the next unit's codes besides


class DigitUnits:
    """What a multiplying warpgroup does with the units of an item, for a configuration that says ``digits``."""

    def __init__(self, kernel: WgmmaKernel):
        self.kernel = kernel
        self.config: WgmmaConfig = kernel.config

    @cute.jit
    def multiply(self, sums, memory, item, place, ring, teller, tokens: int):
        """As `WgmmaKernel.multiply_units`; waits for the last MMAs and gives back every stage itself."""
        if const_expr(self.config.group_steps == 4 and tokens <= AHEAD_TOKENS):
            stage, phase, last = self.multiply_ahead(sums, memory, item, place, ring, teller, tokens)
        else:
            stage, phase, last = self.multiply_each(sums, memory, item, place, ring, teller, tokens)
        return stage, phase, last

    @cute.jit
    def multiply_each(self, sums, memory, item, place, ring, teller, tokens: int):
        """A unit is done before the next one begins."""
        stage, phase, last = ring
        x_place = self.x_scale_place(item)
        for _ in cutlass.range(item.begin, item.end, 1, unroll=1):
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            self.multiply_unit(sums, memory, stage, place, x_place, tokens)
            cute.arch.sync_warp()
            self.kernel.release(memory, stage, teller)
            last = stage
            stage, phase = advance(stage, phase, self.config.num_stages)
        return stage, phase, last

    def multiply_unit(self, sums, memory, stage, place, x_place, tokens: int):
        """Adds a unit's products; sums of a tile are scaled while the next one's products are under way."""
        tiles, together = self.config.m_tiles, self.config.group_steps > 1 and tokens <= TOGETHER_TOKENS
        words, scales, x_scales = self.load(memory, stage, place, x_place, tokens)
        x = self.descriptor(memory, stage)
        started = self.start(self.operands(words[0], place.masks), x, tokens)
        for i in range(tiles):
            following = self.operands(words[i + 1], place.masks) if i + 1 < tiles else []
            ahead = together and i + 1 < tiles
            if ahead:
                following = self.start(following, x, tokens)
            dots = wgmma.wait_for_dots(started, 1 if ahead else 0)
            self.add(sums, i, self.join(dots), scales[i], x_scales)
            if i + 1 < tiles:
                started = following if ahead else self.start(following, x, tokens)

    @cute.jit
    def multiply_ahead(self, sums, memory, item, place, ring, teller, tokens: int):
        """As :meth:`multiply_each`; the next unit's first codes are decoded while the last tile's products are under
        way, and that tile's sums scaled while the next unit's first ones are."""
        stage, phase, last = ring
        config = self.config
        tiles = config.m_tiles
        final = tiles - 1
        x_place = self.x_scale_place(item)
        words = cute.make_rmem_tensor(tiles * STAGE_WORDS, Uint32)
        operands = cute.make_rmem_tensor(2 * STAGE_WORDS, Uint32)
        products = cute.make_rmem_tensor(tokens // 2, Int32)  # of the last tile of the unit before, and their scales
        scales = cute.make_rmem_tensor(2, Float32)
        x_scales = cute.make_rmem_tensor(tokens // 4, Float32)
        products.fill(0)
        scales.fill(0.0)
        x_scales.fill(0.0)
        cute.arch.mbarrier_wait(memory.full + stage, phase)
        self.take(memory, stage, place, words, operands)
        for unit in cutlass.range(item.begin, item.end, 1, unroll=1):
            x = self.descriptor(memory, stage)
            started = self.start([operands[i] for i in range(2 * STAGE_WORDS)], x, tokens)
            before = [products[i] for i in range(tokens // 2)]
            self.add(sums, final, before, [scales[i] for i in range(2)], [x_scales[i] for i in range(tokens // 4)])
            own_scales = [self.load_scales(memory, stage, place, i) for i in range(tiles)]
            own_x_scales = self.load_x_scales(memory, stage, x_place, tokens)
            for i in cutlass.range_constexpr(1, tiles):
                chunk = [words[i * STAGE_WORDS + j] for j in range(STAGE_WORDS)]
                following = self.start(self.operands([chunk[:4], chunk[4:]], place.masks), x, tokens)
                done = self.join(wgmma.wait_for_dots(started, 1))
                self.add(sums, i - 1, done, own_scales[i - 1], own_x_scales)
                started = following
            last = stage
            stage, phase = advance(stage, phase, config.num_stages)
            if unit + 1 < item.end:
                cute.arch.mbarrier_wait(memory.full + stage, phase)
            # Behind the item's last unit these are bytes of some unit before, and not used.
            self.take(memory, stage, place, words, operands)
            done = self.join(wgmma.wait_for_dots(started, 0))
            self.kernel.release(memory, last, teller)
            for i in cutlass.range_constexpr(tokens // 2):
                products[i] = done[i]
            for i in cutlass.range_constexpr(2):
                scales[i] = own_scales[final][i]
            for i in cutlass.range_constexpr(tokens // 4):
                x_scales[i] = own_x_scales[i]
        done = [products[i] for i in range(tokens // 2)]
        self.add(sums, final, done, [scales[i] for i in range(2)], [x_scales[i] for i in range(tokens // 4)])
        return stage, phase, last

    def take(self, memory, stage, place, words, operands) -> None:
        """Loads a stage's codes, and decodes those of the first tile."""
        config = self.config
        found = self.kernel.load_codes(memory.codes + stage * config.code_stage_bytes + place.code_offset)
        for i, word in enumerate(word for tile in found for chunk in tile for word in chunk):
            words[i] = word
        for i, register in enumerate(self.operands(found[0], place.masks)):
            operands[i] = register

    def load(self, memory, stage, place, x_place, tokens: int) -> tuple[Any, Any, Any]:
        """A stage's codes and scales of the thread's rows, [tile], and the scales of its tokens."""
        config = self.config
        words = self.kernel.load_codes(memory.codes + stage * config.code_stage_bytes + place.code_offset)
        scales = [self.load_scales(memory, stage, place, i) for i in range(config.m_tiles)]
        return words, scales, self.load_x_scales(memory, stage, x_place, tokens)

    def descriptor(self, memory, stage):
        """Of a stage's digits."""
        return wgmma.descriptor(memory.x_address + cute.arch.make_warp_uniform(stage) * self.config.x_stage_bytes)

    def load_scales(self, memory, stage, place, tile: int) -> list[Any]:
        """Scales of the thread's two rows of a tile, fp32."""
        row = (place.row // TILE_N + tile) * TILE_N + place.row % TILE_N
        address = memory.scales + stage * self.config.scale_stage_bytes + row * 2
        return [self.kernel.to_float(ptx.load_shared_part(address, 16 * half, 2)) for half in range(2)]

    def x_scale_place(self, item):
        """Bytes from a stage's scales of x to that of the thread's first token."""
        return (self.kernel.x_scale_shift(item) + cute.arch.lane_idx() % 4 * 2) * 4

    def load_x_scales(self, memory, stage, x_place, tokens: int) -> list[Any]:
        """Scales of x of the thread's tokens, two of every eight."""
        address = memory.x_scales + stage * self.config.x_scale_stage_bytes + x_place
        return [
            ptx.load_shared(address, 4 * (8 * block + i)).bitcast(Float32) for block in range(tokens // 8) for i in range(2)
        ]

    def operands(self, words, masks) -> list[Any]:
        """The A operands of a tile's unit: two registers for each k16 step."""
        steps = self.kernel.decoder.steps
        return [
            register
            for step in range(self.config.unit_steps)
            for register in self.fragment(words[step // steps][step % steps], masks)
        ]

    def start(self, operands, x, tokens: int) -> list[Any]:
        """Starts the products of a tile's unit: [digit][tokens / 2] sums of high and of low digits."""
        ready = wgmma.fence(operands)
        dots: list[Any] = []
        for step in range(self.config.unit_k // MMA_K):
            b = wgmma.advanced(x, step * wgmma.STEP_BYTES)
            dots = wgmma.multiply_bytes(dots, tokens, ready[4 * step : 4 * step + 4], b)
        wgmma.commit()
        return dots

    def fragment(self, word, masks) -> list[Any]:
        """Bytes of the codes of a k16 step, less 8 and times 16, of the thread's two rows."""
        return [((word << 4) ^ masks) & Uint32(UPPER_HALVES), (word ^ masks) & Uint32(UPPER_HALVES)]

    def masks(self, nothing) -> Any:
        """A constant for `fragment`, kept in a register: an instruction has room for one."""
        return nothing + Uint32(SIGNS)

    def join(self, dots) -> list[Any]:
        """The exact products of a tile's group, of both digits' sums."""
        count = len(dots) // 2
        return [dots[i] * DIGIT_BASE + dots[count + i] for i in range(count)]

    def add(self, sums, tile: int, products, scales, x_scales) -> None:
        """Adds the products of a tile's group, scaled, to its sums."""
        first = tile * (self.config.tokens // 2)
        for i, exact in enumerate(products):
            value = numbers.to_float(exact) * x_scales[i // 4 * 2 + i % 2]
            sums[first + i] = ptx.fma(value, scales[i // 2 % 2], sums[first + i])
