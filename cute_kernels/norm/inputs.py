"""`LayerInputs`, which scales and permutes the inputs of a quantised layer in the launch of the norm before the layer.

A separate launch would have to wait for the norm and load the norm's results again. The order and the factors do not
depend on the previous kernel, so they are loaded before the wait for it. A row is permuted in shared memory, where
access to scattered elements of two bytes is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.norm.config import VECTOR, NormConfig

LOW_HALVES = 0x5410
VECTOR_BYTES = 2 * VECTOR


class LayerInputs:
    """Makes a quantised layer's inputs from a norm's results, inside `.kernel.NormKernel`, for a configuration with
    `NormConfig.inputs`.

    Args:
        sums_bytes: bytes of shared memory that the kernel uses for sums.
        unpack, pack: functions that convert a packed pair to fp32 numbers, and round fp32 numbers to a packed pair.
    """

    def __init__(
        self,
        config: NormConfig,
        sums_bytes: int,
        unpack: Callable[[Sequence[Uint32]], list[Any]],
        pack: Callable[[Sequence[Any]], list[Any]],
    ):
        self.config, self.unpack, self.pack = config, unpack, pack
        self.room_offset = -(-sums_bytes // VECTOR_BYTES) * VECTOR_BYTES  # a row's vectors, after the sums

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a CTA needs, including the kernel's sums."""
        return self.room_offset + (2 * self.config.columns if self.config.ordered else 0)

    def ask(self, order, factors, places) -> tuple[list[Any], list[Any]]:
        """Starts loading order (eight words) and factors (four words) for each vector at ``places``. Returns (orders,
        factors), each with one list of words for each vector. Without an order in the configuration, the list of orders
        is empty; without factors, that of factors.
        """
        # Not as constant memory: ptxas moves such loads after the wait.
        orders = [self.load(order + Int64(place) * 4, (0, 16)) for place in places] if self.config.ordered else []
        return orders, [self.load(factors + Int64(place) * 2, (0,)) for place in places] if self.config.scaled else []

    def load(self, start, offsets) -> list[Any]:
        return [word for at in offsets for word in ptx.load_global_words(start, at, 4, constant=False)]

    def make(self, vectors, columns, asked, memory) -> list[Any]:
        """Scales and permutes a row. Returns the result's vectors at ``columns``. Products are rounded to the row's
        dtype.

        Args:
            vectors: the norm's results at ``columns``.
            asked: the result of `ask`.
            memory: shared memory of `shared_bytes`.
        """
        orders, factors = asked
        if factors:
            vectors = [self.times(vector, words) for vector, words in zip(vectors, factors, strict=True)]
        if not orders:
            return vectors
        room = memory + self.room_offset
        for column, words in zip(columns, vectors, strict=True):
            ptx.store_shared(room + column * 2, 0, words)
        cute.arch.barrier()
        return [self.gather(room, places) for places in orders]

    def times(self, words, factors) -> list[Any]:
        """Returns the products of packed pairs, rounded to their dtype."""
        pairs = zip(self.unpack(words), self.unpack(factors), strict=True)
        return self.pack([value * factor for value, factor in pairs])

    def gather(self, room, places) -> list[Any]:
        """Loads the row's elements with the indices ``places`` from shared memory. Returns them as a vector of packed
        pairs.
        """
        halves = [ptx.load_shared_part(room + Int32(place) * 2, 0, 2) for place in places]
        return [ptx.prmt(halves[i], halves[i + 1], Uint32(LOW_HALVES)) for i in range(0, VECTOR, 2)]
