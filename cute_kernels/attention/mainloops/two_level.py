"""Two-level accumulation: tensor cores add up P V within a block, and fp32 sums in registers add up the blocks.

The tensor cores add products of E4M3 with some 14 bits, so a sum over many blocks loses small terms. So each block's
accumulators begin at zero, and are then added to the thread's fp32 sums. The same instruction rescales the earlier fp32
sums. MMAs also multiply the rounded probabilities with ones, which gives their sums. The output is divided by these
sums, so the weights of all keys add up to 1.

P V of a block is computed before the next block's scores, in the same registers: 132 accumulators a thread. If P V were
computed during the next block's softmax, as in :mod:`.tiles`, a thread would need 212. The other warpgroup keeps the
tensor cores busy meanwhile.
"""

from __future__ import annotations

from typing import Any

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.loads.memory import KEYS, VALUES
from cute_kernels.attention.mainloops.warpgroup_barriers import await_turn, pass_turn
from cute_kernels.device import ptx, wgmma, wgmma_tiles
from cute_kernels.device.softmax import row_of


class TwoLevelSums:
    """The processing of blocks for FP8 products. Its methods have the arguments of `tiles.Consumer`'s methods."""

    def __init__(self, config: ExtendConfig, consumer: Any):
        self.config, self.consumer, self.products = config, consumer, consumer.products

    def go_on(self, features, work, span, rows, sums, packed, factors, memory, group, lane, block, state) -> None:
        """Adds P V of the block before ``block``, then computes the scores and the softmax of ``block``."""
        consumer, following = self.consumer, memory.pipelines[KEYS].next(state)
        await_turn(group)
        self.finish(rows, sums, packed, factors, memory, lane, state)
        scores = wgmma_tiles.make_sums(self.config.tile_tokens)
        consumer.score(scores, memory, group, following)
        pass_turn(group)
        tile = consumer.softmax.load_tile_scales(memory.scales_of(KEYS, following.stage))
        values = consumer.finish_scores(scores, memory, following, lane, 0)
        factors.fill(1.0)
        consumer.weigh(features, work, span, rows, values, factors, tile, lane, block)
        self.products.pack(values, packed)

    def finish(self, rows, sums, packed, factors, memory, lane, state) -> None:
        """Adds P V of one block to the sums of all blocks. Adds the block's sums of probabilities to the totals.
        packed: the block's probabilities."""
        memory.pipelines[VALUES].consumer_wait(state)
        part = wgmma_tiles.make_sums(self.products.rows)
        self.products.multiply_values(part, packed, memory, state.stage)
        wgmma_tiles.commit()
        wgmma_tiles.wait()
        for i, value in enumerate(wgmma.wait_all([part[i] for i in range(self.products.rows // 2)])):
            row = row_of(i)
            if i < self.config.columns // 2:
                sums[i] = ptx.fma(sums[i], factors[row], value)
            elif i % 2 == 0:
                rows.online.add(row, factors[row], value)
        self.consumer.release(memory.pipelines[VALUES], state, lane)
