"""Loads queries of a warpgroup's 64 rows into shared memory. The warps that multiply the queries also load them.

The loads begin once the last scores of the previous work tile are computed, and arrive during that tile's last MMAs.

For keys that are codes, bf16 queries become fp16. Each row is multiplied by a power of 2 that brings its largest
magnitude below 2**15; numbers that are 2**28 times smaller are still exact.

For FP8 products queries become E4M3, in another buffer. Each row is multiplied by a power of 2 that brings its largest
magnitude below 2**8; numbers up to 2**13 times smaller keep 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import ELEMENT_BYTES, SLAB_COLUMNS, WARPGROUP_ROWS
from cute_kernels.attention.loads.elements import of_name
from cute_kernels.attention.mainloops.fp8 import pack_e4m3x4
from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import in_pairs, lane_max, neighbours
from cute_kernels.device.types import Index

TOP_EXPONENTS = {"fp16": 14, "e4m3": 7}  # exponent that a row's greatest number is scaled to
WARP_ROWS = 16
WIDE_UNROLLED = 2  # unrolled steps over rows of which a lane has several pieces
PIECE_COLUMNS = wgmma_tiles.PIECE_BYTES // ELEMENT_BYTES
SLAB_BYTES = WARPGROUP_ROWS * SLAB_COLUMNS * ELEMENT_BYTES


def query_row(shape, work, row):
    """Returns (row of out, query, head) of a packed row of a work tile. Row of out: index in [total_q * num_q_heads].
    query: index of the query in its request.
    """
    place, member = shape.group.divide_int(row)
    head = work.head * shape.group.value + member
    return (work.q_start + place) * shape.num_q_heads + head, place, head


@dataclass(frozen=True)
class QueryRows:
    """The place of queries in global memory; run-time values. A query's heads are contiguous. token_bytes: bytes from
    one query to the next.
    """

    base: Int64
    token_bytes: Int64

    @classmethod
    def of(cls, q: cute.Tensor) -> QueryRows:
        """Describes queries for a kernel. Runs on the host."""
        first, *_ = cast("tuple[int, ...]", q.stride)
        return cls(ptx.address(q), Int64(first) * ELEMENT_BYTES)

    def address(self, shape, work, row, row_bytes: int):
        """Returns the address of a packed row, which has to exist. row_bytes: bytes of a query head's row."""
        _, place, head = query_row(shape, work, row)
        return self.base + Int64(work.q_start + place) * self.token_bytes + Int64(head) * row_bytes


