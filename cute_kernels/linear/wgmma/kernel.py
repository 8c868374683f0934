"""Weight-only GEMM for many rows of x: out^T = W X^T by warpgroup MMAs with W, decoded, in registers.

The blob holds each thread's A operands of several k16 steps in 16 bytes (`layouts.weights.hopper`), so decoded weights
go straight from a thread's registers to the tensor cores and only X is read from shared memory. One warp brings X as
the swizzled B operand through TMA, one the codes and scales by bulk copies, and the multiplying warpgroups, 64 or 128
output features each, take turns: while one decodes the next steps into a second set of registers the tensor cores have
its own last group and the other's to do.

Scales meet the weights right after decoding, in the dtype of the activations: W is rounded once, as the reference
rounds it, and sums need no second set of registers. A scale per output feature meets the sums instead.

That operands in registers and two multiplying warpgroups are the way to full rate with mixed operands is known from
CUTLASS's mixed-input mainloop for Hopper; here it needs neither its shuffles nor its pass over shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_kernels.device import numbers, ptx, wgmma
from cute_kernels.device.ring import advance
from cute_kernels.linear.config import SCALE_BYTES, ZERO_BYTES
from cute_kernels.linear.decode import Decoder
from cute_kernels.linear.wgmma.config import (
    BOX_ALIGNMENT,
    BOX_K,
    COPY_REGISTERS,
    MATH_REGISTERS,
    WARPGROUP_WARPS,
    WgmmaConfig,
)
from cute_kernels.linear.wgmma.epilogue import Corner, Store, TileEpilogue
from cute_kernels.linear.wgmma.tiles import Items, Shape
from cute_kernels.linear.work import Operands
from cute_kernels.sm90 import WARP_THREADS
from layouts.weights.hopper import STEP_K, TILE_BYTES, TILE_N

FRAGMENT_BYTES = 16  # of a thread, in a tile
MMA_DTYPE = {"bf16": "bf16", "fp16": "f16"}
ELEMENTS = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


@dataclass(frozen=True)
class Memory:
    """Shared memory of a CTA: addresses, and pointers to barriers and to the ring of activations."""

    x: Any
    x_address: Any
    codes: Any
    scales: Any
    zeros: Any
    staging: Any
    full: Any
    empty: Any


@dataclass(frozen=True)
class Lane:
    """A thread's places in a stage; run-time integers."""

    code_offset: Any  # of its 16 bytes in the first tile of its warpgroup
    row: Any  # its first row in the first tile of its warpgroup, among the block's
    masks: Any  # of the decoder


