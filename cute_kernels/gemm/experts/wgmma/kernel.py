"""Grouped weight-only GEMM for many rows an expert: persistent over the tiles of all experts, by warpgroup MMAs.

The roles are those of `cute_kernels.gemm.wgmma.kernel.TileRoles`; what differs is where things are: `ExpertPlaces`.
Rows of x lie in the order of the places, so a tile's are neighbours and TMA loads them from whatever row the expert's
begin at. What it loads beyond the expert's last row are other columns of the product, which nobody stores.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS
from cute_kernels.gemm.experts.wgmma.schedule import ENTRY_BYTES, TABLE_BYTES, TABLE_WARPS
from cute_kernels.gemm.experts.wgmma.tiles import GroupedLimbSizes, GroupedTileScheduler, GroupedTileSizes, fill_table
from cute_kernels.gemm.wgmma.config import M_TILE_BAND, WgmmaConfig
from cute_kernels.gemm.wgmma.consumers import Consumers
from cute_kernels.gemm.wgmma.epilogue import TileEpilogue
from cute_kernels.gemm.wgmma.kernel import TileRoles, launch_options, make_mainloop, make_reduction
from cute_kernels.gemm.wgmma.loads import TmaLoads, WeightLoads
from cute_kernels.gemm.wgmma.mainloops import X_SCALE_ALIGNMENT
from cute_kernels.gemm.wgmma.places import tile_of_block
from cute_kernels.gemm.wgmma.reading import StageReader
from cute_kernels.gemm.wgmma.tiles import dense_sizes
from cute_kernels.gemm.work import Operands, operands_of


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
    """How many scales of x lie between the last multiple of 16 bytes and a work tile's first one."""
    return work_tile.token & (X_SCALE_ALIGNMENT - 1)


class GroupedRoles:
    """The policies of a grouped product, what loads its activations, and how a CTA finds its work tiles."""

    def __init__(self, config: WgmmaConfig):
        self.config = config
        places, stages = ExpertPlaces(config), StageReader(config)
        mainloop = make_mainloop(config, stages, places, masks_by_lane=False, x_scale_shift=x_scale_shift)
        reduction = make_reduction(config, TileEpilogue(config, dense=False), places)
        consumers = Consumers(config, stages, places, mainloop, reduction)
        self.activations = TmaLoads(config, places, limbs=config.limbs, waits=config.limbs)
        # Nobody knows which weights are the first before the table is there.
        weights = WeightLoads(config, places, asks_first=False)
        self.roles = TileRoles(config, places, weights, self.activations, consumers, TABLE_BYTES)

    @cute.jit
    def find_work_tiles(self, memory, offsets, shape, cta, num_ctas, warp, lane):
        """Makes barriers and the table of tiles, then lets the next launch begin. Returns the CTA's tile scheduler."""
        config = self.config
        if warp == config.consumer_warps:
            if lane == 0:
                self.roles.init_barriers(memory)
        elif warp < TABLE_WARPS:
            fill_table(memory.table, offsets, shape, warp, lane, config.tile_m)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        count = cute.arch.make_warp_uniform(Int32(ptx.load_shared(memory.table, MAX_EXPERTS * ENTRY_BYTES)))
        return GroupedTileScheduler(
            shape=shape,
            first=cta,
            stride=num_ctas,
            count=count,
            table=memory.table,
            lane=lane,
            tile_m=config.tile_m,
        )


def grouped_sizes(config: WgmmaConfig, given) -> Any:
    """The fields of a `GroupedTileSizes`, of a launch's arguments; an expert's tiles are counted on the device."""
    dense = dense_sizes(config, given, whole=Int32(0), splits=Int32(1))
    blocks = cute.ceil_div(given.num_tiles, config.block_tiles)
    return *dense, None, given.num_experts, blocks, Divisor.of(blocks * M_TILE_BAND), Divisor.of(given.num_ctas)


class GroupedWgmmaKernel:
    """One compiled variant; `cute_kernels.gemm.wgmma.config.WgmmaConfig` says which, without parts of K."""

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.grouped = GroupedRoles(config)
        self.activations = self.grouped.activations

    def launch(self, given, stream):
        """Launches ``num_ctas`` CTAs; ``given`` has the arguments `TILES` of `cute_kernels.gemm.experts.arguments`."""
        copy_x, x_view = self.activations.tma(given.x)
        shape = GroupedTileSizes(*grouped_sizes(self.config, given))
        unused = {"x": Int64(0), "residual": Int64(0), "workspace": Int64(0)}
        options = launch_options(self.config, given.num_ctas, stream, use_pdl=True)
        operands = operands_of(Operands, given, **unused)
        self.kernel(operands, shape, given.offsets, copy_x, x_view).launch(**options)

    @cute.kernel
    def kernel(self, operands, shape, offsets, copy_x, x_view):
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.grouped.roles.allocate()
        cute.arch.griddepcontrol_wait()
        scheduler = self.grouped.find_work_tiles(memory, offsets, shape, cta, num_ctas, warp, lane)
        self.grouped.roles.take(operands, shape, memory, scheduler, copy_x, x_view, warp, lane)


class GroupedLimbKernel:
    """The same of activations in limbs, as `cute_kernels.gemm.wgmma.limb_rows` leaves them."""

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.grouped = GroupedRoles(config)
        self.activations = self.grouped.activations

    def launch(self, given, stream):
        """As `GroupedWgmmaKernel`, but for x; ``given`` has the arguments `LIMB_TILES` of
        `cute_kernels.gemm.experts.arguments`."""
        copy_x, x_view = self.activations.tma(given.x)
        sizes = grouped_sizes(self.config, given)
        shape = GroupedLimbSizes(*sizes, x_scales=given.x_scales, x_scale_pitch=given.x_scale_pitch)
        unused = {name: Int64(0) for name in ("x", "zeros", "residual", "workspace")}
        options = launch_options(self.config, given.num_ctas, stream, use_pdl=True)
        operands = operands_of(Operands, given, **unused)
        self.kernel(operands, shape, given.offsets, copy_x, x_view).launch(**options)

    @cute.kernel
    def kernel(self, operands, shape, offsets, copy_x, x_view):
        """As `GroupedWgmmaKernel.kernel`; only the warp that loads limbs waits for the launch before."""
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.grouped.roles.allocate()
        scheduler = self.grouped.find_work_tiles(memory, offsets, shape, cta, num_ctas, warp, lane)
        self.grouped.roles.take(operands, shape, memory, scheduler, copy_x, x_view, warp, lane)
