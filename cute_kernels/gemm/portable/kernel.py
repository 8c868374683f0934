"""Weight-only GEMM for sm_80 and later: out^T = W X^T by mma.m16n8k16, weights decoded in registers.

The textbook multistage loop (CUTLASS's for sm_80): every thread asks by cp.async for its pieces of a later
stage, commits them as a group, waits for the oldest group, and after one barrier the four warps multiply. The blob
(`layouts.weights.hopper`) holds the 16 bytes that a thread of a warpgroup decodes into its operands of several k16
steps, and a warpgroup's operand and accumulators are those of four warps of mma.m16n8k16, 16 rows each. So codes are
read back by the thread that brought them, and what decodes scales, cuts the work and stores the results is that of
`cute_kernels.gemm.wgmma`. W is rounded once to the dtype of the activations, as there.

One CTA for each work tile of work: GPUs have from 20 to 150 SMs with room for one to four of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.packed_math import PortableMath
from cute_kernels.gemm.config import MMA_N
from cute_kernels.gemm.portable.config import VECTOR_BYTES, PortableConfig
from cute_kernels.gemm.wgmma.epilogue import Store, TileEpilogue
from cute_kernels.gemm.wgmma.places import DensePlaces
from cute_kernels.gemm.wgmma.reading import Channel, StageReader, nothing
from cute_kernels.gemm.wgmma.reduction import WorkspaceReduction
from cute_kernels.gemm.wgmma.register_mainloop import MMA_DTYPE
from cute_kernels.gemm.wgmma.tiles import TileSizes, dense_grid, dense_scheduler, dense_sizes
from cute_kernels.gemm.work import Operands, operands_of
from layouts.weights.hopper import STEP_K, TILE_BYTES


@dataclass(frozen=True)
class Stages:
    """Shared memory of a CTA: addresses of the first stage's parts."""

    codes: Int32
    x: Int32
    scales: Int32
    zeros: Int32
    staging: Int32  # of the results; over the pipeline, when it is no longer read


class PortableStore:
    """Every kind of output by way of fp32 in shared memory: stmatrix, which transposes 16-bit results, is sm_90's."""

    dense = False  # as of `TileEpilogue`: all of its results are stored as any kind

    def __init__(self, config: PortableConfig):
        self.config, self.epilogue = config, TileEpilogue(config, dense=False)

    def prepare(self, operands, shape, store: Store, corner, ordinal: int) -> None:
        """Nothing."""

    @cute.jit
    def run(self, operands, shape, store: Store, corner, acc, first: int, ordinal: int):
        for chunk in cutlass.range_constexpr(len(self.config.chunks)):
            self.epilogue.store_any(operands, shape, store, corner, acc, first, chunk)

    def finish(self) -> None:
        """Nothing: the thread's own stores are all there is."""


