"""Allocates the shared memory of a CTA that streams weights, initialises its barriers, and zeroes the activations
beyond K.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.pipeline import Pipeline, fence_init
from cute_kernels.gemm.stream.config import NUM_BUFFERS, StreamConfig


@dataclass(frozen=True)
class StreamMemory:
    """The shared memory of a CTA: its addresses, a pipeline of weights and activations, and a pipeline of blocks'
    results."""

    stages: Int32
    x: Int32
    x_pitch: Int32  # bytes from a token to the next
    staging: Int32
    pipeline: Pipeline
    results: Pipeline  # staging buffers, from consumer to epilogue warps
    x_slot_bytes: Int32  # from one set of activations to the next, where there are several


def allocate(config: StreamConfig, x_pitch, x_slot_bytes) -> StreamMemory:
    """Allocates the shared memory of a CTA. x_pitch: bytes from a row of activations to the next. x_slot_bytes: bytes
    of one set of activations."""
    smem = cutlass.utils.SmemAllocator()
    stages = smem.allocate(config.stages_bytes, byte_alignment=128)
    x = smem.allocate(config.x_bytes, byte_alignment=config.activations.alignment)
    staging = smem.allocate(NUM_BUFFERS * config.buffer_bytes, byte_alignment=128)
    barriers = smem.allocate_array(cutlass.Int64, config.num_barriers)
    empty, staged = barriers + config.num_stages, barriers + 2 * config.num_stages
    drained = staged + NUM_BUFFERS
    return StreamMemory(
        stages=Int32(stages.toint()),
        x=Int32(x.toint()),
        x_pitch=x_pitch,
        staging=Int32(staging.toint()),
        pipeline=Pipeline(barriers, empty, config.num_stages, config.producer_warps, config.stage_warps),
        results=Pipeline(staged, drained, NUM_BUFFERS, config.consumer_warps, config.store.epilogue_warps),
        x_slot_bytes=x_slot_bytes,
    )


def init_barriers(memory: StreamMemory) -> None:
    """Initialises all barriers. One thread calls it, before any other thread uses them."""
    memory.pipeline.init()
    memory.results.init()
    fence_init()


@cute.jit
def clear_tail(config: StreamConfig, memory: StreamMemory, work, tid):
    """Zeroes the activations beyond K. Weight codes there decode to 0, but old data in shared memory could be NaN, and
    0 times NaN is NaN.
    """
    k_block_bytes = 2 * config.block_k
    wanted = work.own_k_blocks * k_block_bytes
    present = cutlass.max(work.shape.k * 2 - work.first_k_block * k_block_bytes, 0)
    if (present < wanted) & (tid < config.consumer_warps * WARP_THREADS):
        for token in cutlass.range(work.shape.m, unroll=1):
            start = memory.x + token * memory.x_pitch
            step = config.consumer_warps * WARP_THREADS * 16
            for place in cutlass.range(present + tid * 16, wanted, step, unroll=1):
                ptx.store_shared_zero16(start + place, 0)
