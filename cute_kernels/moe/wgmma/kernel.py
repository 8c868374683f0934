"""Grouped weight-only GEMM for many rows an expert: persistent over the tiles of all experts, by warpgroup MMAs.

The roles are those of :class:`cute_kernels.linear.wgmma.kernel.WgmmaKernel`; what differs is where things are. Rows of
x lie in the order of the places, so a tile's are neighbours and TMA brings them from whatever row the expert's begin
at. What it brings beyond the expert's last row are other columns of the product, which nobody stores.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor
from cute_kernels.linear.wgmma.config import M_TILE_BAND, TMA_TILE_K, X_SCALE_ALIGNMENT
from cute_kernels.linear.wgmma.kernel import WgmmaKernel
from cute_kernels.linear.work import Operands
from cute_kernels.moe.schedule import MAX_EXPERTS
from cute_kernels.moe.wgmma.schedule import ENTRY_BYTES, TABLE_BYTES, TABLE_WARPS
from cute_kernels.moe.wgmma.tiles import GroupedShape, GroupedTileScheduler, LimbShape, fill_table


class GroupedWgmmaKernel(WgmmaKernel):
    """One compiled variant; `cute_kernels.linear.wgmma.config.WgmmaConfig` says which, without parts of K."""

    table_bytes = TABLE_BYTES
    use_pdl = True

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        zeros: Int64,
        bias: Int64,
        out: Int64,
        offsets: Int64,
        n: Int32,
        num_tiles: Int32,
        k_blocks: Int32,
        num_experts: Int32,
        num_ctas: Int32,
        activation: Int32,
        out_kind: Int32,
        stream,
    ):
        """Launches ``num_ctas`` CTAs.

        x: [places, k], rows in the order of the places, k a multiple of 8, 16-byte aligned. Addresses: codes, scales
        and zeros as in the dense kernel, those of all experts one behind the other; bias [experts, n] of x's dtype or
        0; out [places, n] (half of n for swiglu); offsets int32 [num_experts + 1], the first place of each expert.
        """
        copy_x, x_view = self.tma_tile_copy(x)
        shape = GroupedShape(*self.sizes(x, n, num_tiles, k_blocks, num_experts, num_ctas, activation, out_kind))
        operands = Operands(Int64(0), codes, scales, zeros, bias, Int64(0), out, Int64(0))
        self.kernel(operands, shape, offsets, copy_x, x_view).launch(**self.launch_options(num_ctas, stream))

    def sizes(  # type: ignore[override]
        self, x, n, num_tiles, k_blocks, num_experts, num_ctas, activation, out_kind
    ) -> Any:
        """The fields of a `GroupedShape`."""
        dense = super().sizes(x, n, num_tiles, k_blocks, Int32(0), Int32(1), activation, out_kind)
        blocks = cute.ceil_div(num_tiles, self.config.block_tiles)
        return *dense, num_experts, blocks, Divisor.of(blocks * M_TILE_BAND), Divisor.of(num_ctas)

    def tile_grid(self, m, num_tiles, whole, splits) -> None:
        """Nothing: an expert's tiles are counted on the device."""

    @cute.kernel
    def kernel(self, operands, shape, offsets, copy_x, x_view):  # type: ignore[override]
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate()
        if cutlass.const_expr(not config.limbs):
            cute.arch.griddepcontrol_wait()
        if warp == config.consumer_warps:
            if lane == 0:
                self.init_barriers(memory)
        elif warp < TABLE_WARPS:
            fill_table(memory.table, offsets, shape, warp, lane, config.tile_m)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        count = cute.arch.make_warp_uniform(Int32(ptx.load_shared(memory.table, MAX_EXPERTS * ENTRY_BYTES)))
        scheduler = GroupedTileScheduler(
            shape=shape,
            first=cta,
            stride=num_ctas,
            count=count,
            table=memory.table,
            lane=lane,
            tile_m=config.tile_m,
        )
        self.take_roles(operands, shape, memory, scheduler, copy_x, x_view, warp, lane)

    @property
    def asks_first(self) -> bool:
        """Nobody knows which weights are the first before the table is there."""
        return False

    def nothing(self, shape, lane):
        # What all lanes share will do: these tiles' masks are in registers of each.
        return Uint32(shape.m >> 31)

    def rows_of(self, shape, work_tile):
        return work_tile.token, work_tile.end_token

    def weight_tile(self, shape, work_tile, index):
        return work_tile.expert * shape.num_tiles + super().weight_tile(shape, work_tile, index)

    def bias_place(self, shape, work_tile, row):
        return work_tile.expert * shape.n + row


class GroupedLimbKernel(GroupedWgmmaKernel):
    """The same of activations in limbs, as `cute_kernels.linear.wgmma.limb_rows` leaves them."""

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        x_scales: Int64,
        bias: Int64,
        out: Int64,
        offsets: Int64,
        n: Int32,
        num_tiles: Int32,
        k_blocks: Int32,
        num_experts: Int32,
        num_ctas: Int32,
        activation: Int32,
        out_kind: Int32,
        x_scale_pitch: Int32,
        stream,
    ):
        """As `GroupedWgmmaKernel`, but for x, [places, padded k] of 16 bits: of each 128 inputs first the high limbs,
        then the low ones. x_scales: address, on 16 bytes, of fp32 [k blocks, x_scale_pitch], a multiple of 4 and large
        enough for 68 scales from any place on.
        """
        copy_x, x_view = self.tma_tile_copy(x)
        sizes = self.sizes(x, n, num_tiles, k_blocks, num_experts, num_ctas, activation, out_kind)
        shape = LimbShape(*sizes, x_scales=x_scales, x_scale_pitch=x_scale_pitch)
        operands = Operands(Int64(0), codes, scales, Int64(0), bias, Int64(0), out, Int64(0))
        self.kernel(operands, shape, offsets, copy_x, x_view).launch(**self.launch_options(num_ctas, stream))

    def wait_for_activations(self) -> None:
        # The launch before makes them. All else it has waited for itself, before it let this one begin.
        cute.arch.griddepcontrol_wait()

    def tma_tile_place(self, stage, part: int, tma_tile: int, present) -> tuple[Any, Any]:
        """As `ProducerWarps.tma_tile_place`; both limbs are one operand, so TMA tiles lie without gaps."""
        tma_tiles, parts = self.config.block_k // TMA_TILE_K, self.config.row_parts
        place = tma_tile * present + part
        return place & (parts - 1), stage * tma_tiles + (place >> (parts.bit_length() - 1))

    def copy_beside(self, shape, memory, work_tile, k_block, stage) -> None:
        """Asks for the scales of a tile's rows of x, from the last multiple of 16 bytes on."""
        size = self.config.x_scale_stage_bytes
        first, _ = self.rows_of(shape, work_tile)
        ptx.bulk_copy_to_shared(
            memory.x_scales + stage * size,
            shape.x_scales + (Int64(k_block) * shape.x_scale_pitch + (first & -X_SCALE_ALIGNMENT)) * 4,
            Int32(size),
            Int32((memory.full + stage).toint()),
        )

    def x_scale_shift(self, work_tile):
        return work_tile.token & (X_SCALE_ALIGNMENT - 1)
