"""The shared memory of the kernel for few heads, and the named barriers of its warps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.mla.few_heads.config import (
    CONSUMER_WARPS,
    FLAG_BYTES,
    PRODUCER_WARPS,
    ROW_BYTES,
    SCORE_WARPS,
    VALUE_WARPS,
    WEIGHT_BUFFERS,
    FewHeadsConfig,
)

QUERIES_READY, RESULTS_READY = 1, 2  # named barriers of scoring and value warps
RAISING, EXCHANGING = 3, 4  # ... of score warps


@dataclass(frozen=True)
class FewHeadsMemory:
    """The addresses of all regions as Int32, and the barriers as pointers."""

    ring: Int32  # raw tokens, stages of 64
    queries: Int32  # as operands: see `Queries`
    query_scales: Int32  # fp32 [heads]: what a head's scores are multiplied by to undo its queries' scaling
    weights: Int32  # fp16 [buffer, tile, block of 8 heads, token, head]
    factors: Int32  # fp32 [buffer, tile, head]: what accumulators shrink by before a block is added
    raised: Int32  # word [buffer], 16 bytes apart: whether there are such factors
    exchange: Int32  # fp32 [score warp, head], then [score warp, tile]
    results: Int32  # fp32 [tile, head]: what accumulators are multiplied by in the end
    statistics: Int32 | None  # fp32 [head, (maximum, total)] of a part of a cluster
    flags: Int32  # word [stage, score warp]: which of its 16 tokens exist
    full: cute.Pointer  # a stage holds tokens
    empty: cute.Pointer  # no one needs them any more
    weighed: cute.Pointer  # a buffer holds weights
    added: cute.Pointer  # no one needs them any more


def allocate(config: FewHeadsConfig) -> FewHeadsMemory:
    smem = cutlass.utils.SmemAllocator()

    def take(size: int) -> Int32:
        return Int32(smem.allocate(size, byte_alignment=16).toint())

    stages, buffers = config.stages, WEIGHT_BUFFERS
    ring = Int32(smem.allocate(config.ring_bytes, byte_alignment=128).toint())
    queries, query_scales = take(config.query_bytes), take(config.head_bytes)
    weights, factors = take(buffers * config.weight_bytes), take(buffers * config.factor_bytes)
    raised, exchange = take(buffers * 16), take(config.exchange_bytes)
    results, flags = take(config.factor_bytes), take(stages * FLAG_BYTES)
    statistics = take(config.statistic_bytes) if config.cluster > 1 else None
    barriers = smem.allocate_array(cutlass.Int64, 2 * (stages + buffers))
    return FewHeadsMemory(
        ring, queries, query_scales, weights, factors, raised, exchange, results, statistics, flags,
        full=barriers,
        empty=barriers + stages,
        weighed=barriers + 2 * stages,
        added=barriers + (2 * stages + buffers),
    )  # fmt: skip


def init_barriers(config: FewHeadsConfig, memory: FewHeadsMemory) -> None:
    """Initialises all barriers. One thread calls it, before any other thread uses them."""
    for i in range(config.stages):
        # Every copying thread arrives when its copies have, and a lane of each of their warps for the flags.
        cute.arch.mbarrier_init(memory.full + i, PRODUCER_WARPS * (WARP_THREADS + 1))
        cute.arch.mbarrier_init(memory.empty + i, CONSUMER_WARPS)
    for i in range(WEIGHT_BUFFERS):
        cute.arch.mbarrier_init(memory.weighed + i, SCORE_WARPS)
        cute.arch.mbarrier_init(memory.added + i, VALUE_WARPS)
    cute.arch.mbarrier_init_fence()


def matrix_lane(lane: Int32) -> Any:
    """Returns the offset of a lane's address for ldmatrix, which loads 32 bytes of each of 16 tokens. The first two of
    the four matrices are the first 16 bytes of tokens 0 to 7 and of tokens 8 to 15. The last two matrices are the last
    16 bytes of these tokens. Rows are an odd number of 16 bytes apart, so there are no bank conflicts.
    """
    return lane % 16 * ROW_BYTES + lane // 16 * 16
