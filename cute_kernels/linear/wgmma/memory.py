"""Shared memory of a CTA of the weight-only GEMM for many rows, and its barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.linear.wgmma.config import WgmmaConfig


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
    x_barrier: Any = None  # of resident limbs,
    tile_barriers: Any = None  # and of a stage's tiles but the first, where each has its own


def allocate(config: WgmmaConfig, layout, element, table_bytes: int) -> TileMemory:
    """Shared memory of a CTA: the regions and barriers that the policies of a configuration declare.

    layout: of the stages of activations, of type ``element``. table_bytes: for a table of tiles, of grouped products.
    """
    smem = cutlass.utils.SmemAllocator()
    activations, *others = config.regions
    x = smem.allocate_tensor(element, layout.outer, byte_alignment=activations.alignment, swizzle=layout.inner)
    parts: dict[str, Any] = {"x": x, "x_address": x.iterator.toint()}
    for region in others:
        parts[region.name] = allocate_bytes(smem, region.size, region.alignment)
    first, count = smem.allocate_array(cutlass.Int64, config.num_barriers), 0
    for group in config.barriers:
        parts[group.name] = first + count if count else first
        count += group.count
    return TileMemory(**parts, table=allocate_bytes(smem, table_bytes, 16))


def allocate_bytes(smem: Any, size: int, alignment: int) -> Any:
    """The address of so many bytes; 0 of none."""
    return smem.allocate(size, byte_alignment=alignment).toint() if size else Int32(0)


def init_barriers(config: WgmmaConfig, memory: TileMemory) -> None:
    """Of one thread, before any other uses them: all but those that their owner initialises."""
    for i in range(config.num_stages):
        for group in config.mainloop.barriers(config):
            cute.arch.mbarrier_init(getattr(memory, group.name) + i, group.arrivals)
    for group in config.reduction.barriers(config):
        for i in range(group.count):
            barrier = getattr(memory, group.name) + i
            cute.arch.mbarrier_init(barrier, group.arrivals)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, group.expected_bytes)
    cute.arch.mbarrier_init_fence()