class PortableKernel:
    """One compiled variant; :class:`WgmmaConfig` with `PortableMmaSync` says which."""

    def __init__(self, config: PortableConfig):
        self.config, self.places = config, DensePlaces(config)
        self.math = PortableMath(config.dtype)
        self.decoder = config.format.decoder(config.dtype, self.math)
        self.stages = StageReader(config, self.decoder)
        self.channel = Channel(config, self.stages, self.places)
        self.reduction = WorkspaceReduction(config, PortableStore(config), self.places)

    def masks(self, shape, lane):
        return self.decoder.masks(nothing(shape, lane))

    def launch(self, given, stream):
        """Launches a CTA for each of the ``num_ctas`` work tiles; ``given`` has the arguments `TILES` of
        :mod:`cute_kernels.gemm.arguments`.

        A CTA waits for parts of K of CTAs before it only, and CTAs start in order: they need not fit on the GPU
        together.
        """
        shape = TileSizes(*dense_sizes(self.config, given), grid=dense_grid(self.config, given))
        self.compute_work_tile(operands_of(Operands, given), shape).launch(
            grid=(given.num_ctas, 1, 1),
            block=(self.config.num_threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def compute_work_tile(self, operands, shape):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        tid = warp * WARP_THREADS + lane
        stages = self.allocate_stages()
        work_tile = dense_scheduler(config, shape, cta, num_ctas).work_tile(cta)
        place = self.stages.lane(shape, warp, lane, self.masks)
        channel = self.channel.load(operands, shape, work_tile, 0, place)
        acc = cute.make_rmem_tensor(config.thread_acc, Float32)
        acc.fill(0.0)
        self.multiply_all(acc, operands, shape, stages, work_tile, place, channel, tid, lane)
        self.channel.scale(acc, [acc[i] for i in range(config.thread_acc)], channel)
        store = Store(staging=stages.staging, warpgroup=Int32(0), tid=tid, row_warp=warp, lane=lane)
        self.reduction.finish(operands, shape, None, store, work_tile, acc, 0, 0)

    def allocate_stages(self) -> Stages:
        config = self.config
        start = Int32(cutlass.utils.SmemAllocator().allocate(config.smem_bytes, byte_alignment=128).toint())
        x = start + config.num_stages * config.code_stage_bytes
        scales = x + config.num_stages * config.x_stage_bytes
        zeros = scales + config.num_stages * config.scale_stage_bytes
        return Stages(start, x, scales, zeros, start)

    # -- copies -------------------------------------------------------------------------------------------------------

    def copy_stage(self, operands, shape, stages: Stages, work_tile, k_block, stage, tid):
        """A thread's part of a stage: k blocks behind the last one of the work tile bring nothing."""
        self.copy_codes(operands, shape, stages, work_tile, k_block, stage, tid)
        self.copy_x(operands, shape, stages, work_tile, k_block, stage, tid)
        config = self.config
        parts = [(operands.scales, stages.scales, config.scale_stage_bytes, config.format.group_scale_bytes)]
        parts += [(operands.zeros, stages.zeros, config.zero_stage_bytes, config.format.group_zero_bytes)]
        for source, target, stage_bytes, group_bytes in parts:
            if stage_bytes:
                self.copy_groups(source, target + stage * stage_bytes, group_bytes, shape, work_tile, k_block, tid)

    def copy_codes(self, operands, shape, stages: Stages, work_tile, k_block, stage, tid):
        """Each thread its own 16 bytes of every tile."""
        config = self.config
        k_block_bytes = config.k_block_tiles * TILE_BYTES
        target = stages.codes + stage * config.code_stage_bytes + tid * VECTOR_BYTES
        for i in range(config.n_tiles):
            tile = self.places.weight_tile(shape, work_tile, i)
            source = operands.codes + (Int64(tile) * shape.k_blocks + k_block) * k_block_bytes + tid * VECTOR_BYTES
            for part in range(0, k_block_bytes, TILE_BYTES):
                numbers.copy_async(target + (i * k_block_bytes + part), source + part, Int32(VECTOR_BYTES))

    def copy_x(self, operands, shape, stages: Stages, work_tile, k_block, stage, tid):
        """A k block of all tokens, zeros behind the end of K: codes there decode to 0, but 0 times NaN is NaN.

        Behind the last token it comes once more, for products that nobody stores.
        """
        config = self.config
        vectors = 2 * config.block_k // VECTOR_BYTES  # of a token
        rows = config.num_threads // vectors  # of which the threads bring a vector each
        row, vector = tid // vectors, tid % vectors
        column = k_block * config.block_k + vector * (VECTOR_BYTES // 2)
        num_bytes = cutlass.select_(column < shape.k, Int32(VECTOR_BYTES), Int32(0))
        column = cutlass.min(column, shape.k - VECTOR_BYTES // 2)
        target = stages.x + stage * config.x_stage_bytes + row * config.mainloop.x_pitch(config) + vector * VECTOR_BYTES
        for first in range(0, config.tile_m, rows):
            token = cutlass.min(work_tile.m_tile * config.tile_m + first + row, shape.m - 1)
            source = operands.x + (Int64(token) * shape.k + column) * 2
            numbers.copy_async(target + first * config.mainloop.x_pitch(config), source, num_bytes)

    @cute.jit
    def copy_groups(self, source, target, group_bytes: int, shape, work_tile, k_block, tid):
        """The scales, or zero points, of a k block's groups: a run for each tile, a vector for each of a few
        threads."""
        if tid < self.config.n_tiles * self.config.k_block_groups * group_bytes // VECTOR_BYTES:
            start = source + self.group_offset(group_bytes, shape, work_tile, k_block, tid)
            numbers.copy_async(target + tid * VECTOR_BYTES, start, Int32(VECTOR_BYTES))

    def group_offset(self, group_bytes: int, shape, work_tile, k_block, tid):
        """Where the ``tid``-th vector of a k block's scales, or zero points, lies among those of the weight, bytes."""
        config = self.config
        vectors = config.k_block_groups * group_bytes // VECTOR_BYTES  # of a tile
        tile = self.places.weight_tile(shape, work_tile, tid // vectors)
        group = Int64(tile) * shape.scale_groups + k_block * config.block_k // config.group_size
        return group * group_bytes + tid % vectors * VECTOR_BYTES

    # -- products -----------------------------------------------------------------------------------------------------

    @cute.jit
    def multiply_all(self, acc, operands, shape, stages, work_tile, place, channel, tid, lane):
        """Adds W X^T of the k blocks of a work tile to ``acc``: [tile][tokens / 2]. All of the pipeline is free
        afterwards."""
        config = self.config
        ahead = config.num_stages - 1
        for stage in cutlass.range_constexpr(ahead):
            if work_tile.begin + stage < work_tile.end:
                self.copy_stage(operands, shape, stages, work_tile, work_tile.begin + stage, stage, tid)
            cute.arch.cp_async_commit_group()
        stage = Int32(0)
        for k_block in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
            cute.arch.cp_async_wait_group(ahead - 1)
            # All have what they asked for, and all have done with the stage before, which is filled again.
            cute.arch.sync_threads()
            if k_block + ahead < work_tile.end:
                before = cutlass.select_(stage == 0, Int32(ahead), stage - 1)
                self.copy_stage(operands, shape, stages, work_tile, k_block + ahead, before, tid)
            cute.arch.cp_async_commit_group()
            self.multiply_stage(acc, stages, stage, place, channel, lane)
            stage = cutlass.select_(stage == ahead, Int32(0), stage + 1)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    def multiply_stage(self, acc, stages: Stages, stage, place, channel, lane):
        """Adds the products of a stage."""
        config = self.config
        codes = stages.codes + stage * config.code_stage_bytes + place.code_offset
        words = self.stages.load_codes(codes)
        groups = [self.stages.load_groups(stages, stage, place, i) for i in range(config.n_tiles)]
        # ldmatrix takes the rows of 8 tokens, for two k16 steps.
        x = (
            stages.x
            + stage * config.x_stage_bytes
            + lane % 8 * config.mainloop.x_pitch(config)
            + lane // 8 * VECTOR_BYTES
        )
        tile_acc = config.tile_m // 2
        totals = [acc[i] for i in range(config.thread_acc)]
        for pair in range(0, config.k_block_steps, 2):
            b = [
                ptx.load_matrix_x4(x, block * 8 * config.mainloop.x_pitch(config) + pair * STEP_K * 2, transpose=False)
                for block in range(config.tile_m // MMA_N)
            ]
            for step in (pair, pair + 1):
                for i in range(config.n_tiles):
                    a = self.fragment(words[i], step, groups[i] or channel[i : i + 1], place.masks)
                    for block in range(config.tile_m // MMA_N):
                        first = i * tile_acc + 4 * block
                        part = b[block][2 * (step - pair) : 2 * (step - pair) + 2]
                        dtype = MMA_DTYPE[config.dtype]
                        totals[first : first + 4] = ptx.mma_m16n8k16(totals[first : first + 4], a, part, dtype=dtype)
        for i in range(config.thread_acc):
            acc[i] = totals[i]

    def fragment(self, words, step: int, groups, masks) -> list[Any]:
        """As `RegisterMainloop.fragment`."""
        config, decoder = self.config, self.decoder
        scales, offsets = groups[step * STEP_K // config.group_size if config.group_size else 0]
        registers = decoder.fragment(words[step // decoder.steps], step % decoder.steps, offsets, masks)
        if not config.group_size:
            return registers
        return [self.math.multiply(register, scales[i % 2]) for i, register in enumerate(registers)]
