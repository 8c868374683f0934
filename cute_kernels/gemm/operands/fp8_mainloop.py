"""MMAs of E4M3 with decoded W in registers, x in E4M3 in shared memory, and sums at two levels.

The tensor cores add products of E4M3 with some 14 bits. So the sums of a group of inputs, 128 at most, begin at zero.
They are added in fp32, times the weight's scale, and once a k block times the scale of x's row: an instruction for
each, which overlaps with another warpgroup's MMAs. Scales that hold for all of K are applied to the fp32 sums at the
end.

Promoting sums of 128 inputs to fp32 is known from DeepGEMM, decoding a codebook of four bits by a byte permutation from
FlashInfer's and CUTLASS's mixed products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, product
from operator import or_
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.gemm.operands.fp8_config import X_GROUP, Fp8Wgmma, groups_apart, x_group
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.gemm.wgmma.limbs import MMA_K, LimbReader, Shift, StageByStage
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS
from cute_kernels.gemm.wgmma.places import Places
from cute_kernels.gemm.wgmma.reading import Channel, StageReader, nothing
from layouts.weights.hopper import STEP_K

AHEAD_TILE_M = 64  # for which a thread has registers for the sums of two groups at a time
SLICE_M = 128  # rows of x whose sums a thread has registers for beside the accumulators of twice as many
PIECE_M = 32  # of them whose scales are loaded at a time
TURN = 9  # the first of the named barriers of the warpgroups' turns, behind those of `wgmma.kernel`


@dataclass(frozen=True)
class Group:
    """Products that have a scale in common: of a tile, MMAs ``first`` to ``end`` of its k block.

    scales: of the thread's two rows; none where they hold for all of K.
    tables: of each MMA, what its codes are looked up in; none where all codes have the same.
    is_last: of its tile's groups of the k block.
    """

    tile: int
    first: int
    end: int
    scales: Sequence[Any]
    tables: Sequence[Any]
    is_last: bool


class Turns:
    """Two consumer warpgroups take turns: while one's MMAs run the other adds its sums.

    Without turns both wait for the same stage, so their MMAs run side by side and end at the same time, and then the
    tensor cores wait for both. Each warpgroup has a named barrier, at which it waits for the other one's arrival.
    FlashAttention-3 and CUTLASS's ping-pong kernels order their warpgroups so.
    """

    def __init__(self, warpgroups: int):
        assert warpgroups == 2, warpgroups

    @cute.jit
    def begin(self, warp):
        """The first warpgroup has the first turn."""
        if warp >= WARPGROUP_WARPS:
            self.give(warp)

    def wait(self, warp, nothing=0):
        """nothing: a run-time 0 that is there when all is that the turn begins with; ptxas moves other computation
        behind the barrier, and so into the turn."""
        own = (TURN + warp // WARPGROUP_WARPS) | nothing
        cute.arch.barrier(barrier_id=own, number_of_threads=2 * WARPGROUP_THREADS)

    def give(self, warp):
        other = TURN + 1 - warp // WARPGROUP_WARPS
        cute.arch.barrier_arrive(barrier_id=other, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def end(self, warp):
        """Takes the turn that the second warpgroup gave last."""
        if warp < WARPGROUP_WARPS:
            self.wait(warp)


class Fp8Mainloop(StageByStage):
    """One mainloop policy: see `cute_kernels.gemm.wgmma.register_mainloop.RegisterMainloop`.

    x_scale_shift: as of `LimbReader`; None where tiles begin at any multiple of 8 rows.
    """

    def __init__(
        self,
        config: WgmmaConfig[Fp8Wgmma],
        stages: StageReader,
        channel: Channel,
        places: Places,
        x_scale_shift: Shift | None,
    ):
        self.config, self.stages, self.channel, self.places = config, stages, channel, places
        self.by_row = not x_group(config.format)
        self.reader = LimbReader(config, stages, x_scale_shift, in_pairs=x_scale_shift is None)
        decoder = config.format.e4m3_decoder()
        assert decoder is not None, config.format
        self.decoder = decoder(HopperMath(config.dtype))
        self.turns = Turns(config.warpgroups) if config.mainloop.takes_turns(config) else None

    def masks(self, shape, lane):
        return nothing(shape, lane)

    @cute.jit
    def multiply(self, acc, memory, work_tile, place, channel, state, releases, tile_m: int):
        """See `StageByStage`."""
        if const_expr(self.turns is not None):
            self.turns.begin(place.warp)
        here, last = StageByStage.multiply(self, acc, memory, work_tile, place, channel, state, releases, tile_m)
        if const_expr(self.turns is not None):
            self.turns.end(place.warp)
        return here, last

    def multiply_k_block(self, acc, memory, stage, place, x_place, tile_m: int):
        """Adds a k block's products."""
        words = self.reader.load_codes(memory, stage, place)
        x, groups = self.reader.descriptor(memory, stage), self.groups(memory, stage, place)
        if self.turns is not None:
            self.multiply_in_turn(acc, memory, stage, place, x_place, words, x, groups, tile_m)
            return
        x_scales = [] if self.by_row else self.reader.load_x_scales(memory, stage, x_place, tile_m)
        self.multiply_groups(acc, words, x, groups, x_scales, tile_m)

    def multiply_groups(self, acc, words, x, groups, x_scales, tile_m: int):
        """Multiplies group by group: while one's MMAs run the next one is decoded."""
        ahead = tile_m <= AHEAD_TILE_M
        ready = wgmma.fence(self.operands(words, groups[0]))
        started, before = self.start(ready, x, groups[0], tile_m), []
        for group, after in pairwise([*groups, None]):
            assert group is not None
            following = self.operands(words, after) if after else []
            if after and ahead:
                following = self.start(wgmma.fence(following), x, after, tile_m)
            sums = wgmma.wait_for(started, 1 if after and ahead else 0)
            before = self.add(acc, group, sums, x_scales, before)
            if after:
                started = following if ahead else self.start(wgmma.fence(following), x, after, tile_m)

    def multiply_in_turn(self, acc, memory, stage, place, x_place, words, x, groups, tile_m: int):
        """Multiplies slices of rows of x, each in a turn of the warpgroup's own."""
        for group in groups:
            operands = self.operands(words, group)
            for first in range(0, tile_m, SLICE_M):
                rows = min(SLICE_M, tile_m - first)
                ready = wgmma.fence(operands)
                self.turns.wait(place.warp, 0 if first else Int32(reduce(or_, operands) & place.masks))
                started = self.start(ready, wgmma.advanced(x, first * wgmma.ROW_BYTES), group, rows)
                wgmma.wait(1)
                self.turns.give(place.warp)  # the last MMA is still running: the other's follow it without a gap
                sums = wgmma.wait_for(started, 0)
                self.add_slice(acc, memory, stage, x_place, group, sums, first)

    def groups(self, memory, stage, place) -> list[Group]:
        """The parts of a k block that have scales of their own."""
        count, steps, found = groups_apart(self.config.format), X_GROUP // MMA_K, []
        for tile in range(self.config.n_tiles):
            if self.decoder.folds:
                tables, scales = self.decoder.fold(self.reader.load_scale_words(memory, stage, place, tile))
                found.append(Group(tile, 0, steps, scales, tables, is_last=True))
                continue
            scales = self.reader.load_scales(memory, stage, place, tile) if self.config.group_size else []
            scales = [scale * self.decoder.unit if self.decoder.unit != 1 else scale for scale in scales]
            for i in range(count):
                first, end = steps // count * i, steps // count * (i + 1)
                found.append(Group(tile, first, end, scales[2 * i : 2 * i + 2], [], is_last=i == count - 1))
        return found

    def operands(self, words, group: Group) -> list[Any]:
        """The A operands of a group: four registers for each of its MMAs."""
        decoder, found = self.stages.decoder, []
        for step in range(group.first * MMA_K // STEP_K, group.end * MMA_K // STEP_K):
            chunk, first = words[group.tile][step // decoder.steps], step % decoder.steps * decoder.words_per_step
            own = [chunk[first + i] for i in range(decoder.words_per_step)]
            found += self.decoder.fragment(own, *([group.tables[step * STEP_K // MMA_K]] if group.tables else []))
        return found

    def start(self, ready, x, group: Group, rows: int) -> list[Any]:
        """Issues the MMAs of a group, the last one as a commit group of its own where warpgroups take turns. Returns a
        thread's sums of it. ready: its operands, behind a fence."""
        sums: list[Any] = []
        for number, step in enumerate(range(group.first, group.end)):
            if self.turns is not None and step == group.end - 1:
                wgmma.commit()
            b = wgmma.advanced(x, step * wgmma.STEP_BYTES)
            sums = wgmma.multiply_e4m3(sums, rows // 2, ready[4 * number : 4 * number + 4], b)
        wgmma.commit()
        return sums

    def add(self, acc, group: Group, sums, x_scales, before: Sequence[Any]) -> list[Any]:
        """Scales a group's sums and adds ``before``, the total of the k block's earlier groups. Returns the new total.

        After the k block's last group the total, times the scales of x, goes into the accumulators; returns [] then.
        Where a row of x has one scale each group's sums go there at once."""
        if self.by_row:
            self.add_rows(acc, group, sums, 0)
            return []
        scales, total = group.scales, list(sums)
        if before:
            total = [ptx.fma(value, scales[i // 2 % 2], before[i]) for i, value in enumerate(sums)]
        elif scales:
            total = [value * scales[i // 2 % 2] for i, value in enumerate(sums)]
        if not group.is_last:
            return total
        first = group.tile * (self.config.tile_m // 2)
        for i, value in enumerate(total):
            acc[first + i] = ptx.fma(value, x_scales[i // 4 * 2 + i % 2], acc[first + i])
        return []

    def add_rows(self, acc, group: Group, sums, first_row: int) -> None:
        """Adds sums whose scales of x meet the accumulators at the end."""
        first = group.tile * (self.config.tile_m // 2) + first_row // 2
        for i, value in enumerate(sums):
            scaled = (
                ptx.fma(value, group.scales[i // 2 % 2], acc[first + i]) if group.scales else acc[first + i] + value
            )
            acc[first + i] = scaled

    def add_slice(self, acc, memory, stage, x_place, group: Group, sums, first_row: int) -> None:
        """Adds the sums of a slice of rows, scaled. While those of some rows are added the scales of the next ones are
        loaded: there are no registers for all."""
        if self.by_row:
            self.add_rows(acc, group, sums, first_row)
            return
        rows = 2 * len(sums)
        starts = range(0, rows, PIECE_M)

        def load(start):
            place = x_place + 4 * (first_row + start)
            return self.reader.load_x_scales(memory, stage, place, min(PIECE_M, rows - start))

        following = load(0)
        for start in starts:
            x_scales, following = following, load(start + PIECE_M) if start + PIECE_M < rows else []
            for i in range(start // 2, start // 2 + len(x_scales) * 2):
                value = sums[i] * group.scales[i // 2 % 2] if group.scales else sums[i]
                place = group.tile * (self.config.tile_m // 2) + first_row // 2 + i
                acc[place] = ptx.fma(value, x_scales[(i - start // 2) // 4 * 2 + i % 2], acc[place])

    def finish(self, acc, shape, memory, work_tile, place, channel, last, releases) -> None:
        """Applies scales that hold for all of K."""
        if self.by_row:
            self.scale_rows(acc, shape, work_tile, place)
        if not self.config.group_size:
            sums = [acc[i] for i in range(self.config.thread_acc)]
            unit = self.decoder.unit
            self.channel.scale(acc, [value * unit for value in sums] if unit != 1 else sums, channel)

    def scale_rows(self, acc, shape, work_tile, place) -> None:
        """Multiplies by the scales of rows of x."""
        first, _ = self.places.rows_of(shape, work_tile)
        address = shape.x_scales + Int64(first + place.lane % 4 * 2) * 4
        tile_acc = self.config.tile_m // 2
        for start in range(0, self.config.tile_m, PIECE_M):
            end = min(start + PIECE_M, self.config.tile_m)
            places = [4 * (row + i) for row in range(start, end, 8) for i in range(2)]
            scales = [ptx.load_global_words(address, place, 1, constant=False)[0].bitcast(Float32) for place in places]
            for tile, i in product(range(self.config.n_tiles), range((end - start) // 2)):
                at = tile * tile_acc + start // 2 + i
                acc[at] = acc[at] * scales[i // 4 * 2 + i % 2]
