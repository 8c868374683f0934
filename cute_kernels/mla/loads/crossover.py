"""Crossover: two CTAs with different heads of a row decode half of its tokens each and send them to each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla.barriers import await_barriers
from cute_kernels.mla.config import BLOCK_TOKENS, FLAG_BYTES, GROUP_TOKENS, NUM_STAGES
from cute_kernels.mla.loads.gather import GROUP_BYTES, SLAB_BYTES, DequantizeLoad, leads
from cute_kernels.mla.work_tiles import Cursor

LEFT, RIGHT = 0, 1  # parts of a tile


@dataclass(frozen=True)
class Link:
    """The other CTA of a pair; run-time values."""

    first_row: Any  # of the warp's rows in a block
    distance: Any  # from an address of this CTA's shared memory to the same place in the other's


@dataclass(frozen=True)
class SharedTile:
    """Where rows go: here, and as far away in the other CTA, which counts them on its barrier; run-time values."""

    address: Any
    rows: Any  # of the warp's group, the same in all lanes
    distance: Any
    barrier: Any


class CrossoverLoad(DequantizeLoad):
    """Half of the tokens of every block, written here and copied to the other CTA of the pair, which sends its half.

    The idea ("crossover") is that of FlashMLA's FP8 kernel (DeepSeek 2025), whose threads store everything twice. Here
    the 8 rows that a warp has written of a slab, 1 KB side by side, are one bulk copy; those of all slabs are sent at
    once, since the fence before them waits for loads that are under way. Tiles are whole, for
    :mod:`.mainloops.stepped`."""

    def first_row(self, warp):
        rank = cute.arch.block_idx_in_cluster()
        return rank * (BLOCK_TOKENS // 2) + warp * GROUP_TOKENS

    def link(self, memory, first_row) -> Link:
        other = 1 - cute.arch.block_idx_in_cluster()
        distance = numbers.address_in(memory.tiles, other) - memory.tiles
        return Link(cute.arch.make_warp_uniform(first_row), cute.arch.make_warp_uniform(distance))

    @cute.jit
    def publish_flags(self, memory, link, stage, group, valid, lane):
        flags = Uint32(cute.arch.vote_ballot_sync(valid != 0)) & 0xFF
        if lane == 0:
            place = memory.flags + stage * FLAG_BYTES + group * 4
            ptx.store_shared(place, 0, [flags])
            barrier = (memory.full + self.config.part_number(stage, 0)).toint() + link.distance
            numbers.store_async(place + link.distance, [flags], barrier)

    def tile(self, memory, link, stage, group: int, part: int = 0) -> SharedTile:
        address = memory.tiles + stage * self.config.tile_bytes + group * GROUP_BYTES
        rows = address + link.first_row * wgmma_tiles.ROW_BYTES
        barrier = (memory.full + self.config.part_number(stage, part)).toint() + link.distance
        return SharedTile(address, rows, link.distance, barrier)

    def here(self, tile: SharedTile):
        return tile.address

    def store(self, tile: SharedTile, place, offset: int, values) -> None:
        ptx.store_shared(tile.address + place, offset, values)

    def send(self, tile: SharedTile, part: int = 0) -> None:
        """Copies a warp's rows of all slabs of a part."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            for slab in self.config.parts[part]:
                source = tile.rows + slab * SLAB_BYTES
                numbers.copy_to_cluster(source + tile.distance, source, GROUP_BYTES, tile.barrier)

    def finish(self, memory, stage, phase) -> None:
        """Waits until both CTAs have given back all tiles: then the other has this one's rows, and its last arrival is
        here, so that this one may leave."""
        for _ in range(NUM_STAGES):
            for part in range(self.config.tile_parts):
                cute.arch.mbarrier_wait(memory.empty + self.config.part_number(stage, part), phase)
            stage, phase = advance(stage, phase, NUM_STAGES)

    @cute.jit
    def announce_tile(self, memory, stage, warp, lane, part: cutlass.Constexpr = 0):
        """As that of one CTA, of a part of a tile, behind the fence of the copies; the first warp also says how many
        bytes are to come from the other CTA."""
        barrier = memory.full + self.config.part_number(stage, part)
        if lane == 0:
            if warp == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.config.sent_bytes(part))
            else:
                cute.arch.mbarrier_arrive(barrier)


