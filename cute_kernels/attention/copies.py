"""Bringing tiles of K and V from global into shared memory: raw rows by bulk copies, by words, or by tensor maps."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.attention.config import WARP_THREADS, DecodeConfig
from cute_kernels.attention.tiles import int4_tile
from cute_kernels.device import ptx
from layouts.kv.tile import WORD_BYTES


def make_copier(config: DecodeConfig):
    """The object that fills the ring of ``config``."""
    return {"bulk": BulkCopier, "word": WordCopier, "tma": TensorMapCopier}[config.copy](config)


class RowCopier:
    """What bulk and word copies share: where INT4 rows lie in global and in shared memory."""

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.tile = int4_tile(config)
        self.row_bytes = config.format.row_bytes(config.head_dim)
        # A lane issues a copy in some 30 cycles: where a tile takes many, all warps share them.
        self.num_issuers = 1 if self.tile.num_copies == 1 else config.num_warps

    def make_source(self, k_cache: cute.Tensor, v_cache: cute.Tensor):
        return k_cache, v_cache

    def open(self, source, ring, full, place) -> "RowTiles":
        """This CTA's part of the caches and its ring."""
        offset = (Int64(place.batch) * place.max_seq_len * place.num_kv_heads + place.first_head) * self.row_bytes
        k_source, v_source = (ptx.pinned(cache.iterator.toint() + offset) for cache in source)
        return RowTiles(ring.toint(), full, (k_source, v_source), place.num_kv_heads * self.row_bytes)

    def stage_address(self, tiles: "RowTiles", stage):
        """Shared-memory address of a stage's K tile; V follows ``tile_bytes`` later."""
        return tiles.ring + stage * (2 * self.config.tile_bytes)


@dataclass(frozen=True)
class RowTiles:
    """Where a CTA's tiles come from and go to; run-time values."""

    ring: Any  # shared-memory address
    full: Any  # barriers of the stages
    sources: Any  # global addresses of token 0 of K and V
    token_bytes: Any  # from one token to the next


class BulkCopier(RowCopier):
    """cp.async.bulk of runs of whole tokens, counted in bytes on the stage's barrier; one lane of an issuing warp."""

    arrivals = 1

    @cute.jit
    def copy_tile(self, tiles, place, token: Int32, length: Int32, stage: Int32, warp: Int32, lane: Int32):
        if lane == 0:
            tile = self.tile
            # Whole 16-byte pieces: rows past the request's length may come along, rows past the cache may not.
            tokens = cutlass.min((length - token + 3) & -4, place.max_seq_len - token)
            tokens = cutlass.min(tokens, tile.num_tokens)
            token_bytes = tile.token_words * WORD_BYTES
            barrier = tiles.full + stage
            if warp == 0:
                # Bytes of other warps' copies may land before: the count may run below zero until this arrival.
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * tokens * token_bytes)
            step = self.num_issuers * tile.copy_tokens
            for i in cutlass.range(warp * tile.copy_tokens, tokens, step, unroll=1):
                size = cutlass.min(tokens - i, tile.copy_tokens) * token_bytes
                target = self.stage_address(tiles, stage) + i // tile.copy_tokens * (tile.copy_pitch_words * WORD_BYTES)
                offset = Int64(token + i) * tiles.token_bytes
                for operand in cutlass.range_constexpr(2):
                    ptx.bulk_copy_to_shared(
                        target + operand * self.config.tile_bytes,
                        tiles.sources[operand] + offset,
                        size,
                        barrier.toint(),
                    )


