"""Units of a tile of few rows whose digits its CTA makes itself; warpgroups may take them in turn.

Digits lie unit by unit, so a unit's are found by its number, where :mod:`.digits_ahead` finds them by the stage. All x
that a CTA needs is made before the first item, if there is room. If not, one half of the room has a chunk of K while
the other is filled with the next: the ring has the weights of several units, which warpgroups in turn catch up with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.device import wgmma
from cute_kernels.linear.wgmma.digits_ahead import AheadUnits
from cute_kernels.linear.wgmma.reading import Lane, ReadingWarps
from cute_kernels.linear.wgmma.resident_config import ResidentConfig
from cute_kernels.linear.wgmma.resident_rows import ROW_BYTES


@dataclass(frozen=True)
class ResidentLane(Lane):
    """A thread's places in a stage, and what it makes digits of."""

    warp: Any
    lane: Any
    fits: Any  # whether all of x that the CTA needs is made at once, before the first item


class ResidentWarps(ReadingWarps):
    """The part of a kernel that these units are made and read by: see `.resident_kernel.ResidentKernel`."""

    if TYPE_CHECKING:

        def bring_units(self, place: ResidentLane, first, begin, end) -> None:
            """Asks for x of units [begin, end), as the ``first`` of those there is room for."""

        def make_units(self, place: ResidentLane, memory, begin, end, x_phase) -> None:
            """Digits of units [begin, end), once x has come."""

        def meet(self) -> None:
            """Waits for all multiplying warps."""

        def next_stage(self, stage, phase) -> Any:
            """See `WgmmaKernel.next_stage`."""


class ResidentUnits(AheadUnits):
    """What a multiplying warpgroup does with the units of an item whose digits its CTA makes."""

    kernel: ResidentWarps
    config: ResidentConfig

    @cute.jit
    def multiply(self, sums, memory, item, place, ring, teller, tokens: int):
        """As `WgmmaKernel.multiply_units`; the last of ``ring`` is the parity of what of x comes next.

        Where there is no room for all of x, one half of the room has a chunk of K, and the next is made in the other:
        the copying warp goes on meanwhile, and multiplying catches up. The chunk before the first is empty.
        """
        stage, phase, x_phase = ring
        half = self.config.boxes // 2
        size = cutlass.select_(place.fits != 0, item.end - item.begin, Int32(half))
        count = (item.end - item.begin + half - 1) // half
        count = cutlass.select_(place.fits != 0, Int32(1), count)
        for chunk in cutlass.range(cutlass.select_(place.fits != 0, Int32(0), Int32(-1)), count, 1, unroll=1):
            begin = item.begin + chunk * size
            following, end = begin + size, cutlass.min(begin + size, item.end)
            following_end, buffer = cutlass.min(following + half, item.end), ((chunk + 1) & 1) * half
            if following < item.end:
                self.kernel.bring_units(place, buffer, following, following_end)
            if chunk >= 0:
                start = cutlass.select_(place.fits != 0, item.begin, begin - (chunk & 1) * half)
                part = replace(item, begin=begin, end=end)
                stage, phase = self.multiply_chunk(sums, memory, part, start, place, stage, phase, teller, tokens)
            if following < item.end:
                there = self.at(memory, buffer, tokens)
                self.kernel.make_units(place, there, following, following_end, x_phase)
                x_phase = x_phase ^ 1
            if place.fits == 0:
                self.kernel.meet()
        return stage, phase, x_phase

    @cute.jit
    def multiply_chunk(self, sums, memory, item, start, place, stage, phase, teller, tokens: int):
        """As `multiply`, of units whose digits are there, those of ``start`` first."""
        if const_expr(self.config.ahead):
            stage, phase = self.multiply_ahead(sums, memory, item, start, place, stage, phase, teller, tokens)
        else:
            stage, phase = self.multiply_each(sums, memory, item, start, place, stage, phase, teller, tokens)
        return stage, phase

    @cute.jit
    def multiply_each(self, sums, memory, item, start, place, stage, phase, teller, tokens: int):
        """As `DigitUnits.multiply`."""
        x_place = self.x_scale_place(item)
        for unit in cutlass.range(item.begin + place.turn, item.end, self.config.turns, unroll=1):
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            self.multiply_unit(sums, self.at(memory, unit - start, tokens), stage, place, x_place, tokens)
            cute.arch.sync_warp()
            self.kernel.release(memory, stage, teller)
            stage, phase = self.kernel.next_stage(stage, phase)
        return stage, phase

    @cute.jit
    def multiply_ahead(self, sums, memory, item, start, place, stage, phase, teller, tokens: int):
        """As `AheadUnits.multiply`; there may be no unit for a turn."""
        x_place = self.x_scale_place(item)
        between = self.nothing_yet(tokens)
        turns = self.config.turns
        if item.begin + place.turn < item.end:
            cute.arch.mbarrier_wait(memory.full + stage, phase)
        self.take(memory, stage, place, between)
        for unit in cutlass.range(item.begin + place.turn, item.end, turns, unroll=1):
            here = self.at(memory, unit - start, tokens)
            started, scales, x_scales = self.multiply_but_last(sums, here, stage, place, x_place, between, tokens)
            last = stage
            stage, phase = self.kernel.next_stage(stage, phase)
            if unit + turns < item.end:
                cute.arch.mbarrier_wait(memory.full + stage, phase)
            # Behind the item's last unit these are bytes of some other, and not used.
            self.take(memory, stage, place, between)
            self.keep(between, wgmma.wait_for_dots(started, 0), scales, x_scales)
            cute.arch.sync_warp()
            self.kernel.release(memory, last, teller)
        self.add_kept(sums, between)
        return stage, phase

    def at(self, memory, index, tokens: int):
        """Memory as units read it, of the ``index``-th resident one."""
        index = cute.arch.make_warp_uniform(index)
        return replace(
            memory,
            x_address=memory.x_address + index * (2 * tokens * ROW_BYTES),
            x_scales=memory.x_scales + index * (4 * tokens),
        )
