"""Makes rows of x in E4M3, or in int8 limbs, on the GPU, with fp32 scales; rows may be gathered by index.

A half warp converts 128 inputs of a row; each lane has 8. For products, the first and the second eight of 16 inputs are
interleaved, as a thread's codes of a weight are (`E4m3Decoder`). Two lanes exchange a word for this. With one scale per
row, a CTA first reads all of the row to find the scale. It then reads the row again from cache.

For 16-bit products of few rows, the kernel stores the numbers that codes stand for, in x's own order. For int8 products
(`cute_kernels.gemm.wgmma.limbs`) it stores limbs, see `cute_kernels.gemm.wgmma.limb_rows`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import lanes, numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.types import extents
from cute_kernels.gemm.device_operands import row_of
from cute_kernels.gemm.inputs.config import THREADS
from cute_kernels.gemm.operands.fp8_config import (
    BY_GROUP,
    BY_ROW,
    FOR_PRODUCTS,
    GIVEN,
    LIMBS,
    ROUNDED,
    SCALE_BITS,
    SCALE_ROUND_UP,
    RowsConfig,
)
from cute_kernels.gemm.wgmma.limb_rows import GROUP_LANES, INFINITY, PIECE_BYTES, RowLimbs

WARPS = THREADS // WARP_THREADS
HALF_LANES = GROUP_LANES // 2
GROUPS_AT_ONCE = THREADS // GROUP_LANES
MOST = 448.0
IN_FLIGHT = 4  # pieces that a thread asks for at a time
LEAST_BITS = (127 - 110) << 23  # 2**-110 as fp32 bits, the least group maximum that has a scale
SCALE = 1.0 / 16  # keeps reciprocals of all numbers that count in range


class RowCodes:
    """The device code that makes E4M3 codes of a lane's 8 inputs of a row."""

    piece_bytes = 8  # of a lane

    def __init__(self, config: RowsConfig):
        self.config, self.inputs = config, RowLimbs(config.dtype)

    def target(self, piece, lane) -> Any:
        """Returns the index of the piece of a row of out that a lane stores. piece: the index of the piece of x's row
        that the lane has read.
        """
        return piece

    def scales_of(self, largest) -> tuple[Any, Any]:
        """Returns (factor by which inputs are multiplied, bits of the fp32 scale). largest: bits of the largest
        magnitude.
        """
        most = Uint32(cutlass.max(largest, LEAST_BITS)).bitcast(Float32)
        finite = largest < INFINITY
        scale = Uint32(numbers.bits(numbers.multiply(most, Float32(1 / MOST))))
        scale = Uint32((scale + Uint32(SCALE_ROUND_UP)) & Uint32(SCALE_BITS))
        factor = cutlass.select_(finite, self.over(scale.bitcast(Float32)), Float32(0.0))
        return Float32(factor), Uint32(cutlass.select_(finite, scale, Uint32(0x7FFFFFFF)))

    def given_scale(self, bits) -> tuple[Any, Any]:
        """Returns (factor by which inputs are multiplied, bits of the fp32 scale) for a given scale."""
        return self.over(bits.bitcast(Float32)), bits

    def over(self, by) -> Any:
        """Returns 1 / by, rounded to nearest. It improves the special-function unit's reciprocal by Newton's method."""
        by = numbers.multiply(by, Float32(SCALE))
        minus = numbers.multiply(by, Float32(-1.0))
        over = ptx.reciprocal(by)
        over = ptx.fma(over, ptx.fma(minus, over, Float32(1.0)), over)
        found = numbers.multiply(over, Float32(SCALE))
        return ptx.fma(ptx.fma(minus, found, Float32(SCALE)), over, found)

    def codes(self, words, factor, scale, lane) -> list[Any]:
        """Returns a lane's 8 codes, as two words."""
        values = [numbers.multiply(half, factor) for word in words for half in self.inputs.to_floats(word)]
        pairs = [numbers.pack_e4m3x2(values[i], values[i + 1]) for i in range(0, 8, 2)]
        own = [ptx.prmt(pairs[i], pairs[i + 1], Uint32(0x5410)) for i in (0, 2)]
        if self.config.makes != FOR_PRODUCTS:
            return own
        odd = (lane & 1) == 1
        came = cute.arch.shuffle_sync_bfly(cutlass.select_(odd, own[0], own[1]), offset=1)
        first, second = cutlass.select_(odd, came, own[0]), cutlass.select_(odd, own[1], came)
        return [ptx.prmt(first, second, Uint32(selector)) for selector in (0x5140, 0x7362)]


class RowValues(RowCodes):
    """The device code that makes bf16 numbers: codes times their scale."""

    piece_bytes = 16

    def codes(self, words, factor, scale, lane) -> list[Any]:
        scale = scale.bitcast(Float32)
        pairs = [[numbers.multiply(half, factor) for half in self.inputs.to_floats(word)] for word in words]
        halves = [numbers.e4m3x2_to_f16x2(numbers.pack_e4m3x2(*pair)) for pair in pairs]
        values = [(ptx.half2_low_to_float(word), ptx.half2_high_to_float(word)) for word in halves]
        return [ptx.pack_bf16x2(*(numbers.multiply(value, scale) for value in pair)) for pair in values]


