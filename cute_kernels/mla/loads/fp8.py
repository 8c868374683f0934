"""Producer warps over an FP8 cache: tokens are gathered, decoded and written as tiles of bf16, whole or in two
parts."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.mla.barriers import await_barriers
from cute_kernels.mla.config import GROUP_TOKENS, NUM_STAGES, MlaConfig
from cute_kernels.mla.loads.decode import TokenDecoder
from cute_kernels.mla.loads.destination import CrossoverTiles, OwnTiles
from cute_kernels.mla.loads.entries import Entries
from cute_kernels.mla.loads.gather import LanePlaces, leads
from cute_kernels.mla.loads.queries import QueryLoader
from cute_kernels.mla.work_tiles import Cursor

LEFT, RIGHT = 0, 1  # parts of a tile


class Fp8Load:
    """The load of whole tiles, for :mod:`.mainloops.serial` and :mod:`.mainloops.stepped`. tiles: the destination of
    the tiles."""

    def __init__(self, config: MlaConfig, tiles: OwnTiles | CrossoverTiles):
        self.config, self.tiles = config, tiles
        self.decoder = TokenDecoder(config, tiles, constant=True)
        self.entries = Entries.of(config)
        self.loader = QueryLoader(config)

    @cute.jit
    def run(self, work_tiles, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's work tiles."""
        first_row, place, link = places_of(self.tiles, memory, warp, lane)
        cursor = Cursor.before(work_tiles, self.loader, leads(warp, lane))
        words, scales = self.decoder.registers()
        self.entries.start(cursor, source, memory, first_row, lane)
        token = self.entries.token(source, memory, Int32(0), first_row, place.row)
        for i in cutlass.range_constexpr(self.decoder.num_loads):
            self.decoder.load_piece(words, token, place, i)
        self.decoder.load_scales(scales, token)
        held = token.valid
        self.entries.prefetch_first(source, memory, first_row, lane)
        await_barriers(self.config, produces=True)
        stage, phase, number = Int32(0), Int32(1), Int32(0)
        while number < cursor.found:
            cute.arch.mbarrier_wait(memory.empty + stage, phase)
            for group in cutlass.range_constexpr(self.config.warp_groups):
                following, row = self.step(number, group + 1, place)
                token = self.entries.token(source, memory, following, first_row, row)
                self.tiles.publish_flags(memory, link, stage, place.row // GROUP_TOKENS + group, held, lane)
                tile = self.tiles.tile(memory, link, stage, group)
                self.decoder.write_group(words, scales, token, tile, place)
                if const_expr(group == self.config.warp_groups - 1):
                    self.tiles.announce_tile(memory, stage, warp, lane)
                self.decoder.load_last(words, scales, token, place)
                held = token.valid
            self.entries.step(cursor, source, memory, number, first_row, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
            number = number + 1
        self.tiles.finish(memory, stage, phase)

    def step(self, number, groups: int, place):
        """Returns (block, row in the block) of a lane's token in the warp's ``groups``-th group of 8 tokens, counted on
        from the first group of block ``number`` into later blocks.
        """
        ahead, group = divmod(groups, self.config.warp_groups)
        return number + ahead, place.row + group * GROUP_TOKENS


class SplitFp8Load:
    """The load of tiles in two parts, for :mod:`.mainloops.delayed_pv`. Each part is written, sent and announced
    separately. The first part is the left half of the value with the columns after the value.

    Each part ends with a fence, for the copies to the other CTA. A fence waits for all loads in flight. The first use
    of a loaded register also waits for all loads, as the compiler counts a loop's loads on one scoreboard. Therefore a
    lane starts loading its whole next token right after the first fence. The second part has registers of its own, so
    it is decoded and sent before anything waits for the next token.
    """

    def __init__(self, config: MlaConfig):
        self.config, self.tiles = config, CrossoverTiles(config)
        # Loads stay between the fences where they are issued.
        self.decoder = TokenDecoder(config, self.tiles, constant=False)
        self.entries = Entries.of(config)
        self.loader = QueryLoader(config)

    @cute.jit
    def run(self, work_tiles, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's work tiles."""
        first_row, place, link = places_of(self.tiles, memory, warp, lane)
        cursor = Cursor.before(work_tiles, self.loader, leads(warp, lane))
        words, scales = self.decoder.registers()
        self.entries.start(cursor, source, memory, first_row, lane)
        token = self.entries.token(source, memory, Int32(0), first_row, place.row)
        self.load_token(words, scales, token, place)
        held = token.valid
        await_barriers(self.config, produces=True)
        stage, phase, number = Int32(0), Int32(1), Int32(0)
        while number < cursor.found:
            following = self.entries.token(source, memory, number + 1, first_row, place.row)
            factors = self.decoder.factors(scales)
            codes = self.taken(words)
            for part in cutlass.range_constexpr(2):
                cute.arch.mbarrier_wait(memory.empty + self.config.part_number(stage, part), phase)
                if const_expr(part == LEFT):
                    self.tiles.publish_flags(memory, link, stage, place.row // GROUP_TOKENS, held, lane)
                tile = self.tiles.tile(memory, link, stage, 0, part)
                self.write_part(codes, factors, tile, place, part)
                self.tiles.send(tile, part)
                self.tiles.announce_tile(memory, stage, warp, lane, part)
                if const_expr(part == LEFT):
                    self.load_token(words, scales, following, place)
            held = following.valid
            self.entries.step(cursor, source, memory, number, first_row, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
            number = number + 1
        self.tiles.finish(memory, stage, phase)

    @cached_property
    def pieces(self) -> tuple[list[int], ...]:
        """Indices of a lane's 16-byte pieces, for each part. Pieces of codes have the lowest indices, pieces of RoPE
        columns follow.
        """
        codes = self.decoder.layout.code_slabs
        return tuple(
            [i for i in range(self.decoder.num_loads) if min(i, codes) in slabs] for slabs in self.config.parts
        )

    def load_token(self, words, scales, token, place) -> None:
        """Starts loading a lane's scales and pieces of a token."""
        self.decoder.load_scales(scales, token)
        for part in (LEFT, RIGHT):
            for i in self.pieces[part]:
                self.decoder.load_piece(words, token, place, i)

    def taken(self, words) -> list[list[Uint32]]:
        """Returns a lane's pieces, 4 words each. The second part's pieces are in registers of their own, which the next
        token's load does not overwrite."""
        pieces = [[Uint32(words[4 * i + j]) for j in range(4)] for i in range(self.decoder.num_loads)]
        for i in self.pieces[RIGHT]:
            pieces[i] = [ptx.pinned(word) for word in pieces[i]]
        return pieces

    def write_part(self, codes, factors, tile, place, part: int) -> None:
        """Decodes a lane's pieces of a part into their slabs."""
        first_rope = self.decoder.layout.code_slabs
        for i in self.pieces[part]:
            if i < first_rope:
                own = factors.scales[i // self.decoder.layout.slabs_per_scale]
                self.decoder.store_latent(self.decoder.decode(codes[i], own), i, tile, place)
            else:
                self.decoder.store_rope(codes[i], i - first_rope, tile, place)
        slabs = [i for i in self.pieces[part] if i < first_rope]
        self.decoder.raise_large(factors, self.tiles.here(tile), place, slabs)


def places_of(tiles: OwnTiles | CrossoverTiles, memory, warp, lane) -> tuple[Any, Any, Any]:
    """Returns (a warp's first row of a block, its lanes' `LanePlaces`, the link to the other CTA)."""
    first_row = tiles.first_row(warp)
    return first_row, LanePlaces.of(first_row, lane), tiles.link(memory, first_row)
