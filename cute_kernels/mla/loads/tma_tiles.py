"""Loads tiles of 16-bit tokens by TMA, where every 64 tokens are contiguous in a page.

One thread issues the loads. A tile is loaded and released in two parts, each with its own barriers. The first part is
the left half of the value with the columns after the value. The second part is the right half of the value, which
:mod:`.mainloops.delayed_pv` reads a block later. In a cluster of two CTAs, both have heads of the same row and need the
same tokens. Each CTA loads half of the tokens for both (TMA multicast).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import numbers, wgmma_tiles
from cute_kernels.device.ring import advance
from cute_kernels.mla.barriers import await_barriers
from cute_kernels.mla.config import BLOCK_TOKENS, GROUP_TOKENS, NUM_STAGES, MlaConfig
from cute_kernels.mla.elements import of_name
from cute_kernels.mla.few_heads.config import FewHeadsConfig
from cute_kernels.mla.loads.destination import drain
from cute_kernels.mla.loads.gather import GROUP_BYTES, SLAB_BYTES, LanePlaces, leads
from cute_kernels.mla.loads.locate import PagedSource, make_locator
from cute_kernels.mla.loads.queries import QueryLoader
from cute_kernels.mla.work_tiles import Cursor

BOTH_CTAS = 0b11  # of a cluster
HALF_PIECES = 4  # 16-byte pieces of a row of a slab that a lane's two loads are apart


@dataclass(frozen=True)
class TmaPagedSource(PagedSource):
    """A paged cache with its tensor map."""

    copy: cute.CopyAtom
    view: cute.Tensor  # coordinates [tokens of a page, columns, pages]


class TmaTileMap:
    """The tensor map of a cache. A TMA tile has 64 columns of the tokens that one CTA loads."""

    def __init__(self, config: MlaConfig | FewHeadsConfig):
        self.cluster, self.width = config.cluster, config.head_dim
        self.type = of_name(config.layout.dtype).type
        self.box = (BLOCK_TOKENS // config.cluster, wgmma_tiles.SLAB_COLUMNS)

    def source(self, paged: PagedSource, cache, page_stride, token_stride) -> TmaPagedSource:
        """Makes the tensor map of the cache, on the host. cache: the cache's address. Strides are in bytes; all three
        are multiples of 16. Tokens of pages that do not exist, and tokens after a page's last one, read as zeros."""
        rows, pages = paged.pages.page_size.value, paged.num_pages
        row, page = (cute.assume(Int64(stride) // 2, divby=8) for stride in (token_stride, page_stride))
        layout = cute.make_layout((rows, self.width, pages), stride=(row, 1, page))
        tokens = cute.make_tensor(cute.make_ptr(self.type, cache, cute.AddressSpace.gmem, assumed_align=16), layout)
        both = self.cluster > 1
        operation = cpasync.CopyBulkTensorTileG2SMulticastOp() if both else cpasync.CopyBulkTensorTileG2SOp()
        place = wgmma_tiles.tile_layout(*self.box, self.type)
        copy, view = cpasync.make_tiled_tma_atom(operation, tokens, place, self.box)
        return TmaPagedSource(**vars(paged), copy=copy, view=view)


class TmaTileLoad:
    """The load by TMA: only the first producer warp works."""

    def __init__(self, config: MlaConfig):
        self.config, self.parts = config, config.layout.parts
        self.locator = make_locator(config.tokens)
        self.loader = QueryLoader(config)
        self.tma_tiles = TmaTileMap(config)
        self.box_rows = self.tma_tiles.box[0]

    @cute.jit
    def run(self, work_tiles, source, memory, warp, lane):
        """Fills a tile for every block of the CTA's work tiles."""
        if warp == 0:
            self.fill(work_tiles, source, memory, lane)
        elif const_expr(self.config.crossover):
            await_barriers(self.config, produces=True)

    @cute.jit
    def fill(self, work_tiles, source, memory, lane):
        cursor = Cursor.before(work_tiles, self.loader, leads(Int32(0), lane))
        cursor.advance()
        entry = self.locator.load_entry(cursor.work, source, cursor.block, Int32(0))
        await_barriers(self.config, produces=True)
        stage, phase, number = Int32(0), Int32(1), Int32(0)
        while number < cursor.found:
            block, page = cursor.block, entry
            tokens = cursor.work.length - block * BLOCK_TOKENS
            cursor.advance()
            entry = self.locator.load_entry(cursor.work, source, cursor.block, Int32(0))
            if const_expr(self.config.tiles.load.prefetch > 0):
                self.prefetch(source, entry, cursor.block, lane)
            for part in cutlass.range_constexpr(len(self.parts)):
                place = self.config.tile_parts * stage + part
                cute.arch.mbarrier_wait(memory.empty + place, phase)
                if tokens >= BLOCK_TOKENS:
                    self.ask(source, memory, stage, page, block, part)
                else:
                    self.copy_rows(source, memory, stage, page, block, tokens, lane, part)
                    if lane == 0:
                        cute.arch.mbarrier_arrive(memory.full + place)
            stage, phase = advance(stage, phase, NUM_STAGES)
            number = number + 1
        if const_expr(self.config.cluster > 1):
            drain(self.config, memory, stage, phase)

    def rank(self):
        """Returns the rank of this CTA in its cluster."""
        return cute.arch.block_idx_in_cluster() if self.config.cluster > 1 else Int32(0)

    def prefetch(self, source, page, block, lane) -> None:
        """Prefetches this CTA's share of a block's tokens into L2, if the tokens are contiguous."""
        _, offset = source.pages.page_size.divide(Uint32(block * BLOCK_TOKENS))
        size = self.config.head_dim * 2
        exists = (page >= 0) & (page < source.num_pages)
        wanted = (lane == 0) & exists & (source.pages.token_stride == size)
        address = source.pages.address(Uint32(page), offset + Uint32(self.rank() * self.box_rows))
        condition = cutlass.select_(wanted, Int32(1), Int32(0))
        numbers.prefetch_bulk_if(condition, address, Int32(self.box_rows * size))

    @cute.jit
    def ask(self, source, memory, stage, page, block, part: cutlass.Constexpr):
        """Starts loading this CTA's share of one part of a tile."""
        slabs = self.parts[part]
        barrier = memory.full + (self.config.tile_parts * stage + part)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(slabs) * SLAB_BYTES)
        _, offset = source.pages.page_size.divide(Uint32(block * BLOCK_TOKENS))
        row = Int32(offset) // self.box_rows + self.rank()
        share = self.rank() * (self.box_rows * wgmma_tiles.ROW_BYTES)
        first = memory.tile_pointer + (stage * self.config.tile_bytes + share)
        tma_tiles = cute.local_tile(source.view, self.tma_tiles.box, (None, None, None))
        options = {"tma_bar_ptr": barrier}
        if const_expr(self.config.cluster > 1):
            options["mcast_mask"] = Int16(BOTH_CTAS)
        for slab in slabs:
            place = wgmma_tiles.tile(first + slab * SLAB_BYTES, *self.tma_tiles.box, self.tma_tiles.type)
            target, origin = cpasync.tma_partition(
                source.copy, 0, cute.make_layout(1), cute.group_modes(place, 0, 2), cute.group_modes(tma_tiles, 0, 2)
            )
            cute.copy(source.copy, origin[None, row, slab, page], target, **options)

    @cute.jit
    def copy_rows(self, source, memory, stage, page, block, tokens, lane, part: cutlass.Constexpr):
        """Writes a part of a tile that has fewer than 64 tokens, and makes the part visible to MMAs. Each CTA writes
        the whole part. Missing tokens become zeros, whatever the cache holds in their places."""
        place = LanePlaces.of(0, lane)
        tile = memory.tiles + stage * self.config.tile_bytes
        for group in cutlass.range(BLOCK_TOKENS // GROUP_TOKENS, unroll=1):
            row = place.row + group * GROUP_TOKENS
            token = self.locator.token(source, page, block, row)
            size = cutlass.select_(row < tokens, token.valid, Int32(0)) * wgmma_tiles.PIECE_BYTES
            self.copy_group(tile + group * GROUP_BYTES, token, size, place, part)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def copy_group(self, tile, token, size, place: LanePlaces, part: int) -> None:
        """Starts copying 8 rows of a part of a tile. size: how many bytes are read of each 16-byte piece; the remaining
        bytes become zeros.
        """
        apart = HALF_PIECES * wgmma_tiles.PIECE_BYTES
        for slab in self.parts[part]:
            for i in range(2):
                origin = token.address + (place.source + wgmma_tiles.ROW_BYTES * slab + apart * i)
                numbers.copy_async(((tile + place.rope) ^ (apart * i)) + slab * SLAB_BYTES, origin, size)
