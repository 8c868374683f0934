"""The FP8 mainloop: E4M3 MMAs with decoded W in registers, x in shared memory, and sums at two levels.

The tensor cores add products of E4M3 with some 14 bits. So the sums of each group, of 128 inputs at most, begin at
zero. They are multiplied by the weight's scale and added up in fp32. Once a k block, the total is multiplied by the
scale of x's row. Each step takes one instruction a sum, which overlaps with another warpgroup's MMAs. Scales that hold
for all of K are applied to the fp32 sums at the end.

DeepGEMM promotes sums of 128 inputs to fp32, too. FlashInfer's and CUTLASS's mixed products also decode a 4-bit
codebook by a byte permutation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.device.pipeline import PipelineState
from cute_kernels.gemm.operands.fp8_config import X_GROUP, Fp8Wgmma, groups_apart, x_group
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.limbs import MMA_K, LimbReader, Shift
from cute_kernels.gemm.wgmma.places import Places
from cute_kernels.gemm.wgmma.reading import Channel, StageReader, nothing
from layouts.weights.hopper import STEP_K

DECODED_MMAS = 2  # whose operands are decoded before the first of them is issued
PIECE_M = 32  # rows of x whose scales are loaded at a time


@dataclass(frozen=True)
class Group:
    """The MMAs ``first`` to ``end`` of a tile's k block, whose products share a scale.

    scales: of the thread's two rows; empty where scales hold for all of K. tables: for each MMA, the table in which its
    codes are looked up; empty where all codes have the same table. is_last: whether no other group of the tile's k
    block follows.
    """

    tile: int
    first: int
    end: int
    scales: Sequence[Any]
    tables: Sequence[Any]
    is_last: bool


@dataclass(frozen=True)
class Slice:
    """A group's sums for a slice of the rows of x, which MMAs may still be writing.

    first_row: of the slice. before: the total of the k block's earlier groups. stage: the pipeline stage in which the
    scales of x are.
    """

    tile: int
    first_row: int
    is_last: bool
    sums: Sequence[Any]
    scales: Sequence[Any]
    before: Sequence[Any]
    stage: Any


class Fp8Mainloop:
    """The mainloop policy of FP8 products; `cute_kernels.gemm.wgmma.register_mainloop.RegisterMainloop` describes the
    methods.

    A k block is multiplied slice by slice. While the MMAs of a slice run, a thread adds the sums of the slice before,
    also where that one is the last of the k block before.

    x_scale_shift: as in `LimbReader`; None where tiles begin at any multiple of 8 rows.
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

    def masks(self, shape, lane):
        return nothing(shape, lane)

    @cute.jit
    def multiply(self, acc, memory, work_tile, place, channel, state, releases, tile_m: int):
        """Multiplies as `RegisterMainloop.multiply` does; waits for all MMAs and releases every stage itself."""
        here, last = state
        begin, x_place = work_tile.begin, self.reader.x_scale_place(work_tile)
        slice_m = self.config.mainloop.slice_m(self.config, tile_m)
        running = cute.make_rmem_tensor(sum(self.running_words(slice_m)), Float32)
        running.fill(0.0)
        for k_block in cutlass.range(begin, work_tile.end, 1, unroll=1):
            memory.pipeline.consumer_wait(here)
            before = (running, self.state_before(here, k_block > begin), releases & (k_block > begin))
            self.multiply_k_block(acc, memory, here.stage, place, x_place, before, tile_m)
            here = memory.pipeline.next(here)
        last = self.state_before(here, here.stage >= 0)
        added = self.loaded(running, last.stage, tile_m)
        self.add(acc, memory, x_place, replace(added, sums=wgmma.wait_for(added.sums, 0)))
        if const_expr(self.by_row):
            self.scale_rows(acc, memory, last.stage, x_place, tile_m)
        cute.arch.sync_warp()
        self.stages.release(memory, last, releases)
        return here, last

    def state_before(self, here, has_one) -> PipelineState:
        """Returns the state at the k block before, or at this one unless ``has_one``. It is computed again, as there is
        no register for it; its phase is not."""
        before = cutlass.select_(here.stage == 0, Int32(self.config.num_stages), here.stage) - 1
        return PipelineState(cutlass.select_(has_one, before, here.stage), here.phase)

    def multiply_k_block(self, acc, memory, stage, place, x_place, before, tile_m: int) -> None:
        """Adds a k block's products to ``acc``, but for those of its last slice, whose MMAs are left running.

        before: (what `stored` stored for the k block before, its state, whether this lane releases its stage).
        """
        running, last, releases = before
        added, free = self.loaded(running, last.stage, tile_m), []
        # Codes are loaded, and decoded, when no MMA reads the registers of the k block before's any more.
        added, first = replace(added, sums=wgmma.wait_for(added.sums, 0)), True
        words, x = self.reader.load_codes(memory, stage, place), self.reader.descriptor(memory, stage)
        slice_m = self.config.mainloop.slice_m(self.config, tile_m)
        for group in self.groups(memory, stage, place):
            operands: list[Any] = []
            for first_row in range(0, tile_m, slice_m):
                b = wgmma.advanced(x, first_row * wgmma.ROW_BYTES)
                if operands:
                    operands = wgmma.fence(operands)
                    sums = self.start(free, slice_m, operands, b, group.first, place.masks)
                else:
                    sums, operands = self.decode_and_start(free, slice_m, words, b, group, place.masks)
                wgmma.commit()
                if not first:
                    added = replace(added, sums=wgmma.wait_for(added.sums, 1))
                total, free = self.add(acc, memory, x_place, added), added.sums
                if first:
                    cute.arch.sync_warp()
                    self.stages.release(memory, last, releases)
                added, first = Slice(group.tile, first_row, group.is_last, sums, group.scales, total, stage), False
        self.stored(running, added)

    def running_words(self, slice_m: int) -> tuple[int, ...]:
        """Returns how many numbers a loop carries: sums, totals of earlier groups, scales of two rows."""
        totals = slice_m // 2 * (groups_apart(self.config.format) > 1 and not self.by_row)
        return slice_m // 2, totals, 2 * bool(self.config.group_size)

    def stored(self, running, added: Slice) -> None:
        """Stores a k block's last slice in registers that a loop carries."""
        for i, value in enumerate([*added.sums, *added.before, *added.scales]):
            running[i] = value

    def loaded(self, running, stage, tile_m: int) -> Slice:
        """Returns the slice that `stored` stored. stage: that of its k block."""
        slice_m = self.config.mainloop.slice_m(self.config, tile_m)
        ends = [*accumulate(self.running_words(slice_m), initial=0)]
        sums, totals, scales = ([running[i] for i in range(*bounds)] for bounds in pairwise(ends))
        return Slice(self.config.n_tiles - 1, tile_m - slice_m, True, sums, scales, totals, stage)

    def groups(self, memory, stage, place) -> list[Group]:
        """Returns the groups of a k block, tile by tile."""
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

    def operands(self, words, group: Group, first: int, end: int) -> list[Any]:
        """Decodes the A operands of a group's MMAs ``first`` to ``end``: four registers each."""
        decoder, found = self.stages.decoder, []
        for step in range(first * MMA_K // STEP_K, end * MMA_K // STEP_K):
            chunk, first_word = words[group.tile][step // decoder.steps], step % decoder.steps * decoder.words_per_step
            own = [chunk[first_word + i] for i in range(decoder.words_per_step)]
            found += self.decoder.fragment(own, *([group.tables[step * STEP_K // MMA_K]] if group.tables else []))
        return found

    def decode_and_start(self, sums, slice_m: int, words, x, group: Group, zero) -> tuple[list[Any], list[Any]]:
        """Decodes codes of a group and issues MMAs of a slice, `DECODED_MMAS` at a time. Returns (sums, operands)."""
        operands: list[Any] = []
        for first in range(group.first, group.end, DECODED_MMAS):
            part = wgmma.fence(self.operands(words, group, first, min(first + DECODED_MMAS, group.end)))
            sums = self.start(sums, slice_m, part, x, first, zero if first == group.first else 1)
            operands += part
        return sums, operands

    def start(self, sums, slice_m: int, operands, x, first: int, adds) -> list[Any]:
        """Issues the MMAs of a slice from ``first`` on and returns the thread's sums.

        sums: registers that these sums shall have, or []. adds: 0, or a run-time 0, if MMAs begin at zero.
        """
        for number in range(len(operands) // 4):
            a, b = operands[4 * number : 4 * number + 4], wgmma.advanced(x, (first + number) * wgmma.STEP_BYTES)
            sums = wgmma.multiply_e4m3(sums, slice_m // 2, a, b, 1 if number else adds)
        return sums

    def add(self, acc, memory, x_place, added: Slice) -> list[Any]:
        """Waits for a slice's MMAs, all but the last ``pending`` groups, scales its sums and adds ``before`` to them.
        Returns this new total.

        After the k block's last group it adds the total, times the scales of x, to the accumulators and returns [].
        Where x has one scale per row, it adds each group's sums to the accumulators at once and returns []."""
        first, scales = added.tile * (self.config.tile_m // 2) + added.first_row // 2, added.scales
        if self.by_row:
            for i, value in enumerate(added.sums):
                acc[first + i] = ptx.fma(value, scales[i // 2 % 2] if scales else Float32(1.0), acc[first + i])
            return []
        total = [
            ptx.fma(value, scales[i // 2 % 2], added.before[i]) if added.before else value * scales[i // 2 % 2]
            for i, value in enumerate(added.sums)
        ]
        if not added.is_last:
            return total
        for start in range(0, len(total), PIECE_M // 2):
            part = total[start : start + PIECE_M // 2]
            x_scales = self.reader.load_x_scales(
                memory, added.stage, x_place + 4 * (added.first_row + 2 * start), 2 * len(part)
            )
            for i, value in enumerate(part):
                at = first + start + i
                acc[at] = ptx.fma(value, x_scales[i // 4 * 2 + i % 2], acc[at])
        return []

    def scale_rows(self, acc, memory, stage, x_place, tile_m: int) -> None:
        """Multiplies the accumulators by the scales of rows of x."""
        tile_acc = self.config.tile_m // 2
        for first in range(0, tile_m, PIECE_M):
            rows = min(PIECE_M, tile_m - first)
            scales = self.reader.load_x_scales(memory, stage, x_place + 4 * first, rows)
            for tile, i in product(range(self.config.n_tiles), range(rows // 2)):
                at = tile * tile_acc + first // 2 + i
                acc[at] = acc[at] * scales[i // 4 * 2 + i % 2]

    def finish(self, acc, shape, memory, work_tile, place, channel, last, releases) -> None:
        """Applies the weight's scales that hold for all of K."""
        if not self.config.group_size:
            sums = [acc[i] for i in range(self.config.thread_acc)]
            unit = self.decoder.unit
            self.channel.scale(acc, [value * unit for value in sums] if unit != 1 else sums, channel)
