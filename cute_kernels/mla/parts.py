"""Crossover in two parts, for :mod:`.lagging`: a part of a tile is written, sent and announced by itself.

The left half of the value, with the columns behind it, comes first: products want it first and give it back first. A
fence stands behind each part, for the copies to the other CTA, and one would wait for tokens that have just been asked
for; and the first use of any of them waits for all, since the compiler counts what a loop carries on one scoreboard. So
all of a lane's next token is asked for at one place, right behind the first fence, with the second part still to be
decoded and sent before anyone waits. That part has registers of its own meanwhile.
"""

from __future__ import annotations

from functools import cached_property

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import GROUP_TOKENS, NUM_STAGES
from cute_kernels.mla.gather import Crossing, GatherLane, await_barriers, leads
from cute_kernels.mla.items import Cursor

LEFT, RIGHT = 0, 1


class CrossingInParts(Crossing):
    """See the module."""

    constant = False  # loads stay between the fences where they are issued

    @cute.jit
    def run(self, items, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's shares."""
        first_row = self.first_row(warp)
        place = GatherLane.of(first_row, lane)
        link = self.link(memory, first_row)
        words = cute.make_rmem_tensor(4 * self.num_loads, Uint32)
        scales = cute.make_rmem_tensor(self.scale_words, Uint32)
        cursor = Cursor.before(items, self.loader, leads(warp, lane))
        self.entries.start(cursor, source, memory, first_row, lane)
        token = self.entries.token(source, memory, Int32(0), first_row, place.row)
        self.load_token(words, scales, token, place)
        held = token.valid
        await_barriers(self.config)
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
                own = factors[i // self.layout.slabs_per_scale]
                self.store_latent(self.decode(codes[i], own), i, tile, place)
            else:
                self.store_rope(codes[i], i - first_rope, tile, place)
