"""The warp in NumPy of the attention tests, with what the weight-only GEMM needs beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.attention import warp
from tests.attention.warp import Access, Float32, Lanes, bf16_bits, bf16_values, from_halves, halves


@dataclass
class LinearWarp(warp.Warp):
    """Its methods have the names and arguments of `cute_kernels.device.ptx` and `cute_kernels.device.numbers`."""

    def add_bf16x2(self, a: Lanes, b: Lanes) -> Lanes:
        return from_halves(bf16_bits(bf16_values(halves(a)) + bf16_values(halves(b))))

    def mul_bf16x2(self, a: Lanes, b: Any) -> Lanes:
        left, right = (bf16_values(halves(np.broadcast_to(np.asarray(x, np.uint32), (32,)))) for x in (a, b))
        return from_halves(bf16_bits(left * right))

    def fma_bf16x2(self, a: Lanes, b: Any, c: Lanes) -> Lanes:
        left, right, addend = (
            bf16_values(halves(np.broadcast_to(np.asarray(x, np.uint32), (32,)))).astype(np.float64) for x in (a, b, c)
        )
        return from_halves(bf16_bits(left * right + addend))

    def fma_f16x2(self, a: Lanes, b: Any, c: Lanes) -> Lanes:
        left, right, addend = (
            halves(np.broadcast_to(np.asarray(x, np.uint32), (32,))).view(np.float16).astype(np.float64)
            for x in (a, b, c)
        )
        return from_halves((left * right + addend).astype(np.float16).view(np.uint16))

    def to_float(self, x: Lanes) -> Lanes:
        return Float32(np.asarray(x, np.int32))

    def load_shared_part(self, address: Lanes, offset: int, num_bytes: int) -> Lanes:
        places = np.asarray(address, np.int64) + offset
        self.accesses.append(Access("ld", num_bytes, tuple(places.tolist())))
        return self._part(self.shared_memory, places, num_bytes)

    def load_global_part(self, address: Lanes, offset: int, num_bytes: int) -> Lanes:
        return self._part(self.global_memory, np.asarray(address, np.int64) + offset, num_bytes)

    def _part(self, memory: np.ndarray, places: np.ndarray, num_bytes: int) -> Lanes:
        assert not (places % num_bytes).any(), "misaligned access"
        assert places.min() >= 0 and places.max() + num_bytes <= memory.size, "access out of bounds"
        parts = memory.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[num_bytes])[places // num_bytes]
        return warp.Uint32(parts)

    def store_shared(self, address: Lanes, offset: int, values: Any) -> None:
        places = np.asarray(address, np.int64) + offset
        width = 4 * len(values)
        self.accesses.append(Access("st", width, tuple(places.tolist())))
        assert not (places % width).any() and places.max() + width <= self.shared_memory.size, "bad access"
        for i, value in enumerate(values):
            self.shared_memory.view(np.float32)[places // 4 + i] = np.asarray(Float32(value))