class WgmmaKernel:
    """One compiled variant; :class:`WgmmaConfig` says which."""

    def __init__(self, config: WgmmaConfig):
        self.config = config
        self.decoder = Decoder(config.bits, config.dtype)
        self.epilogue = TileEpilogue(config)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        zeros: Int64,
        bias: Int64,
        residual: Int64,
        out: Int64,
        workspace: Int64,
        n: Int32,
        num_tiles: Int32,
        units: Int32,
        whole: Int32,
        splits: Int32,
        num_ctas: Int32,
        activation: Int32,
        out_kind: Int32,
        stream,
    ):
        """Launches ``num_ctas`` CTAs, a multiple of the cluster's size.

        x: [m, k], k a multiple of 8, 16-byte aligned. Addresses: codes uint8 [num_tiles, units * unit_tiles, 2048],
        scales of x's dtype and zeros uint8 [num_tiles, groups, 64], bias [n] and residual as out, of x's dtype, or 0;
        out [m, n] (half of n for swiglu) of the kind ``out_kind``; workspace fp32 [tiles that are cut, splits - 1,
        block_rows * tokens], every word EMPTY before and after. units: padded K / unit_k; whole: tiles, those of a
        cluster counted as one, that are not cut; splits: parts of K of the others, none of them empty, 1 unless the
        configuration splits K. activation, out_kind: see `cute_kernels.linear.epilogue`.
        """
        config = self.config
        m, k = x.shape  # pyright: ignore[reportGeneralTypeIssues]
        layout = self.x_layout()
        box = cute.slice_(layout, (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        if const_expr(config.cluster > 1):
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        copy_x, x_view = cpasync.make_tiled_tma_atom(op, x, box, (config.tokens, BOX_K), num_multicast=config.cluster)
        scale_groups = Int32(1)
        if const_expr(config.group_size):
            scale_groups = units * config.unit_k // config.group_size
        split_units = cute.ceil_div(units, splits)
        shape = Shape(m, n, k, num_tiles, units, scale_groups, whole, splits, split_units, activation, out_kind)
        operands = Operands(Int64(0), codes, scales, zeros, bias, residual, out, workspace)
        self.kernel(operands, shape, copy_x, x_view).launch(
            grid=(num_ctas, 1, 1),
            block=(config.num_threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def x_layout(self):
        """[tokens, BOX_K, boxes of all stages], swizzled as wgmma wants its B operand."""
        config = self.config
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, ELEMENTS[config.dtype])
        boxes = config.num_stages * config.unit_k // BOX_K
        return cute.tile_to_shape(atom, (config.tokens, BOX_K, boxes), order=(0, 1, 2))

    @cute.kernel
    def kernel(self, operands, shape, copy_x, x_view):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate()
        items = self.items_of(shape, cta, num_ctas)
        if warp == config.math_warps:
            if lane == 0:
                self.init_barriers(memory)
        if const_expr(config.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp < config.math_warps:
            cute.arch.setmaxregister_increase(MATH_REGISTERS[config.warpgroups])
            self.multiply(operands, shape, memory, items, warp, lane)
        else:
            cute.arch.setmaxregister_decrease(COPY_REGISTERS)
            if warp == config.math_warps:
                self.copy_activations(shape, memory, items, copy_x, x_view)
            else:
                for i in cutlass.range_constexpr(config.weight_warps):
                    if warp == config.math_warps + 1 + i:
                        self.copy_weights(operands, shape, memory, items, i)
        if const_expr(config.cluster > 1):
            # A CTA's memory stays until the others have had their last word to it.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    def allocate(self) -> Memory:
        config = self.config
        smem = cutlass.utils.SmemAllocator()
        stages = config.num_stages
        layout = self.x_layout()
        x = smem.allocate_tensor(
            ELEMENTS[config.dtype], layout.outer, byte_alignment=BOX_ALIGNMENT, swizzle=layout.inner
        )
        codes = smem.allocate(stages * config.code_stage_bytes, byte_alignment=128).toint()
        scales = zeros = Int32(0)
        if const_expr(config.scale_stage_bytes):
            scales = smem.allocate(stages * config.scale_stage_bytes, byte_alignment=128).toint()
        if const_expr(config.zero_stage_bytes):
            zeros = smem.allocate(stages * config.zero_stage_bytes, byte_alignment=128).toint()
        staging = smem.allocate(config.warpgroups * config.staging_bytes, byte_alignment=128)
        full = smem.allocate_array(cutlass.Int64, config.num_barriers)
        return Memory(
            x=x,
            x_address=x.iterator.toint(),
            codes=codes,
            scales=scales,
            zeros=zeros,
            staging=staging.toint(),
            full=full,
            empty=full + stages,
        )

    def init_barriers(self, memory: Memory):
        config = self.config
        for i in range(config.num_stages):
            cute.arch.mbarrier_init(memory.full + i, 1 + config.weight_warps)  # activations, weights
            cute.arch.mbarrier_init(memory.empty + i, config.math_warps * config.cluster)
        cute.arch.mbarrier_init_fence()

    def items_of(self, shape: Shape, cta, num_ctas) -> Items:
        config = self.config
        blocks = cute.ceil_div(shape.num_tiles, config.block_tiles * config.cluster)
        token_tiles = cute.ceil_div(shape.m, config.tokens)
        return Items(
            shape=shape,
            first=cta // config.cluster,
            stride=num_ctas // config.cluster,
            count=shape.whole + (blocks * token_tiles - shape.whole) * shape.splits,
            blocks=blocks,
            token_tiles=token_tiles,
            band=cutlass.min(Int32(config.token_band), token_tiles),
            cluster=config.cluster,
            rank=cta % config.cluster,
        )

    # -- copies -------------------------------------------------------------------------------------------------------

    @cute.jit
    def copy_activations(self, shape, memory, items, copy_x, x_view):
        """Brings the activations of every unit, a box of 64 inputs at a time; one warp.

        In a cluster each CTA brings a part of the tokens to all. So its stages are free when they are free everywhere.
        """
        config = self.config
        boxes = config.unit_k // BOX_K
        places = cute.local_tile(x_view, (config.tokens, BOX_K), (None, None))
        target, source = cpasync.tma_partition(
            copy_x,
            items.rank,
            cute.make_layout(config.cluster),
            cute.group_modes(memory.x, 0, 2),
            cute.group_modes(places, 0, 2),
        )
        mask = cutlass.Int16((1 << config.cluster) - 1)
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(items.first, items.count, items.stride, unroll=1):
            item = items.item(index)
            for unit in cutlass.range(item.begin, item.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                barrier = memory.full + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, config.x_stage_bytes)
                for box in cutlass.range_constexpr(boxes):
                    chosen = source[None, item.token_tile, unit * boxes + box]
                    place = target[None, stage * boxes + box]
                    if const_expr(config.cluster > 1):
                        cute.copy(copy_x, chosen, place, tma_bar_ptr=barrier, mcast_mask=mask)
                    else:
                        cute.copy(copy_x, chosen, place, tma_bar_ptr=barrier)
                stage, phase = advance(stage, phase, config.num_stages)

    @cute.jit
    def copy_weights(self, operands, shape, memory, items, number: int):
        """Brings the codes, scales and zero points of every unit, the ``number``-th warp's share of its tiles."""
        config = self.config
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(items.first, items.count, items.stride, unroll=1):
            item = items.item(index)
            for unit in cutlass.range(item.begin, item.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                with cute.arch.elect_one():
                    self.copy_unit(operands, shape, memory, item.block, unit, stage, number)
                stage, phase = advance(stage, phase, config.num_stages)

    def copy_unit(self, operands, shape, memory, block, unit, stage, number: int):
        """Asks for a share of a unit of a block: of each tile a run of codes, one of scales, one of zero points."""
        config = self.config
        barrier = memory.full + stage
        share = range(number, config.block_tiles, config.weight_warps)
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(share) * config.weight_tile_bytes)
        address = Int32(barrier.toint())
        tile_bytes = config.unit_tiles * TILE_BYTES
        group_bytes = config.unit_groups * SCALE_BYTES
        zero_bytes = config.unit_groups * ZERO_BYTES
        for i in share:
            # Of the last block, tiles behind the last one are that one again.
            tile = cutlass.min(block * config.block_tiles + i, shape.num_tiles - 1)
            ptx.bulk_copy_to_shared(
                memory.codes + stage * config.code_stage_bytes + i * tile_bytes,
                operands.codes + (Int64(tile) * shape.units + unit) * tile_bytes,
                Int32(tile_bytes),
                address,
            )
            if config.group_size:
                group = Int64(tile) * shape.scale_groups + unit * config.unit_k // config.group_size
                ptx.bulk_copy_to_shared(
                    memory.scales + stage * config.scale_stage_bytes + i * group_bytes,
                    operands.scales + group * SCALE_BYTES,
                    Int32(group_bytes),
                    address,
                )
                if config.zero_point:
                    ptx.bulk_copy_to_shared(
                        memory.zeros + stage * config.zero_stage_bytes + i * zero_bytes,
                        operands.zeros + group * ZERO_BYTES,
                        Int32(zero_bytes),
                        address,
                    )

    # -- products -----------------------------------------------------------------------------------------------------

    def lane_places(self, shape, warp, lane) -> Lane:
        config = self.config
        first_tile = warp // WARPGROUP_WARPS * config.m_tiles
        row_warp = warp % WARPGROUP_WARPS
        return Lane(
            code_offset=first_tile * (config.unit_tiles * TILE_BYTES)
            + row_warp * (WARP_THREADS * FRAGMENT_BYTES)
            + lane * FRAGMENT_BYTES,
            row=first_tile * TILE_N + row_warp * 16 + lane // 4,
            masks=self.decoder.masks(Uint32(shape.m >> 31)),
        )

    @cute.jit
    def multiply(self, operands, shape, memory, items, warp, lane):
        """A multiplying warp: the products of its items, then their results."""
        config = self.config
        place = self.lane_places(shape, warp, lane)
        group = warp // WARPGROUP_WARPS
        store = Store(
            staging=memory.staging + group * config.staging_bytes,
            warpgroup=group,
            tid=warp % WARPGROUP_WARPS * WARP_THREADS + lane,
            row_warp=warp % WARPGROUP_WARPS,
            lane=lane,
        )
        # Lanes that tell a CTA of the cluster that a stage is free.
        teller = lane < config.cluster
        stage, phase = Int32(0), Int32(0)
        last = Int32(0)
        tile_sums = config.tokens // 2
        sums = cute.make_rmem_tensor(config.m_tiles * tile_sums, Float32)
        if const_expr(config.stagger > 0):
            self.stay_behind(memory, items, group)
        for index in cutlass.range(items.first, items.count, items.stride, unroll=1):
            item = items.item(index)
            first_tile = item.block * config.block_tiles + group * config.m_tiles
            sums.fill(0.0)
            channel = self.load_channel(operands, shape, first_tile, place)
            for unit in cutlass.range(item.begin, item.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.full + stage, phase)
                self.multiply_unit(sums, memory, stage, place, channel, last, teller & (unit > item.begin), lane)
                last = stage
                stage, phase = advance(stage, phase, config.num_stages)
            finished = wgmma.wait_all([sums[i] for i in range(config.m_tiles * tile_sums)])
            self.release(memory, last, teller, lane)
            self.put_sums(sums, finished, channel)
            if const_expr(config.splits_k):
                self.epilogue.combine(operands, store, item, sums)
            if item.split == item.splits - 1:
                for i in cutlass.range_constexpr(config.m_tiles):
                    corner = Corner((first_tile + i) * TILE_N, item.token_tile * config.tokens)
                    self.epilogue.run(operands, shape, store, corner, sums, i * tile_sums)

    @cute.jit
    def stay_behind(self, memory, items, group):
        """Lets the second warpgroup begin some stages later: so it remains, as the tensor cores serve both alike."""
        first = items.item(items.first)
        if (group > 0) & (first.end - first.begin > self.config.stagger):
            cute.arch.mbarrier_wait(memory.full + self.config.stagger, 0)

    def put_sums(self, sums, finished, channel):
        """Keeps the finished sums, times the scales of their rows where those hold for all of K."""
        tile_sums = self.config.tokens // 2
        for i, value in enumerate(finished):
            sums[i] = value * channel[i // tile_sums][0][i // 2 % 2] if channel else value

    @cute.jit
    def release(self, memory, stage, teller, lane):
        """Says that this warp has done with a stage, to every CTA that brings a part of it."""
        if teller:
            if const_expr(self.config.cluster > 1):
                cute.arch.mbarrier_arrive(memory.empty + stage, lane)
            else:
                cute.arch.mbarrier_arrive(memory.empty + stage)

    def multiply_unit(self, sums, memory, stage, place: Lane, channel, last, teller, lane):
        """Adds W X^T of a unit to ``sums``, whose last MMAs it leaves running; gives back the stage before.

        sums: [tile of the warpgroup][tokens / 2]. last: the stage before; teller: whether this lane gives it back.
        """
        config = self.config
        codes = memory.codes + stage * config.code_stage_bytes + place.code_offset
        words = [
            [
                ptx.load_shared_vector(codes, (i * config.unit_tiles + tile) * TILE_BYTES, 4)
                for tile in range(config.unit_tiles)
            ]
            for i in range(config.m_tiles)
        ]
        groups = [self.load_groups(memory, stage, place, i) for i in range(config.m_tiles)]
        x = wgmma.descriptor(memory.x_address + cute.arch.make_warp_uniform(stage) * config.x_stage_bytes)
        tile_sums = config.tokens // 2
        totals = [[sums[i * tile_sums + j] for j in range(tile_sums)] for i in range(config.m_tiles)]
        for part in range(config.unit_steps // config.group_steps):
            steps = range(part * config.group_steps, (part + 1) * config.group_steps)
            operands = [
                self.fragment(words[i], step, groups[i] or channel[i : i + 1], place.masks)
                for step in steps
                for i in range(config.m_tiles)
            ]
            ready = wgmma.fence([register for fragment in operands for register in fragment])
            for number, step in enumerate(steps):
                box, offset = divmod(step * STEP_K, BOX_K)
                b = wgmma.advanced(x, box * config.box_bytes + offset * 2)
                for i in range(config.m_tiles):
                    first = 4 * (number * config.m_tiles + i)
                    a = ready[first : first + 4]
                    totals[i] = wgmma.mma(totals[i], a, b, dtype=MMA_DTYPE[config.dtype])
            wgmma.commit()
            # The group before is done: its operands' registers are free for the next one's.
            wgmma.wait(1)
            if part == 0:
                self.release(memory, last, teller, lane)
        for i in range(config.m_tiles):
            for j in range(tile_sums):
                sums[i * tile_sums + j] = totals[i][j]

    def fragment(self, words, step: int, groups, masks) -> list[Any]:
        """The A operand of a k16 step of the unit: weights, rounded once; without groups, codes less zero points."""
        config, decoder = self.config, self.decoder
        scales, offsets = groups[step * STEP_K // config.group_size if config.group_size else 0]
        registers = decoder.fragment(words[step // decoder.steps], step % decoder.steps, offsets, masks)
        if not config.group_size:
            return registers
        multiply = ptx.mul_bf16x2 if config.dtype == "bf16" else ptx.mul_f16x2
        return [multiply(register, scales[i % 2]) for i, register in enumerate(registers)]

    def load_groups(self, memory, stage, place: Lane, tile: int) -> list[Any]:
        """[group of the unit] (scales, offsets) of the thread's two rows of a tile; scales are packed pairs."""
        config = self.config
        scales = memory.scales + stage * config.scale_stage_bytes
        zeros = memory.zeros + stage * config.zero_stage_bytes
        # The rows of a group of a tile lie together, the groups of a tile behind each other.
        first_tile, row = place.row // TILE_N, place.row % TILE_N
        groups = []
        for group in range(config.unit_groups):
            at = (first_tile + tile) * (config.unit_groups * TILE_N) + group * TILE_N + row
            found = [ptx.load_shared_part(scales + at * 2, 16 * half, 2) for half in range(2)]
            pairs = [ptx.prmt(word, word, Uint32(0x1010)) for word in found]
            points = [Uint32(self.decoder.symmetric_zero)] * 2
            if config.zero_point:
                points = [ptx.load_shared_part(zeros + at, 8 * half, 1) for half in range(2)]
            groups.append((pairs, self.decoder.offsets(points)))
        return groups

    def load_channel(self, operands, shape, first_tile, place: Lane) -> list[Any]:
        """[tile] (scales, offsets) of the thread's two rows where they hold for all of K; else nothing."""
        config, decoder = self.config, self.decoder
        channel = []
        if not config.group_size:
            for i in range(config.m_tiles):
                tile = cutlass.min(first_tile + i, shape.num_tiles - 1)
                row = Int64(tile) * TILE_N + place.row % TILE_N
                words = [numbers.load_global_part(operands.scales + row * 2, 16 * half, 2) for half in range(2)]
                points = [Uint32(decoder.symmetric_zero)] * 2
                if config.zero_point:
                    points = [numbers.load_global_part(operands.zeros + row, 8 * half, 1) for half in range(2)]
                channel.append(([self.to_float(word) for word in words], decoder.offsets(points)))
        return channel

    def to_float(self, word):
        """The low 16 bits of a word, of the configuration's dtype."""
        return ptx.bf16x2_low_to_float(word) if self.config.dtype == "bf16" else ptx.half2_low_to_float(word)
