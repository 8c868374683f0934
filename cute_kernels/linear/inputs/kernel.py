"""Rows of x, scaled and in another order, on the GPU.

A CTA makes a part of some rows. Where the order changes, all of a row comes into shared memory first, for inputs of two
bytes, here and there, are what shared memory is good at: of many rows an input of four lies side by side, one access
for all of them. Order and factors are the weight's: a thread asks for its first ones before it waits for the launch
before (programmatic dependent launch). So are codes: what the product behind reads first is asked into L2 as well, so
that the memory is not idle while rows are prepared.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.types import extents
from cute_kernels.linear.inputs.config import VECTOR, InputRowsConfig

WORDS = VECTOR // 2  # of a vector
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632
CHUNK_BYTES = 16  # of shared memory: two inputs of four rows


class InputRowsKernel:
    """One compiled variant; :class:`InputRowsConfig` says which."""

    def __init__(self, config: InputRowsConfig):
        self.config = config
        if config.dtype == "bf16":
            self.halves, self.pack = (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float), ptx.pack_bf16x2
        else:
            self.halves, self.pack = (ptx.half2_low_to_float, ptx.half2_high_to_float), ptx.pack_f16x2

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        x: Int64,
        order: Int64,
        factors: Int64,
        stride: Int64,
        codes: Int64,
        pitch: Int64,
        parts: Int32,
        runs: Int32,
        run_bytes: Int32,
        stream,
    ):
        """Launches ``parts`` CTAs for each group of rows of out [m, k], k a multiple of 8.

        Addresses on 16 bytes: x, rows of k elements, ``stride`` elements apart, a multiple of 8; order int32 [k], which
        input of x each is; factors [k] of x's dtype, in x's order. Those that the configuration has no use for are not
        read. Of ``codes`` ``runs`` runs of ``run_bytes``, ``pitch`` bytes apart, all multiples of 16, are asked into
        L2.
        """
        shape = extents(out)
        groups = cute.ceil_div(shape[0], self.config.rows)
        ahead = (codes, pitch, runs, run_bytes)
        self.kernel(ptx.address(out), shape[0], shape[1] // VECTOR, x, order, factors, stride, ahead).launch(
            grid=(groups, parts, 1), block=(self.config.num_threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self, out: Int64, m: Int32, vectors: Int32, x: Int64, order: Int64, factors: Int64, stride: Int64, ahead
    ):
        config = self.config
        thread = cute.arch.thread_idx()[0]
        group, part, _ = cute.arch.block_idx()
        groups, parts, _ = cute.arch.grid_dim()
        begin, end = part * vectors // parts, (part + 1) * vectors // parts
        cute.arch.griddepcontrol_launch_dependents()
        inputs = cute.make_rmem_tensor(VECTOR, Uint32)
        scales = cute.make_rmem_tensor(VECTOR, Uint32)
        self.ask(inputs, scales, order, factors, begin + thread, vectors)
        codes, pitch, runs, run_bytes = ahead
        for run in cutlass.range(
            part * groups + group + thread * (groups * parts), runs, groups * parts * config.num_threads, unroll=1
        ):
            numbers.prefetch_bulk_if(Int32(1), codes + Int64(run) * pitch, run_bytes)
        cute.arch.griddepcontrol_wait()
        first = group * config.rows
        rows = x + Int64(first) * (stride * 2)
        room = Int32(0)
        if const_expr(config.room):
            room = (
                cutlass.utils.SmemAllocator()
                .allocate(2 * config.rows * config.room, byte_alignment=CHUNK_BYTES)
                .toint()
            )
            self.bring(room, rows, stride, m - first, vectors, thread)
            cute.arch.sync_threads()
        for vector in cutlass.range(begin + thread, end, config.num_threads, unroll=1):
            made = self.load(room, rows, stride, m - first, [inputs[i] for i in range(VECTOR)], vector)
            if const_expr(config.scaled):
                factor_words = [scales[i] for i in range(VECTOR)]
                made = [self.scale(words, factor_words) for words in made]
            self.ask(inputs, scales, order, factors, vector + config.num_threads, vectors)
            for i in cutlass.range_constexpr(config.rows):
                if first + i < m:
                    ptx.store_global(out + (Int64(first + i) * vectors + vector) * 16, made[i])

    def ask(self, inputs, scales, order, factors, vector, vectors) -> None:
        """Loads a vector's order and factors; of one behind the row's end, the last one's."""
        vector = cutlass.min(vector, vectors - 1)
        if self.config.room:
            at = order + Int64(vector) * (4 * VECTOR)
            for i, word in enumerate(ptx.load_global_words(at, 0, 4) + ptx.load_global_words(at, 16, 4)):
                inputs[i] = word
        if self.config.scaled:
            if self.config.room:
                for i in range(VECTOR):
                    scales[i] = numbers.load_global_part(factors + Int64(Int32(inputs[i])) * 2, 0, 2)
            else:
                for i, word in enumerate(ptx.load_global_words(factors + Int64(vector) * 16, 0, WORDS)):
                    scales[i] = word

    @cute.jit
    def bring(self, room, rows, stride, count, vectors, thread):
        """Brings rows, of which there are ``count``, into shared memory; a thread's own are there when it ends."""
        config = self.config
        if const_expr(config.rows == 1):
            for vector in cutlass.range(thread, vectors, config.num_threads, unroll=4):
                numbers.copy_async(room + vector * 16, rows + Int64(vector) * 16, Int32(16))
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
        else:
            for vector in cutlass.range(thread, vectors, config.num_threads, unroll=2):
                made = self.vectors(rows, stride, count, vector)
                for pair in cutlass.range_constexpr(WORDS):
                    # Two inputs, [input][row].
                    words = [
                        ptx.prmt(made[row][pair], made[row + 1][pair], Uint32(selector))
                        for selector in (LOW_HALVES, HIGH_HALVES)
                        for row in range(0, config.rows, 2)
                    ]
                    ptx.store_shared(room + self.place(vector * VECTOR + 2 * pair), 0, words)

    def vectors(self, rows, stride, count, vector) -> list[Any]:
        """A vector of each row; zeros of those there are not."""
        return [
            numbers.load_global_if(
                cutlass.select_(count > i, Int32(1), Int32(0)),
                rows + Int64(i) * (stride * 2) + Int64(vector) * 16,
                0,
                WORDS,
                constant=False,
            )
            for i in range(self.config.rows)
        ]

    def place(self, place) -> Any:
        """Where an input of four rows lies. Pairs of inputs are exchanged so that eight threads that have 64 bytes each
        are at different banks at a time."""
        pair = place >> 1
        return (pair ^ ((pair >> 3) & 3)) * CHUNK_BYTES + (place & 1) * (CHUNK_BYTES // 2)

    def load(self, room, rows, stride, count, inputs, vector) -> list[list[Any]]:
        """A vector of each row, packed pairs."""
        if not self.config.room:
            return self.vectors(rows, stride, count, vector)
        if self.config.rows == 1:
            return [self.pairs([ptx.load_shared_part(room + Int32(place) * 2, 0, 2) for place in inputs])]
        found = [ptx.load_shared_vector(room + self.place(Int32(place)), 0, 2) for place in inputs]
        return [
            self.pairs([one[row // 2] for one in found], HIGH_HALVES if row % 2 else LOW_HALVES)
            for row in range(self.config.rows)
        ]

    def pairs(self, halves, selector: int = LOW_HALVES) -> list[Any]:
        """Packed pairs of words that have an element in their lower halves, or the upper ones."""
        return [ptx.prmt(halves[i], halves[i + 1], Uint32(selector)) for i in range(0, VECTOR, 2)]

    def scale(self, words, scales) -> list[Any]:
        """Each element times its factor, rounded: what a product in x's dtype gives."""
        factors = self.pairs(scales) if self.config.room else scales[:WORDS]
        low, high = self.halves
        return [
            self.pack(low(word) * low(factor), high(word) * high(factor))
            for word, factor in zip(words, factors, strict=True)
        ]
