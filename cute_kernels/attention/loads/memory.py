"""The shared memory of an extend attention CTA, and where rows of a cache lie in global memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cute.nvgpu.cpasync import TmaInfo

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import (
    MMA_WARPGROUPS,
    MMA_WARPS,
    ROW_BYTES,
    TILE_ROWS,
    WORK_BYTES,
    WORK_SLOTS,
)
from cute_kernels.attention.mainloops.fp8 import QUARTERS
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.pages import Pages
from cute_kernels.device.pipeline import Pipeline, fence_init

KEYS, VALUES = 0, 1


@dataclass(frozen=True)
class ExtendMemory:
    """The shared memory of an extend attention CTA. A tile is addressed by its operand (KEYS or VALUES) and its stage.

    Attributes:
        tile_pointer, tiles: pointer to the tiles, and their address: tiles of all of K's stages, then of V's stages.
        query_pointer, queries: pointer to the queries of all warpgroups, and their address.
        code_pointer, codes: pointer to the queries in E4M3, and their address. Without FP8 products they are equal to
            query_pointer and queries.
        scales: [2, stages, 4] words. K's words hold a tile's powers of 2, as in :class:`.unpack.UnpackTarget`, or one
            :func:`.powers.word_of` for each decoding warp.
        query_scales: fp32 [128]: for each row of converted queries, the power of 2 that restores it by multiplication.
        slots: address of the work tiles that the first producer warp has published.
        pipelines: the pipelines of K's tiles and of V's tiles. Producer warps fill them and all consumer warps empty
            them.
        work: the pipeline of the slots.
    """

    config: ExtendConfig
    tile_pointer: cute.Pointer
    tiles: Int32
    query_pointer: cute.Pointer
    queries: Int32
    code_pointer: cute.Pointer
    codes: Int32
    scales: Int32
    query_scales: Int32
    slots: Int32
    pipelines: tuple[Pipeline, Pipeline]
    work: Pipeline

    @staticmethod
    def allocate(config: ExtendConfig) -> ExtendMemory:
        smem = cutlass.utils.SmemAllocator()
        tiles = smem.allocate(config.pipeline.num_stages * sum(config.tile_rooms), byte_alignment=1024)
        queries = smem.allocate(MMA_WARPGROUPS * config.query_bytes, byte_alignment=1024)
        query_address = Int32(queries.toint())
        codes, code_address = queries, query_address
        if config.query_code_bytes:
            codes = smem.allocate(MMA_WARPGROUPS * config.query_code_bytes, byte_alignment=1024)
            code_address = Int32(codes.toint())
        scales = smem.allocate(max(2 * config.pipeline.num_stages * config.scale_bytes, 16), byte_alignment=16)
        query_scales = smem.allocate(4 * TILE_ROWS, byte_alignment=16)
        slots = smem.allocate(WORK_SLOTS * WORK_BYTES, byte_alignment=16)
        barriers = smem.allocate_array(cutlass.Int64, 4 * config.pipeline.num_stages + 2 * WORK_SLOTS)
        stages, readers = config.pipeline.num_stages, MMA_WARPS + config.filling_warps
        return ExtendMemory(
            config=config,
            tile_pointer=tiles,
            tiles=Int32(tiles.toint()),
            query_pointer=queries,
            queries=query_address,
            code_pointer=codes,
            codes=code_address,
            scales=Int32(scales.toint()),
            query_scales=Int32(query_scales.toint()),
            slots=Int32(slots.toint()),
            pipelines=(
                Pipeline(barriers, barriers + 2 * stages, stages, config.tile_fillers[KEYS], MMA_WARPS),
                Pipeline(barriers + stages, barriers + 3 * stages, stages, config.tile_fillers[VALUES], MMA_WARPS),
            ),
            work=Pipeline(barriers + 4 * stages, barriers + (4 * stages + WORK_SLOTS), WORK_SLOTS, 1, readers),
        )

    def init_barriers(self) -> None:
        """Initialises all barriers. One thread calls it, before any thread uses a barrier."""
        for pipeline in (*self.pipelines, self.work):
            pipeline.init()
        fence_init()

    def number(self, operand: int, stage):
        """Returns the index of a tile among all tiles: K's tiles by stage, then V's tiles by stage."""
        return operand * self.config.pipeline.num_stages + stage

    def tile(self, operand: int, stage):
        """Returns the byte offset of a tile."""
        rooms = self.config.tile_rooms
        return operand * self.config.pipeline.num_stages * rooms[KEYS] + stage * rooms[operand]

    def write_ones(self, lane) -> None:
        """Writes the rows of ones after the tiles of V's transpose. One warp calls it, before any MMA reads these
        rows."""
        for stage in range(self.config.pipeline.num_stages):
            behind = self.tile(VALUES, stage) + self.config.tile_bytes[VALUES]
            for piece in range(0, self.config.ones_rows * ROW_BYTES, WARP_THREADS * 16):
                ptx.store_shared(self.tiles + lane * 16, behind + piece, [Uint32(QUARTERS)] * 4)
        cute.arch.fence_proxy("async.shared", space="cta")

    def scales_of(self, operand: int, stage):
        """Returns the address of the scales of a tile's rows."""
        return self.scales + self.number(operand, stage) * self.config.scale_bytes


@dataclass(frozen=True)
class Rows:
    """The place of K's or V's rows in global memory; run-time values.

    Attributes:
        base: address of the first row.
        block_bytes, token_bytes, head_bytes: strides in bytes of blocks (a page, or a request's contiguous cache),
            tokens and heads.
    """

    base: Int64
    block_bytes: Int64
    token_bytes: Int32
    head_bytes: Int64

    @staticmethod
    def of(cache: cute.Tensor, element_bytes: int, head_major: bool) -> Rows:
        """Describes a cache for a kernel. Runs on the host. cache: 4 dimensions, rows contiguous."""
        strides: Any = cache.stride
        block, outer, inner = (Int64(stride) * element_bytes for stride in strides[:3])
        token, head = (inner, outer) if head_major else (outer, inner)
        return Rows(ptx.address(cache), block, token.to(Int32), head)

    def address(self, block, place, head):
        """Returns the address of a head's row of token ``place`` of a block."""
        return (
            self.base
            + (Int64(block) * self.block_bytes + Int64(head) * self.head_bytes)
            + Int64(place) * Int64(self.token_bytes)
        )


@dataclass(frozen=True)
class Source:
    """The caches of a launch; run-time values.

    Attributes:
        maps: the producer's tensor maps of K and V; None if it uses none.
        tile_scales: for unpacked keys, the address of ``tile_scales`` of :class:`.unpack.UnpackTarget`.
    """

    keys: Rows
    values: Rows
    pages: Pages
    maps: tuple[TmaInfo, TmaInfo] | None
    tile_scales: Int64

    def rows(self, operand: int) -> Rows:
        return (self.keys, self.values)[operand]
