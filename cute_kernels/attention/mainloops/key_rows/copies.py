"""Producer warps that copy raw rows of codes into the order that ldmatrix reads, without decoding.

Tensor maps copy rows of 128 bytes and, if `ExtendConfig.mapped` is True, rows with their headers. Tokens that no query
sees become zeros, which no tensor map writes. So cp.async copies tiles with such tokens, and all tiles in other
configurations. cp.async copies pieces of 16 bytes if rows are multiples of 16 bytes, else words. A row of an fp32 scale
and 8-bit codes is copied from the multiple of 16 bytes at or before its start, see `codes.ScaledByteRows`. Copies
arrive on a tile's barrier asynchronously, so a warp issues tiles as long as there are free stages.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import GROUP_TOKENS, MMA_WARPGROUPS
from cute_kernels.attention.loads.memory import KEYS, VALUES
from cute_kernels.attention.loads.rows import Places, RowRuns
from cute_kernels.attention.mainloops.key_rows.codes import CHUNK_BYTES, ByteRows, rows_of
from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.pipeline import PipelineState


def _aligned(address: Int64) -> Int64:
    """Rounds an address down to a multiple of 16."""
    return address & ~Int64(CHUNK_BYTES - 1)


class TileRows:
    """The copies of a producer warp's rows of K or V.

    by_tma: whether tensor maps copy the rows of a tile in which all rows exist.
    """

    def __init__(self, config: ExtendConfig, operand: int, runs: RowRuns, by_tma: bool):
        form = config.formats[operand]
        self.operand, self.tokens, self.warp_rows = operand, config.tile_tokens, runs.warp_rows
        self.heads = config.tile_heads if config.paired else 1  # of a row
        self.of_head, self.tuples = config.tile_tokens // runs.warp_rows, config.tile_heads
        self.rows = rows_of(form, config.paired)
        self.header_bytes, self.header_words = form.header_bytes, form.header_bytes // 4
        self.cache_bytes = form.row_bytes(config.head_dim)
        self.of_tokens = self.cache_bytes % CHUNK_BYTES > 0  # a map is over all bytes of a token, not over rows
        self.piece_bytes = 4 if self.of_tokens else CHUNK_BYTES
        self.row_pieces = self.rows.row_bytes // self.piece_bytes
        self.step_rows = 0 if self.rows.headed else WARP_THREADS // self.row_pieces
        self.runs, self.by_tma = runs, by_tma

    def lane_place(self, lane):
        """Returns what a lane copies when each lane of a warp copies one piece: (row among the rows that they copy
        together, the piece's first byte in the row, the piece's offset in the tile from the first of these rows).
        """
        below, first = lane // self.row_pieces, lane % self.row_pieces * self.piece_bytes
        place = below * self.rows.row_bytes + (first ^ (self.rows.swizzle(below) * CHUNK_BYTES))
        return below, first, place

    def copy_headed_rows(self, bases, token_bytes, tile, low, high, lane) -> None:
        """Starts copying rows with their headers, in all pieces of 16 bytes that the rows touch. No byte after a row is
        read. low, high: as for :meth:`copy_rows`.
        """
        pieces, somewhere = self.rows.row_bytes // CHUNK_BYTES, _aligned(bases[0])
        total, behind = self.warp_rows * pieces, self.heads * self.cache_bytes - (pieces - 1) * CHUNK_BYTES
        for first in range(0, total, WARP_THREADS):
            number = first + lane
            if first + WARP_THREADS > total:  # the last piece more than once
                number = cutlass.min(number, Int32(total - 1))
            row, piece = number // pieces, number % pieces
            base = bases[0]
            for run in range(1, len(bases)):
                base = cutlass.select_(row >= run * self.runs.rows, bases[run], base)
            start = base + Int64(row % self.runs.rows) * Int64(token_bytes)
            count, address = Int32(CHUNK_BYTES), _aligned(start) + Int64(piece * CHUNK_BYTES)
            if self.rows.shifted:
                last = (start.to(Int32) & (CHUNK_BYTES - 1)) + behind
                count = cutlass.select_(piece == pieces - 1, last, count)
            if low is not None:
                exists = (row >= low) & (row < high)
                count = cutlass.select_(exists, count, Int32(0))
                address = cutlass.select_(exists, address, somewhere)
            numbers.copy_async(tile + number * CHUNK_BYTES, address, count)

    @cute.jit
    def copy(
        self, source, work, memory, first_valid, places: Places, block: Int32, state: PipelineState, warp: Int32, lane
    ):
        """Starts copying a warp's rows of a block of tokens."""
        rows, stage = source.rows(self.operand), state.stage
        head = work.head * self.tuples + warp // self.of_head
        bases = self.runs.bases(source, rows, places, head)
        first = block * self.tokens + warp % self.of_head * self.warp_rows
        low, high = first_valid - first, work.kv_stop - first
        tile = memory.tile(self.operand, stage) + warp * (self.warp_rows * self.rows.row_bytes)
        headers = memory.header(self.operand, stage) + 4 * (warp * self.warp_rows)
        if const_expr(self.by_tma):
            if (low <= 0) & (high >= self.warp_rows):
                self.copy_tma_tiles(source, head, memory, places, state, warp)
            elif const_expr(self.rows.headed):
                self.copy_headed_rows(bases, rows.token_bytes, tile, low, high, lane)
            else:
                self.copy_rows(bases, rows.token_bytes, tile, headers, low, high, lane)
        elif const_expr(self.rows.headed):
            if (low <= 0) & (high >= self.warp_rows):
                self.copy_headed_rows(bases, rows.token_bytes, tile, None, None, lane)
            else:
                self.copy_headed_rows(bases, rows.token_bytes, tile, low, high, lane)
        elif (low <= 0) & (high >= self.warp_rows):
            self.copy_rows(bases, rows.token_bytes, tile, headers, None, None, lane)
        else:
            self.copy_rows(bases, rows.token_bytes, tile, headers, low, high, lane)

    def place_of(self, rows: int):
        """Returns the layout of ``rows`` rows in shared memory. Its elements are bytes, or words of 4 bytes if the
        tensor map is over whole tokens, since a TMA tile has at most 256 elements in each dimension."""
        if self.of_tokens:
            return cute.make_layout((rows, self.rows.row_bytes // 4), stride=(self.rows.row_bytes // 4, 1))
        if self.rows.headed:
            return cute.make_layout((rows, self.rows.row_bytes), stride=(self.rows.row_bytes, 1))
        return wgmma_tiles.tile_layout(rows, self.rows.row_bytes, Uint8)

    def tensor(self, pointer) -> cute.Tensor:
        """Returns the tensor of a run's rows at a pointer to shared memory."""
        rows = self.runs.rows
        if self.of_tokens:
            return cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), self.place_of(rows))
        if self.rows.headed:
            return cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint8), self.place_of(rows))
        return wgmma_tiles.tile(pointer, rows, self.rows.row_bytes, Uint8)

    def make_map(self, cache: cute.Tensor, head_major: bool):
        """Makes a tensor map with coordinates [token of a block, byte, head, block]. Runs on the host. Strides and the
        first bytes of TMA tiles have to be multiples of 16 bytes. If rows begin elsewhere, the map has coordinates
        [token of a block, word of the token, block]."""
        modes, rows = [2, 3, 1, 0] if head_major else [1, 3, 2, 0], self.runs.rows
        layout, pointer, length = cute.select(cache.layout, mode=modes), cache.iterator, self.rows.row_bytes
        if self.of_tokens:
            shape: Any = layout.shape
            stride: Any = layout.stride
            tokens, row, heads, blocks = shape
            words = (heads * row // 4, stride[0] // 4, stride[3] // 4)
            layout = cute.make_layout((tokens, words[0], blocks), stride=(words[1], 1, words[2]))
            pointer, length = cute.recast_ptr(pointer, dtype=Uint32), length // 4
        view = cute.make_tensor(pointer, layout)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, self.place_of(rows), (rows, length))

    def copy_tma_tiles(self, source, head, memory, places: Places, state: PipelineState, warp) -> None:
        """Starts copying all of a warp's rows by TMA, one load for each run of rows."""
        atom, view = source.maps[self.operand]
        shape, heads = (self.runs.rows, self.rows.row_bytes), [head]
        run_bytes = shape[0] * shape[1]
        if self.of_tokens:
            shape = (self.runs.rows, self.rows.row_bytes // 4)
            first_word = (head * self.cache_bytes & ~(CHUNK_BYTES - 1)) >> 2
            view, heads = cute.domain_offset((0, cute.assume(first_word, divby=CHUNK_BYTES // 4), 0), view), []
        tma_tiles = cute.local_tile(view, shape, (None,) * (3 + len(heads)))
        barrier = memory.tile_pipeline.full_barrier(state)
        first = memory.tile_offset(self.operand, state.stage) + warp * (self.warp_rows * self.rows.row_bytes)
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(barrier, self.warp_rows * self.rows.row_bytes)
        for run in range(self.runs.count):
            block = self.runs.block(source, places, run)
            target, origin = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(self.tensor(memory.tile_pointer + (first + run * run_bytes)), 0, 2),
                cute.group_modes(tma_tiles, 0, 2),
            )
            row = places.places[run] // shape[0]
            cute.copy(atom, origin[(None, row, 0, *heads, block)], target, tma_bar_ptr=barrier)

    def copy_rows(self, bases, token_bytes, tile, headers, low, high, lane) -> None:
        """Starts copying rows without headers, and headers that lie apart. low, high: rows ``low`` to ``high`` - 1
        exist; None if all rows do.
        """
        below, first, place = self.lane_place(lane)
        step_bytes = Int64(token_bytes) * self.step_rows
        start = Int64(below) * Int64(token_bytes) + Int64(first + self.header_bytes)
        place = tile + place
        address = bases[0] + start
        for row in range(0, self.warp_rows, self.step_rows):
            if row % self.runs.rows == 0:
                address = bases[row // self.runs.rows] + start
            target = (place ^ (self.rows.swizzle(row) * CHUNK_BYTES)) + row * self.rows.row_bytes
            exists = None if low is None else (row + below >= low) & (row + below < high)
            self.copy_piece(target, address, exists, self.piece_bytes, bases[0])
            address = address + step_bytes
        if self.header_words:
            base = bases[0]
            for run in range(1, len(bases)):
                base = cutlass.select_(lane >= run * self.runs.rows, bases[run], base)
            base = base + Int64(lane % self.runs.rows) * Int64(token_bytes)
            exists = None if low is None else (lane >= low) & (lane < high)
            for word in range(self.header_words):
                target = headers + 4 * lane + 4 * (MMA_WARPGROUPS * GROUP_TOKENS) * word
                self.copy_piece(target, base + 4 * word, exists, 4, bases[0])

    def copy_piece(self, target, address, exists, size: int, somewhere) -> None:
        if size == CHUNK_BYTES:
            count = Int32(CHUNK_BYTES)
            if exists is not None:
                count = cutlass.select_(exists, count, Int32(0))
                address = cutlass.select_(exists, address, somewhere)
            numbers.copy_async(target, address, count)
        elif exists is None:
            ptx.async_copy_word(target, address)
        else:
            there = cutlass.select_(exists, Int32(1), Int32(0))
            numbers.copy_word_async_or(there, target, address, Int32(0))


class RawRowProducer:
    """The producer warps of key rows. Each copies its rows of K's tile, then its rows of V's tile."""

    def __init__(self, config: ExtendConfig):
        self.config = config
        warp_rows = config.tile_tokens * (1 if config.paired else config.tile_heads) // config.pipeline.producer_warps
        assert warp_rows == WARP_THREADS or config.paired
        self.of_head = config.tile_tokens // warp_rows  # producer warps that bring a head's rows
        self.runs = RowRuns(config, warp_rows)
        # Maps copy rows of 128 bytes, of K and of V, and others where that is asked for.
        by_tma = config.mapped or all(type(rows_of(form)) is ByteRows for form in config.formats)
        self.tiles = tuple(TileRows(config, operand, self.runs, by_tma) for operand in (KEYS, VALUES))

    def make_maps(self, k_cache, v_cache):
        """Makes the tensor maps of K and of V with :meth:`TileRows.make_map`. Returns None if no maps are used. Runs on
        the host."""
        if not self.tiles[KEYS].by_tma:
            return None
        head_major = self.config.features.head_major
        return tuple(
            tile.make_map(cache, head_major) for tile, cache in zip(self.tiles, (k_cache, v_cache), strict=True)
        )

    def prefetch_maps(self, source) -> None:
        """Prefetches the tensor maps, before the first work tile is known."""
        for atom, _ in source.maps or ():
            cpasync.prefetch_descriptor(atom)

    @cute.jit
    def fill(self, source, work, span, first_valid, memory, warp: Int32, lane: Int32, state: PipelineState):
        """Fills the tiles of a work tile, the last block first. Returns the next state of the pipeline."""
        places, following = self.runs.make(), self.runs.make()
        self.runs.ask(places, source, work, cutlass.max(span.end - 1, 0), warp % self.of_head)
        for i in cutlass.range(span.begin, span.end, 1, unroll=1):
            block = span.end - 1 - (i - span.begin)
            self.runs.ask(following, source, work, cutlass.max(block - 1, span.begin), warp % self.of_head)
            memory.tile_pipeline.producer_acquire(state)
            for operand in cutlass.range_constexpr(2):
                self.tiles[operand].copy(source, work, memory, first_valid, places, block, state, warp, lane)
                numbers.arrive_when_copied(memory.tile_pipeline.full_address(state))
            for run in cutlass.range_constexpr(self.runs.count):
                places.entries[run] = following.entries[run]
                places.places[run] = following.places[run]
            state = memory.tile_pipeline.next(state)
        return state