class SplitCrossoverLoad(CrossoverLoad):
    """Tiles in two parts, for :mod:`.mainloops.delayed_pv`: each is written, sent and announced by itself, the left
    half of the value with the columns behind it first.

    A fence stands behind each part, for the copies to the other CTA, and one would wait for tokens that have just been
    asked for; and the first use of any of them waits for all, since the compiler counts what a loop carries on one
    scoreboard. So all of a lane's next token is asked for at one place, right behind the first fence, with the second
    part still to be decoded and sent before anyone waits. That part has registers of its own meanwhile.
    """

    constant = False  # loads stay between the fences where they are issued

    @cute.jit
    def run(self, work_tiles, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's shares."""
        first_row, place, link = self.places(memory, warp, lane)
        cursor = Cursor.before(work_tiles, self.loader, leads(warp, lane))
        token, words, scales = self.first_token(cursor, source, memory, first_row, place, lane)
        self.load_token(words, scales, token, place)
        held = token.valid
        await_barriers(self.config, produces=True)
        stage, phase, number = Int32(0), Int32(1), Int32(0)
        while number < cursor.found:
            following = self.entries.token(source, memory, number + 1, first_row, place.row)
            factors = self.factors(scales)
            codes = self.taken(words)
            for part in cutlass.range_constexpr(2):
                cute.arch.mbarrier_wait(memory.empty + self.config.part_number(stage, part), phase)
                if const_expr(part == LEFT):
                    self.publish_flags(memory, link, stage, place.row // GROUP_TOKENS, held, lane)
                tile = self.tile(memory, link, stage, 0, part)
                self.write_part(codes, factors, tile, place, part)
                self.send(tile, part)
                self.announce_tile(memory, stage, warp, lane, part)
                if const_expr(part == LEFT):
                    self.load_token(words, scales, following, place)
            held = following.valid
            self.entries.step(cursor, source, memory, number, first_row, lane)
            stage, phase = advance(stage, phase, NUM_STAGES)
            number = number + 1
        self.finish(memory, stage, phase)

    @cached_property
    def pieces(self) -> tuple[list[int], ...]:
        """Which of a lane's 16 bytes, those of the codes and then of the RoPE columns, belong to each part."""
        codes = self.layout.code_slabs
        return tuple([i for i in range(self.num_loads) if min(i, codes) in slabs] for slabs in self.config.parts)

    def load_token(self, words, scales, token, place) -> None:
        """Asks for all that a lane has of a token."""
        self.load_scales(scales, token)
        for part in (LEFT, RIGHT):
            for i in self.pieces[part]:
                self.load_piece(words, token, place, i)

    def taken(self, words) -> list[list[Uint32]]:
        """A lane's pieces, 4 words each; those of the second part in registers that outlive the next load."""
        pieces = [[Uint32(words[4 * i + j]) for j in range(4)] for i in range(self.num_loads)]
        for i in self.pieces[RIGHT]:
            pieces[i] = [ptx.pinned(word) for word in pieces[i]]
        return pieces

    def write_part(self, codes, factors, tile, place, part: int) -> None:
        """Decodes a lane's pieces of a part into their slabs."""
        first_rope = self.layout.code_slabs
        for i in self.pieces[part]:
            if i < first_rope:
                own = factors.scales[i // self.layout.slabs_per_scale]
                self.store_latent(self.decode(codes[i], own), i, tile, place)
            else:
                self.store_rope(codes[i], i - first_rope, tile, place)
        slabs = [i for i in self.pieces[part] if i < first_rope]
        self.raise_large(factors, self.here(tile), place, slabs)
