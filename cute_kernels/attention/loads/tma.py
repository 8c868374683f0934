"""The producer of 16-bit caches: TMA tiles of 128-byte rows in the 128-byte swizzle, without decoding.

A block may have tokens that do not exist, or that no query sees. Their rows become zeros, and the block's valid rows
are copied one by one. The memory of a token that does not exist may hold anything, and NaN times a probability of 0 is
NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import ELEMENT_BYTES, TILE_SCALE_BYTES
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.attention.loads.memory import KEYS, VALUES, Source
from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.pipeline import PipelineState

MOST_UNROLLED = 4  # TMA tiles of a block whose copies are unrolled: the code stands twice, and with 8 registers spill


@dataclass(frozen=True)
class Filling:
    """The source and the destination of the K and V tiles of a work tile. first_valid: the first token that some query
    sees."""

    source: Source
    work: Any
    memory: Any
    first_valid: Int32


@dataclass(frozen=True)
class BlockPlace:
    """A block of tokens, and its place in the cache. found, place: the result of `TmaTileProducer.locate`, which
    differs from lane to lane. Each lane has the place of one TMA tile of the block."""

    block: Int32
    found: Int32
    place: Int32


class TmaTileProducer:
    """The producer warps of a 16-bit cache: one warp for K and V, or one warp for each
    (`ExtendConfig.filling_warps`)."""

    def __init__(self, config: ExtendConfig):
        self.config = config
        self.types = [Uint8 if config.fp8 else of_name(name).type for name in config.operand_types]
        self.tma_rows = min(config.page_tokens or config.tile_tokens, config.tile_tokens)
        self.num_tma_tiles = config.tile_tokens // self.tma_rows
        self.tma_shape = (self.tma_rows, config.slab_columns)
        self.num_slabs = tuple(columns // config.slab_columns for columns in config.operand_columns)
        self.row_pieces = tuple(columns // 8 for columns in config.operand_columns)
        self.real_pieces = config.head_dim // 8, config.value_dim // 8  # others are zeros

    def make_maps(self, k_cache: cute.Tensor, v_cache: cute.Tensor):
        """Makes tensor maps with coordinates [token of a block, column, head, block]. Runs on the host."""
        caches = ((KEYS, k_cache), (VALUES, v_cache))
        return tuple(self.make_map(operand, cache) for operand, cache in caches)

    def make_map(self, operand: int, cache: cute.Tensor):
        """Makes the tensor map of K or of V."""
        modes = [2, 3, 1, 0] if self.config.features.head_major else [1, 3, 2, 0]
        view = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=modes))
        place = wgmma_tiles.tile_layout(*self.tma_shape, self.types[operand])
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, place, self.tma_shape)

    def fill(self, source, work, span, first_valid, memory, warp, lane, state: PipelineState):
        """Fills the tiles of a work tile, the last block first. Returns the next state of the pipelines."""
        return self.fill_by(self.copy_warps, Filling(source, work, memory, first_valid), span, warp, lane, state)

    @cute.jit
    def fill_by(self, copy: cutlass.Constexpr, filling, span, warp: Int32, lane: Int32, state: PipelineState):
        """Fills the tiles of a work tile. For each block it calls ``copy``, a function with the arguments of
        `copy_warps`.
        """
        found, place = self.locate(filling, cutlass.max(span.end - 1, 0), lane)
        for i in cutlass.range(span.begin, span.end, 1, unroll=1):
            block = span.end - 1 - (i - span.begin)
            next_found, next_place = self.locate(filling, cutlass.max(block - 1, span.begin), lane)
            copy(filling, BlockPlace(block, found, place), warp, lane, state)
            state = filling.memory.pipelines[KEYS].next(state)
            found, place = next_found, next_place
        return state

    @cute.jit
    def copy_warps(self, filling, at, warp: Int32, lane: Int32, state: PipelineState):
        """Copies a block's tiles of K and V. If there is one producer warp, it copies both. If there are two, each
        copies one of them.
        """
        if const_expr(self.config.filling_warps == 1):
            for operand in cutlass.range_constexpr(2):
                self.copy(operand, filling, at, lane, state)
        else:
            if warp == KEYS:
                self.copy(KEYS, filling, at, lane, state)
            else:
                self.copy(VALUES, filling, at, lane, state)

    @cute.jit
    def copy(self, operand: cutlass.Constexpr, filling, at, lane: Int32, state: PipelineState):
        """Fills a block's tile of K or of V once its stage is free."""
        first = at.block * self.config.tile_tokens
        pipeline = filling.memory.pipelines[operand]
        pipeline.producer_acquire(state)
        if const_expr(self.config.unpacked):  # whole tiles, whatever their request's length
            self.copy_tma_tiles(operand, filling, at, state)
        else:
            whole = (first >= filling.first_valid) & (first + self.config.tile_tokens <= filling.work.kv_stop)
            if whole:
                self.copy_tma_tiles(operand, filling, at, state)
            else:
                self.copy_rows(operand, filling, at, state.stage, lane)
                if lane == 0:
                    pipeline.producer_commit(state)

    def locate(self, filling, block, lane):
        """Returns where a lane's TMA tile of a block of tokens lies: (block of the cache, row of that block)."""
        source, work = filling.source, filling.work
        token = block * self.config.tile_tokens + lane % self.num_tma_tiles * self.tma_rows
        token = cutlass.select_(token < work.kv_stop, token, Int32(0))
        if const_expr(self.config.ragged):
            return Int32(0), work.kv_start + token
        if const_expr(self.config.page_tokens == 0):
            return work.request, token
        entry, place = source.pages.ask(work.request, token)
        return source.pages.existing(entry), place

    def first_tile(self, source, work):
        """Returns the index of the first tile of the work tile's request and head, counted over all tiles of the
        unpacked keys.
        """
        rows, config = source.keys, self.config
        offset = Int64(work.request) * rows.block_bytes + Int64(work.head) * rows.head_bytes
        return offset // (config.tile_tokens * config.head_dim * ELEMENT_BYTES)

    @cute.jit
    def copy_tma_tiles(self, operand: cutlass.Constexpr, filling, at, state: PipelineState):
        """Issues the TMA loads of a whole tile."""
        source, work, memory, found, place = filling.source, filling.work, filling.memory, at.found, at.place
        pipeline, stage = memory.pipelines[operand], state.stage
        scaled = operand == KEYS and self.config.unpacked and any(self.config.tile_scales)
        with cute.arch.elect_one():
            barrier = pipeline.producer_expect(state, self.config.tile_bytes[operand] + TILE_SCALE_BYTES * scaled)
            if const_expr(scaled):
                tile = place // self.config.tile_tokens
                address = source.tile_scales + (self.first_tile(source, work) + tile) * TILE_SCALE_BYTES
                smem = memory.scales_of(operand, stage)
                ptx.bulk_copy_to_shared(smem, address, Int32(TILE_SCALE_BYTES), barrier)
        atom, view = source.maps[operand]
        if const_expr(self.config.ragged):
            view = cute.domain_offset((work.kv_start, 0, 0, 0), view)
            place = place - work.kv_start
        tma_tiles = cute.local_tile(view, self.tma_shape, (None, None, None, None))
        tile = memory.tile_pointer + memory.tile(operand, stage)
        before = self.parts_before(operand, work) * self.num_slabs[operand]
        for part in cutlass.range(0, self.num_tma_tiles, 1, unroll=min(self.num_tma_tiles, MOST_UNROLLED)):
            where = cute.arch.shuffle_sync(found, part)
            row = cute.arch.shuffle_sync(place, part) // self.tma_rows
            for slab in cutlass.range_constexpr(self.num_slabs[operand]):
                offset = slab * self.config.slab_bytes + part * (self.tma_rows * wgmma_tiles.ROW_BYTES)
                target, origin = cpasync.tma_partition(
                    atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(wgmma_tiles.tile(tile + offset, *self.tma_shape, self.types[operand]), 0, 2),
                    cute.group_modes(tma_tiles, 0, 2),
                )
                origin = origin[None, row, before + slab, work.head, where]
                cute.copy(atom, origin, target, tma_bar_ptr=pipeline.full_barrier(state))

    def parts_before(self, operand: int, work):
        """Returns how many parts of V's columns lie before the part that the work tile computes; 0 for K."""
        return work.value_part if operand == VALUES and self.config.value_parts > 1 else 0

    @cute.jit
    def copy_rows(self, operand: cutlass.Constexpr, filling, at, stage: Int32, lane: Int32):
        """Copies the rows of a tile that some query sees. Other rows become zeros."""
        for start in cutlass.range_constexpr(0, self.row_pieces[operand], WARP_THREADS):
            self.copy_pieces(operand, start, filling, at, stage, lane)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @cute.jit
    def copy_pieces(self, operand: cutlass.Constexpr, start: cutlass.Constexpr, filling, at, stage: Int32, lane: Int32):
        """Starts copying 16-byte pieces of a tile's rows: at most 32 pieces of each row, from piece ``start`` on."""
        work, memory, first = filling.work, filling.memory, at.block * self.config.tile_tokens
        rows, row_pieces = filling.source.rows(operand), self.row_pieces[operand]
        row_lanes = min(row_pieces, WARP_THREADS)
        below, piece = lane // row_lanes, lane % row_lanes + start
        slab, source_piece = piece // 8, piece + self.parts_before(operand, work) * row_pieces
        tile = memory.tiles + memory.tile(operand, stage) + slab * self.config.slab_bytes
        step_rows = WARP_THREADS // row_lanes
        for step in cutlass.range(0, self.config.tile_tokens, step_rows, unroll=4 if self.num_tma_tiles < 8 else 1):
            row = step + below
            part = row // self.tma_rows
            where = cute.arch.shuffle_sync(at.found, part)
            place = cute.arch.shuffle_sync(at.place, part)
            exists = (first + row >= filling.first_valid) & (first + row < work.kv_stop)
            if const_expr(self.real_pieces[operand] < row_pieces):
                exists = exists & (piece < self.real_pieces[operand])
            token = cutlass.select_(exists, place + row % self.tma_rows, Int32(0))
            size = cutlass.select_(exists, Int32(wgmma_tiles.PIECE_BYTES), Int32(0))
            address = rows.address(where, token, work.head) + Int64(source_piece * wgmma_tiles.PIECE_BYTES)
            numbers.copy_async(tile + wgmma_tiles.piece_offset(row, piece % 8), address, size)


assert (KEYS, VALUES) == (0, 1)  # the order of the tensor maps
