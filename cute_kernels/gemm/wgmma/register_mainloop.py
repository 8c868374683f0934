"""The mainloop of warpgroup MMAs with decoded W in registers and x in shared memory.

Scales of groups are applied to the weights right after decoding, in the dtype of the activations. So W is rounded once,
as the reference rounds it, and one set of accumulators is enough. A scale per output feature is applied to the
accumulators instead. While a commit group of k16 steps is decoded into a second set of registers, the MMAs of the
previous commit group run.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from cute_kernels.device import wgmma
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import TMA_TILE_K, RegisterWgmma
from cute_kernels.gemm.wgmma.reading import Channel, Lane, MainloopParts, nothing, nothing_by_lane
from layouts.weights.hopper import STEP_K

MMA_DTYPE = {"bf16": "bf16", "fp16": "f16"}


class RegisterMainloop:
    """The mainloop policy of warpgroup MMAs whose A operand is decoded to registers."""

    def __init__(self, config: WgmmaConfig[RegisterWgmma], parts: MainloopParts):
        self.config, self.stages = config, parts.stages
        self.channel = Channel(config, parts.stages, parts.places)
        self.math = HopperMath(config.dtype)
        self.nothing = nothing_by_lane if parts.masks_by_lane else nothing

    def masks(self, shape, lane):
        return self.stages.decoder.masks(self.nothing(shape, lane))

    @cute.jit
    def multiply(self, acc, memory, work_tile, place: Lane, channel, state, releases, tile_m: int):
        """Adds W X^T of a work tile's k blocks to ``acc``, for the first ``tile_m`` rows of its tile.

        Args:
            channel: as `Channel.load` returns it.
            state: (the pipeline's state at the next k block, its state at the previous k block, whose stage is not
                released yet). The result is such a pair, too.
            releases: whether this lane releases stages.
        """
        here, last = state
        begin = work_tile.begin + place.k_rank
        for k_block in cutlass.range(begin, work_tile.end, self.config.k_warpgroups, unroll=1):
            memory.pipeline.consumer_wait(here)
            self.multiply_k_block(acc, memory, here, place, channel, last, releases & (k_block > begin), tile_m)
            last = here
            here = self.stages.next_state(memory, here)
        return here, last

    def multiply_k_block(self, acc, memory, here, place: Lane, channel, last, releases, tile_m: int):
        """Adds W X^T of a k block to ``acc`` and leaves its last MMAs running. Releases the previous k block's stage.

        Args:
            acc: [tile of the warpgroup][tile_m / 2].
            last: the pipeline's state at the previous k block.
            releases: whether this lane releases stages.
        """
        config, mainloop, stage = self.config, self.config.mainloop, here.stage
        codes = memory.codes + stage * config.code_stage_bytes + place.code_offset
        words = self.stages.load_codes(codes)
        groups = [self.stages.load_groups(memory, stage, place, i) for i in range(config.n_tiles)]
        x = wgmma.descriptor(memory.x_address + cute.arch.make_warp_uniform(stage) * config.x_stage_bytes)
        tile_acc = config.tile_m // 2
        totals = [[acc[i * tile_acc + j] for j in range(tile_m // 2)] for i in range(config.n_tiles)]
        for part in range(config.k_block_steps // mainloop.group_steps):
            steps = range(part * mainloop.group_steps, (part + 1) * mainloop.group_steps)
            operands = [
                self.fragment(words[i], step, groups[i] or channel[i : i + 1], place.masks)
                for step in steps
                for i in range(config.n_tiles)
            ]
            ready = wgmma.fence([register for fragment in operands for register in fragment])
            for number, step in enumerate(steps):
                tma_tile, offset = divmod(step * STEP_K, TMA_TILE_K)
                b = wgmma.advanced(x, tma_tile * config.tma_tile_bytes + offset * 2)
                for i in range(config.n_tiles):
                    first = 4 * (number * config.n_tiles + i)
                    a = ready[first : first + 4]
                    totals[i] = wgmma.mma(totals[i], a, b, dtype=MMA_DTYPE[config.dtype])
            wgmma.commit()
            # The oldest group is done: its operands' registers are free for the next one's.
            wgmma.wait(mainloop.in_flight)
            # So many groups of this k block are in flight: those of the previous one, and its stage, are done with.
            if part == mainloop.in_flight - 1:
                self.stages.release(memory, last, releases)
        for i in range(config.n_tiles):
            for j in range(tile_m // 2):
                acc[i * tile_acc + j] = totals[i][j]

    def fragment(self, words, step: int, groups, masks) -> list[Any]:
        """Returns the A operand of a k16 step: scaled weights, rounded once. If scales are per output feature, the A
        operand is codes minus zero points.
        """
        config, decoder = self.config, self.stages.decoder
        scales, rows = groups[step * STEP_K // config.group_size if config.group_size else 0]
        registers = decoder.fragment(words[step // decoder.steps], step % decoder.steps, rows, masks)
        if decoder.scales_weights or not config.group_size:
            return registers
        return [self.math.multiply(register, scales[i % 2]) for i, register in enumerate(registers)]

    def finish(self, acc, shape, memory, work_tile, place: Lane, channel, last, releases) -> None:
        """Waits for the last MMAs, releases their stage, and applies scales that hold for all of K."""
        finished = wgmma.wait_all([acc[i] for i in range(self.config.thread_acc)])
        self.stages.release(memory, last, releases & (work_tile.begin + place.k_rank < work_tile.end))
        self.channel.scale(acc, finished, channel)
