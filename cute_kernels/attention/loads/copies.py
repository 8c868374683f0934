"""Loads tiles of K and V from global into shared memory: raw rows by bulk copies, by words, or by tensor maps.

K and V each have their own kind of load. A stage of the ring is full when its tiles of K and V have arrived on the
stage's barrier. The ring holds the tiles of K of all stages, then the tiles of V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.attention.decode_config import DecodeConfig, lane_tokens, tiles_of, tokens_per_copy
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.pages import Pages
from cute_kernels.device.pipeline import Pipeline, PipelineState
from cute_kernels.device.types import Index
from layouts.kv.swizzled_tile import PANEL_BYTES, SwizzledTile
from layouts.kv.tile import WORD_BYTES, RowTile

VECTOR_BYTES = 16
VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
PLACE_BYTES = 128  # shared addresses of TMA tiles are multiples of this


class TileCopier:
    """The copier that fills the ring's stages with tiles of K and V.

    Attributes:
        operands: the loader of K and the loader of V.
        arrivals: number of arrivals that a stage's full barrier waits for, in addition to bytes.
        lane_tokens: number of tokens of a tile that each lane copies in bulk; they lie in one page.
    """

    def __init__(self, config: DecodeConfig):
        self.config = config
        kinds = {"bulk": BulkOperand, "word": WordOperand, "tma": TensorMapOperand, "map": RowMapOperand}
        self.operands = tuple(kinds[copy](config, index) for index, copy in enumerate(config.copies))
        self.words = tuple(operand for operand in self.operands if operand.copy == "word")
        self.tensor_maps = tuple(operand for operand in self.operands if operand.copy in ("tma", "map"))
        self.counted = any(operand.copy != "word" for operand in self.operands)
        self.arrivals = int(self.counted) + (WARP_THREADS * config.filling_warps if self.words else 0)
        bulk = [operand for operand in self.operands if isinstance(operand, BulkOperand)]
        # Those whose copies take the same tokens are issued side by side.
        steps = dict.fromkeys(operand.run_tokens for operand in bulk)
        self.bulk = tuple((step, [op for op in bulk if op.run_tokens == step]) for step in steps)
        self.lane_tokens = lane_tokens(config)

    def make_source(self, k_cache: cute.Tensor, v_cache: cute.Tensor):
        """Returns (K's source, V's source): tensors or tensor maps, which are passed to the kernel instead of the
        caches.
        """
        return tuple(op.make_source(cache) for op, cache in zip(self.operands, (k_cache, v_cache), strict=True))

    def open(self, source, ring, pipeline, place, pages) -> Tiles:
        """Makes the `Tiles` of this CTA, from its part of the caches and its ring."""
        opened = tuple(op.open(part, ring, place) for op, part in zip(self.operands, source, strict=True))
        return Tiles(ring.toint(), pipeline, opened, place.shape.max_seq_len, pages)

    def enter(self, tiles, request) -> Tiles:
        """Returns ``tiles``, narrowed to one request's tokens."""
        if self.config.page_tokens:
            return tiles
        opened = tuple(op.enter(part, request) for op, part in zip(self.operands, tiles.opened, strict=True))
        return replace(tiles, opened=opened)

    def stage_addresses(self, tiles: Tiles, stage):
        """Returns the shared-memory addresses of a stage's tiles of K and of V."""
        return [operand.rows_address(tiles, stage) for operand in self.operands]

    @cute.jit
    def copy_tile(
        self,
        tiles,
        request: Int32,
        token: Int32,
        length: Int32,
        state: PipelineState,
        producer: Int32,
        lane: Int32,
        page,
        place,
    ):
        """Starts copying a request's tile whose first token is ``token``. Rows from ``length`` on may be left out.

        producer: index of the warp among the producer warps, which share the copies. page, place: the result of
        :meth:`find_pages` for this tile.
        """
        config = self.config
        stage, barrier = state.stage, tiles.pipeline.full_barrier(state)
        # Four tokens' rows are whole 16-byte pieces. Rows past the request's length may be copied, past the cache not.
        tokens = cutlass.min((length - token + 3) & -4, tiles.max_seq_len - token)
        tokens = cutlass.min(tokens, config.tile_tokens)
        if const_expr(self.counted):
            if (producer == 0) & (lane == 0):
                # Other producers' bytes may land before: the barrier's count may be negative until this arrival.
                tiles.pipeline.producer_expect(state, self._arriving_bytes(tokens))
        if const_expr(len(self.bulk) > 0):
            self._copy_runs(tiles, token, tokens, stage, barrier, producer, lane, page, place)
        if const_expr(len(self.tensor_maps) > 0):
            cute.arch.sync_warp()
            if const_expr(config.page_tokens > 0):
                self._copy_pages(tiles, tokens, stage, barrier, producer, page, place)
            else:
                self._copy_boxes(tiles, request, token, stage, barrier, producer)
        if const_expr(len(self.words) > 0):
            self._copy_words(
                tiles, request, token, cutlass.min(length - token, config.tile_tokens), stage, producer, lane
            )  # fmt: skip
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    def _arriving_bytes(self, tokens):
        """Returns how many bytes the barrier counts for a tile of which ``tokens`` tokens are copied."""
        total = Int32(0)
        for operand in self.operands:
            total = total + operand.arriving_bytes(tokens)
        return total

    def find_pages(self, tiles, request, token, lane):
        """Returns (page, row of the page) of the first token of a lane's share of the tile that begins with ``token``.
        Callers do this one tile ahead, since the block table lies in global memory.
        """
        if not self.config.page_tokens:
            return Int32(0), Int32(0)
        return tiles.pages.ask(request, cutlass.min(token + lane * self.lane_tokens, tiles.max_seq_len - 1))

    @cute.jit
    def _copy_runs(self, tiles, token, tokens, stage, barrier, producer, lane, page, place):
        """Issues the bulk copies of a tile. A copy brings consecutive tokens of one page. Each lane issues the copies
        that begin in its share of the tile. Rows beyond the request's end are not copied, since their page may not
        exist.

        token: the tile's first token. tokens: how many tokens are copied. page, place: the page in which the lane's
        share begins, and the row of this page.
        """
        share, config = self.lane_tokens, self.config
        first, mine = Int32(0), (lane == 0) & (producer == 0)
        if const_expr(share < config.tile_tokens):
            first = lane * share
            mine = (lane % config.filling_warps == producer) & (first < tokens)
        block = None
        start = token + first
        if const_expr(config.page_tokens > 0):
            block = tiles.pages.existing(page)
            start = place
        if mine:
            for kind in cutlass.range_constexpr(len(self.bulk)):
                run, operands = self.bulk[kind]
                begins = True if run <= share else first % run == 0
                if begins:
                    for i in cutlass.range_constexpr(0, share, run):
                        left = tokens - (first + i)
                        if left > 0:
                            size = cutlass.min(left, run)
                            for operand in operands:
                                operand.copy_run(tiles, block, start + i, first + i, size, stage, barrier)

    @cute.jit
    def _copy_pages(self, tiles, tokens, stage, barrier, producer, page, place):
        """Issues a producer warp's share of the TMA loads of a tile from a paged cache. Each load takes tokens of one
        page."""
        size = min(self.config.page_tokens, self.config.tile_tokens)
        pieces = (tokens + (size - 1)) // size
        for piece in cutlass.range(producer, pieces, self.config.filling_warps, unroll=1):
            holder = piece * size // self.lane_tokens
            block = tiles.pages.existing(cute.arch.shuffle_sync(page, holder))
            first = cute.arch.shuffle_sync(place, holder)
            for index in cutlass.range_constexpr(len(self.tensor_maps)):
                self.tensor_maps[index].copy_box(tiles, block, first, piece, stage, barrier)

    @cute.jit
    def _copy_boxes(self, tiles, request, token, stage, barrier, producer):
        """Issues a producer warp's share of the TMA loads of a tile from a contiguous cache."""
        for index in cutlass.range_constexpr(len(self.tensor_maps)):
            for box in cutlass.range_constexpr(self.tensor_maps[index].num_boxes):
                if producer == box % self.config.filling_warps:
                    first = token + box * self.tensor_maps[index].box_tokens
                    self.tensor_maps[index].copy_box(tiles, request, first, box, stage, barrier)

    @cute.jit
    def _copy_words(self, tiles, request, token, tokens, stage, producer, lane):
        for i in cutlass.range(producer, tokens, self.config.filling_warps, unroll=1):
            if const_expr(self.config.page_tokens > 0):
                page, first = tiles.pages.ask(request, token + i)
                self._copy_token(tiles, tiles.pages.existing(page), first, i, stage, lane)
            else:
                self._copy_token(tiles, None, token + i, i, stage, lane)

    def _copy_token(self, tiles, block, first, place, stage, lane):
        for operand in self.words:
            operand.copy_token(tiles, block, first, place, stage, lane)

    def drain(self):
        """Waits for this thread's copies of words. A thread calls it before it exits."""
        if self.words:
            cute.arch.cp_async_wait_group(0)

    @cute.jit
    def clear_rows(self, tiles, stage: Int32, first: Int32, tid: Int32):
        """Writes zeros over a stage's rows of V from token ``first`` on. All consumer threads call it together.

        Memory after a request's end may hold anything. The probabilities of its rows are 0, but 0 times NaN is NaN.
        """
        operand = self.operands[1]
        address = operand.stage_address(tiles.ring, stage)
        start = address + operand.row_start(first)
        aligned = (start + (VECTOR_BYTES - 1)) & -VECTOR_BYTES
        if const_expr(operand.run_bytes == operand.tile_bytes):
            # Rows with headers begin on any word.
            if start + tid * WORD_BYTES < aligned:
                ptx.store_shared_zero(start + tid * WORD_BYTES)
        step = self.config.num_threads * VECTOR_BYTES
        for run in cutlass.range_constexpr(operand.tile_bytes // operand.run_bytes):
            stop = address + (run + 1) * operand.run_bytes
            for target in cutlass.range(aligned + run * operand.run_bytes + tid * VECTOR_BYTES, stop, step, unroll=1):
                ptx.store_shared_zero16(target, 0)

    @cute.jit
    def clear_first_rows(self, tiles, stage: Int32, end: Int32, tid: Int32):
        """Writes zeros over a stage's rows of V before token ``end``, or over all its rows if ``end`` lies beyond the
        tile. All consumer threads call it together.
        """
        operand = self.operands[1]
        address = operand.stage_address(tiles.ring, stage)
        size = operand.row_start(cutlass.min(end, self.config.tile_tokens))
        step = self.config.num_threads * WORD_BYTES
        for run in cutlass.range_constexpr(operand.tile_bytes // operand.run_bytes):
            first = address + run * operand.run_bytes
            for target in cutlass.range(first + tid * WORD_BYTES, first + size, step, unroll=1):
                ptx.store_shared_zero(target)


@dataclass(frozen=True)
class Tiles:
    """The source and destination of a CTA's tiles; run-time values."""

    ring: Int32  # shared-memory address
    pipeline: Pipeline
    opened: tuple[RowSource | RowMapSource | TensorMapSource, ...]  # of K and of V
    max_seq_len: Int32
    pages: Pages


class _Operand:
    """The base of the loaders of K (``index`` 0) and V (1). It knows where the operand's tiles lie in the ring."""

    copy: str

    def __init__(self, config: DecodeConfig, index: int):
        self.config, self.index = config, index
        self.tile_bytes, self.ring_offset = config.tile_bytes[index], config.ring_offsets[index]

    def stage_address(self, ring, stage):
        return ring + self.ring_offset + stage * self.tile_bytes

    def rows_address(self, tiles, stage):
        """Returns the shared address at which a stage's rows begin."""
        return self.stage_address(tiles.ring, stage)

    def enter(self, source, block):
        """Returns the source narrowed to one block of the cache. In this class it returns ``source`` unchanged, since
        each copy names its block.
        """
        return source

    @property
    def run_bytes(self) -> int:
        """Bytes of a run. A run is the same columns of every token of a tile, in the order of the tokens; it may be all
        columns.
        """
        raise NotImplementedError

    def row_start(self, first: Int32):
        """Returns the byte offset of token ``first`` in a run (:attr:`run_bytes`)."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowSource:
    """Raw rows in global memory; run-time values."""

    base: Int64  # address of the CTA's first head of token 0 of block 0
    block_bytes: Int64  # from one block (a request, or a page) to the next, 64 bits
    token_bytes: Index  # from one token to the next, 32 bits, or known at compile time

    def address(self, block, token):
        """Returns the address of a token's rows. block: index of the token's block; None if :meth:`AddressedRows.enter`
        has narrowed the source to a block.
        """
        address = self.base + Int64(token) * self.token_bytes
        return address if block is None else address + Int64(block) * self.block_bytes


class RowOperand(_Operand):
    """The base of all loaders of raw rows."""

    def __init__(self, config: DecodeConfig, index: int):
        super().__init__(config, index)
        tile = tiles_of(config)[index]
        assert isinstance(tile, RowTile)
        self.tile = tile
        self.row_bytes = WORD_BYTES * tile.row_words
        self.run_tokens = tokens_per_copy(config, tile)

    @property
    def run_bytes(self) -> int:
        return self.tile_bytes

    def row_start(self, first: Int32):
        return WORD_BYTES * self.tile.token_offset(first)


class AddressedRows(RowOperand):
    """The base of loaders by bulk copies and by words, whose copies take addresses of rows."""

    def make_source(self, cache: cute.Tensor):
        return cache

    def open(self, source, ring, place) -> RowSource:
        block_bytes, outer_bytes, inner_bytes = (Int64(stride) for stride in source.stride[:3])  # elements are bytes
        head_major = self.config.features.head_major
        token_bytes, head_bytes = (inner_bytes, outer_bytes) if head_major else (outer_bytes, inner_bytes)
        base = ptx.pinned(source.iterator.toint() + Int64(place.first_head) * head_bytes)
        # Known where tokens touch, and the same for K and V.
        known = WORD_BYTES * self.tile.token_words if self.config.runs.contiguous else Int32(token_bytes)
        return RowSource(base, block_bytes, known)

    def enter(self, source: RowSource, block) -> RowSource:
        """Returns the source narrowed to one block of the cache. Addresses of the block's tokens then need no 64-bit
        multiplications, which saves 80 cycles a tile.
        """
        return replace(source, base=ptx.pinned(source.base + Int64(block) * source.block_bytes))


class BulkOperand(AddressedRows):
    """The loader by cp.async.bulk. One lane of a producer warp copies a run of whole tokens. The stage's barrier counts
    the bytes.
    """

    copy = "bulk"

    def arriving_bytes(self, tokens):
        return tokens * (self.tile.token_words * WORD_BYTES)

    def copy_run(self, tiles, block, first, place, tokens, stage, barrier):
        """Issues one copy of ``tokens`` tokens: from token ``first`` of a block to token ``place`` of the tile."""
        tile = self.tile
        target = self.stage_address(tiles.ring, stage)
        target = target + place // tile.copy_tokens * (tile.copy_pitch_words * WORD_BYTES)
        if self.run_tokens < tile.copy_tokens:
            target = target + place % tile.copy_tokens * (tile.token_words * WORD_BYTES)
        source = tiles.opened[self.index].address(block, first)
        ptx.bulk_copy_to_shared(target, source, tokens * (tile.token_words * WORD_BYTES), barrier.toint())


class WordOperand(AddressedRows):
    """The loader by cp.async of single words, for caches whose rows bulk copies cannot address. All lanes of the
    producer warps issue copies."""

    copy = "word"

    def arriving_bytes(self, tokens):
        return 0

    @cute.jit
    def copy_token(self, tiles, block, first: Int32, place: Int32, stage: Int32, lane: Int32):
        tile = self.tile
        source = tiles.opened[self.index].address(block, first)
        target = self.stage_address(tiles.ring, stage) + tile.token_offset(place) * WORD_BYTES
        for word in cutlass.range(lane, tile.token_words, WARP_THREADS, unroll=1):
            ptx.async_copy_word(target + word * WORD_BYTES, source + word * WORD_BYTES)


@dataclass(frozen=True)
class RowMapSource:
    """A tensor map over the words of a cache's tokens, and the ring; run-time values. The map begins at the CTA's first
    head, or up to three words before it.
    """

    atom: cute.CopyAtom
    cache: cute.Tensor
    ring: cute.Pointer
    before: Int32  # bytes, in front of the first head's


class RowMapOperand(RowOperand):
    """The loader of some heads' raw rows by tensor maps. One load takes all tokens of a page; a bulk copy would take
    one token.

    In shared memory, a token's words are followed by padding. Loads fill it with the cache's next words or with zeros.
    """

    copy = "map"

    def __init__(self, config: DecodeConfig, index: int):
        super().__init__(config, index)
        self.box_tokens, self.box_words = self.run_tokens, self.tile.copy_pitch_words
        self.box_bytes = self.box_tokens * self.box_words * WORD_BYTES
        self.num_boxes = config.tile_tokens // self.box_tokens
        # Maps bring whole vectors of a token, and rows may begin within one.
        self.begins_before = bool(self.tile.token_words % VECTOR_WORDS)

    def rows_address(self, tiles, stage):
        address = self.stage_address(tiles.ring, stage)
        return address + tiles.opened[self.index].before if self.begins_before else address

    def make_source(self, cache: cute.Tensor):
        """Makes a tensor map of a cache and the coordinate tensor [tokens of a block, words of all heads, blocks]."""
        shape, (token_words, one, block_words) = self.words_of(cache.shape, cache.stride)
        token_words, block_words = (cute.assume(words, divby=VECTOR_WORDS) for words in (token_words, block_words))
        words = cute.recast_ptr(cache.iterator, dtype=Uint32)
        view = cute.make_tensor(words, cute.make_layout(shape, stride=(token_words, one, block_words)))
        operation = cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(operation, view, self._layout(), (self.box_tokens, self.box_words))

    def words_of(self, shape, stride):
        """Converts the cache's shape and stride from bytes [blocks, tokens, heads, row] to words [tokens, words of all
        heads, blocks]."""
        blocks, tokens, heads = shape[:3]
        return (tokens, heads * self.tile.row_words, blocks), (stride[1] // WORD_BYTES, 1, stride[0] // WORD_BYTES)

    def begin(self, head):
        """Returns (index in a token of the first word that is loaded, bytes from this word to the row of the CTA's
        first head). The numbers are the same for all tokens.
        """
        first = head * self.tile.row_words
        if not self.begins_before:
            return first, 0
        before = first % VECTOR_WORDS
        return first - before, before * WORD_BYTES

    def _layout(self):
        """Returns the layout of a TMA tile in shared memory."""
        return cute.make_layout((self.box_tokens, self.box_words), stride=(self.box_words, 1))

    def open(self, source, ring, place) -> RowMapSource:
        atom, words = source
        first, before = self.begin(place.first_head)
        first = cute.assume(first, divby=VECTOR_WORDS)
        words = cute.domain_offset((0, first, 0), words)
        # [box, of a block's tokens, block]
        cache = cute.local_tile(words, (self.box_tokens, self.box_words), (None, 0, None))
        return RowMapSource(atom, cache, ring, Int32(before))

    def arriving_bytes(self, tokens):
        if not self.config.page_tokens:
            return self.num_boxes * self.box_bytes
        return (tokens + (self.box_tokens - 1)) // self.box_tokens * self.box_bytes

    @cute.jit
    def copy_box(self, tiles, block: Int32, first: Int32, box, stage: Int32, barrier):
        """Copies the ``box``-th part of a tile; this part begins with token ``first`` of a block."""
        source = tiles.opened[self.index]
        place = self.ring_offset + stage * self.tile_bytes + box * self.box_bytes
        pointer = cute.recast_ptr(source.ring + cute.assume(place, divby=PLACE_BYTES), dtype=Uint32)
        target, origin = cpasync.tma_partition(
            source.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(pointer, self._layout()), 0, 2),
            cute.group_modes(source.cache, 0, 2),
        )
        cute.copy(source.atom, origin[None, first // self.box_tokens, block], target, tma_bar_ptr=barrier)


@dataclass(frozen=True)
class TensorMapSource:
    """A tensor map and the partitions of the cache and of the ring that it copies between; run-time values."""

    atom: cute.CopyAtom
    shared: cute.Tensor
    cache: cute.Tensor
    first_head: Int32


class TensorMapOperand(_Operand):
    """The loader by tensor maps with a swizzle. A load takes one KV head's tokens; elements outside the cache read as
    0."""

    copy = "tma"

    def __init__(self, config: DecodeConfig, index: int):
        super().__init__(config, index)
        tile = tiles_of(config)[index]
        assert isinstance(tile, SwizzledTile)
        self.tile = tile
        name = config.format_names[index]
        self.element_type = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}.get(name, cutlass.Uint8)
        self.box_tokens = tokens_per_copy(config, tile)
        self.num_boxes = config.tile_tokens // self.box_tokens

    def make_source(self, cache: cute.Tensor):
        """Makes a tensor map of a cache and the coordinate tensor [tokens of a block, row, num_kv_heads, blocks]. The
        map holds the cache's strides; the kernel knows coordinates alone.
        """
        modes = [2, 3, 1, 0] if self.config.features.head_major else [1, 3, 2, 0]
        view = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=modes))
        operation = cpasync.CopyBulkTensorTileG2SOp()
        shape = (self.box_tokens, self.tile.padded_dim)
        return cpasync.make_tiled_tma_atom(operation, view, self._layout(self.box_tokens), shape)

    def _layout(self, *modes: int):
        """Returns the swizzled layout in shared memory of tiles [tokens, row] of one head. modes: the number of tokens
        of a tile, then the sizes of further dimensions that repeat the tile.
        """
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW128 if self.tile.row_bytes == PANEL_BYTES else kinds.K_SW64
        atom = warpgroup.make_smem_layout_atom(kind, self.element_type)
        shape = (modes[0], self.tile.padded_dim, *modes[1:])
        return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))

    def open(self, source, ring, place) -> TensorMapSource:
        config = self.config
        atom, tensor = source
        layout = self._layout(config.tile_tokens, config.mainloop.num_heads, config.pipeline.num_stages)
        pointer = cute.recast_ptr(ring + self.ring_offset, layout.inner, dtype=self.element_type)
        box = (self.box_tokens, self.tile.padded_dim)
        # [box, of the tile's tokens, head, stage] and [box, of a block's tokens, head, block]
        shared = cute.flat_divide(cute.make_tensor(pointer, layout.outer), box)[None, None, None, 0, None, None]
        cache = cute.local_tile(tensor, box, (None, 0, None, None))
        parts = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(cache, 0, 2)
        )
        return TensorMapSource(atom, parts[0], parts[1], place.first_head)

    def arriving_bytes(self, tokens):
        if not self.config.page_tokens:
            return self.tile.num_bytes
        boxes = (tokens + (self.box_tokens - 1)) // self.box_tokens
        return boxes * (self.tile.num_bytes // self.num_boxes)

    @cute.jit
    def copy_box(self, tiles, block: Int32, first: Int32, box, stage: Int32, barrier):
        """Copies the ``box``-th part of a tile; this part begins with token ``first`` of a block."""
        source = tiles.opened[self.index]
        for head in cutlass.range_constexpr(self.config.mainloop.num_heads):
            cute.copy(
                source.atom,
                source.cache[None, first // self.box_tokens, source.first_head + head, block],
                source.shared[None, box, head, stage],
                tma_bar_ptr=barrier,
            )

    @property
    def run_bytes(self) -> int:
        return self.tile.panel_bytes

    def row_start(self, first: Int32):
        return first * self.tile.row_bytes
