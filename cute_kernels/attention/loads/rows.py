"""The producer warps for caches of codes: they decode rows to fp16 tiles in the 128-byte swizzle, once for all 128
queries.

A warp loads 32 neighbouring words of a row, or of several consecutive rows. A lane's word has 4 or 8 codes, which
become 8 or 16 bytes of the tile. So stores have no bank conflicts. A store's address is one of a few addresses that a
lane keeps, plus a constant.

Half of the warps decode K, half V. When a warp has decoded its rows of one tile, it issues the loads of the next tile's
rows, then waits until that tile is free. A warp issues no loads while it decodes: the hardware counts a thread's loads
together, so decoding would wait for all of them. The pages of a tile are loaded one tile ahead.

Byte codes with one scale for a head or tensor become fp16 numbers without the scale. A scale of a row is divided by a
power of 2 that a warp's rows share (:mod:`.powers`). Codes are multiplied by the quotient in fp16. K's warps read V's
scales, too: consumers want V's powers of 2 with K's tile, before the tile's softmax. INT4 rows become half of code *
scale + shift in fp16, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import ELEMENT_BYTES, SLAB_COLUMNS, UnpackConfig, has_token_scale
from cute_kernels.attention.loads.memory import KEYS, VALUES
from cute_kernels.attention.loads.powers import exponent_beside, power_of_2, word_of
from cute_kernels.attention.loads.tma import Filling, TmaTileProducer
from cute_kernels.device import ptx, wgmma_tiles
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import in_pairs, lane_max, neighbours
from cute_kernels.device.loads import load_word_below
from cute_kernels.device.pipeline import PipelineState
from cute_kernels.device.types import RegisterTensor
from cute_kernels.formats.kv import load_code

WORD_BITS = 32
IN_ORDER = ((0, 1), (2, 3))  # bytes of a word, in pairs
SIGN_BITS = 0x80808080
MAGIC_BYTES = 0x64646464  # upper bytes of fp16 1024 + n, n in the lower byte
MINUS_1024, MINUS_1152 = 0xE400E400, 0xE480E480
NIBBLES = 0xFFF0FF0F  # the lower nibble of the lower byte, the upper one of the upper half's
HALVES_OF_SCALE = 0x28003800  # 2**-1 and 2**-5: of n and of 16 n
HALVES = 0x38003800


class Int8Words:
    """The decoder of INT8 codes, 4 a word, to fp16 pairs. pairs: the two bytes of each pair."""

    def numbers(self, word, header=None, pairs=IN_ORDER) -> list[Uint32]:
        positive = word ^ Uint32(SIGN_BITS)
        selectors = [0x4040 | high << 8 | low for low, high in pairs]
        placed = [ptx.prmt(positive, Uint32(MAGIC_BYTES), Uint32(select)) for select in selectors]
        return [ptx.add_f16x2(pair, Uint32(MINUS_1152)) for pair in placed]


class E4m3Words:
    def numbers(self, word, header=None, pairs=IN_ORDER) -> list[Uint32]:
        if pairs != IN_ORDER:
            (a, b), (c, d) = pairs
            word = ptx.prmt(word, Uint32(0), Uint32(d << 12 | c << 8 | b << 4 | a))
        return [ptx.e4m3x2_low_to_f16x2(word), ptx.e4m3x2_high_to_f16x2(word)]


class E5m2Words:
    def numbers(self, word, header=None, pairs=IN_ORDER) -> list[Uint32]:
        return [ptx.prmt(word, Uint32(0), Uint32(high << 12 | 4 << 8 | low << 4 | 4)) for low, high in pairs]


class Int4Words:
    """The decoder of INT4 codes, 8 a word, to fp16 pairs. header: the fp16 scale and shift of the codes' group."""

    def numbers(self, word, header) -> list[Uint32]:
        scales = ptx.mul_f16x2(ptx.prmt(header, Uint32(0), Uint32(0x1010)), Uint32(HALVES_OF_SCALE))
        shifts = ptx.mul_f16x2(ptx.prmt(header, Uint32(0), Uint32(0x3232)), Uint32(HALVES))
        pairs = []
        for byte in range(4):
            # The byte twice: n of its lower nibble below, 16 n of its upper one above.
            twice = ptx.prmt(word, Uint32(MAGIC_BYTES), Uint32(0x4040 + 0x0101 * byte)) & Uint32(NIBBLES)
            codes = ptx.add_f16x2(twice, Uint32(MINUS_1024))
            pairs.append(ptx.fma_f16x2(codes, scales, shifts))
        return pairs


