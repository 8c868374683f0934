"""Puts one row of x in the order of the weight's packed inputs (act-order), as limbs are made.

A separate launch that does so takes 1.1 us and more: it has to end, and then the product's wait. Here each CTA loads
the row as it lies into shared memory, and its warps gather the inputs of their limbs, two bytes at a time. With one
row, most of a tile's room for limbs is free, so this needs no room of its own. The order is the weight's: it is loaded
before the wait for the launch before (programmatic dependent launch).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, ORDERED_K_BLOCKS
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP

LINE_BYTES = LIMB_GROUP  # of a row's high limbs of a k block, and of its low ones
PLACE_BYTES = 2 * WGMMA_N_STEP * LINE_BYTES  # of a k block's limbs, those of eight rows: first the high ones
FREE = WGMMA_N_STEP // 2 * LINE_BYTES  # from where on they are not those of the first rows, as far as the low ones
PLACE_BITS = (ORDERED_K_BLOCKS * LIMB_GROUP).bit_length() - 1  # log2 of the inputs that lie there, two bytes each
PIECE_BYTES = 16
PIECE_INPUTS = PIECE_BYTES // 2
LOW_HALVES = 0x5410


class RowOrder:
    """How consumer warps permute a row before they make limbs.

    Args:
        warps: how many make limbs.
    """

    def __init__(self, warps: int):
        self.warps = warps

    def place(self, memory, input_number) -> Any:
        """Where an input of the row lies."""
        block = input_number >> PLACE_BITS
        return memory.x_address + FREE + input_number * 2 + block * (PLACE_BYTES - (2 << PLACE_BITS))

    @cute.jit
    def bring(self, x, memory, warp, lane):
        """Loads all of the row, whichever part of K the CTA has; a barrier of all warps has to follow."""
        for first in cutlass.range(warp * WARP_THREADS, x.row_pieces, self.warps * WARP_THREADS, unroll=4):
            piece = first + lane
            inside = cutlass.select_(piece < x.row_pieces, Int32(1), Int32(0))
            target, source = self.place(memory, piece * PIECE_INPUTS), x.address + Int64(piece) * PIECE_BYTES
            numbers.copy_async_if(inside, target, source, Int32(PIECE_BYTES))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    def gather(self, memory, inputs) -> list[Any]:
        """Gathers packed pairs of inputs, whose numbers are words."""
        halves = [ptx.load_shared_part(self.place(memory, Int32(number)), 0, 2) for number in inputs]
        return [ptx.prmt(halves[i], halves[i + 1], Uint32(LOW_HALVES)) for i in range(0, len(halves), 2)]
