"""Scales of groups of less than a k block: those of a thread's two rows in one word, four groups in one load.

A thread wants the scales of rows g and g + 8 of each group of a k block: of groups of 32, eight of a tile. Loaded one
at a time, each is a load, a PRMT that doubles it for packed products, and two products, of what codes are scaled by and
of what half their range comes to. That is 48 instructions a k block and tile where groups of 128 have 12.

A group's scales of a tile lie side by side, those of eight rows in 16 bytes: a row of a matrix of ldmatrix.
Transposed, lane 4 g + t is given column g of the rows 2 t and 2 t + 1. Where these are the scales of a warp's first
and of its second eight rows, for every t, that is both of the lane's scales, and a load has four such matrices. One
packed product scales both, and packed arithmetic reads either half of a register twice: 10 instructions for those 48.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_kernels.device import ptx
from cute_kernels.formats.weights.decoder import CodeDecoder
from cute_kernels.formats.weights.integer_decode import SubnormalDecoder
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.gemm.wgmma.kernel import WgmmaKernel
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.reading import Lane, StageReader
from cute_kernels.gemm.wgmma.register_mainloop import RegisterMainloop
from cute_kernels.gemm.wgmma.scale_pairs_compile import SCALE_BYTES
from layouts.weights.hopper import TILE_N

MATRIX_ROWS, MATRIX_ROW_BYTES = 8, 16
MATRICES = 4  # of a load
WARP_SCALES_BYTES = 2 * MATRIX_ROW_BYTES  # of a warp's 16 rows of a tile
LOW_HALF, HIGH_HALF = 0xFFFF, 0xFFFF0000


@dsl_user_op
def low_twice(pair: Uint32, *, loc=None, ip=None) -> Uint32:
    """The low half of a register in both halves: no instruction where packed arithmetic reads it."""
    asm = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; mov.b32 $0, {low, low}; }"
    return _twice(pair, asm, loc=loc, ip=ip)


@dsl_user_op
def high_twice(pair: Uint32, *, loc=None, ip=None) -> Uint32:
    """The same of the high half."""
    asm = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; mov.b32 $0, {high, high}; }"
    return _twice(pair, asm, loc=loc, ip=ip)


def _twice(pair, asm: str, *, loc, ip) -> Uint32:
    u32 = Uint32.mlir_type
    value = Uint32(pair).ir_value(loc=loc, ip=ip)
    return Uint32(llvm.inline_asm(u32, [value], asm, "=r,r", has_side_effects=False, loc=loc, ip=ip))


class ScalePairs(StageReader):
    """A `StageReader` of scales of 16 bits that come in pairs."""

    def load_groups(self, memory, stage, place: Lane, tile: int) -> list[Any]:
        """As `StageReader.load_groups`."""
        config = self.config
        if type(self.decoder).scale_word is not CodeDecoder.scale_word:
            return super().load_groups(memory, stage, place, tile)  # stored scales are no numbers of the dtype
        first = (place.row // TILE_N + tile) * config.k_block_groups
        pairs = self.load_pairs(memory.scales + stage * config.scale_stage_bytes, first, place)
        return [
            self.numbers_of(pair, self.load_points(memory, stage, first + i, place)) for i, pair in enumerate(pairs)
        ]

    def load_pairs(self, scales, first, place: Lane) -> list[Any]:
        """[group of the k block] the scales of the thread's rows, of a tile whose first group is the stage's
        ``first``."""
        groups = self.config.k_block_groups
        width = min(groups, MATRICES)
        warp_row = place.warp % WARPGROUP_WARPS * WARP_SCALES_BYTES
        matrix = place.lane // MATRIX_ROWS % width
        address = scales + (first + matrix) * (TILE_N * SCALE_BYTES) + warp_row + place.lane % 2 * MATRIX_ROW_BYTES
        loads = range(0, groups, width)
        found = [ptx.load_matrix_x4(Int32(address), i * TILE_N * SCALE_BYTES, transpose=True)[:width] for i in loads]
        return [pair for load in found for pair in load]

    def load_points(self, memory, stage, group, place: Lane) -> list[Any]:
        """The zero points of the thread's rows, of a stage's ``group``."""
        if not self.config.format.has_zeros:
            return [self.decoder.symmetric_zero] * 2
        at = memory.zeros + stage * self.config.zero_stage_bytes + group * TILE_N + place.row % TILE_N
        return [ptx.load_shared_part(at, 8 * half, 1) for half in range(2)]

    def numbers_of(self, pair, points) -> tuple[list[Any], Any]:
        """What `load_groups` has of a group: its rows' scales, and what the decoder wants to know of them."""
        rows = [low_twice(pair), high_twice(pair)]
        if not isinstance(self.decoder, SubnormalDecoder):
            return rows, self.decoder.row_numbers(rows, points)
        low, high = self.decoder.row_numbers(None, points)
        factor = ptx.mul_bf16x2(pair, low[0] & Uint32(LOW_HALF) | high[0] & Uint32(HIGH_HALF))
        factors = low_twice(factor), high_twice(factor)
        if self.config.format.has_zeros:  # which come off before codes are scaled
            return rows, [(factors[0], low[1]), (factors[1], high[1])]
        offset = ptx.mul_bf16x2(pair, low[1] & Uint32(LOW_HALF) | high[1] & Uint32(HIGH_HALF))
        return rows, [(factors[0], low_twice(offset)), (factors[1], high_twice(offset))]


class ScalePairsKernel:
    """One compiled variant of a dense product whose scales come in pairs."""

    def __init__(self, config: WgmmaConfig[RegisterWgmma]):
        self.product = WgmmaKernel(config)
        mainloop = self.product.consumers.mainloop
        assert isinstance(mainloop, RegisterMainloop)
        mainloop.stages = ScalePairs(config)

    def launch(self, given, stream):
        """As `WgmmaKernel.launch`."""
        self.product.launch(given, stream)
