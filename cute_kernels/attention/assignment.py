"""Decides on the device, from the lengths, which tokens a CTA takes: no host synchronisation, one graph for all
lengths.

A *row* is a request (and the heads of a CTA). A *unit* is one part of a row's tiles, on which one CTA works at a time.
If the lengths are alike, every row has as many parts as the launch has CTAs for it. A CTA then takes the part and row
of its own number, so it may load its first tile before it knows any length. If lengths differ, all rows are cut into
parts of about equal size, numbered row by row, and CTA i takes unit i. So one request of 100,000 tokens among a
thousand short ones is spread over the whole GPU. The launch has more CTAs than parts of rows, so that long rows may
have more; CTAs that are left over have nothing to do.

`tests/attention/cut_rows.py` says in plain Python how rows are cut.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.attention.decode_schedule import ALIKE, CUT_STEPS, FEW_ROWS
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS


@dataclass(frozen=True)
class Requests:
    """Lengths and counts of the requests of a launch; run-time values.

    address: of int32 lengths [batch]. max_seq_len: tokens that there is a cache for. seen: the number of tokens at a
    request's end that its queries see at most (:meth:`.terms.ScoreTerms.reach`); None if they see all. parts: CTAs of a
    row. more_rows: rows of CTAs beyond the batch; 0 if every row has ``parts`` parts whatever its length. shares: how
    many parts of about equal size that all requests together are cut into where lengths differ.
    """

    address: Int64
    batch: Int32
    max_seq_len: Int32
    seen: Int32 | None
    parts: Int32
    more_rows: Int32
    shares: Int32


@dataclass(frozen=True)
class Unit:
    """One part of a row: tiles first_tile + part, first_tile + part + num_parts, ...; run-time integers.

    first_unit: the unit number of the row's part 0, which locates the row's partial results. length: tokens of the row.
    """

    row: Int32
    part: Int32
    num_parts: Int32
    first_unit: Int32
    length: Int32
    first_tile: Int32


class Assigner:
    """The device code that computes units. Every warp runs it for itself, so no warp waits for another."""

    def __init__(self, tile_tokens: int):
        self.tile_tokens = tile_tokens

    def fetch_length(self, requests, row):
        """Starts loading a request's length; :meth:`limit_length` has to clamp the loaded number."""
        return ptx.load_global_words(requests.address + Int64(row) * 4, 0, 1)[0].to(Int32)

    def limit_length(self, requests, length):
        """Clamps a loaded length between 0 and max_seq_len, the tokens that there is a cache for."""
        return cutlass.min(cutlass.max(length, 0), requests.max_seq_len)

    def length_of(self, requests, row):
        """Returns a request's clamped length; waits for its load."""
        return self.limit_length(requests, self.fetch_length(requests, row))

    def first_tile(self, requests, length):
        """Returns the tile of the first token that some query sees."""
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
        """Starts loading the first of the lengths that a lane reads; the load brings its neighbours into the caches."""
        return self.fetch_length(requests, cutlass.min(lane * self.rows_of_lane(requests), requests.batch - 1))

    @cute.jit
    def tiles_per_part(self, requests, first_length, lane: Int32):
        """Returns the tiles of a part where the lengths differ; 0 where they are alike, so that each row has ``parts``
        parts.

        first_length: as :meth:`fetch_first_length` returns it.
        """
        result = Int32(0)
        if requests.more_rows > 0:
            total, most = Int32(0), Int32(1)
            rows = self.rows_of_lane(requests)
            if lane * rows < requests.batch:
                total = self.tiles_of(requests, self.limit_length(requests, first_length))
                most = total
            for i in cutlass.range(1, rows, 1, unroll=1):
                row = lane * rows + i
                if row < requests.batch:
                    tiles = self.tiles_of(requests, self.length_of(requests, row))
                    total = total + tiles
                    most = cutlass.max(most, tiles)
            total = ptx.warp_sum(total)
            most = ptx.warp_max(most)
            if Int64(most) * requests.batch * ALIKE[0] > Int64(total) * ALIKE[1]:
                result = self.cut(requests, total, lane)
        return result

    @cute.jit
    def cut(self, requests, total: Int32, lane: Int32):
        """Returns the tiles of a part where the lengths differ: so many that there is a CTA for each part."""
        ctas = (requests.batch + requests.more_rows) * requests.parts
        # A row may have a part more than divides it.
        units = cutlass.min(requests.shares, ctas - requests.batch)
        one_wave = requests.batch * FEW_ROWS <= requests.shares
        if one_wave:
            # No more units than the SMs hold at a time: the smallest parts that make no more are looked for.
            units = cutlass.min(requests.shares, ctas) - requests.batch
        result = (total + units - 1) // units
        if one_wave:
            least = (total + requests.shares - 1) // requests.shares
            for _ in cutlass.range(CUT_STEPS, unroll=1):
                middle = (least + result) // 2
                parts = Int32(0)
                rows = self.rows_of_lane(requests)
                for i in cutlass.range(rows, unroll=1):
                    parts = parts + self.parts_of(requests, lane * rows + i, middle)
                if ptx.warp_sum(parts) <= cutlass.min(requests.shares, ctas):
                    result = middle
                else:
                    least = cutlass.min(middle + 1, result)
        return result

    def grid_unit(self, requests, row, part, length) -> Unit:
        """Returns a CTA's unit where each row has ``parts`` parts; the unit is empty if part >= num_parts."""
        num_parts = cutlass.min(self.tiles_of(requests, length), requests.parts)
        return Unit(row, part, num_parts, row * requests.parts, length, self.first_tile(requests, length))

    @cute.jit
    def find_unit(self, requests, tiles_per_part: Int32, index: Int32, lane: Int32):
        """Returns unit ``index`` where the lengths differ, as (row, part, num_parts); num_parts is 0 if there is no
        such unit."""
        rows = self.rows_of_lane(requests)
        own = Int32(0)
        for i in cutlass.range(rows, unroll=1):
            own = own + self.parts_of(requests, lane * rows + i, tiles_per_part)
        upto = own
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(upto, 1 << step)
            upto = upto + cutlass.select_(lane >= 1 << step, below, Int32(0))
        rest = index - (upto - own)
        found_row, found_part, found_parts = Int32(0), Int32(0), Int32(0)
        if (rest >= 0) & (rest < own):
            for i in cutlass.range(rows, unroll=1):
                parts = self.parts_of(requests, lane * rows + i, tiles_per_part)
                if (rest >= 0) & (rest < parts):
                    found_row = lane * rows + i
                    found_part = rest
                    found_parts = parts
                rest = rest - parts
        # One lane at most has found something, the others hold zeros.
        return ptx.warp_sum(found_row), ptx.warp_sum(found_part), ptx.warp_sum(found_parts)

    @cute.jit
    def parts_of(self, requests, row: Int32, tiles_per_part: Int32):
        """Returns the parts of a row where the lengths differ; 0 for a row that does not exist."""
        parts = Int32(0)
        if row < requests.batch:
            tiles = self.tiles_of(requests, self.length_of(requests, row))
            parts = (tiles + tiles_per_part - 1) // tiles_per_part
        return parts
