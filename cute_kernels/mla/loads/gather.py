"""The common code of producer warps that gather, and the load of 16-bit tokens, which are copied unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla.barriers import await_barriers
from cute_kernels.mla.config import (
    BLOCK_TOKENS,
    FLAG_BYTES,
    GROUP_TOKENS,
    NUM_STAGES,
    MlaConfig,
)
from cute_kernels.mla.loads.locate import Token, make_locator
from cute_kernels.mla.loads.queries import QueryLoader
from cute_kernels.mla.work_tiles import Cursor

SLAB_BYTES = BLOCK_TOKENS * wgmma_tiles.ROW_BYTES
GROUP_BYTES = GROUP_TOKENS * wgmma_tiles.ROW_BYTES  # of a slab


@dataclass(frozen=True)
class LanePlaces:
    """The row and the byte offsets of a producer lane, constant over all blocks."""

    row: Int32  # of its token in a block, in the warp's first group
    source: Int32  # bytes into a token
    even: Int32  # byte offsets in a slab: of the first 8 of 16 columns
    odd: Int32  # ... of the other 8
    rope: Int32  # ... of the first RoPE piece

    @staticmethod
    def of(first_row, lane) -> LanePlaces:
        """Returns a lane's places. first_row: the row, in a block, where the warp's first group begins."""
        row, quarter = lane % GROUP_TOKENS, lane // GROUP_TOKENS
        first = first_row + row
        places = [wgmma_tiles.piece_offset(first, piece) for piece in (2 * quarter, 2 * quarter + 1, quarter)]
        return LanePlaces(first, 16 * quarter, *places)


@cute.jit
def write_flags(memory, stage, group, valid, lane):
    """Stores which of a group's 8 tokens exist, a bit each."""
    flags = cute.arch.vote_ballot_sync(valid != 0)
    if lane == 0:
        ptx.store_shared(memory.flags + stage * FLAG_BYTES + group * 4, 0, [Uint32(flags) & 0xFF])


def leads(warp, lane) -> Int32:
    """Returns 1 in one thread of the producers, else 0."""
    return cutlass.select_((warp == 0) & (lane == 0), Int32(1), Int32(0))


class CopyLoad:
    """The load of 16-bit tokens by asynchronous copies. No producer waits for the copies."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.locator = make_locator(config.tokens)
        self.loader = QueryLoader(config)

    @cute.jit
    def run(self, work_tiles, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's work tiles."""
        groups = self.config.warp_groups
        place = LanePlaces.of(warp * (groups * GROUP_TOKENS), lane)
        entries = cute.make_rmem_tensor(groups, Int32)
        cursor = Cursor.before(work_tiles, self.loader, leads(warp, lane))
        cursor.advance()
        for group in cutlass.range_constexpr(groups):
            row = place.row + group * GROUP_TOKENS
            entries[group] = self.locator.load_entry(cursor.work, source, cursor.block, row)
        await_barriers(self.config, produces=True)
        stage, phase, number = Int32(0), Int32(1), Int32(0)
        while number < cursor.found:
            mark = self.locator.marked(self.locator.mark(cursor.work, cursor.block))
            cursor.advance()
            tokens = []
            for group in cutlass.range_constexpr(groups):
                row = place.row + group * GROUP_TOKENS
                tokens.append(self.locator.token(source, Int32(entries[group]), mark, row))
                entries[group] = self.locator.load_entry(cursor.work, source, cursor.block, row)
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            for group in cutlass.range_constexpr(groups):
                write_flags(memory, stage, warp * groups + group, tokens[group].valid, lane)
                tile = memory.tiles + stage * self.config.tile_bytes + group * GROUP_BYTES
                self.copy_group(tokens[group], tile, place)
            numbers.arrive_when_copied((memory.full + stage).toint())
            # The flags are no copies: a thread that may have written some arrives for them as well.
            if lane == 0:
                cute.arch.mbarrier_arrive(memory.full + stage)
            stage, phase = advance(stage, phase, NUM_STAGES)
            number = number + 1

    def copy_group(self, token: Token, tile, place: LanePlaces) -> None:
        """Starts copying 8 rows of the tile. A lane copies every fourth 16-byte piece of its row; rows of missing
        tokens become zeros."""
        size = token.valid * wgmma_tiles.PIECE_BYTES
        for slab in range(self.config.layout.num_slabs):
            for i in range(2):
                target = (tile + place.rope) ^ (4 * wgmma_tiles.PIECE_BYTES * i)
                source = token.address + (place.source + wgmma_tiles.ROW_BYTES * slab + 64 * i)
                numbers.copy_async(target + slab * SLAB_BYTES, source, size)
