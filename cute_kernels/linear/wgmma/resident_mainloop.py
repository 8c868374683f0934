"""K blocks of a tile of few rows whose limbs its CTA makes itself; warpgroups may take them in turn.

Limbs lie k block by k block, so a k block's are found by its number, where :mod:`.limbs_ahead` finds them by the stage.
All x that a CTA needs is made before the first work tile, if there is room. If not, one half of the room has a chunk of
K while
the other is filled with the next: the pipeline has the weights of several k blocks, which warpgroups in turn catch up
with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.device import wgmma
from cute_kernels.linear.wgmma.limbs_ahead import AheadMainloop
from cute_kernels.linear.wgmma.reading import ConsumerWarps, Lane
from cute_kernels.linear.wgmma.resident_config import ResidentConfig
from cute_kernels.linear.wgmma.resident_rows import ROW_BYTES


@dataclass(frozen=True)
class ResidentLane(Lane):
    """A thread's places in a stage, and what it makes limbs of."""

    warp: Any
    lane: Any
    fits: Any  # whether all of x that the CTA needs is made at once, before the first work tile


class ResidentWarps(ConsumerWarps):
    """The part of a kernel that these k blocks are made and read by: see `.resident_kernel.ResidentKernel`."""

    if TYPE_CHECKING:

        def bring_k_blocks(self, place: ResidentLane, first, begin, end) -> None:
            """Asks for x of k blocks [begin, end), as the ``first`` of those there is room for."""

        def make_k_blocks(self, place: ResidentLane, memory, begin, end, x_phase) -> None:
            """Limbs of k blocks [begin, end), once x has come."""

        def meet(self) -> None:
            """Waits for all consumer warps."""

        def next_stage(self, stage, phase) -> Any:
            """See `WgmmaKernel.next_stage`."""


class ResidentMainloop(AheadMainloop):
    """What a consumer warpgroup does with the k blocks of a work tile whose limbs its CTA makes."""

    kernel: ResidentWarps
    config: ResidentConfig

    @cute.jit
    def multiply(self, acc, memory, work_tile, place, state, teller, tile_m: int):
        """As `WgmmaKernel.multiply_k_blocks`; the last of ``state`` is the parity of what of x comes next.

        Where there is no room for all of x, one half of the room has a chunk of K, and the next is made in the other:
        the producer warp goes on meanwhile, and multiplying catches up. The chunk before the first is empty.
        """
        stage, phase, x_phase = state
        half = self.config.resident_k_blocks // 2
        size = cutlass.select_(place.fits != 0, work_tile.end - work_tile.begin, Int32(half))
        count = (work_tile.end - work_tile.begin + half - 1) // half
        count = cutlass.select_(place.fits != 0, Int32(1), count)
        for chunk in cutlass.range(cutlass.select_(place.fits != 0, Int32(0), Int32(-1)), count, 1, unroll=1):
            begin = work_tile.begin + chunk * size
            following, end = begin + size, cutlass.min(begin + size, work_tile.end)
            following_end, buffer = cutlass.min(following + half, work_tile.end), ((chunk + 1) & 1) * half
            if following < work_tile.end:
                self.kernel.bring_k_blocks(place, buffer, following, following_end)
            if chunk >= 0:
                start = cutlass.select_(place.fits != 0, work_tile.begin, begin - (chunk & 1) * half)
                part = replace(work_tile, begin=begin, end=end)
                stage, phase = self.multiply_chunk(acc, memory, part, start, place, stage, phase, teller, tile_m)
            if following < work_tile.end:
                there = self.at(memory, buffer, tile_m)
                self.kernel.make_k_blocks(place, there, following, following_end, x_phase)
                x_phase = x_phase ^ 1
            if place.fits == 0:
                self.kernel.meet()
        return stage, phase, x_phase

    @cute.jit
    def multiply_chunk(self, acc, memory, work_tile, start, place, stage, phase, teller, tile_m: int):
        """As `multiply`, of k blocks whose limbs are there, those of ``start`` first."""
        if const_expr(self.config.ahead):
            stage, phase = self.multiply_ahead(acc, memory, work_tile, start, place, stage, phase, teller, tile_m)
        else:
            stage, phase = self.multiply_each(acc, memory, work_tile, start, place, stage, phase, teller, tile_m)
        return stage, phase

    @cute.jit
    def multiply_each(self, acc, memory, work_tile, start, place, stage, phase, teller, tile_m: int):
        """As `LimbMainloop.multiply`."""
        x_place = self.x_scale_place(work_tile)
        for k_block in cutlass.range(work_tile.begin + place.k_rank, work_tile.end, self.config.k_warpgroups, unroll=1):
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            self.multiply_k_block(acc, self.at(memory, k_block - start, tile_m), stage, place, x_place, tile_m)
            cute.arch.sync_warp()
            self.kernel.release(memory, stage, teller)
            stage, phase = self.kernel.next_stage(stage, phase)
        return stage, phase

    @cute.jit
    def multiply_ahead(self, acc, memory, work_tile, start, place, stage, phase, teller, tile_m: int):
        """As `AheadMainloop.multiply`; there may be no k block for a turn."""
        x_place = self.x_scale_place(work_tile)
        between = self.nothing_yet(tile_m)
        k_warpgroups = self.config.k_warpgroups
        if work_tile.begin + place.k_rank < work_tile.end:
            cute.arch.mbarrier_wait(memory.full + stage, phase)
        self.take(memory, stage, place, between)
        for k_block in cutlass.range(work_tile.begin + place.k_rank, work_tile.end, k_warpgroups, unroll=1):
            here = self.at(memory, k_block - start, tile_m)
            started, scales, x_scales = self.multiply_but_last(acc, here, stage, place, x_place, between, tile_m)
            last = stage
            stage, phase = self.kernel.next_stage(stage, phase)
            if k_block + k_warpgroups < work_tile.end:
                cute.arch.mbarrier_wait(memory.full + stage, phase)
            # Behind the work tile's last k block these are bytes of some other, and not used.
            self.take(memory, stage, place, between)
            self.keep(between, wgmma.wait_for_dots(started, 0), scales, x_scales)
            cute.arch.sync_warp()
            self.kernel.release(memory, last, teller)
        self.add_kept(acc, between)
        return stage, phase

    def at(self, memory, index, tile_m: int):
        """Memory as k blocks read it, of the ``index``-th resident one."""
        index = cute.arch.make_warp_uniform(index)
        return replace(
            memory,
            x_address=memory.x_address + index * (2 * tile_m * ROW_BYTES),
            x_scales=memory.x_scales + index * (4 * tile_m),
        )
