"""Unpacks a cache into rows of 16 bits once, before attention that has many queries for each row.

A producer that decodes rows again for every 128 rows of queries cannot keep up with the MMAs. This kernel decodes each
row once for all queries, at the speed of memory. Attention then loads tiles by TMA as it does from a 16-bit cache.

For FP8 products rows stay codes. K's tiles are copied unchanged, V's tiles are transposed.

A CTA takes a tile of one KV head, of K or of V. All of its UNPACK_WARPS warps run the same code. They wait for each
other only at barrier 0, and only if tiles have a scale. A warp issues the loads of all of its rows at once, and
decodes them when they have arrived (:mod:`.rows` says how). Other CTAs of the SM keep memory busy meanwhile.

A tile holds the numbers that a decoding producer would have written, with one difference: a code is multiplied by its
row's fp32 scale, and the product is rounded once, to fp16. To allow any scale, attention multiplies a tile's numbers by
a power of 2 (:mod:`.powers`). The tile's warps compute the power from their rows' largest scale, and attention loads
it with the tile.

Code that runs once a tile must be short, since it is loaded through the instruction cache.

Tokens that no query of a request sees become zeros, and requests without queries are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.attention.extend_policies import TILE_SCALE_BYTES, UNPACK_CTAS_PER_SM, UNPACK_WARPS, UnpackConfig
from cute_kernels.attention.loads.memory import KEYS, VALUES, Rows, Source
from cute_kernels.attention.loads.powers import exponent_beside, power_of_2
from cute_kernels.attention.loads.rows import CodedRows
from cute_kernels.attention.mainloops import fp8
from cute_kernels.attention.work_tiles import Lengths, tokens_of
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.division import Divisor
from cute_kernels.device.lanes import in_pairs, lane_max, neighbours
from cute_kernels.device.loads import store_below
from cute_kernels.device.pages import Pages
from cute_kernels.device.types import extents
from cute_kernels.formats.scores.terms import WindowTerm

TOPS_BYTES = 4 * UNPACK_WARPS  # shared memory in which a CTA's warps tell each other their greatest scale of a tile
SHARED_PERCENT = 8  # share of an SM's memory that is no L1: what its CTAs' tops and the driver want


@dataclass(frozen=True)
class UnpackSizes:
    """Run-time integers of a launch.

    Attributes:
        total_q: number of queries of all requests.
        batch: number of requests.
        kv_heads: number of KV heads.
        max_seq_len: number of tokens that a request may have.
        window: number of keys that a query sees, its own key included; 0 for all.
        room: number of tokens that the target has for each request, a multiple of a tile's.
    """

    total_q: Int32
    batch: Int32
    kv_heads: Divisor
    max_seq_len: Int32
    window: Int32
    room: Int32


@dataclass(frozen=True)
class UnpackTarget:
    """The addresses that rows are written to.

    Attributes:
        keys, values: [batch, kv_heads, room, head_dim] of 16 bits.
        tile_scales: fp32 [batch, kv_heads, tiles, 4]. The four numbers of a tile are the factor of K's tile, 0, log2 of
            the factor of V's tile, and the reciprocal of V's factor.
    """

    keys: Int64
    values: Int64
    tile_scales: Int64

    def rows(self, operand: int) -> Int64:
        return (self.keys, self.values)[operand]


@dataclass(frozen=True)
class UnpackWork:
    """A tile to unpack: its request, head and block. The request's queries see tokens first_valid to kv_stop - 1."""

    request: Int32
    head: Int32
    block: Int32
    first_valid: Int32
    kv_stop: Int32


