"""The mainloop of mma.sync for few rows: each warp runs its own MMAs and waits for no other warp.

Each of a warpgroup's four warps runs m16n8k16 MMAs on 16 rows of W. Fragments and accumulators have the layout of
wgmma, so the rest of the kernel does not change. Scales are applied to the fp32 accumulators of a scale group, not to
each weight. This saves a sixth of the instructions per code. A warp reads activations from the swizzled TMA tiles by
ldmatrix, once for all of its tiles.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.device import ptx
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import TMA_TILE_K
from cute_kernels.gemm.wgmma.reading import Channel, MainloopParts, nothing, nothing_by_lane
from cute_kernels.gemm.wgmma.register_mainloop import MMA_DTYPE
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP
from layouts.weights.hopper import STEP_K

ROW_BYTES = 2 * TMA_TILE_K  # bytes of a row of a TMA tile of activations
TMA_TILE_STEPS = TMA_TILE_K // STEP_K
MMA_N = 8  # columns of mma.m16n8
PIECE_BYTES = 16  # the unit that swizzling moves: 8 inputs


class SynchronousMainloop:
    """Multiplies by mma.sync in each warp, which waits for no other warp. The sums of each scale group are multiplied
    by its scale; the weights themselves are not scaled."""

    def __init__(self, config: WgmmaConfig, parts: MainloopParts):
        self.config, self.stages = config, parts.stages
        self.channel = Channel(config, parts.stages, parts.places)
        self.nothing = nothing_by_lane if parts.masks_by_lane else nothing

    def masks(self, shape, lane):
        return self.stages.decoder.masks(self.nothing(shape, lane))

    @cute.jit
    def multiply(self, acc, memory, work_tile, place, channel, state, releases, tile_m: int):
        """Multiplies as `RegisterMainloop.multiply` does, but releases every stage itself, also the last one."""
        here, last = state
        rows = self.rows(cute.arch.lane_idx())
        for _ in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
            memory.pipeline.consumer_wait(here)
            self.multiply_k_block(acc, memory, here.stage, place, rows, channel, tile_m)
            cute.arch.sync_warp()
            self.stages.release(memory, here, releases)
            last = here
            here = memory.pipeline.next(here)
        return here, last

    def rows(self, lane) -> list[Any]:
        """Returns a lane's address offsets in bytes for ldmatrix, one for each k16 step of a TMA tile.

        ldmatrix loads four matrices of 8 tokens by 8 inputs: tokens 0 to 7 with inputs 0 to 7 and 8 to 15, then tokens
        8 to 15 with the same inputs.
        """
        token, half = lane // 16 * 8 + lane % 8, lane // 8 % 2
        return [
            token * ROW_BYTES + ((2 * step + half) ^ (token % WGMMA_N_STEP)) * PIECE_BYTES
            for step in range(TMA_TILE_STEPS)
        ]

    def multiply_k_block(self, acc, memory, stage, place, rows, channel, tile_m: int):
        """Adds W X^T of a k block to ``acc``: [tile of the warpgroup][config.tile_m / 2]."""
        config, stages = self.config, self.stages
        decoder = stages.decoder
        blocks, tile_acc = tile_m // MMA_N, config.tile_m // 2
        codes = memory.codes + stage * config.code_stage_bytes + place.code_offset
        words = stages.load_codes(codes)
        numbers = [stages.load_numbers(memory, stage, place, i) for i in range(config.n_tiles)]
        x = memory.x_address + stage * config.x_stage_bytes
        places = [x + row for row in rows]
        steps = config.k_block_steps // max(config.k_block_groups, 1)
        for group in range(max(config.k_block_groups, 1)):
            parts = [[[Float32(0.0)] * 4 for _ in range(blocks)] for _ in range(config.n_tiles)]
            for step in range(group * steps, (group + 1) * steps):
                tma_tile, offset = divmod(step, TMA_TILE_STEPS)
                b = [
                    ptx.load_matrix_x4(
                        places[offset], tma_tile * config.tma_tile_bytes + pair * 16 * ROW_BYTES, transpose=False
                    )
                    for pair in range(-(-blocks // 2))
                ]
                for i in range(config.n_tiles):
                    offsets = numbers[i][group][1] if config.group_size else channel[i][1]
                    a = decoder.fragment(words[i][step // decoder.steps], step % decoder.steps, offsets, place.masks)
                    for block in range(blocks):
                        operand = b[block // 2][block % 2 * 2 : block % 2 * 2 + 2]
                        parts[i][block] = ptx.mma_m16n8k16(parts[i][block], a, operand, dtype=MMA_DTYPE[config.dtype])
            for i in range(config.n_tiles):
                for block in range(blocks):
                    for j in range(4):
                        at = i * tile_acc + 4 * block + j
                        if config.group_size:
                            scale = numbers[i][group][0][j // 2]
                            acc[at] = ptx.fma(parts[i][block][j], scale, acc[at])
                        else:
                            acc[at] = acc[at] + parts[i][block][j]

    def finish(self, acc, shape, memory, work_tile, place, channel, last, releases) -> None:
        """Applies scales that hold for all of K."""
        self.channel.scale(acc, [acc[i] for i in range(self.config.thread_acc)], channel)
