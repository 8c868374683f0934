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
from itertools import pairwise
from typing import Any

from cute_kernels.device import ptx, wgmma
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.gemm.operands.fp8_config import X_GROUP, Fp8Wgmma
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.limbs import MMA_K, LimbReader, Shift, StageByStage
from cute_kernels.gemm.wgmma.reading import Channel, StageReader
from layouts.weights.hopper import STEP_K

AHEAD_TILE_M = 64  # for which a thread has registers for the sums of two groups at a time


@dataclass(frozen=True)
class Group:
    """Products that have a scale in common: of a tile, MMAs ``first`` to ``end`` of its k block.

    scales: of the thread's two rows; none where they hold for all of K.
    is_last: of its tile's groups of the k block.
    """

    tile: int
    first: int
    end: int
    scales: Sequence[Any]
    is_last: bool


class Fp8Mainloop(StageByStage):
    """One mainloop policy: see `cute_kernels.gemm.wgmma.register_mainloop.RegisterMainloop`.

    x_scale_shift: as of `LimbReader`; None where tiles begin at any multiple of 8 rows.
    """

    def __init__(
        self, config: WgmmaConfig[Fp8Wgmma], stages: StageReader, channel: Channel, x_scale_shift: Shift | None
    ):
        self.config, self.stages, self.channel = config, stages, channel
        self.reader = LimbReader(config, stages, x_scale_shift, in_pairs=x_scale_shift is None)
        decoder = config.format.e4m3_decoder()
        assert decoder is not None, config.format
        self.decoder = decoder(HopperMath(config.dtype))

    def masks(self, shape, lane):
        return None

    def multiply_k_block(self, acc, memory, stage, place, x_place, tile_m: int):
        """Adds a k block's products, group by group: while one's MMAs run the next one is decoded."""
        words = self.reader.load_codes(memory, stage, place)
        x_scales = self.reader.load_x_scales(memory, stage, x_place, tile_m)
        x = self.reader.descriptor(memory, stage)
        ahead = tile_m <= AHEAD_TILE_M
        groups = self.groups(memory, stage, place)
        started, before = self.start(self.operands(words, groups[0]), x, groups[0], tile_m), []
        for group, after in pairwise([*groups, None]):
            assert group is not None
            following = self.operands(words, after) if after else []
            if after and ahead:
                following = self.start(following, x, after, tile_m)
            sums = wgmma.wait_for(started, 1 if after and ahead else 0)
            before = self.add(acc, group, sums, x_scales, before)
            if after:
                started = following if ahead else self.start(following, x, after, tile_m)

    def groups(self, memory, stage, place) -> list[Group]:
        """The parts of a k block that have scales of their own."""
        count, tiles = max(self.config.k_block_groups, 1), range(self.config.n_tiles)
        steps, found = X_GROUP // MMA_K // count, []
        for tile in tiles:
            scales = self.reader.load_scales(memory, stage, place, tile) if self.config.group_size else []
            scales = [scale * self.decoder.unit if self.decoder.unit != 1 else scale for scale in scales]
            for i in range(count):
                own = scales[2 * i : 2 * i + 2]
                found.append(Group(tile, steps * i, steps * (i + 1), own, is_last=i == count - 1))
        return found

    def operands(self, words, group: Group) -> list[Any]:
        """The A operands of a group: four registers for each of its MMAs."""
        decoder, found = self.stages.decoder, []
        for step in range(group.first * MMA_K // STEP_K, group.end * MMA_K // STEP_K):
            chunk, first = words[group.tile][step // decoder.steps], step % decoder.steps * decoder.words_per_step
            found += self.decoder.fragment([chunk[first + i] for i in range(decoder.words_per_step)])
        return found

    def start(self, operands, x, group: Group, tile_m: int) -> list[Any]:
        """Issues the MMAs of a group. Returns a thread's sums of it."""
        ready, sums = wgmma.fence(operands), []
        for number, step in enumerate(range(group.first, group.end)):
            b = wgmma.advanced(x, step * wgmma.STEP_BYTES)
            sums = wgmma.multiply_e4m3(sums, tile_m // 2, ready[4 * number : 4 * number + 4], b)
        wgmma.commit()
        return sums

    def add(self, acc, group: Group, sums, x_scales, before: Sequence[Any]) -> list[Any]:
        """Scales a group's sums and adds ``before``, the total of the k block's earlier groups. Returns the new total.

        After the k block's last group the total, times the scales of x, goes into the accumulators; returns [] then."""
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

    def finish(self, acc, memory, work_tile, place, channel, last, releases) -> None:
        """Applies scales that hold for all of K."""
        if not self.config.group_size:
            sums = [acc[i] for i in range(self.config.thread_acc)]
            unit = self.decoder.unit
            self.channel.scale(acc, [value * unit for value in sums] if unit != 1 else sums, channel)
