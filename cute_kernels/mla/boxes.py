"""Tiles of 16-bit tokens by boxes of a tensor map, where 64 tokens lie side by side in a page.

One warp asks for them. A tile comes and goes in two parts: the left half of the value with the columns behind it, and
the right half, which is read last. Two CTAs of a cluster, with different heads of a row, want the same tokens: each
asks for half of them and the copy goes to both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import BLOCK_TOKENS, GROUP_TOKENS, NUM_STAGES, MlaConfig
from cute_kernels.mla.gather import GROUP_BYTES, SLAB_BYTES, GatherLane, leads
from cute_kernels.mla.items import Cursor
from cute_kernels.mla.layout import HALF_SLABS, VALUE_SLABS
from cute_kernels.mla.locate import PagedSource, make_locator
from cute_kernels.mla.numbers16 import of_name
from cute_kernels.mla.queries import QueryLoader

BOTH_CTAS = 0b11


@dataclass(frozen=True)
class BoxedSource(PagedSource):
    """A paged cache with a tensor map of it."""

    copy: Any = None
    view: Any = None  # coordinates [tokens of a page, columns, pages]


def part_slabs(num_slabs: int, part: int) -> tuple[int, ...]:
    """The slabs of a part of a tile: the left half of the value and what lies behind the value, or the right half."""
    if part:
        return tuple(range(HALF_SLABS, VALUE_SLABS))
    return (*range(HALF_SLABS), *range(VALUE_SLABS, num_slabs))


class BoxLoader:
    """The tensor map of a cache."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.type = of_name(config.layout.dtype).type
        self.box = (BLOCK_TOKENS // config.cluster, wgmma_tiles.SLAB_COLUMNS)

    def source(self, paged: PagedSource, cache, page_stride, token_stride, page_size, num_pages) -> BoxedSource:
        """On the host. Strides in bytes, multiples of 16."""
        row, page = (cute.assume(Int64(stride) // 2, divby=8) for stride in (token_stride, page_stride))
        layout = cute.make_layout((page_size, self.config.head_dim, num_pages), stride=(row, 1, page))
        pointer = cute.make_ptr(self.type, cache, cute.AddressSpace.gmem, assumed_align=16)
        operation = cpasync.CopyBulkTensorTileG2SOp()
        if self.config.cluster > 1:
            operation = cpasync.CopyBulkTensorTileG2SMulticastOp()
        place = wgmma_tiles.tile_layout(*self.box, self.type)
        copy, view = cpasync.make_tiled_tma_atom(operation, cute.make_tensor(pointer, layout), place, self.box)
        return BoxedSource(
            paged.pages, paged.num_pages, paged.table, paged.table_stride, paged.max_pages, paged.lengths, copy, view
        )


class Boxes:
    """The gathering warps, of which one works."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.layout = config.layout
        self.locator = make_locator(config.tokens)
        self.loader = QueryLoader(config)
        self.type = of_name(config.layout.dtype).type
        self.box = BoxLoader(config).box

    @cute.jit
    def run(self, items, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's shares."""
        if warp == 0:
            self.fill(items, source, memory, lane)

    @cute.jit
    def fill(self, items, source, memory, lane):
        cursor = Cursor.before(items, self.loader, leads(Int32(0), lane))
        cursor.advance()
        entry = self.locator.load_entry(cursor.work, source, cursor.block, Int32(0))
        stage, phase, number = Int32(0), Int32(1), Int32(0)
        while number < cursor.found:
            block, page = cursor.block, entry
            tokens = cursor.work.length - block * BLOCK_TOKENS
            cursor.advance()
            entry = self.locator.load_entry(cursor.work, source, cursor.block, Int32(0))
            if const_expr(self.config.prefetch > 0):
                self.prefetch(source, entry, cursor.block, lane)
            for part in cutlass.range_constexpr(2):
                cute.arch.mbarrier_wait(memory.empty + (2 * stage + part), phase)
                if tokens >= BLOCK_TOKENS:
                    self.ask(source, memory, stage, page, block, part)
                else:
                    self.copy_rows(source, memory, stage, page, block, tokens, lane, part)
            stage, phase = advance(stage, phase, NUM_STAGES)
            number = number + 1
        if const_expr(self.config.cluster > 1):
            # The other CTA may not be done with what this one has sent, and arrives here.
            for _ in range(NUM_STAGES):
                for part in range(2):
                    cute.arch.mbarrier_wait(memory.empty + (2 * stage + part), phase)
                stage, phase = advance(stage, phase, NUM_STAGES)

    def rank(self):
        """Of the CTA in its cluster."""
        return cute.arch.block_idx_in_cluster() if self.config.cluster > 1 else Int32(0)

    def prefetch(self, source, page, block, lane) -> None:
        """Asks for a block's tokens, or the CTA's share of them, in L2."""
        rows = self.box[0]
        _, offset = source.pages.page_size.divide(Uint32(block * BLOCK_TOKENS))
        wanted = (lane == 0) & (page >= 0) & (page < source.num_pages)
        size = self.config.head_dim * 2
        wanted = wanted & (source.pages.token_stride == size)
        address = source.pages.address(Uint32(page), offset + Uint32(self.rank() * rows))
        numbers.prefetch_bulk_if(cutlass.select_(wanted, Int32(1), Int32(0)), address, Int32(rows * size))

    @cute.jit
    def ask(self, source, memory, stage, page, block, part: cutlass.Constexpr):
        """Asks for the CTA's share of a part of a tile."""
        slabs = part_slabs(self.layout.num_slabs, part)
        _, offset = source.pages.page_size.divide(Uint32(block * BLOCK_TOKENS))
        row = Int32(offset) // self.box[0] + self.rank()
        barrier = memory.full + (2 * stage + part)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(slabs) * SLAB_BYTES)
        share = self.rank() * (self.box[0] * wgmma_tiles.ROW_BYTES)
        first = memory.tile_pointer + (stage * self.config.tile_bytes + share)
        boxes = cute.local_tile(source.view, self.box, (None, None, None))
        options = {"tma_bar_ptr": barrier}
        if const_expr(self.config.cluster > 1):
            options["mcast_mask"] = Int16(BOTH_CTAS)
        for slab in slabs:
            place = wgmma_tiles.tile(first + slab * SLAB_BYTES, *self.box, self.type)
            target, origin = cpasync.tma_partition(
                source.copy, 0, cute.make_layout(1), cute.group_modes(place, 0, 2), cute.group_modes(boxes, 0, 2)
            )
            cute.copy(source.copy, origin[None, row, slab, page], target, **options)

    @cute.jit
    def copy_rows(self, source, memory, stage, page, block, tokens, lane, part: cutlass.Constexpr):
        """A part of a tile with fewer than 64 tokens, each CTA's own: others become zeros."""
        slabs = part_slabs(self.layout.num_slabs, part)
        place = GatherLane.of(0, lane)
        tile = memory.tiles + stage * self.config.tile_bytes
        for group in cutlass.range(BLOCK_TOKENS // GROUP_TOKENS, unroll=1):
            row = place.row + group * GROUP_TOKENS
            token = self.locator.token(source, page, block, row)
            size = cutlass.select_(row < tokens, token.valid, Int32(0)) * wgmma_tiles.PIECE_BYTES
            for slab in cutlass.range_constexpr(self.layout.num_slabs):
                if const_expr(slab in slabs):
                    for i in cutlass.range_constexpr(2):
                        target = (tile + group * GROUP_BYTES + place.rope) ^ (4 * wgmma_tiles.PIECE_BYTES * i)
                        origin = token.address + (place.source + wgmma_tiles.ROW_BYTES * slab + 64 * i)
                        numbers.copy_async(target + slab * SLAB_BYTES, origin, size)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(memory.full + (2 * stage + part))