class LimbCodes(RowCodes):
    """The device code that makes int8 limbs. The high limbs of each 128 inputs lie before the low limbs. Even lanes
    store high limbs, odd lanes low limbs."""

    piece_bytes = 16

    def target(self, piece, lane) -> Any:
        return piece - lane + (lane & 1) * HALF_LANES + (lane >> 1)

    def scales_of(self, largest) -> tuple[Any, Any]:
        factor, scale = self.inputs.scales_of(largest)
        return factor, Uint32(scale)

    def codes(self, words, factor, scale, lane) -> list[Any]:
        return self.inputs.limbs(words, factor, lane)


MAKERS = {ROUNDED: RowValues, LIMBS: LimbCodes}


class RowsKernel:
    """The kernel that makes rows of x in E4M3 or in limbs, in the variant of its :class:`RowsConfig`."""

    def __init__(self, config: RowsConfig):
        self.config, self.codes = config, MAKERS.get(config.makes, RowCodes)(config)

    def launch(self, given, stream):
        """Launches one CTA for each row of out if each row has one scale. Otherwise launches one CTA for each
        `GROUPS_AT_ONCE` groups of a row. ``given`` has the arguments `ROWS`.
        """
        row_pieces = extents(given.x)[1] // (PIECE_BYTES // 2)
        parts = 1 if self.config.scales == BY_ROW else cute.ceil_div(given.groups, GROUPS_AT_ONCE)
        addresses = ptx.address(given.x), given.end, given.rows, given.given, given.out, given.scales
        strides = given.scale_groups, given.group_stride, given.place_stride
        self.kernel(*addresses, row_pieces, given.out_pieces, given.groups, *strides).launch(
            grid=(given.places, parts, 1), block=(self.config.num_threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        end: Int64,
        rows: Int64,
        given: Int64,
        out: Int64,
        scales: Int64,
        row_pieces: Int32,
        out_pieces: Int32,
        groups: Int32,
        scale_groups: Int32,
        group_stride: Int32,
        place_stride: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        place, part, _ = cute.arch.block_idx()
        _, parts, _ = cute.arch.grid_dim()
        # In this order: what comes next reads weights and routing without waiting for these rows.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        count, row = row_of(end, rows, place)
        if place < count:
            first, lane = thread // GROUP_LANES, thread % GROUP_LANES
            factor, scale = Float32(0.0), Uint32(0)
            if const_expr(self.config.scales == GIVEN):
                factor, scale = self.codes.given_scale(ptx.load_global_words(given, 0, 1, constant=False)[0])
            if const_expr(self.config.scales == BY_ROW):
                factor, scale = self.of_row(x, row, row_pieces, groups, first, lane, thread)
            for begin in cutlass.range(part * GROUPS_AT_ONCE, groups, parts * GROUPS_AT_ONCE, unroll=1):
                group = begin + first
                piece = group * GROUP_LANES + lane
                words = self.codes.inputs.load(x, row, self.source(piece, group, groups, row_pieces), row_pieces)
                if const_expr(self.config.scales == BY_GROUP):
                    factor, scale = self.codes.scales_of(self.codes.inputs.of_group(self.codes.inputs.largest(words)))
                made = self.codes.codes(words, factor, scale, lane)
                if piece < out_pieces:
                    target = Int64(place) * out_pieces + self.codes.target(piece, lane)
                    ptx.store_global(out + target * self.codes.piece_bytes, made)
                if (lane == 0) & (group < scale_groups):
                    ptx.store_global(scales + (Int64(group) * group_stride + Int64(place) * place_stride) * 4, [scale])

    def source(self, piece, group, groups, row_pieces):
        """Returns the index of the piece of x's row that a lane reads. With ``half_last``, the first half of the last
        group has indices beyond the row's end, for which zeros are read.
        """
        if not self.config.half_last:
            return piece
        early = cutlass.select_(piece % GROUP_LANES < HALF_LANES, row_pieces, piece - HALF_LANES)
        return cutlass.select_(group == groups - 1, early, piece)

    def ask(self, x, row, piece, row_pieces):
        """Loads a lane's 8 inputs as `RowLimbs.load` does, without a branch for which the next load would wait."""
        inside = cutlass.select_(piece < row_pieces, Int32(1), Int32(0))
        address = x + (Int64(row) * row_pieces + piece) * PIECE_BYTES
        return numbers.load_global_if(inside, address, 0, 4, constant=False)

    @cute.jit
    def of_row(self, x, row, row_pieces, groups, first, lane, thread):
        """Returns the results of `RowCodes.scales_of` for a whole row. All threads of the CTA get the same values."""
        largest = Int32(0)
        for begin in cutlass.range(0, groups, IN_FLIGHT * GROUPS_AT_ONCE, unroll=1):
            pieces = [(begin + i * GROUPS_AT_ONCE + first) * GROUP_LANES + lane for i in range(IN_FLIGHT)]
            for words in [self.ask(x, row, piece, row_pieces) for piece in pieces]:
                largest = cutlass.max(largest, self.codes.inputs.largest(words))
        room = cutlass.utils.SmemAllocator().allocate(4 * WARPS, byte_alignment=16).toint()
        own = ptx.warp_max(largest)
        if thread % WARP_THREADS == 0:
            ptx.store_shared(room + thread // WARP_THREADS * 4, 0, [own])
        cute.arch.sync_threads()
        words = [word for i in range(0, WARPS, 4) for word in ptx.load_shared_vector(room, 4 * i, 4)]
        return self.codes.scales_of(lanes.in_pairs(cutlass.max, [Int32(word) for word in words]))
