"""Unpacking a cache beside attention's products: what :mod:`.unpack` does in a launch of its own, the producer warps
that have nothing to fill do here.

They draw chunks, 32 rows of a tile of K or V of one KV head, in the order in which work tiles want them: the last
request first, its last tokens first. A warp tells of a chunk's rows (:mod:`.progress`) when it has asked for those of
the next one, since telling waits for all stores of its SM to be seen. The warp that fills tiles waits until both tiles
of a block are there; it looks at 16 blocks together, and unpacking is soon far ahead of the products.

What they issue, consumers do not. A warpgroup waits for its slowest warp: three warps that decode by themselves, each
on a scheduler of its own, would delay it three times. So a CTA's warps decode at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.extend.config import ExtendConfig
from cute_kernels.attention.extend.decode import CodedRows
from cute_kernels.attention.extend.loads import store_below
from cute_kernels.attention.extend.memory import KEYS, VALUES, Pages, Rows, Source
from cute_kernels.attention.extend.multiply import FIRST_TURN
from cute_kernels.attention.extend.policies import (
    ELEMENT_BYTES,
    MMA_WARPGROUPS,
    SLAB_COLUMNS,
    TILE_SCALE_BYTES,
    TILE_TOKENS,
    UnpackConfig,
)
from cute_kernels.attention.extend.powers import exponent_beside, power_of_2
from cute_kernels.attention.extend.progress import NOTHING, Progress
from cute_kernels.attention.extend.tma_tiles import TmaTileProducer
from cute_kernels.attention.extend.unpack import DenseRows, UnpackKernel, UnpackTarget, UnpackWork
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.division import Divisor
from cute_kernels.device.lanes import in_pairs, lane_max, neighbours
from cute_kernels.device.ring import advance
from cute_kernels.device.types import extents
from cute_kernels.formats.kv import KvFormat

CHUNK_ROWS = WARP_THREADS  # a lane for the scale of each
DENSE_ROWS = 16  # of a chunk of 16 bits, that a warp has registers for
CHUNKS = TILE_TOKENS[SLAB_COLUMNS] // CHUNK_ROWS  # of a tile
UNPACKING = FIRST_TURN + MMA_WARPGROUPS  # barrier of the warps that unpack


@dataclass(frozen=True)
class SourceBeside(Source):
    """Unpacked keys, and the cache that they are made of meanwhile; run-time values.

    Attributes:
        cache: the latter. target: where rows go. room: tokens that a request has there. progress: how far it is.
    """

    cache: Source
    target: UnpackTarget
    room: Int32
    progress: Progress

    @staticmethod
    def of(source: Source, given, config: UnpackConfig) -> SourceBeside:
        """On the host."""
        blocks, rows = extents(given.k_codes), extents(given.k_cache)
        tokens = blocks[2] if config.head_major else blocks[1]
        codes = given.k_codes, given.v_codes
        element_bytes = 1 if config.formats[0].is_coded else ELEMENT_BYTES
        keys, values = (Rows.of(tensor, element_bytes, config.head_major) for tensor in codes)
        pages = Pages(given.block_table, given.table_pages, blocks[0], Divisor.of(tokens))
        progress = Progress(given.counter, rows[0], rows[1], rows[2] // config.tile_tokens)
        return SourceBeside(
            keys=source.keys,
            values=source.values,
            pages=source.pages,
            maps=source.maps,
            tile_scales=source.tile_scales,
            cache=Source(keys, values, pages, None, Int64(0)),
            target=UnpackTarget(ptx.address(given.k_cache), ptx.address(given.v_cache), source.tile_scales),
            room=rows[2],
            progress=progress,
        )


class ProducerBeside(TmaTileProducer):
    """One warp fills tiles, the others unpack."""

    def __init__(self, config: ExtendConfig):
        super().__init__(config)
        assert config.unpacks is not None
        self.chunks = ChunkUnpacker(config)
        self.num_warps = config.producer_warps

    @cute.jit
    def fill(self, source, work, span, first_valid, memory, warp: Int32, lane: Int32, stage: Int32, phase: Int32):
        """As :class:`.TmaTileProducer` has it, of tiles that are unpacked meanwhile."""
        known = Int32(0)
        for i in cutlass.range(span.begin, span.end, 1, unroll=1):
            block = span.end - 1 - (i - span.begin)
            if known == 0:
                known = source.progress.wait(work.request, work.head, block, span.begin, Int32(CHUNKS - 1), lane)
            known = known - 1
            found, place = self.locate(source, work, block, lane)
            for operand in cutlass.range_constexpr(2):
                self.copy(operand, source, work, memory, block, first_valid, found, place, lane, stage, phase)
            stage, phase = advance(stage, phase, self.config.num_stages)
        return stage, phase

    @cute.jit
    def unpack(self, shape, source, lengths, memory, warp: Int32, lane: Int32):
        """What the other warps do."""
        self.chunks.run(shape, source, lengths, memory, warp, lane)

    def leave(self, source, lane) -> None:
        """What each of them all does last."""
        source.progress.leave(cute.arch.grid_dim()[0] * self.num_warps, lane)


class ChunkUnpacker:
    """Warps that draw chunks until there are no more, one each for all of a CTA at a time."""

    def __init__(self, config: ExtendConfig):
        assert config.unpacks is not None
        self.config, self.warps = config.unpacks, config.unpacking_warps
        self.kernel = UnpackKernel(self.config)
        self.rows = tuple(self.rows_of(operand) for operand in (KEYS, VALUES))
        first, second = self.config.formats
        self.alike = first == second  # then code for one of K and V serves both
        self.rounds = CHUNK_ROWS // self.rows[KEYS].warp_rows  # of a chunk: rows that a warp holds at a time
        self.scales = TileScale(self.config, KEYS), TileScale(self.config, VALUES)

    def rows_of(self, operand: int) -> CodedRows | DenseRows:
        shape = ChunkRows.of(self.config)
        if self.config.formats[operand].is_coded:
            return ChunkWords(shape, operand, looks_first=True, around=True)
        return DenseRows(shape, operand)

    @cute.jit
    def run(self, shape, source, lengths, memory, warp: Int32, lane: Int32):
        """All requests, the last one first. warp: among those that unpack."""
        progress, tokens = source.progress, self.config.tile_tokens
        passed, told, turn = Int32(0), Int64(NOTHING), Int32(0)
        chunk = self.share(self.draw(progress, warp, lane), memory, turn, warp, lane)
        for first in cutlass.range(0, shape.batch, WARP_THREADS):
            own = shape.batch - 1 - (first + lane)
            own = cutlass.select_(own < 0, shape.batch, own)  # one that there is not
            own_valid, own_stop = self.kernel.tokens(shape, lengths, own)
            for k in cutlass.range(0, cutlass.min(shape.batch - first, WARP_THREADS), 1):
                first_valid, kv_stop = cute.arch.shuffle_sync(own_valid, k), cute.arch.shuffle_sync(own_stop, k)
                begin, end = first_valid // tokens, (kv_stop + (tokens - 1)) // tokens
                count = (end - begin) * shape.kv_heads.value * (2 * CHUNKS)
                request = shape.batch - 1 - (first + k)
                while chunk - passed < count:
                    turn = turn ^ 1
                    work = UnpackWork(request, Int32(0), kv_stop)
                    chunk, told = self.unpack(
                        shape, source, memory, work, first_valid, end, chunk - passed, told, turn, warp, lane
                    )
                passed = passed + count
        if chunk - warp < passed:  # others have a chunk where this warp has none: they wait for it, too
            cute.arch.barrier_arrive(barrier_id=UNPACKING, number_of_threads=self.warps * WARP_THREADS)
        progress.tell(told, lane)

    @cute.jit
    def draw(self, progress, warp: Int32, lane: Int32):
        """The number of the CTA's next chunks, which its first warp draws; not to be waited for before it is used."""
        ticket = Int32(0)
        if warp == 0:
            ticket = progress.draw(lane)
        return ticket

    @cute.jit
    def share(self, ticket: Int32, memory, turn: Int32, warp: Int32, lane: Int32):
        """A warp's next chunk, of those that the first warp has drawn; all meet here. turn: 0 and 1, one after the
        other."""
        place = memory.drawn + 4 * turn
        self.publish(ticket, place, warp, lane)
        cute.arch.barrier(barrier_id=UNPACKING, number_of_threads=self.warps * WARP_THREADS)
        return Int32(ptx.load_shared(place, 0)) * self.warps + warp

    @cute.jit
    def publish(self, ticket: Int32, address: Int32, warp: Int32, lane: Int32):
        """For the other warps."""
        if (warp == 0) & (lane == 0):
            ptx.store_shared(address, 0, [Uint32(ticket)])

    @cute.jit
    def unpack(
        self,
        shape,
        source,
        memory,
        work,
        first_valid: Int32,
        end: Int32,
        index: Int32,
        told: Int64,
        turn: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """A request's chunk of a number. told: address of the word of the chunk before, which is told of meanwhile.
        Returns the warp's next chunk, and the address of this one's word."""
        part, rest = index % CHUNKS, index // CHUNKS
        operand, rest = rest & 1, rest >> 1
        rank, head = shape.kv_heads.divide_int(rest)
        block = end - 1 - rank
        work = UnpackWork(work.request, head, work.kv_stop)
        given = (shape, source, memory, work, first_valid, block, told, part, turn, warp, lane)
        chunk = Int32(0)
        if const_expr(self.alike):
            chunk = self.copy(KEYS, operand, *given)
        else:
            if operand == KEYS:
                chunk = self.copy(KEYS, Int32(KEYS), *given)
            else:
                chunk = self.copy(VALUES, Int32(VALUES), *given)
        return chunk, source.progress.block(work.request, head, block) + 4 * operand

    @cute.jit
    def copy(
        self,
        form: cutlass.Constexpr,
        operand: Int32,
        shape,
        source,
        memory,
        work,
        first_valid: Int32,
        block: Int32,
        told: Int64,
        part: Int32,
        turn: Int32,
        warp: Int32,
        lane: Int32,
    ):
        """Rows of a tile of K or V; form: whose code does. Returns the warp's next chunk."""
        config, rows = self.config, self.rows[form]
        is_key = operand == KEYS
        ticket = self.draw(source.progress, warp, lane)
        cache, target = self.of_operand(source.cache, is_key), source.target
        held, places = rows.make(), rows.runs.make()
        first = part * self.rounds
        rows.runs.ask(places, cache, work, block, first)
        rows.load(held, places, cache, work, first_valid, block, first, lane)
        scales = self.scales[form].load(cache, work, first_valid, block, lane)
        source.progress.tell(told, lane)
        self.wait(held, rows)
        chunk = self.share(ticket, memory, turn, warp, lane)
        line = Int64(work.request) * shape.kv_heads.value + work.head
        factor = Float32(1.0)
        if const_expr(any(config.tile_scales)):
            number = line * (source.room // config.tile_tokens) + block
            place = target.tile_scales + number * TILE_SCALE_BYTES
            factor = self.scales[form].tell(scales, is_key, place, part * WARP_THREADS + lane)
        row = line * source.room + (block * config.tile_tokens + part * CHUNK_ROWS)
        tile = cutlass.select_(is_key, target.keys, target.values) + row * self.kernel.row_bytes
        self.kernel.store(rows, held, factor, tile, lane)
        for i in cutlass.range_constexpr(1, self.rounds):
            rows.runs.ask(places, cache, work, block, first + i)
            rows.load(held, places, cache, work, first_valid, block, first + i, lane)
            self.kernel.store(rows, held, factor, tile + i * rows.warp_rows * self.kernel.row_bytes, lane)
        return chunk

    def wait(self, held, rows: CodedRows | DenseRows) -> None:
        """Until what was asked for last is there, and with it most of what was asked for before: for warps to decode at
        the same time, no result relies on it."""
        asked = [held.words] if isinstance(rows, DenseRows) or not rows.has_headers else [held.words, held.headers]
        for words in asked:
            words[rows.num_words - 1] = ptx.pinned(words[rows.num_words - 1])

    def of_operand(self, cache, is_key) -> Source:
        """Where both K and V are the one or the other."""
        keys, values = cache.keys, cache.values

        def chosen(name: str):
            return cutlass.select_(is_key, getattr(keys, name), getattr(values, name))

        rows = Rows(*map(chosen, ("base", "block_bytes", "token_bytes", "head_bytes")))
        return Source(rows, rows, cache.pages, None, Int64(0))


@dataclass(frozen=True)
class ChunkRows:
    """A chunk's rows of a tile, as :class:`.decode.RowShape`."""

    formats: tuple[KvFormat, KvFormat]
    head_dim: int
    columns: int
    tile_tokens: int
    page_tokens: int
    warp_rows: int = CHUNK_ROWS

    @staticmethod
    def of(config: UnpackConfig) -> ChunkRows:
        rows = CHUNK_ROWS if config.formats[0].is_coded else DENSE_ROWS
        return ChunkRows(config.formats, config.head_dim, config.columns, config.tile_tokens, config.page_tokens, rows)


class ChunkWords(CodedRows):
    """A chunk's rows that are all there come with an instruction for an address: it is the products' time."""

    def load_words(self, held, rows, bases, low, count, lane) -> None:
        if count is not None or self.real_units < self.row_units:
            super().load_words(held, rows, bases, low, count, lane)
            return
        below, word = self.lane_place(lane)
        stride = Int64(rows.token_bytes)
        firsts = [base + Int64(below) * stride for base in bases]
        words = [first + 4 * word for first in firsts]
        headers = [first + 4 * (word // self.group_words) for first in firsts]
        for k in range(self.num_loads):
            run, row = divmod(k * WARP_THREADS // self.row_units, self.runs.rows)
            held.words[k] = self.load_word(None, None, words[run] + row * stride, self.header_bytes)
            if self.has_headers:
                held.headers[k] = self.load_word(None, None, headers[run] + row * stride)


class TileScale:
    """The power of 2 of a tile of K or V: each warp that has a part of it looks at the scales of all its rows."""

    def __init__(self, config: UnpackConfig, operand: int):
        self.config, self.operand, self.is_scaled = config, operand, config.tile_scales[operand]
        self.loads = config.tile_tokens // WARP_THREADS if self.is_scaled else 0

    @property
    def rows(self) -> CodedRows:
        """Of a tile that has one."""
        return CodedRows(ChunkRows.of(self.config), self.operand, around=True)

    @cute.jit
    def load(self, source, work, first_valid: Int32, block: Int32, lane: Int32):
        """Asks for the scales of a tile's rows, of which a lane has every 32nd; registers."""
        scales = cute.make_rmem_tensor(max(self.loads, 1), Uint32)
        own = cute.make_rmem_tensor(1, Uint32)
        for i in cutlass.range_constexpr(self.loads):
            places = self.rows.runs.make()
            self.rows.runs.ask(places, source, work, block, Int32(i))
            self.rows.load_scales(own, places, source, work, first_valid, block, Int32(i), lane)
            scales[i] = own[0]
        return scales

    @cute.jit
    def tell(self, scales, is_key, address: Int64, thread: Int32):
        """Writes a tile's power of 2 to an address, as :class:`.unpack.UnpackTarget` has it; returns its reciprocal.
        thread: among those that have the tile, of which one writes."""
        exponent = Int32(0)
        if const_expr(self.is_scaled):
            own = in_pairs(ptx.fmax, [scales[i].bitcast(Float32) for i in range(self.loads)])
            exponent = exponent_beside(lane_max(own, neighbours(WARP_THREADS)))
        power, reciprocal = power_of_2(exponent), power_of_2(-exponent)
        words = [
            cutlass.select_(is_key, power, exponent.to(Float32)),
            cutlass.select_(is_key, Float32(0.0), reciprocal),
        ]
        place = address + cutlass.select_(is_key, Int64(0), Int64(2 * 4))
        store_below(thread, Int32(1), place, words)
        return reciprocal
