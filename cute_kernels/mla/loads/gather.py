"""The producer warps: tokens of a cache into tiles of 16-bit numbers that wgmma reads.

A warp fetches 8 tokens at a time, lane l's being token l % 8: the i-th load of a lane takes bytes 64 i + 16 (l / 8)
onwards of its token's 512 or 448 codes. So the 8 lanes of a phase of a 16-byte store write the 8 rows of a swizzle
atom, at 8 different pieces: no bank conflicts, and every address is one of three per lane plus a constant. What is
loaded for the next 8 tokens takes the registers of what has just been decoded: all of a warp's loads are always under
way, also while it waits for a free tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

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
from cute_kernels.mla.loads.dequantize import Dequantizer, Factors
from cute_kernels.mla.loads.entries import Entries
from cute_kernels.mla.loads.locate import Token, make_locator
from cute_kernels.mla.loads.queries import QueryLoader
from cute_kernels.mla.work_tiles import Cursor

SLAB_BYTES = BLOCK_TOKENS * wgmma_tiles.ROW_BYTES
ROPE_LOADS = 2  # of 16 bytes a lane; codes take one for every slab
GROUP_BYTES = GROUP_TOKENS * wgmma_tiles.ROW_BYTES  # of a slab


@dataclass(frozen=True)
class LanePlaces:
    """A producer lane's constant places."""

    row: Any  # of its token in a block, in the warp's first group
    source: Any  # bytes into a token
    even: Any  # byte offsets in a slab: of the first 8 of 16 columns
    odd: Any  # ... of the other 8
    rope: Any  # ... of the first RoPE piece

    @staticmethod
    def of(first_row, lane) -> LanePlaces:
        """first_row: of the warp's first group, in a block."""
        row, quarter = lane % GROUP_TOKENS, lane // GROUP_TOKENS
        first = first_row + row
        places = [wgmma_tiles.piece_offset(first, piece) for piece in (2 * quarter, 2 * quarter + 1, quarter)]
        return LanePlaces(first, 16 * quarter, *places)


@cute.jit
def write_flags(memory, stage, group, valid, lane):
    """Says which of a group's 8 tokens exist."""
    flags = cute.arch.vote_ballot_sync(valid != 0)
    if lane == 0:
        ptx.store_shared(memory.flags + stage * FLAG_BYTES + group * 4, 0, [Uint32(flags) & 0xFF])


def leads(warp, lane) -> Int32:
    """1 in one thread of the warpgroup."""
    return cutlass.select_((warp == 0) & (lane == 0), Int32(1), Int32(0))


