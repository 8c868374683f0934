"""FP8 products of K that ends in half a k block, such as 2880 inputs: 22 k blocks of 128, and 64 inputs.

The last k block has the last 128 inputs, 64 of which the one before has, too. There x has zeros (`.rows`), and the
weights add nothing: a NaN among them makes all results of its row NaN anyway. So the mainloop knows of no tail, nothing
is read after a row's end, and weights keep the padding of 16-bit products.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32

from cute_kernels.device import ptx
from cute_kernels.gemm.wgmma.loads import WeightLoads, product


class TailWeightLoads(WeightLoads):
    """Loads codes and scales of k blocks that are counted by halves: a tile has one less than ``shape.k_blocks``
    twice."""

    def copy_k_block(self, operands, shape, memory, work_tile, k_block, here):
        """Starts loading a k block of a block: of each tile a run of codes, and one of scales."""
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
