"""The gathering warpgroup of sparse decode: 656-byte tokens by index into tiles of bf16 that wgmma reads.

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
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx, wgmma
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import (
    BLOCK_TOKENS,
    FLAG_BYTES,
    GROUP_TOKENS,
    NUM_STAGES,
    TILE_BYTES,
    V_HEAD_DIM,
    WARP_GROUPS,
    SparseConfig,
)
from cute_kernels.mla.dequant import Dequantizer

SCALES_OFFSET = V_HEAD_DIM  # in a token's bytes
ROPE_OFFSET = SCALES_OFFSET + 16
TOKEN_BYTES = ROPE_OFFSET + 128
SLAB_BYTES = BLOCK_TOKENS * wgmma.ROW_BYTES
LATENT_LOADS = V_HEAD_DIM // wgmma.SLAB_COLUMNS  # of 16 bytes a lane, one for every slab
ROPE_LOADS = 2
NUM_SCALES = 4
SLABS_PER_SCALE = LATENT_LOADS // NUM_SCALES


@dataclass(frozen=True)
class Token:
    """Where a lane's next token lies and whether there is one; run-time values."""

    address: Any
    valid: Any  # 1 or 0


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


class Gatherer:
    """What the gathering warpgroup does."""

    def __init__(self, config: SparseConfig):
        self.config = config
        self.dequantizer = Dequantizer(config.scales)

    @cute.jit
    def run(self, work, main, extra, memory, warp, lane):
        """Fills a tile for every block of the CTA's share."""
        place = GatherLane.of(warp, lane)
        words = cute.make_rmem_tensor(4 * (LATENT_LOADS + ROPE_LOADS), Uint32)
        scales = cute.make_rmem_tensor(NUM_SCALES, Uint32)
        index = self.load_index(work, main, extra, work.begin, 0, place)
        token = self.locate(main, extra, index, work.begin >= work.main_blocks, place)
        for i in cutlass.range_constexpr(LATENT_LOADS + ROPE_LOADS):
            self.load_piece(words, token, i)
        self.load_scales(scales, token, place)
        held = token.valid
        index = self.load_index(work, main, extra, work.begin, 1, place)
        stage, phase = Int32(0), Int32(1)
        for block in cutlass.range(work.begin, work.end, unroll=1):
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            for group in cutlass.range_constexpr(WARP_GROUPS):
                after = block + (group + 1) // WARP_GROUPS
                token = self.locate(main, extra, index, after >= work.main_blocks, place)
                beyond = block + (group + 2) // WARP_GROUPS
                index = self.load_index(work, main, extra, beyond, (group + 2) % WARP_GROUPS, place)
                self.write_flags(memory, stage, warp * WARP_GROUPS + group, held, lane)
                tile = memory.tiles + stage * TILE_BYTES + group * (GROUP_TOKENS * wgmma.ROW_BYTES)
                self.write_group(words, scales, token, tile, place)
                held = token.valid
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(memory.full + stage)
            stage, phase = advance(stage, phase, NUM_STAGES)

    # -- tokens -------------------------------------------------------------------------------------------------------

    @cute.jit
    def load_index(self, work, main, extra, block, group: int, place) -> Int32:
        """A lane's index in a group of a block; -1 where none counts."""
        in_extra = block >= work.main_blocks
        first = cutlass.select_(in_extra, block - work.main_blocks, block) * BLOCK_TOKENS
        position = first + group * GROUP_TOKENS + place.row
        length = cutlass.select_(in_extra, work.extra_length, work.main_length)
        base = cutlass.select_(in_extra, extra.indices, main.indices)
        topk = cutlass.select_(in_extra, extra.topk, main.topk)
        index = Int32(-1)
        if (block < work.end) & (position < length):
            index = ptx.load_global_words(base + (Int64(work.row) * topk + position) * 4, 0, 1)[0].to(Int32)
        return index

    def locate(self, main, extra, index, in_extra, place) -> Token:
        """The token of an index; one that does not exist is never read."""
        page_size = cutlass.select_(in_extra, extra.page_size, main.page_size)
        page_stride = cutlass.select_(in_extra, extra.page_stride, main.page_stride)
        base = cutlass.select_(in_extra, extra.base, main.base)
        valid = (index >= 0) & (index < cutlass.select_(in_extra, extra.num_tokens, main.num_tokens))
        page = Uint32(index) // Uint32(page_size)
        offset = Uint32(index) - page * Uint32(page_size)
        address = base + Int64(page) * page_stride + (Int64(offset) * TOKEN_BYTES + place.source)
        return Token(address, cutlass.select_(valid, Int32(1), Int32(0)))

    def load_piece(self, words, token: Token, i: int) -> None:
        """Asks for a lane's i-th 16 bytes: of the codes, then of the RoPE columns."""
        offset = 64 * i if i < LATENT_LOADS else ROPE_OFFSET + 64 * (i - LATENT_LOADS)
        for j, word in enumerate(numbers.load_global_if(token.valid, token.address, offset)):
            words[4 * i + j] = word

    def load_scales(self, scales, token: Token, place) -> None:
        """Asks for a token's four scales."""
        for j, word in enumerate(numbers.load_global_if(token.valid, token.address - place.source, SCALES_OFFSET)):
            scales[j] = word

    # -- tiles --------------------------------------------------------------------------------------------------------

    @cute.jit
    def write_flags(self, memory, stage, group, valid, lane):
        """Says which of a group's 8 tokens exist."""
        flags = cute.arch.vote_ballot_sync(valid != 0)
        if lane == 0:
            ptx.store_shared(memory.flags + stage * FLAG_BYTES + group * 4, 0, [Uint32(flags) & 0xFF])

    def write_group(self, words, scales, token: Token, tile, place) -> None:
        """Decodes the tokens held in registers into rows of the tile and asks for those of ``token`` in their place."""
        factors = [self.dequantizer.factors(Uint32(scales[j]).bitcast(Float32)) for j in range(NUM_SCALES)]
        self.load_scales(scales, token, place)
        even, odd, rope = tile + place.even, tile + place.odd, tile + place.rope
        for i in range(LATENT_LOADS):
            values = []
            for j in range(4):
                values += self.dequantizer.word(words[4 * i + j], factors[i // SLABS_PER_SCALE])
            self.load_piece(words, token, i)
            ptx.store_shared(even, i * SLAB_BYTES, values[:4])
            ptx.store_shared(odd, i * SLAB_BYTES, values[4:])
        for i in range(ROPE_LOADS):
            piece = [words[4 * (LATENT_LOADS + i) + j] for j in range(4)]
            self.load_piece(words, token, LATENT_LOADS + i)
            # Piece 4 + p of a row is 4 pieces from p whatever the row: the swizzle leaves that bit to itself.
            ptx.store_shared(rope ^ (4 * wgmma.PIECE_BYTES * i), LATENT_LOADS * SLAB_BYTES, piece)
