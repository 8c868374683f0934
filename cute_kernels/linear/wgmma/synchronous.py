"""Units of a tile of few rows by mma.sync: a warp's own MMAs, which wait for no other warp.

Fragments and sums of a warpgroup's MMAs are those of four warps of m16n8k16, 16 rows of W each, so all else of the
kernel stays as it is. Scales meet the sums of a group in fp32 instead of each weight: a sixth less to do for a code.
Activations are read from the swizzled boxes by ldmatrix, once for all tiles of a warp.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.linear.config import BLOCK_TOKENS
from cute_kernels.linear.wgmma.config import BOX_K, MMA_TOKENS
from cute_kernels.linear.wgmma.reading import ReadingWarps
from layouts.weights.hopper import STEP_K

ROW_BYTES = 2 * BOX_K  # of a box of activations
BOX_STEPS = BOX_K // STEP_K
PIECE_BYTES = 16  # that swizzling moves: 8 inputs


class SynchronousUnits:
    """What a multiplying warp does with the units of an item, for a configuration that says ``synchronous``."""

    def __init__(self, kernel: ReadingWarps):
        self.kernel = kernel
        self.config = kernel.config

    @cute.jit
    def multiply(self, sums, memory, item, place, channel, ring, teller, tokens: int):
        """As `WgmmaKernel.multiply_units`; gives back every stage itself."""
        stage, phase, last = ring
        rows = self.rows(cute.arch.lane_idx())
        for _ in cutlass.range(item.begin, item.end, 1, unroll=1):
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            self.multiply_unit(sums, memory, stage, place, rows, channel, tokens)
            cute.arch.sync_warp()
            self.kernel.release(memory, stage, teller)
            last = stage
            stage, phase = advance(stage, phase, self.config.num_stages)
        return stage, phase, last

    def rows(self, lane) -> list[Any]:
        """[step of a box] bytes from a box to what a lane asks ldmatrix for: tokens, then halves of 16 inputs.

        Matrices: tokens 0 to 7 of the first and of the second 8 inputs, then the same of tokens 8 to 15.
        """
        token, half = lane // 16 * 8 + lane % 8, lane // 8 % 2
        return [
            token * ROW_BYTES + ((2 * step + half) ^ (token % MMA_TOKENS)) * PIECE_BYTES for step in range(BOX_STEPS)
        ]

    def multiply_unit(self, sums, memory, stage, place, rows, channel, tokens: int):
        """Adds W X^T of a unit to ``sums``: [tile of the warpgroup][tokens / 2]."""
        config, kernel = self.config, self.kernel
        decoder = kernel.decoder
        blocks, tile_sums = tokens // BLOCK_TOKENS, config.tokens // 2
        codes = memory.codes + stage * config.code_stage_bytes + place.code_offset
        words = kernel.load_codes(codes)
        numbers = [kernel.load_numbers(memory, stage, place, i) for i in range(config.m_tiles)]
        x = memory.x_address + stage * config.x_stage_bytes
        places = [x + row for row in rows]
        steps = config.unit_steps // max(config.unit_groups, 1)
        for group in range(max(config.unit_groups, 1)):
            parts = [[[Float32(0.0)] * 4 for _ in range(blocks)] for _ in range(config.m_tiles)]
            for step in range(group * steps, (group + 1) * steps):
                box, offset = divmod(step, BOX_STEPS)
                b = [
                    ptx.load_matrix_x4(places[offset], box * config.box_bytes + pair * 16 * ROW_BYTES, transpose=False)
                    for pair in range(-(-blocks // 2))
                ]
                for i in range(config.m_tiles):
                    offsets = numbers[i][group][1] if config.group_size else channel[i][1]
                    a = decoder.fragment(words[i][step // decoder.steps], step % decoder.steps, offsets, place.masks)
                    for block in range(blocks):
                        operand = b[block // 2][block % 2 * 2 : block % 2 * 2 + 2]
                        parts[i][block] = ptx.mma_m16n8k16(parts[i][block], a, operand, dtype=kernel.mma_dtype)
            for i in range(config.m_tiles):
                for block in range(blocks):
                    for j in range(4):
                        at = i * tile_sums + 4 * block + j
                        if config.group_size:
                            scale = numbers[i][group][0][j // 2]
                            sums[at] = ptx.fma(parts[i][block][j], scale, sums[at])
                        else:
                            sums[at] = sums[at] + parts[i][block][j]
