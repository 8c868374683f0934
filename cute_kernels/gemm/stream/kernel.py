"""Memory-bound weight-only GEMM in one launch: out^T = W X^T, with codes streamed once, at the rate of the memory.

The work is cut twice, see :mod:`.schedule`. First, K is cut into slices, one for each CTA of a group of CTAs. Second,
the k blocks of all blocks of output features form one sequence. Each group of CTAs takes an equal range of this
sequence (stream-K, Osama et al. 2023, with fixed cuts).

One thread of a persistent CTA keeps a pipeline of bulk copies full. The consumer warps wait for a stage. Each thread
decodes 16 bytes of codes into A operands of mma.m16n8k16 (`decoder`). The warps multiply them with the activations of
their slice of K. The activations are loaded with the first weights that need them, and stay in shared memory. Scales
are applied to the fp32 accumulators of a scale group. Results of a block go through a staging buffer to the epilogue
warps (:mod:`.epilogue`), so that neither reduction nor stores hold up the stream. There is no CTA barrier after the
first one.

The tensor cores run mma.sync, as on sm_80. With 16 tokens and 4-bit codes, an SM receives the 256 codes of one A
operand from memory every 6.5 cycles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.device.tensors import matrix_shape
from cute_kernels.gemm.device_operands import Operands, load_channel, operands_of, scale_number
from cute_kernels.gemm.stream.config import ROW_WARPS, X_PAD, StreamConfig
from cute_kernels.gemm.stream.epilogue import StreamEpilogue
from cute_kernels.gemm.stream.memory import StreamMemory, allocate, clear_tail, init_barriers
from cute_kernels.gemm.stream.work import RECIPROCAL_BITS, StreamSizes, Work
from layouts.weights.hopper import STEP_K, TILE_BYTES, TILE_N

FRAGMENT_BYTES = 16  # of a thread, in a tile
MMA_DTYPE = {"bf16": "bf16", "fp16": "f16"}
X_CHUNKS = 4  # chunks whose activations come together
CHAINS = 2  # sets of accumulators that a group's steps alternate between: an MMA's result takes some 30 cycles


@dataclass(frozen=True)
class StreamLane:
    """A thread's offsets; run-time integers. g, t: the row and the pair of columns that the thread has in MMA
    fragments."""

    row_warp: Int32
    k_warp: Int32
    g: Int32
    t: Int32
    code_offset: Int32  # of its 16 bytes in a tile
    scale_offset: Int32  # of its first row's scale among those of a group
    x: Int32  # address: where ldmatrix reads the first k16 steps, or of all limbs


class SliceLoads:
    """The loads of x. A CTA loads its slice of K for all rows, part by part as the weights need it. The slice stays in
    shared memory for all blocks."""

    def __init__(self, config: StreamConfig):
        self.config = config

    @cute.jit
    def copy(self, operands, memory, work, lane):
        """Loads the slice of K of all tokens; each lane loads the inputs of one token. The full barrier of the
        first weights that are multiplied with a part of the slice counts the part's bytes, too.

        A load of the whole slice at once would wait for a pipeline full of weights, or delay the weights. This warp
        arrives at every stage's barrier, even if it has nothing to load. Otherwise it could run a whole round of the
        pipeline ahead, and mistake a barrier's phase for a later phase of the same parity.
        """
        config, pipeline = self.config, memory.pipeline
        here = pipeline.producer_state()
        for index in cutlass.range(work.num_segments, unroll=1):
            segment = work.segment(index)
            for k_block in cutlass.range(segment.begin, segment.end, config.chunk_k_blocks, unroll=1):
                # The first chunk brings the rows of several: one long copy instead of many short ones.
                reach = cutlass.select_(
                    (k_block - segment.begin) % (X_CHUNKS * config.chunk_k_blocks) == 0,
                    Int32(X_CHUNKS * config.chunk_k_blocks),
                    Int32(0),
                )
                end = cutlass.min(k_block + reach, segment.end)
                first, size = work.missing_x(index, k_block, end, 2 * config.block_k)
                if lane == 0:  # alone: where nothing is copied, a slower lane could miss the phase and wait for ever
                    pipeline.producer_acquire(here)
                    pipeline.producer_expect(here, size * work.shape.m)
                cute.arch.sync_warp()
                if (lane < work.shape.m) & (size > 0):
                    start = Int64(lane) * work.shape.k + work.first_k_block * config.block_k
                    ptx.bulk_copy_to_shared(
                        memory.x + lane * memory.x_pitch + first,
                        operands.x + start * 2 + first,
                        size,
                        pipeline.full_address(here),
                    )
                here = pipeline.next(here)


class StreamRoles:
    """The roles of a CTA's warps: one loads weights, one loads activations, others multiply, others store."""

    def __init__(self, config: StreamConfig):
        self.config, self.activations = config, SliceLoads(config)
        self.decoder = config.format.decoder(config.dtype, HopperMath(config.dtype))
        self.epilogue = StreamEpilogue(config)

    def allocate(self, shape) -> StreamMemory:
        pitch = shape.slice_k_blocks * (2 * self.config.block_k) + X_PAD
        return allocate(self.config, pitch, shape.m * pitch)

    @cute.jit
    def take(self, operands, memory, work, warp, lane):
        """Runs the role of a warp until the CTA has done all its work."""
        config = self.config
        if warp < config.consumer_warps:
            self.multiply(operands, memory, work, warp, lane)
        elif warp == config.consumer_warps:
            self.copy_weights(operands, memory, work, lane)
        elif warp == config.consumer_warps + 1:
            self.activations.copy(operands, memory, work, lane)
        else:
            tid = (warp - (config.consumer_warps + 2)) * WARP_THREADS + lane
            self.epilogue.run(operands, memory, work, tid, lane)

    @cute.jit
    def copy_weights(self, operands, memory, work, lane):
        """Keeps the pipeline full of weights; one lane issues all copies."""
        config, pipeline = self.config, memory.pipeline
        here = pipeline.producer_state()
        if lane == 0:
            for index in cutlass.range(work.num_segments, unroll=1):
                segment = work.segment(index)
                for k_block in cutlass.range(segment.begin, segment.end, config.chunk_k_blocks, unroll=1):
                    pipeline.producer_acquire(here)
                    end = cutlass.min(k_block + config.chunk_k_blocks, segment.end)
                    self.copy_chunk(operands, memory, work, segment, k_block, end - k_block, here)
                    here = pipeline.next(here)

    def copy_chunk(self, operands, memory, work, segment, k_block, count, here):
        """Starts loading ``count`` k blocks of a block of output features. For each tile it copies the codes, and the
        scales and zero points if there are any."""
        config = self.config
        address = memory.pipeline.producer_expect(here, count * config.k_block_stage_bytes)
        target = memory.stages + here.stage * config.stage_bytes
        parts = [
            (operands.codes, 0, config.k_block_bytes, 0),
            # Of each tile scales of a second level lie after those of its groups.
            (operands.scales, config.scale_offset, config.k_block_scale_bytes, config.more_scale_bytes),
            (operands.zeros, config.zero_offset, config.k_block_zero_bytes, 0),
        ]
        for i in range(config.n_tiles):
            tile = work.tile(segment, i, config.n_tiles)
            place = work.k_block_of_tile(tile, k_block)
            for source, offset, k_block_bytes, more_bytes in parts:
                if k_block_bytes:
                    first = place * k_block_bytes
                    first = first + Int64(tile) * more_bytes if more_bytes else first
                    ptx.bulk_copy_to_shared(
                        target + (offset + i * config.chunk_k_blocks * k_block_bytes),
                        source + first,
                        count * k_block_bytes,
                        address,
                    )

    def lane_places(self, memory, work, warp, lane) -> StreamLane:
        row_warp, g = warp % ROW_WARPS, lane // 4
        return StreamLane(
            row_warp=row_warp,
            k_warp=warp // ROW_WARPS,
            g=g,
            t=lane % 4,
            code_offset=row_warp * (WARP_THREADS * FRAGMENT_BYTES) + lane * FRAGMENT_BYTES,
            scale_offset=row_warp * 16 + g,
            # ldmatrix.x4: lane i names row i % 8 of matrix i // 8. Rows that x lacks repeat its last one.
            x=memory.x + cutlass.min(lane % 8, work.shape.m - 1) * memory.x_pitch + lane // 8 * 16,
        )

    @cute.jit
    def multiply(self, operands, memory, work, warp, lane):
        """Multiplies the consumer warp's k blocks of every chunk, then stages its partial results of the block."""
        config, pipeline, results = self.config, memory.pipeline, memory.results
        place = self.lane_places(memory, work, warp, lane)
        here, staged = pipeline.consumer_state(), results.producer_state()
        acc = cute.make_rmem_tensor(config.n_tiles * 4, Float32)
        for index in cutlass.range(work.num_segments, unroll=1):
            segment = work.segment(index)
            acc.fill(0.0)
            channel = self.load_channel(operands, work, segment, place)
            for k_block in cutlass.range(segment.begin, segment.end, config.chunk_k_blocks, unroll=1):
                pipeline.consumer_wait(here)
                count = cutlass.min(segment.end - k_block, config.chunk_k_blocks)
                base = memory.stages + here.stage * config.stage_bytes
                for i in cutlass.range(place.k_warp, count, config.k_warps, unroll=1):
                    x_offset = (k_block + i) * (2 * config.block_k)
                    self.multiply_k_block(acc, base, i, x_offset, place, channel)
                cute.arch.sync_warp()
                if lane == 0:
                    pipeline.consumer_release(here)
                here = pipeline.next(here)
            results.producer_acquire(staged)
            stage_acc(config, acc, memory, staged.stage, place, channel)
            cute.arch.sync_warp()
            if lane == 0:
                results.producer_commit(staged)
            staged = results.next(staged)

    def multiply_k_block(self, acc, base, k_block, x_offset, place: StreamLane, channel):
        """Adds W X^T of a k block to ``acc`` [tile][4].

        Args:
            base: address of the stage.
            k_block: index of the k block in the chunk.
            x_offset: bytes from a row's begin to the k block's inputs.
        """
        config, decoder = self.config, self.decoder
        group_size = config.group_size or config.block_k
        steps = group_size // STEP_K
        groups = config.block_k // group_size
        codes = base + (k_block * config.k_block_bytes + place.code_offset)
        words = [
            [
                ptx.load_shared_vector(codes, (i * config.chunk_k_blocks * config.k_block_tiles + tile) * TILE_BYTES, 4)
                for tile in range(config.k_block_tiles)
            ]
            for i in range(config.n_tiles)
        ]
        x_row = place.x + x_offset
        pair: list[Any] = []  # of two steps, which may be of two groups
        for group in range(groups):
            numbers = [self.load_group(base, i, k_block, group, place, channel) for i in range(config.n_tiles)]
            parts = [[] for _ in range(config.n_tiles)]
            for step in range(group * steps, (group + 1) * steps):
                if step % 2 == 0:
                    pair = ptx.load_matrix_x4(x_row, step * STEP_K * 2, transpose=False)
                b, chain = pair[2 * (step % 2) : 2 * (step % 2) + 2], (step - group * steps) % CHAINS
                for i, chains in enumerate(parts):
                    load = words[i][step // decoder.steps]
                    a = decoder.fragment(load, step % decoder.steps, numbers[i][1])
                    if chain == len(chains):
                        chains.append([Float32(0.0)] * 4)
                    chains[chain] = ptx.mma_m16n8k16(chains[chain], a, b, dtype=MMA_DTYPE[config.dtype])
            for i, chains in enumerate(parts):
                self.add_group(acc, i, chains, numbers[i][0])

    def load_group(self, base, tile: int, k_block, group: int, place: StreamLane, channel):
        """Loads the scales and offsets of the thread's two rows for one group of a k block. Returns (scales, offsets).

        Scales are None if the decoder applies them, or if a row has one scale for all of K, which is applied at the
        end.
        """
        config, decoder = self.config, self.decoder
        if not config.group_size:
            return None, channel[tile][1]
        size = config.format.scale_bytes
        row = base + (k_block * config.k_block_scale_bytes + place.scale_offset * size)
        offset = config.scale_offset + tile * config.chunk_k_blocks * config.k_block_scale_bytes
        offset += group * config.format.group_scale_bytes
        scales = [self.load_scale(row, offset + 8 * size * half) for half in range(2)]
        zeros = [Uint32(decoder.symmetric_zero)] * 2
        if config.format.has_zeros:
            row = base + (k_block * config.k_block_zero_bytes + place.scale_offset)
            offset = config.zero_offset + tile * config.chunk_k_blocks * config.k_block_zero_bytes
            offset += group * config.format.group_zero_bytes
            zeros = [ptx.load_shared_part(row, offset + 8 * half, 1) for half in range(2)]
        if decoder.scales_weights:
            return None, decoder.row_numbers(scales, zeros)
        return scales, decoder.row_numbers(None, zeros)

    def load_scale(self, address, offset: int):
        """Loads a scale from shared memory, as fp32."""
        word = ptx.load_shared_part(address, offset, self.config.format.scale_bytes)
        return scale_number(self.config, self.decoder, word)

    def load_channel(self, operands, work, segment, place: StreamLane):
        """Loads the scales and offsets that hold for all of K, of the thread's two rows. Returns a pair (scales,
        offsets) for each tile, or an empty list if the format has no scales for all of K.
        """
        config, row = self.config, place.scale_offset
        tile_bytes = work.shape.k_blocks * config.k_block_scale_bytes + config.more_scale_bytes
        tiles = [work.tile(segment, i, config.n_tiles) for i in range(config.n_tiles)]
        return [each for tile in tiles for each in load_channel(config, self.decoder, operands, tile, row, tile_bytes)]

    def add_group(self, acc, tile: int, chains, scales):
        """Adds a group's products to ``acc``, multiplied by the group's scales if ``scales`` is not None."""
        for chain in chains:
            for i in range(4):
                at = 4 * tile + i
                acc[at] = acc[at] + chain[i] if scales is None else ptx.fma(chain[i], scales[i // 2], acc[at])


def stage_acc(config: StreamConfig, acc, memory, buffer, place: StreamLane, channel):
    """Stores a warp's results in a staging buffer [token][output feature of the block]."""
    base = memory.staging + buffer * config.buffer_bytes + place.k_warp * config.slice_bytes
    base = base + place.t * (2 * config.staging_pitch) + place.scale_offset * 4
    for tile in range(config.n_tiles):
        for i in range(4):
            value = acc[4 * tile + i]
            if channel:
                value = value * channel[tile][0][i // 2]
            ptx.store_shared(base, i % 2 * config.staging_pitch + (tile * TILE_N + 8 * (i // 2)) * 4, [value])


class StreamKernel:
    """The kernel of products that stream weights, in the variant of its :class:`StreamConfig`.

    | role | warps | waits | arrives |
    |---|---|---|---|
    | consumers | 4 * k_warps | stage full | stage empty, one lane a warp |
    | | | staging buffer empty | staging buffer full, one lane a warp |
    | loads of weights | 1 | stage empty: all consumer warps | stage full, with the bytes of its copies |
    | loads of activations | 1 | stage empty: all consumer warps | stage full, with bytes that may be 0 |
    | epilogue | epilogue_warps | staging buffer full: all consumer warps | staging buffer empty, one lane a warp |
    | | | parts of other CTAs, by polling | |

    There are two pipelines. One has ``num_stages`` stages of weights. A stage's full barrier also counts the bytes of
    the activations that these weights are the first to need. A full stage takes 2 arrivals, an empty one the arrival of
    each consumer warp. The other pipeline has `NUM_BUFFERS` staging buffers of results. A full buffer takes the arrival
    of each consumer warp, an empty one that of each epilogue warp.
    """

    def __init__(self, config: StreamConfig):
        self.config, self.roles = config, StreamRoles(config)

    def launch(self, given, stream):
        """Launches a CTA for each slice of K of each group; all of them must fit on the GPU together. ``given`` has the
        arguments `STREAM` of :mod:`cute_kernels.gemm.arguments`."""
        self.kernel(operands_of(Operands, given), self.sizes(given)).launch(
            grid=(given.num_slices, given.num_groups, 1),
            block=(self.config.num_threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def sizes(self, given) -> StreamSizes:
        m, k = matrix_shape(given.x)
        slice_k_blocks = cute.ceil_div(given.k_blocks, given.num_slices)
        total = cute.ceil_div(given.num_tiles, self.config.n_tiles) * slice_k_blocks
        base = total // given.num_groups
        return StreamSizes(
            m=m,
            n=given.n,
            k=k,
            num_tiles=given.num_tiles,
            k_blocks=given.k_blocks,
            slice_k_blocks=slice_k_blocks,
            slice_reciprocal=((Int64(1) << RECIPROCAL_BITS) + slice_k_blocks - 1) // slice_k_blocks,
            num_slices=given.num_slices,
            base=base,
            rest=total - base * given.num_groups,
            max_parts=given.max_parts,
            activation=given.activation,
            out_kind=given.out_kind,
        )

    @cute.kernel
    def kernel(self, operands, shape):
        slice_index, group, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.roles.allocate(shape)
        work = Work.of(shape, group, slice_index)
        if warp == self.config.consumer_warps:
            if lane == 0:
                init_barriers(memory)
        else:
            clear_tail(self.config, memory, work, warp * WARP_THREADS + lane)
        cute.arch.sync_threads()
        self.roles.take(operands, memory, work, warp, lane)