class WordCopier(RowCopier):
    """cp.async of single words, for caches whose rows no bulk copy can address."""

    def __init__(self, config: DecodeConfig):
        super().__init__(config)
        self.num_issuers = config.num_warps
        self.arrivals = WARP_THREADS * config.num_warps

    @cute.jit
    def copy_tile(self, tiles, place, token: Int32, length: Int32, stage: Int32, warp: Int32, lane: Int32):
        tile = self.tile
        tokens = cutlass.min(length - token, tile.num_tokens)
        for i in cutlass.range(warp, tokens, self.num_issuers, unroll=1):
            first = i // tile.copy_tokens * tile.copy_pitch_words + i % tile.copy_tokens * tile.token_words
            offset = Int64(token + i) * tiles.token_bytes
            target = self.stage_address(tiles, stage) + first * WORD_BYTES
            for word in cutlass.range(lane, tile.token_words, WARP_THREADS, unroll=1):
                for operand in cutlass.range_constexpr(2):
                    ptx.async_copy_word(
                        target + operand * self.config.tile_bytes + word * WORD_BYTES,
                        tiles.sources[operand] + offset + word * WORD_BYTES,
                    )
        cute.arch.cp_async_mbarrier_arrive_noinc(tiles.full + stage)


class TensorMapCopier:
    """cp.async.bulk.tensor with the 128-byte swizzle, a tile of a KV head at a time; rows past the cache read as 0."""

    arrivals = 1
    num_issuers = 1

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.element_type = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[config.kv_format]

    def make_source(self, k_cache: cute.Tensor, v_cache: cute.Tensor):
        """A tensor map and its coordinate tensor [max_seq_len, head_dim, num_kv_heads, batch] per cache."""
        config = self.config
        operation = cpasync.CopyBulkTensorTileG2SOp()
        shape = (config.tile_tokens, config.head_dim)
        source = []
        for cache in (k_cache, v_cache):
            view = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 3, 2, 0]))
            layout = self._tile_layout()
            atom, tensor = cpasync.make_tiled_tma_atom(operation, view, layout, shape)
            source += [atom, tensor]
        return tuple(source)

    def _tile_layout(self, *outer: int):
        """Swizzled [tokens, head_dim] tile of one head, repeated over ``outer`` modes."""
        kind = warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, self.element_type)
        shape = (self.config.tile_tokens, self.config.head_dim, *outer)
        return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))

    def open(self, source, ring, full, place) -> "TensorMapTiles":
        """This CTA's part of the caches and its ring."""
        config = self.config
        k_atom, k_tensor, v_atom, v_tensor = source
        # Stage, then K or V, then head: the order in which tiles lie in the ring.
        layout = self._tile_layout(config.num_heads, 2, config.num_stages)
        shared = cute.make_tensor(cute.recast_ptr(ring, layout.inner, dtype=self.element_type), layout.outer)
        parts = []
        for operand, (atom, tensor) in enumerate(((k_atom, k_tensor), (v_atom, v_tensor))):
            tiles = cute.local_tile(
                tensor[None, None, None, place.batch], (config.tile_tokens, config.head_dim), (None, 0, None)
            )
            parts.append(
                cpasync.tma_partition(
                    atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(shared[None, None, None, operand, None], 0, 2),
                    cute.group_modes(tiles, 0, 2),
                )
            )
        return TensorMapTiles(ring.toint(), full, (k_atom, v_atom), tuple(parts))

    def stage_address(self, tiles: "TensorMapTiles", stage):
        return tiles.ring + stage * (2 * self.config.tile_bytes)

    @cute.jit
    def copy_tile(self, tiles, place, token: Int32, length: Int32, stage: Int32, warp: Int32, lane: Int32):
        barrier = tiles.full + stage
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * self.config.tile_bytes)
        cute.arch.sync_warp()
        for operand in cutlass.range_constexpr(2):
            shared, source = tiles.parts[operand]
            for head in cutlass.range_constexpr(self.config.num_heads):
                cute.copy(
                    tiles.atoms[operand],
                    source[None, token // self.config.tile_tokens, place.first_head + head],
                    shared[None, head, stage],
                    tma_bar_ptr=barrier,
                )


@dataclass(frozen=True)
class TensorMapTiles:
    """Tensor maps, their partitioned tensors, and the ring; run-time values."""

    ring: Any
    full: Any
    atoms: Any
    parts: Any
