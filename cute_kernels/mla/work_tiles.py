"""The work tiles that a CTA computes one after the other, and the blocks of tokens of each work tile.

Producers load the blocks of the next work tile right after those of the current one, so the pipeline never runs dry.
They find blocks by a cursor of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from cute_kernels.device.division import Divisor
from cute_kernels.device.types import RegisterTensor
from cute_kernels.mla.config import BLOCK_HEADS
from cute_kernels.mla.loads.locate import PagedLocator, PagedSource, SparseLocator, SparseSource, count_blocks
from cute_kernels.mla.loads.queries import QueryLoader, QuerySource
from cute_kernels.mla.stream_k import PartialExchange, StreamK, units_of
from cute_kernels.mla.work import MlaSizes, WorkTile

# What a cursor keeps in registers.
LEFT, BLOCK, FOUND, ROW, END, LENGTH, MAIN_BLOCKS, EXTRA_LENGTH = range(8)


@dataclass(frozen=True)
class Counts:
    """The values by which a kernel divides, as `Divisor`s that the host makes."""

    of_part: Divisor  # work tiles of the first parts of all rows
    head_blocks: Divisor  # of a row
    request_rows: Divisor
    cuts: Divisor  # parts of a row, or teams on stream-K

    @staticmethod
    def of(shape: MlaSizes, head_blocks, num_ctas) -> Counts:
        cuts = cutlass.select_(shape.num_parts == 0, num_ctas // head_blocks, shape.num_parts)
        numbers = shape.rows * head_blocks, head_blocks, shape.request_rows, cutlass.max(cuts, 1)
        return Counts(*(Divisor.of(Int32(number)) for number in numbers))


@dataclass(frozen=True)
class WorkTiles:
    """The work tiles of a CTA; run-time values.

    A work tile is a part of a row for 64 of its heads. Without stream-K a CTA has one work tile. The block of heads
    varies fastest from CTA to CTA, then the row, then the part. So the CTAs of a cluster have the same row and part.
    Under stream-K a CTA has a work range of ``left`` units over successive rows. The range begins with the ``start``-th
    unit of ``row``.
    """

    shape: MlaSizes
    source: SparseSource | PagedSource
    queries: QuerySource
    locator: SparseLocator | PagedLocator
    counts: Counts
    exchange: PartialExchange
    head_block: Int32
    row: Int32  # of the first work tile
    start: Int32  # its part, or its first unit
    left: Int32  # more than 0

    has_stream_k: ClassVar[bool] = True  # whether rows may be one

    @staticmethod
    def of(shape: MlaSizes, source, queries, locator, counts: Counts, words, flags, cta, lane) -> WorkTiles:
        """Returns the work tiles of the ``cta``-th CTA. words, flags: addresses for `PartialExchange`."""
        team, head_block = (Int32(number) for number in counts.head_blocks.divide(Uint32(cta)))
        exchange = PartialExchange(words, flags, cta, cta - counts.head_blocks.value)
        first = _first(shape, source, locator, counts, cta, team, lane)
        row, start, left = (cute.arch.make_warp_uniform(value) for value in first)
        return WorkTiles(shape, source, queries, locator, counts, exchange, head_block, row, start, left)

    def work(self, row, start, left) -> WorkTile:
        """Returns the work tile of a row. start: index of the part or, under stream-K, of the first unit. left: number
        of units that the CTA still has.
        """
        shape = self.shape
        length, main_blocks, num_blocks, extra_length = self.measure(row)
        is_stream_k = shape.num_parts == 0
        part_size, _ = self.counts.cuts.divide(Uint32(num_blocks + shape.num_parts - 1))
        first = cutlass.select_(is_stream_k, start, start * Int32(part_size))
        last = first + cutlass.select_(is_stream_k, left, Int32(part_size))
        begin, end = cutlass.min(first, num_blocks), cutlass.min(last, num_blocks)
        taken = cutlass.min(left, units_of(num_blocks) - start)
        return WorkTile(
            shape, row, self.head_block * BLOCK_HEADS, start, begin, end, length, main_blocks, extra_length,
            left=cutlass.select_(is_stream_k, left - taken, Int32(0)),
            publishes=is_stream_k & (start > 0),
            resumes=is_stream_k & (last < num_blocks),
        )  # fmt: skip

    def next_tile(self, row, left) -> WorkTile:
        """Returns the next work tile under stream-K: a row from its first block on. The result has only the fields that
        a cursor needs."""
        length, main_blocks, num_blocks, extra_length = self.measure(row)
        first_head, end = self.head_block * BLOCK_HEADS, cutlass.min(left, num_blocks)
        left = left - cutlass.min(left, units_of(num_blocks))
        return WorkTile(self.shape, row, first_head, None, Int32(0), end, length, main_blocks, extra_length, left=left)

    def measure(self, row) -> tuple[Any, ...]:
        """Returns (number of a row's tokens in the cache, blocks of these tokens, blocks of both caches, number of
        tokens in the extra cache).
        """
        request, _ = self.counts.request_rows.divide(Uint32(row))
        length, extra_length = self.locator.lengths(self.source, Int32(request))
        return length, *count_blocks(length, extra_length), extra_length


class PartTiles(WorkTiles):
    """The work tile of a CTA under a cooperative combine: one part of a row. `exchange` has the addresses for
    :mod:`.combine.cooperative`."""

    has_stream_k: ClassVar[bool] = False

    @staticmethod
    def of(shape: MlaSizes, source, queries, locator, counts: Counts, words, flags, cta, lane) -> PartTiles:
        part, rest = counts.of_part.divide(Uint32(cta))
        row, head_block = (Int32(number) for number in counts.head_blocks.divide(rest))
        exchange = PartialExchange(words, flags, cta, cta)
        return PartTiles(shape, source, queries, locator, counts, exchange, head_block, row, Int32(part), Int32(1))

    def work(self, row, start, left) -> WorkTile:
        """Returns the CTA's only work tile. start: index of its part."""
        length, main_blocks, num_blocks, extra_length = self.measure(row)
        part_size, _ = self.counts.cuts.divide(Uint32(num_blocks + self.shape.num_parts - 1))
        begin, end = WorkTile.cut(num_blocks, Int32(part_size), start)
        first_head = self.head_block * BLOCK_HEADS
        return WorkTile(
            self.shape, row, first_head, start, begin, end, length, main_blocks, extra_length, left=Int32(0)
        )


