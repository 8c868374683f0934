"""Entries of future blocks, which a producer warp keeps in shared memory. The warp also prefetches the tokens of these
blocks into L2.

The compiler uses one counter to wait for all loads that a loop carries in registers. So a warp that used an entry from
a register would also wait 1000 clocks for the tokens that it has just requested. Therefore entries are copied to shared
memory without passing through registers. Each warp loads and reads only the entries of its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.mla.config import BLOCK_TOKENS, ENTRY_BLOCK_BYTES, GROUP_TOKENS, MlaConfig
from cute_kernels.mla.loads.locate import PagedLocator, SparseLocator, Token, make_locator

LINE_BYTES = 128  # of L2


@dataclass(frozen=True)
class Entries:
    """A producer warp's entries in a circular buffer of ``ring`` blocks.

    A block's entries are loaded ``lead + 1`` blocks ahead, and may be read from ``lead`` blocks ahead on. Its tokens
    are prefetched into L2 ``prefetch`` blocks ahead; the lanes divide a token's lines of 128 bytes among them. The
    tokens of the first two blocks are prefetched at the start. The tokens of the next blocks are prefetched only after
    the first tile, since at the beginning of a launch all SMs load at once, queries too.
    """

    locator: SparseLocator | PagedLocator
    rows: int  # of a block, that a warp fetches
    ring: int  # blocks, a power of 2
    lead: int
    prefetch: int  # blocks, 0 for not at all
    token_bytes: int
    split: bool  # scales lie after the data of all tokens of a page

    @staticmethod
    def of(config: MlaConfig) -> Entries:
        layout, rows = config.layout, config.warp_groups * GROUP_TOKENS
        ring = config.entry_blocks, config.entry_lead
        return Entries(
            make_locator(config.tokens), rows, *ring, config.tiles.load.prefetch, layout.data_bytes, layout.is_split
        )

    @cute.jit
    def start(self, cursor, source, memory, first_row, lane):
        """Loads the entries of the first blocks, and waits for them."""
        for i in cutlass.range(self.lead + 1, unroll=1):
            self.request(cursor, source, memory, i, first_row, lane)
        self.wait()

    @cute.jit
    def prefetch_first(self, source, memory, first_row, lane):
        """Prefetches the tokens of the first two blocks, if the configuration prefetches."""
        if const_expr(self.prefetch > 0):
            for i in cutlass.range_constexpr(2):
                self.ask(source, memory, Int32(i), first_row, lane)

    @cute.jit
    def step(self, cursor, source, memory, number, first_row, lane):
        """Waits for the entries in flight, and starts loading the entries of one more block. Prefetches tokens if the
        configuration prefetches. Callers call it when the tile of block ``number`` is filled.
        """
        self.wait()  # for what the last step asked for
        self.request(cursor, source, memory, number + (self.lead + 1), first_row, lane)
        if const_expr(self.prefetch > 0):
            if number == 0:
                for i in cutlass.range_constexpr(2, self.prefetch):
                    self.ask(source, memory, Int32(i), first_row, lane)
            self.ask(source, memory, number + self.prefetch, first_row, lane)

    def token(self, source, memory, number, first_row, row) -> Token:
        """Returns the token in row ``row`` of the CTA's ``number``-th block, whose entry has arrived."""
        entry = ptx.load_shared(self.place(memory, number, row), 0).to(Int32)
        mark = ptx.load_shared(self.mark_place(memory, number, first_row), 0).to(Int32)
        return self.locator.token(source, entry, self.locator.marked(mark), row)

    def place(self, memory, number, row):
        return memory.entries + (number & (self.ring - 1)) * ENTRY_BLOCK_BYTES + row * 4

    def mark_place(self, memory, number, first_row):
        """Returns the address of a warp's copy of a block's mark; `Locator` says what a mark is."""
        return self.place(memory, number, BLOCK_TOKENS + first_row // GROUP_TOKENS)

    @cute.jit
    def request(self, cursor, source, memory, number, first_row, lane):
        """Starts loading the entries of the next block, the ``number``-th of the CTA."""
        cursor.advance()
        work, block = cursor.work, cursor.block
        if lane < self.rows:
            row = first_row + lane
            self.locator.copy_entry(self.place(memory, number, row), work, source, block, row)
        if lane == 0:
            ptx.store_shared(self.mark_place(memory, number, first_row), 0, [self.locator.mark(work, block)])
        cute.arch.cp_async_commit_group()

    def wait(self) -> None:
        """Waits for all entries in flight; then all lanes may read them."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    def ask(self, source, memory, number, first_row, lane) -> None:
        """Prefetches the tokens of the CTA's ``number``-th block into L2."""
        token = self.token(source, memory, number, first_row, first_row + lane % self.rows)
        for offset in self.lines(lane // self.rows):
            numbers.prefetch_line_if(token.valid, token.address + offset)
        if self.split:
            numbers.prefetch_line_if(cutlass.select_(lane < self.rows, token.valid, Int32(0)), token.behind)

    def lines(self, sharer) -> list[Any]:
        """Returns byte offsets in a token, one for each line that a lane prefetches. sharer: index of the lane among
        the lanes that prefetch the same token. Tokens begin on any multiple of 16 bytes.
        """
        count = -(-(self.token_bytes + LINE_BYTES - wgmma_tiles.PIECE_BYTES) // LINE_BYTES)
        share = -(-count // (WARP_THREADS // self.rows))
        last = self.token_bytes - wgmma_tiles.PIECE_BYTES
        return [cutlass.min((sharer * share + i) * LINE_BYTES, last) for i in range(share)]
