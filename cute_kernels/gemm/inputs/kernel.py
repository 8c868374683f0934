"""Gathers, scales and permutes rows of x on the GPU.

A CTA makes a part of a row. If the order of inputs changes, the CTA first loads all of the row into shared memory,
where scattered reads of two bytes are fast. The order and the factors belong to the weight, and no launch writes them.
So a thread loads the order and the factors of its first vector before it waits for the previous launch (programmatic
dependent launch).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.types import extents
from cute_kernels.gemm.device_operands import row_of
from cute_kernels.gemm.inputs.config import VECTOR
from cute_kernels.gemm.operands.fp8_config import RowsConfig

WORDS = VECTOR // 2  # 32-bit words of a vector
LOW_HALVES = 0x5410


class InputRowsKernel:
    """The kernel that prepares rows of x in their own dtype, in the variant of its :class:`RowsConfig`."""

    def __init__(self, config: RowsConfig):
        self.config = config
        if config.dtype == "bf16":
            self.halves, self.pack = (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float), ptx.pack_bf16x2
        else:
            self.halves, self.pack = (ptx.half2_low_to_float, ptx.half2_high_to_float), ptx.pack_f16x2

    def launch(self, given, stream):
        """Launches ``parts`` CTAs for each row of out; ``given`` has the arguments `INPUT_ROWS` of
        :mod:`cute_kernels.gemm.arguments`."""
        m, k = extents(given.out)
        addresses = given.x, given.end, given.rows, given.order, given.factors
        self.kernel(ptx.address(given.out), k // VECTOR, *addresses, given.stride).launch(
            grid=(m, given.parts, 1), block=(self.config.num_threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self, out: Int64, vectors: Int32, x: Int64, end: Int64, rows: Int64, order: Int64, factors: Int64, stride: Int64
    ):
        thread = cute.arch.thread_idx()[0]
        place, part, _ = cute.arch.block_idx()
        _, parts, _ = cute.arch.grid_dim()
        first, last = part * vectors // parts, (part + 1) * vectors // parts
        cute.arch.griddepcontrol_launch_dependents()
        inputs = cute.make_rmem_tensor(VECTOR, Uint32)
        scales = cute.make_rmem_tensor(VECTOR, Uint32)
        # Not as constant memory: ptxas moves such loads after the wait.
        self.ask(inputs, scales, order, factors, first + thread, vectors, constant=False)
        cute.arch.griddepcontrol_wait()
        count, row = row_of(end, rows, place)
        if place < count:
            row_of_x, row_of_out = x + Int64(row) * (stride * 2), out + Int64(place) * vectors * 16
            self.make(row_of_x, row_of_out, inputs, scales, order, factors, first, last, vectors, thread)

    @cute.jit
    def make(self, row_of_x, row_of_out, inputs, scales, order, factors, first, last, vectors, thread):
        """Makes vectors ``first`` to ``last`` - 1 of a row of out. inputs, scales: the order and the factors of the
        thread's first vector, which `ask` has loaded.
        """
        config, room = self.config, Int32(0)
        if const_expr(config.room):
            room = cutlass.utils.SmemAllocator().allocate(2 * config.room, byte_alignment=16).toint()
            for vector in cutlass.range(thread, vectors, config.num_threads, unroll=4):
                numbers.copy_async(room + vector * 16, row_of_x + Int64(vector) * 16, Int32(16))
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
        for vector in cutlass.range(first + thread, last, config.num_threads, unroll=1):
            words = self.load(room, row_of_x, [inputs[i] for i in range(VECTOR)], vector)
            if const_expr(config.scaled):
                words = self.scale(words, [scales[i] for i in range(VECTOR)])
            self.ask(inputs, scales, order, factors, vector + config.num_threads, vectors)
            ptx.store_global(row_of_out + Int64(vector) * 16, words)

    def ask(self, inputs, scales, order, factors, vector, vectors, *, constant: bool = True) -> None:
        """Loads the order and the factors of a vector's inputs. If ``vector`` is beyond the row's end, it loads those
        of the last vector instead.
        """
        vector = cutlass.min(vector, vectors - 1)
        if self.config.room:
            at = order + Int64(vector) * (4 * VECTOR)
            words = [ptx.load_global_words(at, offset, 4, constant=constant) for offset in (0, 16)]
            for i, word in enumerate(words[0] + words[1]):
                inputs[i] = word
        if self.config.scaled:
            if self.config.room:
                for i in range(VECTOR):
                    scales[i] = numbers.load_global_part(factors + Int64(Int32(inputs[i])) * 2, 0, 2)
            else:
                at = factors + Int64(vector) * 16
                for i, word in enumerate(ptx.load_global_words(at, 0, WORDS, constant=constant)):
                    scales[i] = word

    def load(self, room, row, inputs, vector) -> list[Any]:
        """Loads a vector of the row. Returns words of two elements."""
        if not self.config.room:
            return ptx.load_global_words(row + Int64(vector) * 16, 0, WORDS, constant=False)
        halves = [ptx.load_shared_part(room + Int32(place) * 2, 0, 2) for place in inputs]
        return self.pairs(halves)

    def pairs(self, halves) -> list[Any]:
        """Packs words with one element in the lower half into half as many words of two elements."""
        return [ptx.prmt(halves[i], halves[i + 1], Uint32(LOW_HALVES)) for i in range(0, VECTOR, 2)]

    def scale(self, words, scales) -> list[Any]:
        """Multiplies each element by its factor, and rounds the product to x's dtype."""
        factors = self.pairs(scales) if self.config.room else scales[:WORDS]
        low, high = self.halves
        return [
            self.pack(low(word) * low(factor), high(word) * high(factor))
            for word, factor in zip(words, factors, strict=True)
        ]
