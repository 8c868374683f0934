"""Norms whose rows a quantised layer reads: each result times the layer's `input_scale`, in its packed order.

A launch that scaled rows, or put them in order, would read what this one has in registers, and wait for it. Order and
factors are the weight's, so they are asked for before the wait for the kernel before. A row is put in order in shared
memory, which is good at elements of two bytes here and there.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.norm.config import VECTOR, NormConfig
from cute_kernels.norm.kernel import NormKernel

LOW_HALVES = 0x5410
VECTOR_BYTES = 2 * VECTOR


class InputNormKernel(NormKernel):
    """One compiled variant that is `NormConfig.ordered` or `NormConfig.scaled`."""

    def __init__(self, config: NormConfig):
        super().__init__(config)
        # Where a row is put in order, behind the sums: vectors of 16 bytes.
        self.room_offset = -(-self.shared_bytes // VECTOR_BYTES) * VECTOR_BYTES
        if config.ordered:
            self.shared_bytes = self.room_offset + 2 * config.columns

    def inputs(self, given) -> tuple[Any, ...]:
        return given.order, given.factors

    def ask(self, inputs, places) -> tuple[list[Any], list[Any]]:
        """(order, factors) of the vectors at ``places``: eight words and four each."""
        order, factors = inputs
        orders = [self.load_order(order, place) for place in places] if self.config.ordered else []
        # Not as constant memory: ptxas moves such loads behind the wait.
        return orders, [self.load_row(factors, place) for place in places] if self.config.scaled else []

    def load_order(self, start, column) -> list[Any]:
        at = start + Int64(column) * 4
        return [word for offset in (0, 16) for word in ptx.load_global_words(at, offset, 4, constant=False)]

    def store_results(self, start, element, columns, vectors, n, asked, memory) -> None:
        """Scales the vectors, rounded as a product in their dtype is, and stores them in order."""
        orders, factors = asked
        if factors:
            vectors = [self.times(vector, words) for vector, words in zip(vectors, factors, strict=True)]
        if orders:
            room = memory + self.room_offset
            for column, words in zip(columns, vectors, strict=True):
                ptx.store_shared(room + column * 2, 0, words)
            cute.arch.barrier()
            vectors = [self.gather(room, places) for places in orders]
        self.store(start, element, columns, vectors, n)

    def times(self, words, factors) -> list[Any]:
        """Products of packed pairs, rounded."""
        pairs = zip(self.unpack(words), self.unpack(factors), strict=True)
        return self.pack_all([value * factor for value, factor in pairs])

    def gather(self, room, places) -> list[Any]:
        """A vector of the row's elements at ``places``, packed pairs."""
        halves = [ptx.load_shared_part(room + Int32(place) * 2, 0, 2) for place in places]
        return [ptx.prmt(halves[i], halves[i + 1], Uint32(LOW_HALVES)) for i in range(0, VECTOR, 2)]
