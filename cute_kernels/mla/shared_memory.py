"""The shared memory of the kernel for 64 heads: its regions in order, and its mbarriers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.mla.config import FLAG_BYTES, NUM_STAGES, ROW_VALUE_BYTES, WEIGHT_BYTES, MlaConfig


@dataclass(frozen=True)
class SharedMemory:
    """The regions and barriers of shared memory. A region is an address, or a pointer if tensors are made from it.

    A tile, or each part of a tile in two parts, has two mbarriers. Producers arrive on ``full``, which also counts
    bytes of asynchronous copies. Consumer warps arrive on ``empty``; with crossover, the consumer warps of both CTAs of
    a pair do.
    """

    tile_pointer: cute.Pointer
    tiles: Int32
    query_pointer: cute.Pointer
    queries: Int32
    weight_pointer: cute.Pointer
    row_values: Int32  # a number a row, fp32 [64]
    flags: Int32
    entries: Int32  # of FP8 caches: indices or page numbers of the next blocks, int32 [blocks, 64]
    full: cute.Pointer
    empty: cute.Pointer
    queries_full: cute.Pointer


def allocate(config: MlaConfig) -> SharedMemory:
    """Allocates the shared memory, in device code."""
    smem = cutlass.utils.SmemAllocator()
    tiles = smem.allocate(NUM_STAGES * config.tile_bytes, byte_alignment=1024)
    queries = smem.allocate(config.query_bytes, byte_alignment=1024)
    weights = smem.allocate(WEIGHT_BYTES, byte_alignment=1024)
    row_values = smem.allocate(ROW_VALUE_BYTES, byte_alignment=16)
    flags = smem.allocate(NUM_STAGES * FLAG_BYTES, byte_alignment=16)
    entries = smem.allocate(max(config.entry_bytes, 4), byte_alignment=16)
    num_parts = NUM_STAGES * config.tile_parts
    full = smem.allocate_array(cutlass.Int64, 2 * num_parts + 1)
    return SharedMemory(
        tile_pointer=tiles,
        tiles=Int32(tiles.toint()),
        query_pointer=queries,
        queries=Int32(queries.toint()),
        weight_pointer=weights,
        row_values=Int32(row_values.toint()),
        flags=Int32(flags.toint()),
        entries=Int32(entries.toint()),
        full=full,
        empty=full + num_parts,
        queries_full=full + 2 * num_parts,
    )


def init_barriers(config: MlaConfig, memory: SharedMemory) -> None:
    """Initialises all barriers; one thread calls it, and all others wait, see :mod:`.barriers`."""
    for i in range(NUM_STAGES * config.tile_parts):
        cute.arch.mbarrier_init(memory.full + i, config.tiles.load.full_arrivals)
        cute.arch.mbarrier_init(memory.empty + i, config.empty_arrivals)
    cute.arch.mbarrier_init(memory.queries_full, 1)
    cute.arch.mbarrier_init_fence()
