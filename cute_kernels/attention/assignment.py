"""Decides on the device, from the lengths, which tokens a CTA processes. The host never waits for the lengths, and one
CUDA graph serves all lengths.

A *row* is a request (and the heads of a CTA). A *unit* is one part of a row's tiles, on which one CTA works at a time.
If the lengths are alike, every row is cut into one part for each of its CTAs. A CTA's position in the grid says its row
and part, so it may load its first tile before it knows any length.

If lengths differ, the tiles of all rows form one sequence, row by row. It is cut into ranges of equal length, and CTA i
takes range i (stream-K). So one request of 100,000 tokens among a thousand short ones is spread over the whole GPU, and
all CTAs end together. The tiles of a range that belong to one row are a unit. A CTA processes the units of its range
from the last row to the first.

If several ranges share a row, the first of these ranges ends in the row, so its CTA processes the row before its other
rows. The other ranges begin in the row, so their CTAs process the row last. These other CTAs combine the row. So a
combining CTA never waits for a CTA that has other units to process first.

`tests/attention/cut_rows.py` says in plain Python how rows are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.attention.cta import Work
from cute_kernels.attention.decode_schedule import ALIKE
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS


@dataclass(frozen=True)
class Requests:
    """Lengths and counts of the requests of a launch; run-time values.

    Attributes:
        address: address of the lengths, int32 [batch].
        max_seq_len: number of tokens that the cache has room for in a request.
        seen: how many of a request's last tokens its queries may see (:meth:`.terms.ScoreTerms.reach`); None if they
            see all.
        parts: number of CTAs of a row.
        ranges: number of ranges into which the tiles of all requests are cut if lengths differ; the grid's first CTAs
            take one each. 0: every row has ``parts`` parts whatever its length.
    """

    address: Int64
    batch: Int32
    max_seq_len: Int32
    seen: Int32 | None
    parts: Int32
    ranges: Int32


@dataclass(frozen=True)
class Range:
    """The tiles of all rows form one sequence; this is a CTA's range of it, in run-time integers.

    Attributes:
        size: number of tiles of a range; 0 if lengths are alike.
        ahead: number of the range's tiles that lie before the current row. It is negative if the range begins inside
            the row: -ahead tiles of the row lie before the range.
    """

    size: Int32
    ahead: Int32

    def has_more(self):
        """Returns whether the range begins in a row before the current row."""
        return self.ahead > 0

    def uniform(self) -> Range:
        """Returns the range in uniform registers."""
        return Range(cute.arch.make_warp_uniform(self.size), cute.arch.make_warp_uniform(self.ahead))


class Assigner:
    """The device code that computes units. Every warp runs it, so no warp waits for another."""

    def __init__(self, tile_tokens: int):
        self.tile_tokens = tile_tokens

    def fetch_length(self, requests, row):
        """Starts loading a request's length. The caller passes the loaded length to :meth:`limit_length`."""
        return ptx.load_global_words(requests.address + Int64(row) * 4, 0, 1)[0].to(Int32)

    def limit_length(self, requests, length):
        """Clamps a loaded length between 0 and max_seq_len, the tokens that the cache has room for."""
        return cutlass.min(cutlass.max(length, 0), requests.max_seq_len)

    def length_of(self, requests, row):
        """Returns a request's clamped length; waits for its load."""
        return self.limit_length(requests, self.fetch_length(requests, row))

    def first_tile(self, requests, length):
        """Returns the index of the tile that has the first token which any query sees."""
        if const_expr(requests.seen is None):
            return Int32(0)
        return cutlass.max(length - requests.seen, 0) // self.tile_tokens

    def tiles_of(self, requests, length):
        """Returns how many tiles a row has to read, at least 1: a request without tokens has an output too."""
        tiles = (length + (self.tile_tokens - 1)) // self.tile_tokens - self.first_tile(requests, length)
        return cutlass.max(tiles, 1)

    def rows_of_lane(self, requests):
        return (requests.batch + (WARP_THREADS - 1)) // WARP_THREADS

    def fetch_first_length(self, requests, lane: Int32):
        """Starts loading the length that a lane reads first in `tiles_per_range`. The load also brings the next
        requests' lengths into L1 and L2."""
        return self.fetch_length(requests, cutlass.min(lane * self.rows_of_lane(requests), requests.batch - 1))

    @cute.jit
    def tiles_per_range(self, requests, first_length, lane: Int32):
        """Returns how many tiles a range has if the lengths differ. Returns 0 if they are alike: each row then has
        ``parts`` parts.

        first_length: the result of :meth:`fetch_first_length`.
        """
        result = Int32(0)
        if requests.ranges > 0:
            total, most = Int32(0), Int32(1)
            rows = self.rows_of_lane(requests)
            if lane * rows < requests.batch:
                total = self.tiles_of(requests, self.limit_length(requests, first_length))
                most = total
            for i in cutlass.range(1, rows, 1, unroll=1):
                tiles = self.tiles_of_row(requests, lane * rows + i)
                total = total + tiles
                most = cutlass.max(most, tiles)
            total = ptx.warp_sum(total)
            most = ptx.warp_max(most)
            if Int64(most) * requests.batch * ALIKE[0] > Int64(total) * ALIKE[1]:
                result = (total + requests.ranges - 1) // requests.ranges
        return result

    @cute.jit
    def tiles_of_row(self, requests, row: Int32):
        """Returns how many tiles a row has; 0 for a row that does not exist."""
        tiles = Int32(0)
        if row < requests.batch:
            tiles = self.tiles_of(requests, self.length_of(requests, row))
        return tiles

    @cute.jit
    def find_row(self, requests, tile: Int32, lane: Int32):
        """Finds the row of tile ``tile`` in the sequence of all rows' tiles. Returns (row, index of the row's first
        tile). A tile beyond the last one belongs to the last row.
        """
        rows = self.rows_of_lane(requests)
        own = Int32(0)
        for i in cutlass.range(rows, unroll=1):
            own = own + self.tiles_of_row(requests, lane * rows + i)
        upto = own
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(upto, 1 << step)
            upto = upto + cutlass.select_(lane >= 1 << step, below, Int32(0))
        tile = cutlass.min(tile, cute.arch.shuffle_sync(upto, WARP_THREADS - 1) - 1)
        start = upto - own
        found_row, found_start = Int32(0), Int32(0)
        if (tile >= start) & (tile < upto):
            for i in cutlass.range(rows, unroll=1):
                tiles = self.tiles_of_row(requests, lane * rows + i)
                if (tile >= start) & (tile < start + tiles):
                    found_row, found_start = lane * rows + i, start
                start = start + tiles
        # One lane has found something, the others hold zeros.
        return ptx.warp_sum(found_row), ptx.warp_sum(found_start)

    def grid_work(self, requests, place, row, part, length) -> Work:
        """Returns part ``part`` of a row as a unit. A row has at most ``requests.parts`` parts, which take its tiles
        round-robin. If the result's part >= its num_parts, there is no such unit.
        """
        tiles, first = self.tiles_of(requests, length), self.first_tile(requests, length)
        num_parts = cutlass.min(tiles, requests.parts)
        begin, stride = (first + part) * self.tile_tokens, num_parts * self.tile_tokens
        return Work(place, row, part, num_parts, row * requests.parts, length, begin, length, stride)

    def range_work(self, requests, place, index, row, length, span) -> Work:
        """Returns the tiles of a row that lie in range ``index``, as a unit. If the result's part >= its num_parts,
        there is no such unit.
        """
        tiles, first = self.tiles_of(requests, length), self.first_tile(requests, length)
        before = cutlass.max(-span.ahead, 0)  # tiles of the row that other ranges have
        part = (before + span.size - 1) // span.size
        num_parts = (span.ahead + part * span.size + tiles - 1) // span.size + 1
        # CTAs beyond the ranges have nothing, whatever their numbers overflow to.
        num_parts = cutlass.select_(index < requests.ranges, num_parts, Int32(0))
        end = first + cutlass.min(span.size - span.ahead, tiles)
        begin, stop = first + before, cutlass.min(end * self.tile_tokens, length)
        # From unit to unit the range or the row goes up, so their sum is another for each.
        first_unit = index + row - part
        return Work(
            place, row, part, num_parts, first_unit, length, begin * self.tile_tokens, stop, Int32(self.tile_tokens)
        )

    def row_before(self, requests, work, span) -> tuple[Work, Range]:
        """Moves a range to the row before the row of ``work``. Returns (the range's unit in the new row, the range
        relative to the new row). Waits for the row's length, which :meth:`find_row` has brought into the L1 cache."""
        index, row = work.first_unit + work.part - work.request, work.request - 1
        length = self.length_of(requests, row)
        span = replace(span, ahead=span.ahead - self.tiles_of(requests, length)).uniform()
        return self.range_work(requests, work.place, index, row, length, span).uniform(), span