@dataclass(frozen=True)
class Held:
    """The registers in which a warp holds its part of a tile.

    Attributes:
        words: a lane's codes, a word for each load.
        headers: INT4 scale and shift, a word for each load.
        scales: fp32 scales of rows of 8-bit codes; `CodedRows.scale_place` says which scales a lane has.
    """

    words: RegisterTensor[Uint32]
    headers: RegisterTensor[Uint32]
    scales: RegisterTensor[Uint32]


@dataclass(frozen=True)
class Places:
    """The places in the cache of a warp's rows of a tile, in registers.

    entries, places: for each run of rows, the two results of :meth:`.pages.Pages.ask` for the run's first row: the
    table's entry, and the row in its page.
    """

    entries: RegisterTensor[Int32]
    places: RegisterTensor[Int32]


class RowRuns:
    """A warp's rows of a tile of K or V, as runs. The rows of a run are always contiguous in the cache."""

    def __init__(self, config: ExtendConfig | UnpackConfig, warp_rows: int):
        self.tile_tokens, self.warp_rows, self.paged = config.tile_tokens, warp_rows, config.page_tokens > 0
        self.rows = min(warp_rows, config.page_tokens or warp_rows)  # of a run
        self.count = self.warp_rows // self.rows

    def make(self) -> Places:
        return Places(cute.make_rmem_tensor(self.count, Int32), cute.make_rmem_tensor(self.count, Int32))

    @cute.jit
    def ask(self, places: Places, source, work, block: Int32, warp: Int32):
        """Starts loading the places of a warp's rows of a block into ``places``."""
        first = block * self.tile_tokens + warp * self.warp_rows
        last = cutlass.max(work.kv_stop - 1, 0)
        for run in cutlass.range_constexpr(self.count):
            token = first + run * self.rows
            # The table may end, or its entries may be anything, where no token is.
            token = cutlass.select_(token > last, Int32(0), token)
            if const_expr(self.paged):
                places.entries[run], places.places[run] = source.pages.ask(work.request, token)
            else:
                places.entries[run], places.places[run] = work.request, token

    def block(self, source, places: Places, run: int):
        """Returns the block of the cache (page or request) that has a run's rows. Waits for the load of the page
        index.
        """
        return source.pages.existing(places.entries[run]) if self.paged else places.entries[run]

    def bases(self, source, rows, places: Places, head) -> list[Int64]:
        """Returns the addresses of the runs' first rows, of K or of V."""
        return [rows.address(self.block(source, places, run), places.places[run], head) for run in range(self.count)]


