"""The gathering warpgroup: tokens of a cache into tiles of bf16 that wgmma reads.

A warp fetches 8 tokens at a time, lane l's being token l % 8: the i-th load of a lane takes bytes 64 i + 16 (l / 8)
onwards of its token's 512 codes. So the 8 lanes of a phase of a 16-byte store write the 8 rows of a swizzle atom, at 8
different pieces: no bank conflicts, and every address is one of three per lane plus a constant. What is loaded for the
next 8 tokens takes the registers of what has just been decoded: all of a warp's loads are always under way, also while
it waits for a free tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import (
    BLOCK_TOKENS,
    FLAG_BYTES,
    GROUP_TOKENS,
    HEAD_DIM,
    NUM_STAGES,
    TILE_BYTES,
    V_HEAD_DIM,
    WARP_GROUPS,
    MlaConfig,
)
from cute_kernels.mla.dequant import Dequantizer
from cute_kernels.mla.locate import Token, make_locator

SCALES_OFFSET = V_HEAD_DIM  # in a token's bytes
ROPE_OFFSET = SCALES_OFFSET + 16
SLAB_BYTES = BLOCK_TOKENS * wgmma.ROW_BYTES
LATENT_LOADS = V_HEAD_DIM // wgmma.SLAB_COLUMNS  # of 16 bytes a lane, one for every slab
ROPE_LOADS = 2
NUM_SCALES = 4
COPIES = HEAD_DIM * 2 // 64  # of 16 bytes a lane, of a token of bf16
SLABS_PER_SCALE = LATENT_LOADS // NUM_SCALES


@dataclass(frozen=True)
class GatherLane:
    """A gathering lane's constant places."""

    row: Any  # of its token in a block, in the warp's first group
    source: Any  # bytes into a token
    even: Any  # byte offsets in a slab: of the first 8 of 16 columns
    odd: Any  # ... of the other 8
    rope: Any  # ... of the first RoPE piece

    @staticmethod
    def of(warp, lane) -> GatherLane:
        """warp: 0 to 3."""
        row, quarter = lane % GROUP_TOKENS, lane // GROUP_TOKENS
        first = warp * (WARP_GROUPS * GROUP_TOKENS) + row
        places = [wgmma.piece_offset(first, piece) for piece in (2 * quarter, 2 * quarter + 1, quarter)]
        return GatherLane(first, 16 * quarter, *places)


@cute.jit
def write_flags(memory, stage, group, valid, lane):
    """Says which of a group's 8 tokens exist."""
    flags = cute.arch.vote_ballot_sync(valid != 0)
    if lane == 0:
        ptx.store_shared(memory.flags + stage * FLAG_BYTES + group * 4, 0, [Uint32(flags) & 0xFF])


