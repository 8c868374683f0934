"""Digits of x made by the CTA that multiplies them: no launch before the product, nothing to wait for.

x comes into the ring as it is, two boxes of 64 inputs of each 8 rows, and warps of their own put its digits into the
same bytes: high digits where the first 64 inputs were, low ones where the last 64 were. Digits and scales are those of
:mod:`.digit_rows`, bit for bit.

A half of a warp's lanes has a row, a lane 8 of its inputs: four and the four that stand eight further on, which are
neighbours among the digits. The two rows of a warp differ in the first and the third bit of their numbers, so that
what the lanes of a half of a warp read, and what they write, lies in different banks of swizzled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.linear.wgmma.config import BOX_K, MMA_TOKENS, WgmmaConfig
from cute_kernels.linear.wgmma.digit_rows import (
    CODE_UNIT_BITS,
    FRACTION_BITS,
    INFINITY,
    LEAST_EXPONENT,
    ROUND_UP,
    TOP_EXPONENT,
)

if TYPE_CHECKING:
    from cute_kernels.linear.wgmma.kernel import WgmmaKernel

ROW_BYTES = 2 * BOX_K
PART_BYTES = MMA_TOKENS * ROW_BYTES  # of a box of 8 rows
PIECE_BYTES = 16
OTHER_ROW = 5  # in which bits the two rows of a warp differ
# 2**23 + 2**15 + 2**7: added to a float it leaves the nearest integer in the lower 16 bits, and of its two digits each
# 128 more than it is.
MAGIC = 0x4B008080
MAGNITUDES, SIGNS = 0x7FFF7FFF, 0x80808080


@dataclass(frozen=True)
class Place:
    """Where a lane's inputs and digits are in a box of 8 rows; run-time integers."""

    row: Any  # of the 8
    box: Any  # of its inputs
    source: Any  # of the first four inputs; the others stand in the piece beside
    target: Any  # of its eight digits
    leads: Any  # whether it stores the scale of its row


class OwnDigits:
    """What the warps that make digits do, for a configuration that says ``own_digits``."""

    def __init__(self, kernel: WgmmaKernel):
        self.kernel = kernel
        self.config: WgmmaConfig = kernel.config

    @cute.jit
    def run(self, memory, shape, items, warp, lane):
        """Makes digits of every unit, as soon as its x has come."""
        stage, phase = Int32(0), Int32(0)
        place = self.place_of(warp, lane)
        for index in cutlass.range(items.first, items.count, items.stride, unroll=1):
            item = items.item(index)
            present = self.kernel.parts_of(shape, item)
            for _ in cutlass.range(item.begin, item.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.raw + stage, phase)
                self.make_parts(memory, stage, place, present, 1)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(memory.full + stage)
                stage, phase = advance(stage, phase, self.config.num_stages)

    def place_of(self, warp, lane) -> Place:
        row = warp ^ cutlass.select_((lane & 8) != 0, Int32(OTHER_ROW), Int32(0))
        step, half, box = lane >> 1 & 3, lane & 1, lane >> 4  # 16 inputs of a box, four and four of them
        return Place(
            row=row,
            box=box,
            source=row * ROW_BYTES + ((2 * step) ^ row) * PIECE_BYTES + half * (PIECE_BYTES // 2),
            target=row * ROW_BYTES + ((4 * box + step) ^ row) * PIECE_BYTES + half * (PIECE_BYTES // 2),
            leads=(lane & ~8) == 0,
        )

    @cute.jit
    def make_parts(self, memory, stage, place: Place, present, count: int):
        """Makes digits of a stage's ``present`` parts of 8 rows, which are at least ``count``."""
        if const_expr(count == self.config.row_parts):
            self.make(memory, stage, place, count)
        else:
            if present == count:
                self.make(memory, stage, place, count)
            else:
                self.make_parts(memory, stage, place, present, count + 1)

    def make(self, memory, stage, place: Place, count: int) -> None:
        """Makes digits of ``count`` parts: the boxes of a digit, or of 64 inputs, lie one behind the other."""
        x = memory.x_address + stage * self.config.x_stage_bytes
        source = x + (place.box * (count * PART_BYTES) + place.source)
        beside = source ^ PIECE_BYTES  # boxes start on multiples of what swizzling permutes
        words = [
            ptx.load_shared_vector(source, part * PART_BYTES, 2) + ptx.load_shared_vector(beside, part * PART_BYTES, 2)
            for part in range(count)
        ]
        made = [self.split(part) for part in words]
        scales = memory.x_scales + stage * self.config.x_scale_stage_bytes + place.row * 4
        for part, (_, high, low) in enumerate(made):
            ptx.store_shared(x + place.target, part * PART_BYTES, high)
            ptx.store_shared(x + place.target, (count + part) * PART_BYTES, low)
        self.store_scales(scales, place.leads, [scale for scale, _, _ in made])

    @cute.jit
    def store_scales(self, address, leads, scales):
        """Stores the scales of a lane's row in each part, if it is the lane to do so."""
        if leads:
            for part, scale in enumerate(scales):
                ptx.store_shared(address, 4 * MMA_TOKENS * part, [scale])

    def split(self, words) -> tuple[Any, list[Any], list[Any]]:
        """(bits of a row's scale, high digits, low digits) of a lane's 8 inputs: four, and four 8 further on."""
        factor, scale = self.scales_of(self.largest(words))
        floats = [half for word in words for half in self.to_floats(word)]
        fixed = [ptx.fma(value, factor, Uint32(MAGIC).bitcast(Float32)).bitcast(Uint32) for value in floats]
        # First and second four in turn.
        pairs = [ptx.prmt(fixed[i], fixed[i + 4], Uint32(0x5410)) for i in range(4)]
        high, low = (
            [ptx.prmt(pairs[i], pairs[i + 1], Uint32(selector)) ^ Uint32(SIGNS) for i in (0, 2)]
            for selector in (0x7531, 0x6420)
        )
        return scale, high, low

    def largest(self, words) -> Any:
        """Bits of the largest magnitude of a row as fp32, NaN above all; the row's lanes differ in all bits but the
        fourth."""
        found = [word & Uint32(MAGNITUDES) for word in words]
        found = [ptx.max_u16x2(found[i], found[i + 1]) for i in (0, 2)]
        most = ptx.max_u16x2(*found)
        for offset in (1, 2, 4, 16):
            most = ptx.max_u16x2(most, cute.arch.shuffle_sync_bfly(most, offset=offset))
        most = ptx.max_u16x2(most, most >> 16)
        low, _ = self.to_floats(most)
        return Int32(low.bitcast(Uint32))

    def scales_of(self, largest) -> tuple[Any, Any]:
        """As `DigitRowsKernel.scales_of`."""
        exponent = cutlass.max((largest + ROUND_UP) >> FRACTION_BITS, LEAST_EXPONENT)
        factor = Uint32((254 + TOP_EXPONENT - exponent) << FRACTION_BITS).bitcast(Float32)
        scale = (exponent - TOP_EXPONENT - CODE_UNIT_BITS) << FRACTION_BITS
        return factor, cutlass.select_(largest < INFINITY, Uint32(scale), Uint32(0x7FFFFFFF))

    def to_floats(self, word) -> list[Any]:
        """Both elements of a packed pair."""
        if self.config.dtype == "bf16":
            return [ptx.bf16x2_low_to_float(word), ptx.bf16x2_high_to_float(word)]
        return [ptx.half2_low_to_float(word), ptx.half2_high_to_float(word)]