@cute.jit
def _first(shape, source, locator, counts, cta, team, lane):
    """Returns (row, start, left) of a CTA's first work tile."""
    row, start, left = Int32(0), Int32(0), Int32(1)
    if shape.num_parts == 0:
        requests, _ = counts.request_rows.divide(Uint32(shape.rows))
        stream_k = StreamK(locator, source, Int32(requests), shape.request_rows, counts.cuts)
        row, start, left = stream_k.work_range(team, lane)
    else:
        part, rest = counts.of_part.divide(Uint32(cta))
        number, _ = counts.head_blocks.divide(rest)
        row, start = Int32(number), Int32(part)
    return row, start, left


@dataclass(frozen=True)
class Cursor:
    """A producer's position in the blocks of a CTA. The position goes through all work tiles, block after block. All
    lanes of a warp have the same cursor."""

    work_tiles: WorkTiles
    loader: QueryLoader
    leads: Int32  # 1 in the thread that has the queries of later work tiles brought into L2, else 0
    state: RegisterTensor[Int32]  # rmem int32 [8]

    @staticmethod
    def before(work_tiles: WorkTiles, loader, leads) -> Cursor:
        """Makes the cursor before the first block."""
        state = cute.make_rmem_tensor(8, Int32)
        state.fill(0)
        cursor = Cursor(work_tiles, loader, leads, state)
        cursor.begin(work_tiles.work(work_tiles.row, work_tiles.start, work_tiles.left))
        state[BLOCK] = state[BLOCK] - 1
        return cursor

    @property
    def block(self):
        """The index of the current block in its row."""
        return Int32(self.state[BLOCK])

    @property
    def found(self):
        """The number of blocks that the cursor has reached so far, the current block included."""
        return Int32(self.state[FOUND])

    @property
    def work(self) -> WorkTile:
        """The current block's work tile, with only the fields that locators need."""
        row, end, length, main_blocks, extra = (
            Int32(self.state[i]) for i in (ROW, END, LENGTH, MAIN_BLOCKS, EXTRA_LENGTH)
        )
        return WorkTile(self.work_tiles.shape, row, None, None, None, end, length, main_blocks, extra)

    @cute.jit
    def advance(self):
        """Moves the cursor to the CTA's next block. If no block is left, ``block`` is then at or beyond the work tile's
        end."""
        state = self.state
        state[BLOCK] = state[BLOCK] + 1
        if const_expr(self.work_tiles.has_stream_k):
            while (state[BLOCK] >= state[END]) & (state[LEFT] > 0):
                work = self.work_tiles.next_tile(state[ROW] + 1, state[LEFT])
                self.loader.prefetch(self.work_tiles.queries, work, self.leads)
                self.begin(work)
        if state[BLOCK] < state[END]:
            state[FOUND] = state[FOUND] + 1

    def begin(self, work: WorkTile) -> None:
        """Moves the cursor to the first block of a work tile."""
        assert work.begin is not None and work.left is not None, "want a work tile that knows where it begins"
        kept = (LEFT, work.left), (BLOCK, work.begin), (END, work.end), (ROW, work.row), (LENGTH, work.length)
        for i, value in (*kept, (MAIN_BLOCKS, work.main_blocks), (EXTRA_LENGTH, work.extra_length)):
            self.state[i] = value
