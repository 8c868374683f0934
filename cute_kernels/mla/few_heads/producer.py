"""The producer warps: they copy rows of the cache unchanged into the pipeline stages, asynchronously.

A warp copies 16 tokens of every block. Lanes l and l + 16 hold the address of token l. 16 lanes copy a row together,
256 bytes at a time; the row of a missing token becomes zeros.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.device.ring import advance
from cute_kernels.mla.few_heads.config import FLAG_BYTES, ROW_BYTES, STAGE_BYTES, WARP_TOKENS, FewHeadsConfig
from cute_kernels.mla.loads.locate import Token, make_locator

PIECE_BYTES = 16
ROW_LANES = 16
ROW_PIECES = ROW_BYTES // PIECE_BYTES
LAST_PIECES = ROW_PIECES % ROW_LANES  # of the last access to a row
FLAGS = (1 << WARP_TOKENS) - 1

assert WARP_TOKENS == ROW_LANES


class Producer:
    """The producer warps of one configuration; see the module's docstring."""

    def __init__(self, config: FewHeadsConfig):
        self.config = config
        self.locator = make_locator(config.tokens)

    @cute.jit
    def run(self, work, source, memory, warp, lane):
        """Fills a stage for every block of the CTA's work tile. warp: 0 to 3."""
        row = warp * WARP_TOKENS + lane % WARP_TOKENS
        entries = cute.make_rmem_tensor(self.config.ahead, Int32)
        for i in cutlass.range_constexpr(self.config.ahead):
            entries[i] = self.locator.load_entry(work, source, work.begin + i, row)
        stage, phase = Int32(0), Int32(1)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            token = self.locator.locate(work, source, Int32(entries[0]), block, row)
            for i in cutlass.range_constexpr(self.config.ahead - 1):
                entries[i] = entries[i + 1]
            entries[self.config.ahead - 1] = self.locator.load_entry(work, source, block + self.config.ahead, row)
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            flags = Uint32(cute.arch.vote_ballot_sync(token.valid != 0)) & FLAGS
            self.copy_rows(token, memory.ring + stage * STAGE_BYTES + warp * (WARP_TOKENS * ROW_BYTES), lane)
            numbers.arrive_when_copied((memory.full + stage).toint())
            # The flags are no copies: the lane that writes them arrives once more.
            if lane == 0:
                ptx.store_shared(memory.flags + stage * FLAG_BYTES + warp * 4, 0, [flags])
                cute.arch.mbarrier_arrive(memory.full + stage)
            stage, phase = advance(stage, phase, self.config.stages)

    def copy_rows(self, token: Token, target, lane) -> None:
        """Starts copying 16 rows to address ``target``. token: the token of row lane % 16."""
        piece = lane % ROW_LANES
        last = cutlass.select_(piece < LAST_PIECES, Int32(1), Int32(0))
        low, high = Uint32(token.address), Uint32(token.address >> 32)
        target = target + lane // ROW_LANES * ROW_BYTES + piece * PIECE_BYTES
        for pair in range(WARP_TOKENS // 2):
            owner = 2 * pair + lane // ROW_LANES
            words = [cute.arch.shuffle_sync(word, owner) for word in (low, high)]
            address = ((Int64(words[1]) << 32) | Int64(words[0])) + Int64(piece) * PIECE_BYTES
            size = cute.arch.shuffle_sync(token.valid, owner) * PIECE_BYTES
            for first in range(0, ROW_PIECES, ROW_LANES):
                place = target + (2 * pair * ROW_BYTES + first * PIECE_BYTES)
                if first + ROW_LANES <= ROW_PIECES:
                    numbers.copy_async(place, address + first * PIECE_BYTES, size)
                else:
                    numbers.copy_async_if(last, place, address + first * PIECE_BYTES, size)
