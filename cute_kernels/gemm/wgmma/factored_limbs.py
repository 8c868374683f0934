"""Limbs of rows of x that meet factors, or are in another order, on their way: as `.limb_blocks`.

A launch that makes limbs has each input in a register once, so it costs no launch of its own. Rounded is where a launch
before would round. Order and factors are the weight's: they are asked for before the wait for the launch before
(programmatic dependent launch), not as constant memory, since ptxas moves such loads behind the wait.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.types import extents
from cute_kernels.gemm.wgmma.factored_limbs_config import FactoredLimbsConfig
from cute_kernels.gemm.wgmma.limb_blocks import LimbBlocksKernel
from cute_kernels.gemm.wgmma.limb_rows import GROUP_BYTES, GROUP_LANES, PIECE_BYTES
from cute_kernels.gemm.wgmma.mainloops import ORDERED, ROW_SCALE_BYTES

PIECE_INPUTS = PIECE_BYTES // 2
LOW_HALVES = 0x5410


class FactoredLimbsKernel:
    """One compiled variant; :class:`FactoredLimbsConfig` says which."""

    def __init__(self, config: FactoredLimbsConfig):
        self.config, self.blocks = config, LimbBlocksKernel(config.blocks)
        self.limbs = self.blocks.limbs
        self.pack = ptx.pack_bf16x2 if config.dtype == "bf16" else ptx.pack_f16x2

    def launch(self, given, stream):
        """As of `LimbBlocksKernel`; ``given`` has the arguments `FACTORED_LIMB_BLOCKS` of `.factored_limbs_config`."""
        m, k = extents(given.x)
        groups_at_once = self.config.num_threads // GROUP_LANES
        addresses = ptx.address(given.x), given.out, given.factors
        self.kernel(*addresses, m, k // PIECE_INPUTS, given.groups).launch(
            grid=(given.rows, cute.ceil_div(given.groups, groups_at_once), 1),
            block=(self.config.num_threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Int64, out: Int64, factors: Int64, m: Int32, row_pieces: Int32, groups: Int32):
        thread, _, _ = cute.arch.thread_idx()
        row, part, _ = cute.arch.block_idx()
        rows, _, _ = cute.arch.grid_dim()
        group = part * (self.config.num_threads // GROUP_LANES) + thread // GROUP_LANES
        lane = thread % GROUP_LANES
        piece = group * GROUP_LANES + lane
        inside = (row < m) & (piece < row_pieces)
        piece = cutlass.min(piece, row_pieces - 1)
        own = self.ask(factors, piece)
        # In this order: what comes next reads weights without waiting for limbs.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        found = self.inputs(x + Int64(cutlass.min(row, m - 1)) * row_pieces * PIECE_BYTES, piece, own)
        words = [cutlass.select_(inside, word, Uint32(0)) for word in found]
        scale, limbs = self.limbs.split(words, lane)
        if group < groups:
            ptx.store_global(out + (Int64(group) * (rows * GROUP_BYTES) + self.blocks.place(row, rows, lane)), limbs)
            if lane == 0:
                scales = out + Int64(groups) * (rows * GROUP_BYTES)
                ptx.store_global(scales + Int64(group * rows + row) * ROW_SCALE_BYTES, [scale])

    def ask(self, factors, piece) -> list[Any]:
        """A lane's factors, packed pairs, or the numbers of its inputs."""
        count = 2 if self.config.kind == ORDERED else 1
        at = factors + Int64(piece) * (count * PIECE_BYTES)
        found = [ptx.load_global_words(at, i * PIECE_BYTES, 4, constant=False) for i in range(count)]
        return [word for words in found for word in words]

    def inputs(self, row, piece, own) -> list[Any]:
        """A lane's eight inputs of a row, packed pairs."""
        if self.config.kind == ORDERED:
            return self.gather(row, own)
        loaded = ptx.load_global_words(row + Int64(piece) * PIECE_BYTES, 0, 4, constant=False)
        return [self.scale(word, factor) for word, factor in zip(loaded, own, strict=True)]

    def gather(self, row, order) -> list[Any]:
        """Inputs of a row by their numbers, packed pairs."""
        pairs = [ptx.load_global_words(row + Int64(Int32(one >> 1)) * 4, 0, 1, constant=False)[0] for one in order]
        halves = [pair >> ((one & 1) * 16) for pair, one in zip(pairs, order, strict=True)]
        return [ptx.prmt(halves[i], halves[i + 1], Uint32(LOW_HALVES)) for i in range(0, PIECE_INPUTS, 2)]

    def scale(self, word, factor):
        """A pair of inputs times their factors, rounded."""
        pairs = zip(self.limbs.to_floats(word), self.limbs.to_floats(factor), strict=True)
        return self.pack(*(value * own for value, own in pairs))