class Dequantizing:
    """The gathering warpgroup over an FP8 cache."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.locator = make_locator(config.tokens)
        self.dequantizer = Dequantizer(config.scales)

    @cute.jit
    def run(self, work, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's share."""
        place = GatherLane.of(warp, lane)
        words = cute.make_rmem_tensor(4 * (LATENT_LOADS + ROPE_LOADS), Uint32)
        scales = cute.make_rmem_tensor(NUM_SCALES, Uint32)
        entry = self.locator.load_entry(work, source, work.begin, place.row)
        token = self.locator.locate(work, source, entry, work.begin, place.row)
        for i in cutlass.range_constexpr(LATENT_LOADS + ROPE_LOADS):
            self.load_piece(words, token, place, i)
        self.load_scales(scales, token)
        held = token.valid
        entry = self.locator.load_entry(work, source, work.begin, place.row + GROUP_TOKENS)
        stage, phase = Int32(0), Int32(1)
        for block in cutlass.range(work.begin, work.end, unroll=1):
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            for group in cutlass.range_constexpr(WARP_GROUPS):
                next_block, next_row = self.step(block, group + 1, place)
                token = self.locator.locate(work, source, entry, next_block, next_row)
                entry = self.locator.load_entry(work, source, *self.step(block, group + 2, place))
                write_flags(memory, stage, warp * WARP_GROUPS + group, held, lane)
                tile = memory.tiles + stage * TILE_BYTES + group * (GROUP_TOKENS * wgmma.ROW_BYTES)
                self.write_group(words, scales, token, tile, place)
                held = token.valid
            if const_expr(self.config.fence == "writer"):
                cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(memory.full + stage)
            stage, phase = advance(stage, phase, NUM_STAGES)

    def step(self, block, groups: int, place):
        """(block, a lane's row in it) of the warp's ``groups``-th group counted from the block's first."""
        return block + groups // WARP_GROUPS, place.row + groups % WARP_GROUPS * GROUP_TOKENS

    # -- tokens -------------------------------------------------------------------------------------------------------

    def load_piece(self, words, token: Token, place: GatherLane, i: int) -> None:
        """Asks for a lane's i-th 16 bytes: of the codes, then of the RoPE columns."""
        offset = 64 * i if i < LATENT_LOADS else ROPE_OFFSET + 64 * (i - LATENT_LOADS)
        for j, word in enumerate(numbers.load_global_if(token.valid, token.address + place.source, offset)):
            words[4 * i + j] = word

    def load_scales(self, scales, token: Token) -> None:
        """Asks for a token's four scales."""
        for j, word in enumerate(numbers.load_global_if(token.valid, token.address, SCALES_OFFSET)):
            scales[j] = word

    # -- tiles --------------------------------------------------------------------------------------------------------

    def write_group(self, words, scales, token: Token, tile, place) -> None:
        """Decodes the tokens held in registers into rows of the tile and asks for those of ``token`` in their place."""
        factors = [self.dequantizer.factors(Uint32(scales[j]).bitcast(Float32)) for j in range(NUM_SCALES)]
        self.load_scales(scales, token)
        even, odd, rope = tile + place.even, tile + place.odd, tile + place.rope
        for i in range(LATENT_LOADS):
            values = []
            for j in range(4):
                values += self.dequantizer.word(words[4 * i + j], factors[i // SLABS_PER_SCALE])
            self.load_piece(words, token, place, i)
            ptx.store_shared(even, i * SLAB_BYTES, values[:4])
            ptx.store_shared(odd, i * SLAB_BYTES, values[4:])
        for i in range(ROPE_LOADS):
            piece = [words[4 * (LATENT_LOADS + i) + j] for j in range(4)]
            self.load_piece(words, token, place, LATENT_LOADS + i)
            # Piece 4 + p of a row is 4 pieces from p whatever the row: the swizzle leaves that bit to itself.
            ptx.store_shared(rope ^ (4 * wgmma.PIECE_BYTES * i), LATENT_LOADS * SLAB_BYTES, piece)


class Copying:
    """The gathering warpgroup over a cache of bf16: asynchronous copies, which nobody here waits for."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.locator = make_locator(config.tokens)

    @cute.jit
    def run(self, work, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's share."""
        place = GatherLane.of(warp, lane)
        entries = cute.make_rmem_tensor(WARP_GROUPS, Int32)
        for group in cutlass.range_constexpr(WARP_GROUPS):
            entries[group] = self.locator.load_entry(work, source, work.begin, place.row + group * GROUP_TOKENS)
        stage, phase = Int32(0), Int32(1)
        for block in cutlass.range(work.begin, work.end, unroll=1):
            tokens = []
            for group in cutlass.range_constexpr(WARP_GROUPS):
                row = place.row + group * GROUP_TOKENS
                tokens.append(self.locator.locate(work, source, Int32(entries[group]), block, row))
                entries[group] = self.locator.load_entry(work, source, block + 1, row)
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            for group in cutlass.range_constexpr(WARP_GROUPS):
                write_flags(memory, stage, warp * WARP_GROUPS + group, tokens[group].valid, lane)
                tile = memory.tiles + stage * TILE_BYTES + group * (GROUP_TOKENS * wgmma.ROW_BYTES)
                self.copy_group(tokens[group], tile, place)
            numbers.arrive_when_copied((memory.full + stage).toint())
            # The flags are no copies: a thread that has written some arrives for them as well.
            if lane == 0:
                cute.arch.mbarrier_arrive(memory.full + stage)
            stage, phase = advance(stage, phase, NUM_STAGES)

    def copy_group(self, token: Token, tile, place: GatherLane) -> None:
        """Asks for 8 rows of the tile, a lane's token 64 bytes apart; tokens that do not exist become zeros."""
        size = token.valid * wgmma.PIECE_BYTES
        for i in range(COPIES):
            target = (tile + place.rope) ^ (4 * wgmma.PIECE_BYTES * (i % 2))
            numbers.copy_async(target + i // 2 * SLAB_BYTES, token.address + (place.source + 64 * i), size)


def make_gatherer(config: MlaConfig) -> Dequantizing | Copying:
    """What fills tiles from a cache of the configuration's format."""
    return Copying(config) if config.copies else Dequantizing(config)
