"""Loads the queries of a CTA's 64 heads into shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.mla.config import BLOCK_HEADS, MlaConfig
from cute_kernels.mla.elements import of_name

BOX = (BLOCK_HEADS, wgmma_tiles.SLAB_COLUMNS)


@dataclass(frozen=True)
class QuerySource:
    """The queries of a launch, with their tensor map."""

    copy: cute.CopyAtom
    view: cute.Tensor  # coordinates [heads, columns, rows]
    address: Int64


class QueryLoader:
    """The loads of queries, by TMA."""

    def __init__(self, config: MlaConfig):
        self.width = config.head_dim
        self.type = of_name(config.layout.dtype).type

    def source(self, q, shape) -> QuerySource:
        """Makes a tensor map on the host: TMA tiles of 64 heads and 64 columns, with coordinates [heads, columns,
        rows]."""
        stride = (self.width, 1, shape.num_heads * self.width)
        layout = cute.make_layout((shape.num_heads, self.width, shape.rows), stride=stride)
        place = wgmma_tiles.tile_layout(*BOX, self.type)
        view = cute.make_tensor(q.iterator, layout)
        copy, view = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, place, BOX)
        return QuerySource(copy, view, ptx.address(q))

    @cute.jit
    def ask(self, queries, memory, row, head_block):
        """Starts loading the queries of 64 heads into swizzled shared memory; heads that do not exist become 0. One
        warp calls it."""
        tile = wgmma_tiles.tile(memory.query_pointer, BLOCK_HEADS, self.width, self.type)
        target, source = cpasync.tma_partition(
            queries.copy,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.flat_divide(tile, BOX)[None, None, 0, None], 0, 2),
            cute.group_modes(cute.local_tile(queries.view, BOX, (None, None, None)), 0, 2),
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(memory.queries_full, BLOCK_HEADS * self.width * 2)
        for slab in cutlass.range_constexpr(self.width // wgmma_tiles.SLAB_COLUMNS):
            place = target[None, slab]
            cute.copy(queries.copy, source[None, head_block, slab, row], place, tma_bar_ptr=memory.queries_full)

    def prefetch(self, queries, work, condition) -> None:
        """Prefetches a work tile's queries into L2, if condition is not 0."""
        count = cutlass.min(work.shape.num_heads - work.first_head, Int32(BLOCK_HEADS))
        address = queries.address + Int64(work.query_row(0)) * (self.width * 2)
        numbers.prefetch_bulk_if(condition, address, count * (self.width * 2))