class DequantizeLoad:
    """The producer warps over an FP8 cache."""

    constant = True  # loads of tokens may be put off

    def __init__(self, config: MlaConfig):
        self.config = config
        self.layout = config.layout
        self.num_loads = self.layout.code_slabs + ROPE_LOADS
        self.last_chunk = (self.num_loads - 1) // config.chunk * config.chunk  # its first piece
        self.scale_words = self.layout.scale_bytes // 4
        self.entries = Entries.of(config)
        self.loader = QueryLoader(config)
        self.dequantizer = Dequantizer(config.scales, self.scale_words, exponents=self.layout.is_split)

    @cute.jit
    def run(self, work_tiles, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's shares."""
        first_row, place, link = self.places(memory, warp, lane)
        cursor = Cursor.before(work_tiles, self.loader, leads(warp, lane))
        token, words, scales = self.first_token(cursor, source, memory, first_row, place, lane)
        for i in cutlass.range_constexpr(self.num_loads):
            self.load_piece(words, token, place, i)
        self.load_scales(scales, token)
        held = token.valid
        self.entries.prefetch_first(source, memory, first_row, lane)
        await_barriers(self.config, produces=True)
        stage, phase, number = Int32(0), Int32(1), Int32(0)
        while number < cursor.found:
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            for group in cutlass.range_constexpr(self.config.warp_groups):
                following, row = self.step(number, group + 1, place)
                token = self.entries.token(source, memory, following, first_row, row)
                self.publish_flags(memory, link, stage, place.row // GROUP_TOKENS + group, held, lane)
                tile = self.tile(memory, link, stage, group)
                self.write_group(words, scales, token, tile, place)
                if const_expr(group == self.config.warp_groups - 1):
                    self.announce_tile(memory, stage, warp, lane)
                self.load_last(words, scales, token, place)
                held = token.valid
            self.entries.step(cursor, source, memory, number, first_row, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
            number = number + 1
        self.finish(memory, stage, phase)

    def places(self, memory, warp, lane) -> tuple[Any, Any, Any]:
        """(first row of a block, a lane's places, what is known of another CTA) of a warp."""
        first_row = self.first_row(warp)
        return first_row, LanePlaces.of(first_row, lane), self.link(memory, first_row)

    def first_token(self, cursor, source, memory, first_row, place, lane) -> tuple[Any, Any, Any]:
        """A lane's first token, and the registers that its words and its scales are loaded into."""
        words = cute.make_rmem_tensor(4 * self.num_loads, Uint32)
        scales = cute.make_rmem_tensor(self.scale_words, Uint32)
        self.entries.start(cursor, source, memory, first_row, lane)
        return self.entries.token(source, memory, Int32(0), first_row, place.row), words, scales

    def step(self, number, groups: int, place):
        """(block, a lane's row in it) of the warp's ``groups``-th group counted from the block's first."""
        ahead, group = divmod(groups, self.config.warp_groups)
        return number + ahead, place.row + group * GROUP_TOKENS

    # -- where tiles go: another class may send them further ----------------------------------------------------------

    def first_row(self, warp):
        """The first row of a block that a warp fetches."""
        return warp * (self.config.warp_groups * GROUP_TOKENS)

    def link(self, memory, first_row):
        """What is known of another CTA: nothing."""
        return

    def publish_flags(self, memory, link, stage, group, valid, lane) -> None:
        """Says which of a group's 8 tokens exist."""
        write_flags(memory, stage, group, valid, lane)

    def tile(self, memory, link, stage, group: int):
        """Where the rows of a warp's group go in every slab."""
        return memory.tiles + stage * self.config.tile_bytes + group * GROUP_BYTES

    def here(self, tile):
        """The address of a tile in the CTA's own memory."""
        return tile

    def store(self, tile, place, offset: int, values) -> None:
        """Stores 16 bytes of a tile."""
        ptx.store_shared(tile + place, offset, values)

    def send(self, tile) -> None:
        """A warp has written its rows of all slabs: nobody else wants them."""

    def finish(self, memory, stage, phase) -> None:
        """Behind the last tile: nobody else is to be waited for."""

    @cute.jit
    def announce_tile(self, memory, stage, warp, lane):
        """Says that the warp's part of a tile is written."""
        if const_expr(self.config.fence == "writer"):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(memory.full + stage)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def load_piece(self, words, token: Token, place: LanePlaces, i: int, constant: bool = True) -> None:
        """Asks for a lane's i-th 16 bytes, of the codes, then of the RoPE columns. constant: see :meth:`load`."""
        codes = self.layout.code_slabs
        offset = 64 * i if i < codes else self.layout.rope_offset + 64 * (i - codes)
        for j, word in enumerate(self.load(token.valid, token.address + place.source, offset, 4, constant)):
            words[4 * i + j] = word

    def load_scales(self, scales, token: Token, constant: bool = True) -> None:
        """Asks for a token's scales. constant: see :meth:`load`."""
        offset = self.layout.scales_offset
        base = token.behind if offset is None else token.address
        for j, word in enumerate(self.load(token.valid, base, offset or 0, self.scale_words, constant)):
            scales[j] = word

    def load(self, condition, address, offset: int, num_words: int, constant: bool) -> list[Uint32]:
        """Asks for words of the cache, zeros if condition is 0. constant: whether the compiler may put that off, if it
        ever may."""
        return numbers.load_global_if(condition, address, offset, num_words, constant=constant and self.constant)

    # -- tiles --------------------------------------------------------------------------------------------------------

    @cute.jit
    def write_group(self, words, scales, token, tile, place):
        """Decodes the tokens held in registers into rows of the tile and asks for those of ``token`` in their place,
        but for those of :meth:`load_last`.

        The compiler puts loads off to the end of a basic block, since only the next block wants them: branches that are
        always taken keep them in their stretch.
        """
        factors = self.factors(scales)
        for chunk in cutlass.range_constexpr(0, self.num_loads, self.config.chunk):
            if const_expr(chunk < self.last_chunk):
                if numbers.active_lanes() != 0:
                    self.write_chunk(words, factors, tile, place, chunk, token)
            else:
                self.write_chunk(words, factors, tile, place, chunk, None)
        self.raise_large(factors, self.here(tile), place, range(self.layout.code_slabs))
        self.send(tile)

    def load_last(self, words, scales, token, place) -> None:
        """Asks for the scales of ``token`` and the pieces whose place the last stretch had: behind the fence, which
        would wait for them, and so by loads that the compiler leaves there."""
        self.load_scales(scales, token, constant=False)
        for i in range(self.last_chunk, self.num_loads):
            self.load_piece(words, token, place, i, constant=False)

    def factors(self, scales) -> Factors:
        """What a token's codes are multiplied with."""
        return self.dequantizer.factors(scales, self.layout.num_scales)

    def pieces_from(self, first: int) -> range:
        """Those of a lane's pieces that are written in the stretch that begins with its ``first``."""
        return range(first, min(first + self.config.chunk, self.num_loads))

    def write_chunk(self, words, factors: Factors, tile, place, first: int, token: Token | None) -> None:
        """Decodes and stores a stretch, and asks for the pieces of ``token`` in their place, if there is one."""
        codes = self.layout.code_slabs
        for i in self.pieces_from(first):
            if i < codes:
                own = factors.scales[i // self.layout.slabs_per_scale]
                values = self.decode([words[4 * i + j] for j in range(4)], own)
                if token is not None:
                    self.load_piece(words, token, place, i)
                self.store_latent(values, i, tile, place)
            else:
                self.write_rope(words, i - codes, tile, place)
                if token is not None:
                    self.load_piece(words, token, place, i)

    def decode(self, codes: list[Any], factors) -> list[Uint32]:
        """16 codes, 4 words, times their scale: 8 words."""
        return [pair for word in codes for pair in self.dequantizer.word(word, factors)]

    def store_latent(self, values: list[Uint32], slab: int, tile, place) -> None:
        """Stores a lane's 16 columns of a slab."""
        self.store(tile, place.even, slab * SLAB_BYTES, values[:4])
        self.store(tile, place.odd, slab * SLAB_BYTES, values[4:])

    @cute.jit
    def raise_large(self, factors: Factors, tile, place, slabs: cutlass.Constexpr):
        """Multiplies what a lane has written of some slabs by the 2**120 that its token's scales were too large to
        contain. Hardly ever is there such a token. tile: an address."""
        if const_expr(self.dequantizer.any_scale):
            if cute.arch.vote_any_sync(reduce(or_, factors.large) != 0):
                for slab in slabs:
                    for half in (place.even, place.odd):
                        address = tile + half + slab * SLAB_BYTES
                        products = ptx.load_shared_vector(address, 0, 4)
                        raised = self.dequantizer.raised(products, factors, slab // self.layout.slabs_per_scale)
                        ptx.store_shared(address, 0, raised)

    def write_rope(self, words, i: int, tile, place) -> None:
        """Stores a lane's i-th 8 RoPE columns as they are."""
        first = 4 * (self.layout.code_slabs + i)
        self.store_rope([words[first + j] for j in range(4)], i, tile, place)

    def store_rope(self, values: list[Any], i: int, tile, place) -> None:
        """Stores a lane's i-th 8 RoPE columns, 4 words."""
        # Piece 4 + p of a row is 4 pieces from p whatever the row: the swizzle leaves that bit to itself.
        offset = place.rope ^ (4 * wgmma_tiles.PIECE_BYTES * i)
        self.store(tile, offset, self.layout.code_slabs * SLAB_BYTES, values)


class CopyLoad:
    """The producer warps over a cache of 16-bit numbers: asynchronous copies, which nobody here waits for."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.locator = make_locator(config.tokens)
        self.loader = QueryLoader(config)

    @cute.jit
    def run(self, work_tiles, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's shares."""
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
        """Asks for 8 rows of the tile, 64 bytes of a lane's apart; zeros for tokens that do not exist."""
        size = token.valid * wgmma_tiles.PIECE_BYTES
        for slab in range(self.config.layout.num_slabs):
            for i in range(2):
                target = (tile + place.rope) ^ (4 * wgmma_tiles.PIECE_BYTES * i)
                source = token.address + (place.source + wgmma_tiles.ROW_BYTES * slab + 64 * i)
                numbers.copy_async(target + slab * SLAB_BYTES, source, size)