class UnpackKernel:
    """The kernel that unpacks a cache, in the variant of an :class:`UnpackConfig`."""

    def __init__(self, config: UnpackConfig):
        self.config = config
        # A branch around a tile's loads keeps ptxas from putting some of them after the wait for its greatest scale.
        self.rows = tuple(CodedRows(config, operand, looks_first=True) for operand in (KEYS, VALUES))
        self.row_bytes = config.head_dim * config.element_bytes

    def launch(self, given, stream):
        """Launches the kernel; ``given`` has the arguments of :data:`.arguments.UNPACK`."""
        config = self.config
        cache, target = extents(given.k_cache), extents(given.k_rows)
        tokens = cache[2] if config.head_major else cache[1]
        caches = given.k_cache, given.v_cache
        keys, values = (Rows.of(tensor, 1, config.head_major) for tensor in caches)
        pages = Pages(given.block_table, given.max_pages, cache[0], Divisor.of(tokens))
        shape = UnpackSizes(
            total_q=given.total_q,
            batch=target[0],
            kv_heads=Divisor.of(target[1]),
            max_seq_len=given.max_seq_len,
            window=given.window,
            room=target[2],
        )
        lengths = Lengths(ptx.address(given.cu_seqlens), ptx.address(given.seq_lens), None, given.prefix_only)
        rows = UnpackTarget(ptx.address(given.k_rows), ptx.address(given.v_rows), given.tile_scales)
        sizes = {"grid": (given.num_ctas, 1, 1), "block": (UNPACK_WARPS * WARP_THREADS, 1, 1), "stream": stream}
        sizes |= {"min_blocks_per_mp": UNPACK_CTAS_PER_SM, "preferred_smem_carveout": SHARED_PERCENT}
        self.kernel(shape, Source(keys, values, pages, None, Int64(0)), rows, lengths).launch(**sizes)

    @cute.kernel
    def kernel(self, shape, source, target, lengths):
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        tops = Int32(0)
        if const_expr(any(self.config.tile_scales)):
            tops = Int32(cutlass.utils.SmemAllocator().allocate(2 * TOPS_BYTES, byte_alignment=2 * TOPS_BYTES).toint())
        item, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        self.unpack(shape, source, target, lengths, tops, item, stride, warp, lane)

    @cute.jit
    def unpack(self, shape, source, target, lengths, tops: Int32, item: Int32, stride: Int32, warp: Int32, lane: Int32):
        """Unpacks a CTA's tiles: every ``stride``-th tile from ``item`` on. tops: address of shared memory for the
        warps' largest scales; two buffers alternate from tile to tile.

        Tiles are ordered by request, then block, then head, then K and V. So CTAs that run at the same time read the
        same tokens.
        """
        for first in cutlass.range(0, shape.batch, WARP_THREADS):
            first_valid, kv_stop = self.tokens(shape, lengths, first + lane)
            for k in cutlass.range(0, cutlass.min(shape.batch - first, WARP_THREADS), 1):
                own_valid, own_stop = cute.arch.shuffle_sync(first_valid, k), cute.arch.shuffle_sync(kv_stop, k)
                end = (own_stop + (self.config.tile_tokens - 1)) // self.config.tile_tokens
                tiles = end - own_valid // self.config.tile_tokens
                count = tiles * shape.kv_heads.value * 2
                while item < count:
                    tile, head = shape.kv_heads.divide_int(item >> 1)
                    block = own_valid // self.config.tile_tokens + tile
                    work = UnpackWork(Int32(first + k), head, block, own_valid, own_stop)
                    self.unpack_tile(shape, source, target, work, item, tops, warp, lane)
                    item, tops = item + stride, tops ^ TOPS_BYTES
                item = item - count

    @cute.jit
    def tokens(self, shape, lengths, request: Int32):
        """Returns the range (first, end) of tokens that some query of a request sees. The range is (0, 0) if the
        request does not exist, or its queries see no tokens."""
        exists = request < shape.batch
        at = cutlass.select_(exists, request, Int32(0))
        ends = [Int32(ptx.load_global_words(lengths.cu_seqlens_q + Int64(at + i) * 4, 0, 1)[0]) for i in range(2)]
        q_start = cutlass.min(cutlass.max(ends[0], 0), shape.total_q)
        queries = cutlass.min(cutlass.max(ends[1], q_start), shape.total_q) - q_start
        kv_len = Int32(ptx.load_global_words(lengths.seq_lens + Int64(at) * 4, 0, 1)[0])
        before, kv_stop = tokens_of(kv_len, queries, shape.max_seq_len, lengths.prefix_only)
        seen = WindowTerm.reach_of(shape.window, 1)
        first = cutlass.select_(shape.window > 0, cutlass.max(before + 1 - seen, 0), Int32(0))
        # Attention loads the last token's tile even if no query sees it, as with a window of 1 beside new tokens.
        first = cutlass.min(first, kv_stop)
        some = exists & (queries > 0) & (kv_stop > 0)
        return cutlass.select_(some, first, Int32(0)), cutlass.select_(some, kv_stop, Int32(0))

    @cute.jit
    def unpack_tile(self, shape, source, target, work: UnpackWork, index: Int32, tops: Int32, warp: Int32, lane: Int32):
        """Unpacks a tile of K or V. index: the tile's index in its request, where K's and V's tiles alternate."""
        if (index & 1) == KEYS:
            self.copy(KEYS, shape, source, target, work, tops, warp, lane)
        else:
            self.copy(VALUES, shape, source, target, work, tops, warp, lane)

    @cute.jit
    def copy(self, operand: cutlass.Constexpr, shape, source, target, work, tops: Int32, warp: Int32, lane: Int32):
        """Unpacks a warp's rows of a tile of K or of V."""
        rows = self.rows[operand]
        line = Int64(work.request) * shape.kv_heads.value + work.head  # of the target's: a request's head
        tile = target.rows(operand) + (line * shape.room + work.block * self.config.tile_tokens) * self.row_bytes
        held, places, source = rows.make(), rows.runs.make(), self.pinned(source)
        rows.runs.ask(places, source, work, work.block, warp)
        rows.load(held, places, source, work, work.first_valid, work.block, warp, lane)
        factor = Float32(1.0)
        if const_expr(any(self.config.tile_scales)):
            number = line * (shape.room // self.config.tile_tokens) + work.block
            factor = self.scale_tile(operand, held, target.tile_scales + number * TILE_SCALE_BYTES, tops, warp, lane)
        first = warp * self.config.warp_rows
        if const_expr(self.config.dtype == "e4m3"):
            self.store_codes(operand, held, tile, first, lane)
        else:
            self.store(rows, held, factor, tile + first * self.row_bytes, lane)

    def pinned(self, source):
        """Returns ``source`` with token strides that are opaque to the compiler. Otherwise it would move address
        arithmetic before the loop, where registers are scarce."""
        keys, values = (
            replace(rows, token_bytes=ptx.pinned(rows.token_bytes)) for rows in (source.keys, source.values)
        )
        return replace(source, keys=keys, values=values)

    @cute.jit
    def scale_tile(self, operand: cutlass.Constexpr, held, address: Int64, tops: Int32, warp: Int32, lane: Int32):
        """Writes a tile's power of 2 to ``address``. Returns the power's reciprocal, by which rows' scales are
        multiplied.
        """
        exponent = Int32(0)
        if const_expr(self.config.tile_scales[operand]):
            top = lane_max(Float32(held.scales[0].bitcast(Float32)), neighbours(WARP_THREADS))
            exponent = exponent_beside(self.greatest(top, tops, warp, lane))
        else:
            cute.arch.barrier()  # tops are used in turn: nobody may be two tiles ahead
        power, reciprocal = power_of_2(exponent), power_of_2(-exponent)
        thread = warp * WARP_THREADS + lane
        if const_expr(operand == KEYS):
            store_below(thread, Int32(1), address, [power, Float32(0.0)])
        else:
            store_below(thread, Int32(1), address, [exponent.to(Float32), reciprocal], 8)
        return reciprocal

    @cute.jit
    def greatest(self, top: Float32, tops: Int32, warp: Int32, lane: Int32):
        """Returns the largest ``top`` of all warps of the CTA. No second barrier is needed, since the next tile uses
        another buffer."""
        self.publish(top, tops + 4 * warp, lane)
        cute.arch.barrier()
        words = [word for i in range(0, UNPACK_WARPS, 4) for word in ptx.load_shared_vector(tops, 4 * i, 4)]
        return in_pairs(ptx.fmax, [word.bitcast(Float32) for word in words])

    @cute.jit
    def publish(self, top: Float32, address: Int32, lane: Int32):
        """Publishes a warp's largest scale for the CTA's other warps."""
        if lane == 0:
            ptx.store_shared(address, 0, [top])

    @cute.jit
    def store(self, rows: cutlass.Constexpr, held, factor, address: Int64, lane: Int32):
        """Decodes a warp's loaded words of a tile into rows of the target. address: where the first of these rows
        begins. factor: the number by which all rows' scales are multiplied.
        """
        below = lane // rows.row_units if const_expr(rows.row_units < WARP_THREADS) else Int32(0)
        unit = lane % rows.row_units if const_expr(rows.row_units < WARP_THREADS) else lane
        own = address + Int64(below * self.row_bytes + unit * rows.unit_bytes)
        for k in cutlass.range_constexpr(rows.num_loads):
            row, part = k * WARP_THREADS // rows.row_units, k * WARP_THREADS % rows.row_units
            words = rows.numbers(held, k)
            if const_expr(rows.token_scale):
                scale = cute.arch.shuffle_sync(held.scales[0], below + row).bitcast(Float32) * factor
                words = [self.scaled(word, scale) for word in words]
            offset = row * self.row_bytes + part * rows.unit_bytes
            if const_expr(rows.real_units < rows.row_units):
                store_below(unit + part, Int32(rows.real_units), own, words, offset)
            else:
                ptx.store_global(own, words, offset=offset)

    def store_codes(self, operand: int, held, tile: Int64, first: Int32, lane) -> None:
        """Stores a warp's codes of a tile, 16 rows from ``first`` on, into the tile at address ``tile``. K's rows stay
        rows; V's rows become columns, see `mainloops.fp8`. A lane's words are 4 columns of each row."""
        words = [held.words[k] for k in range(self.config.warp_rows)]
        if operand == KEYS:
            own = tile + Int64(first * self.row_bytes + 4 * lane)
            for k, word in enumerate(words):
                ptx.store_global(own, [word], offset=k * self.row_bytes)
            return
        own = tile + Int64(4 * lane * self.config.tile_tokens + first)
        for column, codes in enumerate(fp8.transposed(words)):
            ptx.store_global(own, codes, offset=column * self.config.tile_tokens)

    def scaled(self, word, scale):
        """Returns a pair of decoded codes times a scale, rounded once to fp16."""
        low, high = ptx.half2_low_to_float(word), ptx.half2_high_to_float(word)
        return ptx.pack_f16x2(low * scale, high * scale)
