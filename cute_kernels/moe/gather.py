"""Rows of x in the order of their places, a CTA for each place: TMA on Hopper brings neighbouring rows only.

It costs a write and a read of the activations, a few percent of the products of many rows, which alone need it. The
table of rows says where each comes from; places that no expert has are left as they are.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.moe.config import GATHER_THREADS, GatherConfig

PIECE_BYTES = 16


class GatherKernel:
    """One compiled variant; :class:`GatherConfig` says which."""

    def __init__(self, config: GatherConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        end: Int64,
        rows: Int64,
        out: Int64,
        places: Int32,
        stream,
    ):
        """Launches over the places.

        x: [.., k] of 16-bit elements, k a multiple of 8, on 16 bytes. Addresses: end, of the int32 that says how many
        places have a row; rows, int32 [places]; out [places, k] as x.
        """
        shape: Any = x.shape
        row_pieces = shape[1] // (PIECE_BYTES // 2)
        self.kernel(ptx.address(x), end, rows, out, row_pieces).launch(
            grid=(places, 1, 1),
            block=(self.config.num_threads, 1, 1),
            use_pdl=self.config.use_pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Int64, end: Int64, rows: Int64, out: Int64, row_pieces: Int32):
        thread, _, _ = cute.arch.thread_idx()
        place, _, _ = cute.arch.block_idx()
        if const_expr(self.config.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        (count,) = ptx.load_global_words(end, 0, 1, constant=False)
        (row,) = ptx.load_global_words(rows + Int64(place) * 4, 0, 1, constant=False)
        if place < Int32(count):
            row_bytes = Int64(row_pieces) * PIECE_BYTES
            source = x + Int64(Int32(row)) * row_bytes
            target = out + Int64(place) * row_bytes
            step = GATHER_THREADS * self.config.batch
            for first in cutlass.range(thread, row_pieces, step, unroll=1):
                self.copy(source + Int64(first) * PIECE_BYTES, target + Int64(first) * PIECE_BYTES, row_pieces - first)

    @cute.jit
    def copy(self, source, target, left):
        """Copies pieces GATHER_THREADS apart, those that are ``left``."""
        words = cute.make_rmem_tensor(4 * self.config.batch, Uint32)
        for i in cutlass.range_constexpr(self.config.batch):
            if i * GATHER_THREADS < left:
                loaded = ptx.load_global_words(source, i * GATHER_THREADS * PIECE_BYTES, 4, constant=False)
                for j in cutlass.range_constexpr(4):
                    words[4 * i + j] = loaded[j]
        for i in cutlass.range_constexpr(self.config.batch):
            if i * GATHER_THREADS < left:
                piece = [words[4 * i + j] for j in range(4)]
                ptx.store_global(target + i * (GATHER_THREADS * PIECE_BYTES), piece)
