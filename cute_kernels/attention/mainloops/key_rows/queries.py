"""Writes the queries of a work tile as the B operand of MMAs with keys. They become fp16 numbers, all multiplied by one
power of 2.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import ELEMENT_BYTES, MMA_WARPS, SLAB_COLUMNS, WARPGROUP_WARPS
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.attention.mainloops.key_rows.codes import CHUNK_BYTES, rows_of
from cute_kernels.attention.mainloops.tile_queries import TOP_EXPONENTS
from cute_kernels.attention.mainloops.warpgroup_barriers import sync_consumers, sync_warpgroup
from cute_kernels.device import numbers, ptx, wgmma
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import in_pairs, lane_max, neighbours

TOP_EXPONENT = TOP_EXPONENTS["fp16"]


def sync_head(heads: int, group) -> None:
    """Synchronises the consumer warps of a KV head: all of them, or one warpgroup if a work tile has two ``heads``."""
    if heads == 1:
        sync_consumers()
    else:
        sync_warpgroup(group)


class QueryWriter:
    """Writes the queries of a work tile. If 8 warps share a KV head, warp w writes rows w, w + 8, ... With two heads, 4
    warps share a head, and warp w writes rows w, w + 4, ..."""

    def __init__(self, config: ExtendConfig):
        self.config, self.rows = config, rows_of(config.formats[0])
        self.halves = of_name(config.q_dtype).halves
        self.heads = config.tile_heads
        self.warps = MMA_WARPS // self.heads
        self.count = config.tile_rows // self.warps
        assert config.key_rows is not None
        self.tile_bytes = config.key_rows.query_bytes

    def tile(self, memory, group):
        """Returns the address of the queries of a warpgroup."""
        return memory.queries if self.heads == 1 else memory.queries + group * self.tile_bytes

    @cute.jit
    def write(self, shape, operands, work, memory, group: Int32, warp: Int32, lane: Int32):
        """Writes the queries times a power of 2. Returns the power's reciprocal, by which scores have to be multiplied.
        Callers ensure that no MMA still reads the previous work tile's queries.
        """
        own_tops = memory.tops + 4 * (group * WARPGROUP_WARPS)
        if const_expr(self.heads == 1):
            warp = group * WARPGROUP_WARPS + warp
            own_tops = memory.tops
        values = self.load(shape, work, operands.q, warp, lane)
        top = lane_max(
            in_pairs(ptx.fmax, [self.size_of(value) for own in values for value in own]), neighbours(WARP_THREADS)
        )
        if lane == 0:
            ptx.store_shared(own_tops + 4 * warp, 0, [top])
        sync_head(self.heads, group)
        words = [word for first in range(0, self.warps, 4) for word in ptx.load_shared_vector(own_tops, 4 * first, 4)]
        top = in_pairs(ptx.fmax, [word.bitcast(Float32) for word in words])
        exponent = (numbers.bits(top) >> 23).to(Int32) - 127
        exponent = cutlass.min(cutlass.max(exponent, Int32(-100)), Int32(127))
        to_fp16 = numbers.from_bits(Uint32((127 + TOP_EXPONENT - exponent) << 23))
        from_fp16 = numbers.from_bits(Uint32((127 - TOP_EXPONENT + exponent) << 23))
        self.store([[value * to_fp16 for value in own] for own in values], self.tile(memory, group), warp, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_head(self.heads, group)
        return from_fp16

    def size_of(self, value) -> Any:
        """Returns the magnitude of a number, or 0 for infinity. The power of 2 is chosen from the largest magnitude;
        an infinite one would turn the numbers of all other rows into zeros.
        """
        size = ptx.absolute(value)
        return cutlass.select_(size < math.inf, size, Float32(0.0))

    def load(self, shape, work, queries, warp, lane) -> list[list[Float32]]:
        """Loads four numbers of each of the warp's rows; zeros for rows that the request does not have."""
        column, distance = self.rows.query_columns(lane)
        values = []
        for i in range(self.count):
            row = work.first_row + warp + self.warps * i
            exists = row < work.num_rows
            own = cutlass.select_(exists, row, work.first_row)
            address = queries.address(shape, work, own, self.config.head_dim * ELEMENT_BYTES)
            address = address + Int64(column * ELEMENT_BYTES)
            words = [ptx.load_global_words(address, k * distance * ELEMENT_BYTES, 1)[0] for k in range(2)]
            words = [cutlass.select_(exists, word, Uint32(0)) for word in words]
            values.append([half(word) for word in words for half in self.halves])
        return values

    def store(self, values, tile, warp, lane) -> None:
        """Stores the warp's rows into the B operand."""
        step, t = self.rows.query_step(lane)
        slab, chunk = step // 4, step % 4 * 2
        slab_bytes = self.config.tile_rows * SLAB_COLUMNS * ELEMENT_BYTES
        place = tile + slab * slab_bytes + warp * wgmma.ROW_BYTES + 4 * t
        for pair in range(2):
            target = place + ((chunk + pair) ^ warp) * CHUNK_BYTES
            for i, own in enumerate(values):
                low, high = self.rows.query_pairs(own)[pair]
                place_of_row = target ^ (self.warps * i % 8 * CHUNK_BYTES)
                ptx.store_shared(place_of_row, i * self.warps * wgmma.ROW_BYTES, [ptx.pack_f16x2(low, high)])