class CodedRows:
    """The loads of a warp's rows of K or V: which words each lane loads, and their decoding.

    looks_first: whether a warp first tests if all of its rows exist. If they do, it loads them without a test of each
    row.
    """

    def __init__(self, config: ExtendConfig | UnpackConfig, operand: int, *, looks_first: bool = False):
        self.tile_tokens, self.operand = config.tile_tokens, operand
        self.runs = RowRuns(config, config.warp_rows)
        form = config.formats[operand]
        reader = form.extend
        assert reader is not None  # `ExtendConfig.can_implement` has said so
        self.decoder = load_code(reader.words)()
        self.word_codes = WORD_BITS // form.code_bits
        self.has_headers = reader.scales == "groups"
        self.looks_first = looks_first
        self.token_scale = has_token_scale(form)
        self.header_bytes = form.header_bytes
        self.unit_bytes = self.word_codes * ELEMENT_BYTES  # of a word's numbers
        # Words in the tile; those that the cache lacks are zeros.
        self.row_units = config.operand_columns[operand] // self.word_codes
        self.parts = config.value_parts if operand == VALUES else 1  # of the cache's rows, one of them in the tile
        self.real_units = config.head_dim // self.parts // self.word_codes
        self.group_words = config.head_dim // self.word_codes // form.num_groups
        self.warp_rows = config.warp_rows
        self.num_loads = self.num_words = self.warp_rows * self.row_units // WARP_THREADS
        self.num_groups = form.num_groups if self.token_scale else 1
        self.scale_rows = WARP_THREADS // self.num_groups  # whose scales all lanes hold a register of
        self.scale_words = max(self.warp_rows // self.scale_rows, 1)

    def make(self) -> Held:
        return Held(
            cute.make_rmem_tensor(self.num_loads, Uint32),
            cute.make_rmem_tensor(self.num_loads if self.has_headers else 1, Uint32),
            cute.make_rmem_tensor(self.scale_words, Uint32),
        )

    @cute.jit
    def load(self, held: Held, places: Places, source, work, first_valid, block: Int32, warp: Int32, lane: Int32):
        """Starts loading a warp's rows of a block of tokens. Rows that no query of the request sees become zeros."""
        rows = source.rows(self.operand)
        first = block * self.tile_tokens + warp * self.warp_rows
        low = cutlass.max(first_valid - first, 0)
        count = cutlass.max(work.kv_stop - first - low, 0)
        bases, units = self.runs.bases(source, rows, places, work.head), self.units_before(work)
        if const_expr(self.looks_first):
            if (low == 0) & (count >= self.warp_rows):
                self.load_words(held, rows, bases, units, Int32(0), None, lane)
            else:
                self.load_words(held, rows, bases, units, low, count, lane)
        else:
            self.load_words(held, rows, bases, units, low, count, lane)
        if const_expr(self.token_scale):
            self.load_scales(held.scales, places, source, work, first_valid, block, warp, lane)

    @cute.jit
    def load_scales(self, scales, places: Places, source, work, first_valid, block: Int32, warp: Int32, lane: Int32):
        """Starts loading the scales of a warp's rows of a block."""
        rows = source.rows(self.operand)
        first = block * self.tile_tokens + warp * self.warp_rows
        low = cutlass.max(first_valid - first, 0)
        count = cutlass.max(work.kv_stop - first - low, 0)
        bases = self.runs.bases(source, rows, places, work.head)
        for k in cutlass.range_constexpr(self.scale_words):
            row, group = self.scale_place(lane, k)
            base = bases[0]
            for run in cutlass.range_constexpr(1, len(bases)):
                base = cutlass.select_(row >= run * self.runs.rows, bases[run], base)
            address = base + (row % self.runs.rows) * rows.token_bytes
            if const_expr(self.num_groups > 1):
                address = address + 4 * group
            scales[k] = load_word_below(row - low, count, address)

    def scale_place(self, lane, k: int) -> tuple[Any, Any]:
        """Returns (row, group) of a lane's ``k``-th scale. row: index among the warp's rows."""
        if self.num_groups == 1:
            return lane % self.warp_rows, 0
        return lane % self.scale_rows + k * self.scale_rows, lane // self.scale_rows

    def units_before(self, work):
        """Returns how many words of a row's codes lie before the columns that the work tile computes."""
        return work.value_part * self.real_units if self.parts > 1 else 0

    def scale_of(self, scales, work, lane, k: int):
        """Returns the scale for a lane's word of load ``k``. The lane may get the scale from another lane's registers
        ``scales``.
        """
        row, part = k * WARP_THREADS // self.row_units, k * WARP_THREADS % self.row_units
        below, word = self.lane_place(lane)
        if self.num_groups == 1:
            return cute.arch.shuffle_sync(scales[0], below + row)
        unit = word + self.units_before(work) + part
        group = cutlass.min(unit // self.group_words, self.num_groups - 1)  # what follows is zeros
        holder = group * self.scale_rows + (below + row % self.scale_rows)
        return cute.arch.shuffle_sync(scales[row // self.scale_rows], holder)

    def load_words(self, held: Held, rows, bases, units, low, count, lane) -> None:
        """Starts loading words and headers of rows. units: the result of :meth:`units_before`. low, count: rows ``low``
        to ``low + count`` - 1 exist. count is None if all rows exist, which saves two instructions a word.
        """
        below, word = self.lane_place(lane)
        unit = word + units
        for k in range(self.num_loads):
            row, part = k * WARP_THREADS // self.row_units, k * WARP_THREADS % self.row_units
            address = bases[row // self.runs.rows] + ((row % self.runs.rows) + below) * rows.token_bytes
            index, limit = (below - low) + row, count
            if self.real_units < self.row_units:
                there = self.warp_rows if count is None else count
                limit = cutlass.select_(word + part < self.real_units, Int32(there), Int32(0))
            held.words[k] = self.load_word(index, limit, address + 4 * unit, self.header_bytes + 4 * part)
            if self.has_headers:
                group = (unit + part) // self.group_words
                held.headers[k] = self.load_word(index, limit, address + 4 * group)

    def load_word(self, index, limit, address, offset: int = 0):
        """Loads a word of read-only global memory if 0 <= ``index`` < ``limit``; else returns zero. limit: None if the
        word exists."""
        if limit is not None:
            return load_word_below(index, limit, address, offset)
        return ptx.load_global_words(address, offset, 1)[0]

    def lane_place(self, lane) -> tuple[Int32, Int32]:
        """Returns (row, word) of the word that a lane loads. row: index among the rows of one load. word: index in the
        row."""
        if self.row_units < WARP_THREADS:
            return lane // self.row_units, lane % self.row_units
        return Int32(0), lane

    def numbers(self, held: Held, k: int):
        """Decodes the word that this lane got from its ``k``-th load to packed pairs of numbers. Scales of 8-bit rows
        are not applied."""
        return self.decoder.numbers(held.words[k], held.headers[k] if self.has_headers else None)


class TileWriter:
    """The writer of a warp's rows of K or V into a tile in shared memory."""

    def __init__(self, config: ExtendConfig, operand: int):
        self.config, self.operand = config, operand
        # A test whether all rows exist saves 4 % of the time of INT4, but adds 7 % for bytes (32 x 32 over 8k, H200).
        reader = config.formats[operand].extend
        self.rows = CodedRows(config, operand, looks_first=reader is not None and reader.scales == "groups")

    def place(self, warp, lane):
        """Returns the byte offset in a tile at which a lane stores the numbers of its first word."""
        word_codes = self.rows.word_codes
        below, word = self.rows.lane_place(lane)
        column = word * word_codes
        slab, piece = column // SLAB_COLUMNS, column % SLAB_COLUMNS // 8
        place = slab * self.config.slab_bytes + (warp * self.rows.warp_rows + below) * wgmma_tiles.ROW_BYTES
        return place + (piece ^ below) * wgmma_tiles.PIECE_BYTES + column % 8 * 2

    @cute.jit
    def store(self, held: Held, value_scales, work, memory, stage: Int32, place: Int32, warp: Int32, lane: Int32):
        """Decodes a warp's loaded words into its rows of a tile whose stage is free.

        place: the result of :meth:`place`. value_scales: the scales of V's rows, which K's warps hold.
        """
        row_words, word_codes = self.rows.row_units, self.rows.word_codes
        place = place + (memory.tiles + memory.tile(self.operand, stage))
        exponent = self.exponent_of(held.scales, self.config.scale_words[self.operand])
        if const_expr(self.operand == KEYS and any(self.config.tile_scales)):
            values = self.exponent_of(value_scales, self.config.scale_words[VALUES])
            self.tell(word_of(exponent, values), memory.scales_of(KEYS, stage) + warp * 4, lane)
        scales = self.halves(held.scales, exponent)
        for k in cutlass.range_constexpr(self.rows.num_loads):
            row, part = k * WARP_THREADS // row_words, k * WARP_THREADS % row_words
            offset = row * wgmma_tiles.ROW_BYTES + part * word_codes // SLAB_COLUMNS * self.config.slab_bytes
            pairs = self.rows.numbers(held, k)
            if const_expr(self.rows.token_scale):
                own = Uint32(self.rows.scale_of(scales, work, lane, k))
                pairs = [ptx.mul_f16x2(pair, own) for pair in pairs]
            ptx.store_shared(place ^ (row % 8 * wgmma_tiles.PIECE_BYTES), offset, pairs)

    def halves(self, scales, exponent) -> list[Any]:
        """Returns a lane's scales times a power of 2, each as a pair of equal fp16 numbers."""
        found = []
        for k in range(self.rows.scale_words):
            scale = scales[k].bitcast(Float32) * power_of_2(-exponent)
            found.append(ptx.pack_f16x2(scale, scale))
        return found

    @cute.jit
    def exponent_of(self, scales, count: cutlass.Constexpr):
        """Returns the exponent of the power of 2 that all of a warp's rows share. scales: a lane's ``count`` scales;
        without scales the exponent is 0."""
        exponent = Int32(0)
        if const_expr(count > 0):
            top = in_pairs(ptx.fmax, [Float32(scales[k].bitcast(Float32)) for k in range(count)])
            exponent = exponent_beside(lane_max(top, neighbours(WARP_THREADS)))
        return exponent

    @cute.jit
    def tell(self, word: Uint32, address: Int32, lane: Int32):
        """Publishes ``word``, which has the powers of 2 of K and V. Consumers read it together with K's tile."""
        if lane == 0:
            ptx.store_shared(address, 0, [word])


class RowProducer:
    """The producer warps of caches in which K, V or both have codes. Half of the warps fill K's tiles, half V's.

    If K or V has 16 bits, only the first warp of that operand's half loads its tiles, as in :mod:`.tma`.

    Consumers read V's powers of 2 together with K's tile. So if V's rows have scales and K is not decoded, K's warps
    read V's scales. Each of them reads the scales of one V warp's rows.
    """

    def __init__(self, config: ExtendConfig):
        self.config, self.runs, self.copier = config, RowRuns(config, config.warp_rows), TmaTileProducer(config)
        self.writers = {operand: TileWriter(config, operand) for operand in (KEYS, VALUES) if config.decoded[operand]}

    def make_maps(self, k_cache, v_cache):
        """Returns (K's tensor map, V's tensor map). A map is None if its operand has codes. If both operands have
        codes, returns None instead of the pair. Runs on the host."""
        if all(self.config.decoded):
            return None
        caches = enumerate((k_cache, v_cache))
        return tuple(None if self.config.decoded[i] else self.copier.make_map(i, cache) for i, cache in caches)

    def fill(self, source, work, span, first_valid, memory, warp, lane, state: PipelineState):
        """Fills the tiles of a work tile, the last block first. Returns the next state of the pipelines."""
        return self.fill_both(Filling(source, work, memory, first_valid), span, warp, lane, state)

    @cute.jit
    def fill_both(self, filling, span, warp: Int32, lane: Int32, state: PipelineState):
        if warp < self.config.tile_warps:
            state = self.fill_tiles(KEYS, filling, span, warp, lane, state)
        else:
            state = self.fill_tiles(VALUES, filling, span, warp - self.config.tile_warps, lane, state)
        return state

    def fill_tiles(self, operand: int, *given):
        """Fills the tiles of K or of V, by decoding or by TMA. Returns the next pipeline state."""
        if self.config.decoded[operand]:
            return self.decode_tiles(operand, *given)
        return self.copier.fill_by(partial(self.copy_tile, operand), *given)

    @cute.jit
    def decode_tiles(self, operand: cutlass.Constexpr, filling, span, warp: Int32, lane: Int32, state: PipelineState):
        """Decodes the tiles of K or of V. warp: index of the warp among the warps of K, or of V. Returns the next
        pipeline state.
        """
        source, work, first_valid = filling.source, filling.work, filling.first_valid
        pipeline = filling.memory.pipelines[operand]
        held, places = self.writers[operand].rows.make(), self.runs.make()
        value_scales = cute.make_rmem_tensor(max(self.config.scale_words[VALUES], 1), Uint32)
        # Pinned: registers are scarce, and its terms would take several.
        place = ptx.pinned(self.writers[operand].place(warp, lane))
        if span.begin < span.end:
            self.runs.ask(places, source, work, span.end - 1, warp)
        for i in cutlass.range(span.begin, span.end, 1, unroll=1):
            block = span.end - 1 - (i - span.begin)
            self.writers[operand].rows.load(held, places, source, work, first_valid, block, warp, lane)
            if const_expr(operand == KEYS and self.config.tile_scales[VALUES]):
                self.writers[VALUES].rows.load_scales(
                    value_scales, places, source, work, first_valid, block, warp, lane
                )
            self.runs.ask(places, source, work, cutlass.max(block - 1, span.begin), warp)
            # The rows are in registers; they are stored once the stage is free.
            pipeline.producer_acquire(state)
            self.writers[operand].store(held, value_scales, work, filling.memory, state.stage, place, warp, lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if lane == 0:
                pipeline.producer_commit(state)
            state = pipeline.next(state)
        return state

    @cute.jit
    def copy_tile(self, operand: cutlass.Constexpr, filling, at, warp: Int32, lane: Int32, state: PipelineState):
        """Copies a 16-bit tile. warp: index of the warp among the warps of K, or of V."""
        if const_expr(operand == KEYS and self.config.tile_scales[VALUES]):
            self.tell_powers(filling, at.block, warp, lane, state)
        if warp == 0:
            self.copier.copy(operand, filling, at, lane, state)

    @cute.jit
    def tell_powers(self, filling, block: Int32, warp: Int32, lane: Int32, state: PipelineState):
        """Publishes the power of 2 that a V warp's rows share, together with K's tile. First waits until the stage of
        K's tile is free. All warps except the first then arrive for the tile; the first warp arrives with its copy.
        """
        source, work, memory = filling.source, filling.work, filling.memory
        writer = self.writers[VALUES]
        places, scales = self.runs.make(), cute.make_rmem_tensor(self.config.scale_words[VALUES], Uint32)
        self.runs.ask(places, source, work, block, warp)
        writer.rows.load_scales(scales, places, source, work, filling.first_valid, block, warp, lane)
        memory.pipelines[KEYS].producer_acquire(state)
        exponent = writer.exponent_of(scales, self.config.scale_words[VALUES])
        writer.tell(word_of(Int32(0), exponent), memory.scales_of(KEYS, state.stage) + warp * 4, lane)
        cute.arch.sync_warp()
        if (lane == 0) & (warp > 0):
            memory.pipelines[KEYS].producer_commit(state)
