"""Grouped weight-only GEMM for many rows an expert: persistent over the tiles of all experts, by warpgroup MMAs.

The roles are those of :class:`cute_kernels.linear.wgmma.kernel.WgmmaKernel`; what differs is where things are. Rows of
x lie in the order of the places, so a tile's are neighbours and TMA brings them from whatever row the expert's begin
at. What it brings beyond the expert's last row are other columns of the product, which nobody stores.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.linear.wgmma.config import BOX_K, TOKEN_BAND
from cute_kernels.linear.wgmma.epilogue import Corner
from cute_kernels.linear.wgmma.kernel import Memory, WgmmaKernel
from cute_kernels.linear.work import Operands
from cute_kernels.moe.schedule import MAX_EXPERTS
from cute_kernels.moe.wgmma.schedule import ENTRY_BYTES, TABLE_BYTES
from cute_kernels.moe.wgmma.tiles import GroupedItems, GroupedShape, fill_table
from layouts.weights.hopper import TILE_N


class GroupedWgmmaKernel(WgmmaKernel):
    """One compiled variant; `cute_kernels.linear.wgmma.config.WgmmaConfig` says which, without parts of K."""

    table_bytes = TABLE_BYTES

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
        units: Int32,
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
        config = self.config
        m, k = x.shape  # pyright: ignore[reportGeneralTypeIssues]
        half = (config.tokens // 2, BOX_K)
        box = cute.slice_(self.boxes_layout(config.tokens // 2, 1), (None, None, 0))
        copy_x, x_view = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, box, half)
        scale_groups = Int32(1)
        if cutlass.const_expr(config.group_size):
            scale_groups = units * config.unit_k // config.group_size
        shape = GroupedShape(
            m=m,
            n=n,
            k=k,
            num_tiles=num_tiles,
            units=units,
            scale_groups=scale_groups,
            whole=Int32(0),
            splits=Int32(1),
            split_units=units,
            activation=activation,
            out_kind=out_kind,
            num_experts=num_experts,
            blocks=cute.ceil_div(num_tiles, config.block_tiles),
        )
        operands = Operands(Int64(0), codes, scales, zeros, bias, Int64(0), out, Int64(0))
        self.kernel(operands, shape, offsets, copy_x, x_view).launch(
            grid=(num_ctas, 1, 1),
            block=(config.num_threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands, shape, offsets, copy_x, x_view):  # type: ignore[override]
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate()
        cute.arch.griddepcontrol_wait()
        if warp == config.math_warps:
            if lane == 0:
                self.init_barriers(memory)
        elif warp == config.math_warps + 1:
            fill_table(memory.table, offsets, shape, lane, config.tokens)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        count = cute.arch.make_warp_uniform(Int32(ptx.load_shared(memory.table, MAX_EXPERTS * ENTRY_BYTES)))
        items = GroupedItems(
            shape=shape,
            first=cta,
            stride=num_ctas,
            count=count,
            table=memory.table,
            lane=lane,
            tokens=config.tokens,
            band=TOKEN_BAND,
        )
        self.take_roles(operands, shape, memory, items, copy_x, x_view, warp, lane)

    @cute.jit
    def copy_activations(self, shape, memory: Memory, items, copy_x, x_view):
        """Brings the activations of every unit, a box of 64 inputs of half a tile's rows at a time; one warp."""
        config = self.config
        boxes, half = config.unit_k // BOX_K, config.tokens // 2
        targets = cute.local_tile(memory.x, (half, BOX_K), (None, 0, None))
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(items.first, items.count, items.stride, unroll=1):
            item = items.item(index)
            rows = cute.domain_offset((item.token, 0), x_view)
            places = cute.local_tile(rows, (half, BOX_K), (None, None))
            target, source = cpasync.tma_partition(
                copy_x, 0, cute.make_layout(1), cute.group_modes(targets, 0, 2), cute.group_modes(places, 0, 2)
            )
            whole = item.end_token - item.token > half
            size = cutlass.select_(whole, Int32(config.x_stage_bytes), Int32(config.x_stage_bytes // 2))
            for unit in cutlass.range(item.begin, item.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                barrier = memory.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
                for box in cutlass.range_constexpr(boxes):
                    column, place = unit * boxes + box, stage * boxes + box
                    cute.copy(copy_x, source[None, 0, column], target[None, 0, place], tma_bar_ptr=barrier)
                    if whole:
                        cute.copy(copy_x, source[None, 1, column], target[None, 1, place], tma_bar_ptr=barrier)
                stage, phase = advance(stage, phase, config.num_stages)

    @cute.jit
    def multiply_item(self, sums, memory, item, place, channel, ring, teller):
        """As the dense kernel's; an expert's last tile may have rows for half of the columns only."""
        stage, phase, last = ring
        half = self.config.tokens // 2
        if item.end_token - item.token <= half:
            stage, phase, last = self.multiply_units(sums, memory, item, place, channel, ring, teller, half)
        else:
            full = self.config.tokens
            stage, phase, last = self.multiply_units(sums, memory, item, place, channel, ring, teller, full)
        return stage, phase, last

    def weight_tile(self, shape, item, index):
        return item.expert * shape.num_tiles + super().weight_tile(shape, item, index)

    def corner(self, shape, item, index) -> Corner:
        row = (item.block * self.config.block_tiles + index) * TILE_N
        return Corner(row, item.token, item.end_token, item.expert * shape.n + row)
