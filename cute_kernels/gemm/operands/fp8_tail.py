"""Loads for FP8 products whose K ends in half a k block, such as 2880 inputs: 22 k blocks of 128, and 64 inputs.

The last k block has the last 128 inputs of a row. It shares 64 of them with the k block before. For these 64 inputs, x
has zeros (`.rows`) in the last k block, so they are not added twice. The product of 0 and a NaN weight is NaN, but all
results of such a weight's row are NaN anyway. So the mainloop needs no code for the tail, nothing is read after a row's
end, and weights keep the padding of 16-bit products.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32

from cute_kernels.device import ptx
from cute_kernels.gemm.wgmma.loads import WeightLoads, product


class TailWeightLoads(WeightLoads):
    """Loads codes and scales if K ends in half a k block. A tile has 2 * ``shape.k_blocks`` - 1 half k blocks."""

    def copy_k_block(self, operands, shape, memory, work_tile, k_block, here):
        """Starts loading a k block of the work tile's block of output features. For each tile of 64 features it copies
        the codes, and the scales if there are groups."""
        config, stage = self.config, here.stage
        address = memory.pipeline.producer_expect(here, config.weight_stage_bytes)
        halves = 2 * shape.k_blocks - 1
        first = cutlass.min(2 * k_block, halves - 2)
        parts = [(memory.codes, operands.codes, config.code_stage_bytes)]
        if config.group_size:
            parts.append((memory.scales, operands.scales, config.scale_stage_bytes))
        for i in range(config.block_tiles):
            half = product(self.places.weight_tile(shape, work_tile, i), halves) + first
            for target, source, stage_bytes in parts:
                size = stage_bytes // config.block_tiles
                to = target + stage * stage_bytes + i * size
                ptx.bulk_copy_to_shared(to, source + half * (size // 2), Int32(size), address)
