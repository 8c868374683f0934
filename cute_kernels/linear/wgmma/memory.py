"""Shared memory of a CTA of the weight-only GEMM for many rows, and its barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.policies import TMA_TILE_ALIGNMENT


@dataclass(frozen=True)
class TileMemory:
    """Shared memory of a CTA: addresses, and pointers to barriers and to the stages of activations."""

    x: Any
    x_address: Any
    codes: Any
    scales: Any
    zeros: Any
    staging: Any
    full: Any
    empty: Any
    table: Any
    x_scales: Any
    partials: Any  # of K of a cluster's tiles, and their barriers
    partial_barriers: Any
    x_barrier: Any  # behind all others, if there is one


def allocate(config: WgmmaConfig, layout, element, table_bytes: int) -> TileMemory:
    """Shared memory of a CTA.

    layout: of the stages of activations, of type ``element``. table_bytes: for a table of tiles, of grouped products.
    """
    smem = cutlass.utils.SmemAllocator()
    stages = config.num_stages
    x = smem.allocate_tensor(element, layout.outer, byte_alignment=TMA_TILE_ALIGNMENT, swizzle=layout.inner)
    codes = smem.allocate(stages * config.code_stage_bytes, byte_alignment=128).toint()
    scales = zeros = Int32(0)
    if const_expr(config.scale_stage_bytes):
        scales = smem.allocate(stages * config.scale_stage_bytes, byte_alignment=128).toint()
    if const_expr(config.zero_stage_bytes):
        zeros = smem.allocate(stages * config.zero_stage_bytes, byte_alignment=128).toint()
    x_scales = Int32(0)
    if const_expr(config.limbs):
        x_scales = smem.allocate(config.x_scale_bytes, byte_alignment=128).toint()
    staging = smem.allocate(config.warpgroups * config.staging_bytes, byte_alignment=config.store.alignment)
    partials = Int32(0)
    if const_expr(config.partials_bytes):
        partials = smem.allocate(config.partials_bytes, byte_alignment=128).toint()
    full = smem.allocate_array(cutlass.Int64, config.num_barriers)
    table = Int32(0)
    if const_expr(table_bytes):
        table = smem.allocate(table_bytes, byte_alignment=16).toint()
    return TileMemory(
        x=x,
        x_address=x.iterator.toint(),
        codes=codes,
        scales=scales,
        zeros=zeros,
        staging=staging.toint(),
        full=full,
        empty=full + stages,
        table=table,
        x_scales=x_scales,
        partials=partials,
        partial_barriers=full + 2 * stages,
        x_barrier=full + (2 * stages + config.partial_slots),
    )


def init_barriers(config: WgmmaConfig, memory: TileMemory) -> None:
    """Of one thread, before any other uses them."""
    for i in range(config.num_stages):
        cute.arch.mbarrier_init(memory.full + i, config.stage_copies)
        cute.arch.mbarrier_init(memory.empty + i, config.stage_warps)
    for slot in range(config.partial_slots):
        # It waits for the bytes of all other CTAs' parts.
        cute.arch.mbarrier_init(memory.partial_barriers + slot, 1)
        cute.arch.mbarrier_arrive_and_expect_tx(
            memory.partial_barriers + slot, (config.cluster - 1) * config.partial_bytes
        )
    cute.arch.mbarrier_init_fence()
