"""Gathers rows of x in the order of their places, as TMA on Hopper loads neighbouring rows only.

It costs a write and a read of the activations, a few percent of the products of many rows, which alone need it. The
table of rows says where each comes from; places that no expert has are left as they are.

Each row of x is copied to several places, in an order that the experts decide. If whole rows were copied, and x were
larger than L2, all of x would come from memory for each expert that a token has. So launches go over all places with a
slice of the columns before the next slice: a slice of x, of 4 MB with 8192 tokens, stays in L2 meanwhile.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.types import extents
from cute_kernels.gemm.experts.config import GATHER_THREADS, GatherConfig

PIECE_BYTES = 16
ROW_THREADS = 32  # that copy neighbouring pieces of a row: a slice of the columns
BATCH = 4  # rows of which a thread asks for its piece before it stores the first
THREAD_ROWS = GATHER_THREADS // ROW_THREADS  # of a CTA that are copied at the same time


class GatherKernel:
    """One compiled variant; :class:`GatherConfig` says which."""

    def __init__(self, config: GatherConfig):
        self.config = config

    def launch(self, given, stream):
        """Launches over blocks of places, then slices of columns; ``given`` has the arguments `GATHER` of
        :mod:`.arguments`."""
        config = self.config
        row_pieces = extents(given.x)[1] // (PIECE_BYTES // 2)
        blocks, slices = cute.ceil_div(given.places, THREAD_ROWS * BATCH), cute.ceil_div(row_pieces, ROW_THREADS)
        self.kernel(ptx.address(given.x), given.end, given.rows, given.out, row_pieces, given.places).launch(
            grid=(blocks, slices, 1),
            block=(config.num_threads, 1, 1),
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: Int64, end: Int64, rows: Int64, out: Int64, row_pieces: Int32, places: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, piece_block, _ = cute.arch.block_idx()
        piece = piece_block * ROW_THREADS + thread % ROW_THREADS
        place = block * (THREAD_ROWS * BATCH) + thread // ROW_THREADS
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        (count,) = ptx.load_global_words(end, 0, 1, constant=False)
        numbers = self.load_numbers(rows, place, places - 1)
        if piece < row_pieces:
            self.copy(x, out, place, piece, row_pieces, Int32(count), numbers)

    def load_numbers(self, rows, place, last) -> list[Any]:
        """Loads numbers of a thread's rows, before it is known how many places have one; none after the last."""
        places = [cutlass.min(place + i * THREAD_ROWS, last) for i in range(BATCH)]
        return [ptx.load_global_words(rows + Int64(one) * 4, 0, 1, constant=False)[0] for one in places]

    @cute.jit
    def copy(self, x, out, place, piece, row_pieces, count, numbers):
        """Copies a piece of each of a thread's rows, those whose places are below ``count``."""
        words = cute.make_rmem_tensor(4 * BATCH, Uint32)
        for i in cutlass.range_constexpr(BATCH):
            if place + i * THREAD_ROWS < count:
                source = x + (Int64(Int32(numbers[i])) * row_pieces + piece) * PIECE_BYTES
                loaded = ptx.load_global_words(source, 0, 4, constant=False)
                for j in cutlass.range_constexpr(4):
                    words[4 * i + j] = loaded[j]
        for i in cutlass.range_constexpr(BATCH):
            if place + i * THREAD_ROWS < count:
                target = out + (Int64(place + i * THREAD_ROWS) * row_pieces + piece) * PIECE_BYTES
                ptx.store_global(target, [words[4 * i + j] for j in range(4)])
