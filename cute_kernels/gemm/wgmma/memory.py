"""Shared memory and barriers of a CTA of the weight-only GEMM for many rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.device.pipeline import Barrier, Pipeline, fence_init
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.regions import Region


@dataclass(frozen=True)
class TileMemory:
    """The shared memory of a CTA: addresses of its regions, and pointers to its barriers and to the stages of
    activations."""

    x: cute.Tensor
    x_address: Int32
    codes: Int32
    scales: Int32
    zeros: Int32
    staging: Int32
    pipeline: Pipeline
    table: Int32
    x_scales: Int32
    partials: Int32  # of K of a cluster's tiles, and their barriers
    partial_barriers: cute.Pointer
    x_barrier: cute.Pointer  # of resident limbs, if there is one
    x_sums: Int32 | None = None  # of rows of x, of each group, where weights have zero points


def allocate(config: WgmmaConfig, layout, element, table_bytes: int) -> TileMemory:
    """Allocates the regions and barriers of a CTA that the policies of a configuration declare.

    layout, element: layout and dtype of the stages of activations. table_bytes: bytes of the table of tiles that
    grouped products have.
    """
    smem = cutlass.utils.SmemAllocator()
    activations, *others = config.mainloop.regions(config)
    x = smem.allocate_tensor(element, layout.outer, byte_alignment=activations.alignment, swizzle=layout.inner)
    parts = addresses(smem, others)
    (staging,) = config.store.regions(config)
    staged = smem.allocate(staging.size, byte_alignment=staging.alignment)
    parts |= addresses(smem, config.reduction.regions(config))
    first = smem.allocate_array(cutlass.Int64, config.num_barriers)
    parts |= addresses(smem, [Region("table", table_bytes, 16)])
    where = {"x_address": x.iterator.toint(), "staging": staged.toint()}
    return TileMemory(x=x, **where, **barriers_from(config, first), **parts)


def addresses(smem: cutlass.utils.SmemAllocator, regions: Iterable[Region]) -> dict[str, Any]:
    """Returns the addresses of regions, by name; 0 for regions without bytes."""
    return {
        region.name: smem.allocate(region.size, byte_alignment=region.alignment).toint() if region.size else Int32(0)
        for region in regions
    }


def barriers_from(config: WgmmaConfig, first: cute.Pointer) -> dict[str, Any]:
    """Returns the barrier fields of `TileMemory`, by name: the pipeline, and the addresses of all other barriers.
    first: the address of the first barrier.
    """
    found, arrivals, count = {}, {}, 0
    for group in config.barriers:
        found[group.name], arrivals[group.name] = first + count if count else first, group.arrivals
        count += group.count
    full, empty = (found.pop(name) for name in ("full", "empty"))
    declared = arrivals["full"], arrivals["empty"]
    return {"pipeline": Pipeline(full, empty, config.num_stages, *declared, config.multicast), **found}


def init_barriers(config: WgmmaConfig, memory: TileMemory) -> None:
    """Initialises all barriers except those of `Mainloop.more_barriers`. One thread calls it, before any thread uses a
    barrier."""
    memory.pipeline.init()
    for group in config.reduction.barriers(config):
        for i in range(group.count):
            barrier = Barrier(getattr(memory, group.name) + i, group.arrivals)
            barrier.init()
            barrier.expect(group.expected_bytes)
    fence_init()
