"""Grouped weight-only GEMM for many rows an expert: persistent over the tiles of all experts, by warpgroup MMAs.

The roles are those of `cute_kernels.gemm.wgmma.kernel.TileRoles`. `ExpertPlaces` says where an expert's data lie. Rows
of x lie in the order of the places, so the rows of a tile are neighbours. A TMA load may begin at any row. Rows beyond
the expert's last row become columns of the product that are never stored.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS
from cute_kernels.gemm.experts.wgmma.schedule import ENTRY_BYTES, TABLE_BYTES, TABLE_WARPS
from cute_kernels.gemm.experts.wgmma.tiles import GroupedTileScheduler, GroupedTileSizes, fill_table
from cute_kernels.gemm.wgmma.config import M_TILE_BAND, WgmmaConfig
from cute_kernels.gemm.wgmma.kernel import NOBODY, TileRoles, WgmmaKernel
from cute_kernels.gemm.wgmma.mainloops import X_SCALE_ALIGNMENT
from cute_kernels.gemm.wgmma.memory import init_barriers
from cute_kernels.gemm.wgmma.places import Places, tile_of_block
from cute_kernels.gemm.wgmma.reading import Shift
from cute_kernels.gemm.wgmma.tiles import dense_sizes, x_scales_of


class ExpertPlaces:
    """Where an expert's rows, weights and biases are: see `cute_kernels.gemm.wgmma.places.Places`."""

    def __init__(self, config: WgmmaConfig):
        self.config = config

    def rows_of(self, shape, work_tile) -> tuple[Any, Any]:
        return work_tile.token, work_tile.end_token

    def weight_tile(self, shape, work_tile, index) -> Any:
        return work_tile.expert * shape.num_tiles + tile_of_block(self.config, shape, work_tile, index)

    def bias_place(self, shape, work_tile, row) -> Any:
        return work_tile.expert * shape.n + row


def x_scale_shift(work_tile):
    """Returns the number of scales of x that a load brings before a work tile's first scale. Loads begin at a multiple
    of 16 bytes.
    """
    return work_tile.token & (X_SCALE_ALIGNMENT - 1)


class ExpertTiles:
    """The `TileScheduling` of the tiles of all experts.

    A CTA cannot load its first weights before the table of work tiles is written.
    """

    is_dense, asks_first, masks_by_lane, table_bytes = False, False, False, TABLE_BYTES

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.places: Places = ExpertPlaces(config)
        self.x_scale_shift: Shift | None = x_scale_shift

    def sizes(self, given) -> GroupedTileSizes:
        """Returns the sizes of a launch; the device counts an expert's tiles."""
        dense = dense_sizes(self.config, given, whole=Int32(0), splits=Int32(1))
        blocks = cute.ceil_div(given.num_tiles, self.config.block_tiles)
        divisors = Divisor.of(blocks * M_TILE_BAND), Divisor.of(given.num_ctas)
        sizes: list[Any] = [*dense, None, given.num_experts, blocks, *divisors, given.offsets]
        return GroupedTileSizes(*sizes, **x_scales_of(given))

    @cute.jit
    def begin(self, roles: TileRoles, operands, shape, memory, cta, num_ctas, warp, lane):
        """Initialises barriers and the table of tiles, then lets the next launch begin. Returns the CTA's tile
        scheduler.

        If x is in limbs, only the warp that loads limbs waits for the previous launch. If not, all warps wait.
        """
        config = self.config
        if const_expr(not config.mainloop.scaled_rows):
            cute.arch.griddepcontrol_wait()
        if warp == config.consumer_warps:
            if lane == 0:
                init_barriers(config, memory)
        elif warp < TABLE_WARPS:
            fill_table(memory.table, shape.offsets, shape, warp, lane, config.tile_m)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        count = cute.arch.make_warp_uniform(Int32(ptx.load_shared(memory.table, MAX_EXPERTS * ENTRY_BYTES)))
        return GroupedTileScheduler(
            shape=shape, first=cta, stride=num_ctas, count=count, table=memory.table, lane=lane, tile_m=config.tile_m
        )


def grouped_tiles_kernel(config: WgmmaConfig) -> WgmmaKernel:
    """Returns the kernel of grouped tiles. It takes `TILES` of `cute_kernels.gemm.experts.arguments`, or `LIMB_TILES`
    if x is in limbs.

    Raises ValueError if the configuration is one of dense products only.
    """
    if config.reduction.splits_k:
        raise ValueError(f"config: got parts of K, want none in a grouped product ({config})")
    if config.consumer_warps < TABLE_WARPS:
        raise ValueError(
            f"config: got {config.consumer_warps} consumer warps, want {TABLE_WARPS}, which write the table"
        )
    return WgmmaKernel(config, ExpertTiles(config), waits=NOBODY)
