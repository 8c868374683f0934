"""The FP8 mainloop: E4M3 MMAs with decoded W in registers, x in shared memory, and sums at two levels.

The tensor cores add products of E4M3 with some 14 bits. So the MMAs add up one group at a time, of at most 128 inputs,
from zero. CUDA cores multiply a group's sums by the weight's scale and add them to an fp32 total of the k block. Then
they multiply the total by the scale of x's row and add it to the accumulators. Both steps take one instruction for each
sum, and run during another warpgroup's MMAs. Scales for all of K are applied to the fp32 sums at the end.

DeepGEMM promotes sums of 128 inputs to fp32, too. FlashInfer's and CUTLASS's mixed products also decode a 4-bit
codebook by a byte permutation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise, product
from operator import or_
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.gemm.operands.fp8_config import X_GROUP, Fp8Wgmma, groups_apart, x_group
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.gemm.wgmma.limbs import MMA_K, LimbReader, StageByStage
from cute_kernels.gemm.wgmma.mainloops import WARPGROUP_THREADS
from cute_kernels.gemm.wgmma.reading import Channel, MainloopParts, nothing
from layouts.weights.hopper import STEP_K

SLICE_M = 128  # rows of x whose sums fit a thread's registers besides the accumulators of twice as many
PIECE_M = 32  # rows of x whose scales are loaded at a time
BARRIER = 9  # the first of two named barriers, one a warpgroup, after those of `wgmma.kernel`


@dataclass(frozen=True)
class Group:
    """The MMAs ``first`` to ``end`` - 1 of a tile's k block, whose products share a scale.

    Attributes:
        scales: the scales of the thread's two rows, or empty if rows have one scale for all of K.
        tables: for each MMA, the table by which its codes are decoded; empty if one table decodes all codes.
        is_last: whether this is the last group of the tile's k block.
    """

    tile: int
    first: int
    end: int
    scales: Sequence[Any]
    tables: Sequence[Any]
    is_last: bool


@dataclass(frozen=True)
class KBlock:
    """A thread's operands for one stage: words of codes [tile][chunk][word], the descriptor of x, and a function that
    loads the scales of x from a given row on.
    """

    words: Sequence[Sequence[Sequence[Any]]]
    x: Uint32
    load_x_scales: Callable[[int], Sequence[Any]]


class PingPong:
    """Lets two consumer warpgroups alternate: while the MMAs of one warpgroup run, the other warpgroup adds its sums.

    Without an order, both would wait for the same stage. Their MMAs would end at the same time, and the tensor cores
    would idle while both add. Each warpgroup has a named barrier, at which it waits for the other warpgroup's arrival.
    FlashAttention-3 and CUTLASS's ping-pong kernels order their warpgroups so.
    """

    def __init__(self, config: WgmmaConfig[Fp8Wgmma]):
        self.active = config.mainloop.is_ping_pong(config)

    @cute.jit
    def begin(self, warp):
        """Lets the first warpgroup multiply first: the second one arrives at the first one's barrier."""
        if const_expr(self.active):
            if warp >= WARPGROUP_WARPS:
                self.arrive(warp)

    def wait(self, warp, nothing: Int32 | int = 0):
        """Waits for the other warpgroup's arrival.

        Args:
            nothing: a run-time 0 that is computed from all operands of the next MMAs, so that operands are decoded
                before the barrier. Otherwise ptxas would move the decoding behind the barrier, and the tensor cores
                would wait.
        """
        own = (BARRIER + warp // WARPGROUP_WARPS) | nothing
        cute.arch.barrier(barrier_id=own, number_of_threads=2 * WARPGROUP_THREADS)

    def arrive(self, warp):
        other = BARRIER + 1 - warp // WARPGROUP_WARPS
        cute.arch.barrier_arrive(barrier_id=other, number_of_threads=2 * WARPGROUP_THREADS)

    @cute.jit
    def end(self, warp):
        """Makes the first warpgroup wait for the second warpgroup's last arrival, so that the barrier is free for the
        next work tile."""
        if const_expr(self.active):
            if warp < WARPGROUP_WARPS:
                self.wait(warp)


class Fp8Mainloop(StageByStage):
    """The mainloop policy of FP8 products; `cute_kernels.gemm.wgmma.register_mainloop.RegisterMainloop` describes the
    methods. If `MainloopParts.x_scale_shift` is None, tiles begin at multiples of 8 rows of x.
    """

    def __init__(self, config: WgmmaConfig[Fp8Wgmma], parts: MainloopParts):
        self.config, self.stages, self.places = config, parts.stages, parts.places
        self.channel = Channel(config, parts.stages, parts.places)
        self.by_row, shift = not x_group(config.format), parts.x_scale_shift
        self.reader = LimbReader(config, parts.stages, shift, in_pairs=shift is None)
        decoder = config.format.e4m3_decoder()
        assert decoder is not None, config.format
        self.decoder = decoder(HopperMath(config.dtype))
        self.ping_pong = PingPong(config)

    def masks(self, shape, lane):
        return nothing(shape, lane)

    @cute.jit
    def multiply(self, acc, memory, work_tile, place, channel, state, releases, tile_m: int):
        """Multiplies a work tile stage by stage, as `StageByStage.multiply` does. Calls `PingPong.begin` before and
        `PingPong.end` after, if warpgroups alternate."""
        self.ping_pong.begin(place.warp)
        here, last = StageByStage.multiply(self, acc, memory, work_tile, place, channel, state, releases, tile_m)
        self.ping_pong.end(place.warp)
        return here, last

    def multiply_k_block(self, acc, memory, stage, place, x_place, tile_m: int):
        """Adds a k block's products to ``acc``."""
        words, x = self.reader.load_codes(memory, stage, place), self.reader.descriptor(memory, stage)
        k_block = KBlock(words, x, partial(self.load_x_scales, memory, stage, x_place, tile_m))
        groups = self.groups(memory, stage, place)
        if self.ping_pong.active:
            self.multiply_slices(acc, k_block, groups, place, tile_m)
        else:
            self.multiply_groups(acc, k_block, groups, tile_m)

    def multiply_groups(self, acc, k_block: KBlock, groups: Sequence[Group], tile_m: int):
        """Multiplies a k block group by group. While one group's MMAs run, the next group is decoded and its MMAs are
        issued."""
        before: Sequence[Any] = []
        following = self.start(self.operands(k_block.words, groups[0]), k_block.x, groups[0], tile_m)
        for group, after in pairwise([*groups, None]):
            assert group is not None
            started = following
            if after:
                following = self.start(self.operands(k_block.words, after), k_block.x, after, tile_m)
            before = self.add(acc, k_block, group, wgmma.wait_for(started, 1 if after else 0), before)

    def multiply_slices(self, acc, k_block: KBlock, groups: Sequence[Group], place, tile_m: int):
        """Multiplies a k block by `SLICE_M` rows of x at a time, alternating with the other warpgroup."""
        for group in groups:
            operands = self.operands(k_block.words, group)
            for first in range(0, tile_m, SLICE_M):
                self.ping_pong.wait(place.warp, Int32(reduce(or_, operands) & place.masks))
                x = wgmma.advanced(k_block.x, first * wgmma.ROW_BYTES)
                started = self.start(operands, x, group, min(SLICE_M, tile_m - first))
                wgmma.wait(1)
                self.ping_pong.arrive(place.warp)  # the last MMA is still running: the other's follow it without a gap
                self.add(acc, k_block, group, wgmma.wait_for(started, 0), [], first)

    def load_x_scales(self, memory, stage, x_place, tile_m: int, first: int) -> list[Any]:
        """Loads the scales of a thread's rows among up to `PIECE_M` rows of x: two of every eight. The scales of all
        rows would not fit in registers."""
        return self.reader.load_x_scales(memory, stage, x_place + 4 * first, min(PIECE_M, tile_m - first))

    def groups(self, memory, stage, place) -> list[Group]:
        """Loads a k block's scales, and returns its groups of MMAs (`Group`), tile after tile."""
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
        """Decodes the A operands of a group: four registers for each of its MMAs."""
        decoder, found = self.stages.decoder, []
        for step in range(group.first * MMA_K // STEP_K, group.end * MMA_K // STEP_K):
            chunk, first = words[group.tile][step // decoder.steps], step % decoder.steps * decoder.words_per_step
            own = [chunk[first + i] for i in range(decoder.words_per_step)]
            found += self.decoder.fragment(own, *([group.tables[step * STEP_K // MMA_K]] if group.tables else []))
        return found

    def start(self, operands, x, group: Group, rows: int) -> list[Any]:
        """Issues the MMAs of a group and returns the thread's sums. If warpgroups alternate, the last MMA has its own
        commit group."""
        ready, sums = wgmma.fence(operands), []
        for number, step in enumerate(range(group.first, group.end)):
            if self.ping_pong.active and step == group.end - 1:
                wgmma.commit()
            b = wgmma.advanced(x, step * wgmma.STEP_BYTES)
            sums = wgmma.multiply_e4m3(sums, rows // 2, ready[4 * number : 4 * number + 4], b)
        wgmma.commit()
        return sums

    def add(self, acc, k_block: KBlock, group: Group, sums, before: Sequence[Any], first_row: int = 0) -> list[Any]:
        """Multiplies a group's sums by its weight scales and adds them to ``before``, the total of the k block's
        earlier groups. Returns the new total. After the last group, the total is multiplied by the scales of x and
        added to ``acc`` instead, and [] is returned. If x has one scale per row, each group's sums are added to ``acc``
        at once, and [] is always returned.

        first_row: the first row of the tile that the sums belong to.
        """
        first, scales = group.tile * (self.config.tile_m // 2) + first_row // 2, group.scales
        if self.by_row:
            for i, value in enumerate(sums):
                acc[first + i] = (
                    ptx.fma(value, scales[i // 2 % 2], acc[first + i]) if scales else acc[first + i] + value
                )
            return []
        total = [
            ptx.fma(value, scales[i // 2 % 2], before[i]) if before else value * scales[i // 2 % 2]
            for i, value in enumerate(sums)
        ]
        if not group.is_last:
            return total
        for start in range(0, len(total), PIECE_M // 2):
            x_scales = k_block.load_x_scales(first_row + 2 * start)
            for i, value in enumerate(total[start : start + PIECE_M // 2]):
                at = first + start + i
                acc[at] = ptx.fma(value, x_scales[i // 4 * 2 + i % 2], acc[at])
        return []

    def finish(self, acc, shape, memory, work_tile, place, channel, last, releases) -> None:
        """Applies scales that hold for all of K."""
        if self.by_row:
            self.scale_rows(acc, shape, work_tile, place)
        if not self.config.group_size:
            sums = [acc[i] for i in range(self.config.thread_acc)]
            unit = self.decoder.unit
            self.channel.scale(acc, [value * unit for value in sums] if unit != 1 else sums, channel)

    def scale_rows(self, acc, shape, work_tile, place) -> None:
        """Multiplies the accumulators by the scales of rows of x."""
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
