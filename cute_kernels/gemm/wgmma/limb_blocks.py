"""Limbs of the rows of x of a dense product, where a few rows are a tile: group by group, as MMAs read them.

The limbs are those of :mod:`.limb_rows`. All rows' limbs of 128 inputs are a block, whose bytes are those of the
operand in shared memory, and so are its rows' scales, which lie behind all blocks: two bulk copies bring what a k block
wants, and no tensor map has to be there first. An operand is rows of 128 bytes, first the high limbs of all rows, then
the low ones; pieces of 16 bytes are exchanged among eight rows as 128-byte swizzling has them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.types import extents
from cute_kernels.gemm.wgmma.config import LimbBlocksConfig
from cute_kernels.gemm.wgmma.limb_rows import GROUP_BYTES, GROUP_LANES, PIECE_BYTES, RowLimbs
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, ROW_SCALE_BYTES
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP


class LimbBlocksKernel:
    """One compiled variant; :class:`.config.LimbBlocksConfig` says which."""

    def __init__(self, config: LimbBlocksConfig):
        self.config, self.limbs = config, RowLimbs(config.dtype)

    def launch(self, given, stream):
        """Launches over rows, and groups of 128 inputs; ``given`` has the arguments `LIMB_BLOCKS` of
        :mod:`cute_kernels.gemm.arguments`."""
        m, k = extents(given.x)
        groups_at_once = self.config.num_threads // GROUP_LANES
        self.kernel(ptx.address(given.x), given.out, m, k // (PIECE_BYTES // 2), given.groups).launch(
            grid=(given.rows, cute.ceil_div(given.groups, groups_at_once), 1),
            block=(self.config.num_threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Int64, out: Int64, m: Int32, row_pieces: Int32, groups: Int32):
        thread, _, _ = cute.arch.thread_idx()
        row, part, _ = cute.arch.block_idx()
        rows, _, _ = cute.arch.grid_dim()
        group = part * (self.config.num_threads // GROUP_LANES) + thread // GROUP_LANES
        lane = thread % GROUP_LANES
        # In this order: what comes next reads weights without waiting for limbs.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        words = self.limbs.load(x, row, group * GROUP_LANES + lane, cutlass.select_(row < m, row_pieces, Int32(0)))
        scale, limbs = self.limbs.split(words, lane)
        if group < groups:
            ptx.store_global(out + (Int64(group) * (rows * GROUP_BYTES) + self.place(row, rows, lane)), limbs)
            if lane == 0:
                scales = out + Int64(groups) * (rows * GROUP_BYTES)
                ptx.store_global(scales + Int64(group * rows + row) * ROW_SCALE_BYTES, [scale])

    def place(self, row, rows, lane) -> Int32:
        """Where a lane's 16 limbs belong in a block: even lanes have high ones, odd lanes low ones."""
        operand_row, piece = (lane & 1) * rows + row, lane >> 1
        swizzled = piece ^ (row & (WGMMA_N_STEP - 1))
        return operand_row * LIMB_GROUP + swizzled * PIECE_BYTES