class QueryLoader:
    """The loads of a warpgroup's queries, and their conversion to operands."""

    def __init__(self, config: ExtendConfig):
        self.config = config
        self.row_bytes = config.head_dim * ELEMENT_BYTES
        self.row_pieces = config.columns * ELEMENT_BYTES // wgmma_tiles.PIECE_BYTES
        self.row_lanes = min(self.row_pieces, WARP_THREADS)  # that have a row
        self.parts = self.row_pieces // self.row_lanes  # of a row, of which a lane has a piece each
        self.real_pieces = self.row_bytes // wgmma_tiles.PIECE_BYTES  # others are zeros
        self.halves = of_name(config.q_dtype).halves
        self.step_rows = WARP_THREADS // self.row_lanes
        self.num_steps = WARP_ROWS // self.step_rows

    def places(self, tile, warp, lane, step: Index) -> list[Any]:
        """Returns the shared addresses of a lane's pieces of a row, one piece in each part of the row."""
        row, piece = warp * WARP_ROWS + step * self.step_rows + lane // self.row_lanes, lane % self.row_lanes
        first = tile + piece // 8 * SLAB_BYTES + wgmma_tiles.piece_offset(row, piece % 8)
        return [first + part * (self.row_lanes // 8 * SLAB_BYTES) for part in range(self.parts)]

    def code_place(self, codes, warp, lane, step: Index):
        """Returns the shared address of a lane's E4M3 codes. The lane's piece of 8 numbers of 16 bits becomes 8 codes,
        which take half a piece.
        """
        row, half = warp * WARP_ROWS + step * self.step_rows + lane // self.row_lanes, lane % self.row_lanes
        return codes + wgmma_tiles.piece_offset(row, half // 2) + half % 2 * (wgmma_tiles.PIECE_BYTES // 2)

    @cute.jit
    def ask(self, shape, work, queries, tile: Int32, first_row: Int32, warp: Int32, lane: Int32):
        """Starts loading a warp's 16 rows of queries. Rows that the request does not have become zeros. first_row: the
        first of the warpgroup's 64 rows. tile: shared address of the warpgroup's queries."""
        if const_expr(self.parts == 1):
            for step in cutlass.range_constexpr(self.num_steps):
                self.ask_rows(shape, work, queries, tile, first_row, warp, lane, step)
        else:  # whose addresses, all at once, would be spilled
            for step in cutlass.range(0, self.num_steps, 1, unroll=WIDE_UNROLLED):
                self.ask_rows(shape, work, queries, tile, first_row, warp, lane, step)
        cute.arch.cp_async_commit_group()

    def ask_rows(self, shape, work, queries, tile, first_row, warp, lane, step) -> None:
        """Starts loading the rows of step ``step``."""
        row = first_row + (warp * WARP_ROWS + step * self.step_rows) + lane // self.row_lanes
        exists = row < work.num_rows
        address = queries.address(shape, work, cutlass.select_(exists, row, work.first_row), self.row_bytes)
        address = address + Int64(lane % self.row_lanes * wgmma_tiles.PIECE_BYTES)
        if self.real_pieces < self.row_pieces:
            exists = exists & (lane % self.row_lanes < self.real_pieces)
        size = cutlass.select_(exists, Int32(wgmma_tiles.PIECE_BYTES), Int32(0))
        for part, place in enumerate(self.places(tile, warp, lane, step)):
            numbers.copy_async(place, address + Int64(part * self.row_lanes * wgmma_tiles.PIECE_BYTES), size)

    @cute.jit
    def finish(self, operands, work, tile: Int32, codes: Int32, scales: Int32, warp: Int32, lane: Int32):
        """Waits for this thread's loads, and converts the queries if the configuration requires it. The warpgroup has
        to synchronise before MMAs read the queries.

        codes: shared address of the warpgroup's queries in E4M3. scales: address of the factors of the warpgroup's
        rows.
        """
        cute.arch.cp_async_wait_group(0)
        if const_expr(self.config.converts_queries):
            self.convert(operands, work, tile, codes, scales, warp, lane)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def convert(self, operands, work, tile: Int32, codes: Int32, scales: Int32, warp: Int32, lane: Int32):
        """Converts a warp's rows to fp16 or E4M3. Each row is multiplied by a power of 2 and, if K's columns have
        scales, by these scales.
        """
        channels: list[Float32] = []
        if const_expr(self.config.channel_scales[0]):
            channels = self.channel_scales(operands, work, lane)
        if const_expr(self.parts == 1):
            for step in cutlass.range_constexpr(self.num_steps):
                self.convert_rows(channels, tile, codes, scales, warp, lane, step)
        else:
            for step in cutlass.range(0, self.num_steps, 1, unroll=WIDE_UNROLLED):
                self.convert_rows(channels, tile, codes, scales, warp, lane, step)

    def convert_rows(self, channels: list[Float32], tile, codes, scales, warp, lane, step) -> None:
        """Converts the rows of a step."""
        places = self.places(tile, warp, lane, step)
        loaded = [word for place in places for word in ptx.load_shared_vector(place, 0, 4)]
        words, from_operand = self.convert_piece(loaded, channels)
        if not self.config.fp8:
            for part, place in enumerate(places):
                ptx.store_shared(place, 0, words[4 * part : 4 * part + 4])
        else:
            ptx.store_shared(self.code_place(codes, warp, lane, step), 0, words)
        self.tell_of_piece(from_operand, scales, warp, lane, step)

    @cute.jit
    def tell_of_piece(self, from_operand: Float32, scales: Int32, warp: Int32, lane: Int32, step: Int32):
        """Publishes the factor of a lane's row, ``from_operand``, for the consumer warps."""
        if lane % self.row_lanes == 0:
            row = warp * WARP_ROWS + step * self.step_rows + lane // self.row_lanes
            ptx.store_shared(scales + row * 4, 0, [from_operand])

    def convert_piece(self, words, channels: list[Float32]) -> tuple[list[Any], Float32]:
        """Converts a lane's pieces of a row to fp16 or E4M3, and multiplies them by the scales of their columns if
        there are any. Returns (words of the operand, the power of 2 that restores the operand's numbers by
        multiplication)."""
        values = [half(word) for word in words for half in self.halves]
        if channels:
            values = [value * scale for value, scale in zip(values, channels, strict=True)]
            top = in_pairs(ptx.fmax, [ptx.absolute(value) for value in values])
        else:
            top = Float32(0.0)  # in turn: one register
            for value in values:
                top = ptx.fmax(top, ptx.absolute(value))
        top = lane_max(top, neighbours(self.row_lanes))
        to_operand, from_operand = self.powers_of(top)
        to_operand = to_operand + (top - top)  # a row with an infinite number is NaN: E4M3 has no infinity
        scaled = [value * to_operand for value in values]
        if self.config.fp8:
            return [pack_e4m3x4(scaled[i : i + 4]) for i in range(0, len(scaled), 4)], from_operand
        return [ptx.pack_f16x2(scaled[i], scaled[i + 1]) for i in range(0, len(scaled), 2)], from_operand

    def channel_scales(self, operands, work, lane) -> list[Float32]:
        """Loads the scales of the columns of a lane's pieces."""
        piece = cutlass.min(lane % self.row_lanes, self.real_pieces - 1)  # what follows is zeros
        first = Int64(work.head) * operands.k_scale_stride + Int64(piece * PIECE_COLUMNS)
        starts = [part * self.row_lanes * PIECE_COLUMNS * 4 for part in range(self.parts)]
        offsets = [start + half for start in starts for half in (0, 16)]
        words = [ptx.load_global_words(operands.k_scale + first * 4, offset, 4) for offset in offsets]
        return [word.bitcast(Float32) for half in words for word in half]

    def powers_of(self, top: Float32) -> tuple[Float32, Float32]:
        """Returns (power of 2 by which a row is multiplied, the power's reciprocal). top: the row's largest
        magnitude.
        """
        wanted = TOP_EXPONENTS["e4m3" if self.config.fp8 else "fp16"]
        exponent = (numbers.bits(top) >> 23).to(Int32) - 127
        exponent = cutlass.min(cutlass.max(exponent, Int32(-100)), Int32(127))
        to_operand = numbers.from_bits(Uint32((127 + wanted - exponent) << 23))
        return to_operand, numbers.from_bits(Uint32((127 - wanted + exponent) << 23))
