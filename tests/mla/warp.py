"""The warp in NumPy of the attention tests, with the packed bf16 arithmetic and the copies of MLA's producer warps."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.attention import warp
from tests.attention.warp import Access, Float32, Lanes, Uint32, bf16_bits, bf16_values, from_halves, halves


def _values(word: Any) -> np.ndarray:
    return bf16_values(halves(np.broadcast_to(np.asarray(word, np.uint32), (32,)))).astype(np.float64)


def _rounded(values: np.ndarray) -> Lanes:
    """fp64 to nearest-even bf16, in one rounding: fp32 keeps what decides a tie, by rounding to odd."""
    near = values.astype(np.float32)
    inexact = near.astype(np.float64) != values
    away = np.abs(near.astype(np.float64)) > np.abs(values)
    truncated = np.where(away, np.nextafter(near, np.float32(0)), near)
    odd = (truncated.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)
    return from_halves(bf16_bits(odd))


@dataclass
class MlaWarp(warp.Warp):
    """Its methods have the names and arguments of `cute_kernels.device.ptx` and `cute_kernels.device.numbers`.

    reads: (first byte, bytes) of every access to global memory that was made.
    sent: bytes of asynchronous stores and copies, by the address of the barrier that counts them.
    """

    reads: list[tuple[int, int]] = field(default_factory=list)
    sent: Counter = field(default_factory=Counter)

    def install(self, monkeypatch, *modules) -> None:
        super().install(monkeypatch, *modules)
        for module in modules:
            if hasattr(module, "numbers"):
                monkeypatch.setattr(module, "numbers", self)
            if hasattr(module, "cutlass"):
                monkeypatch.setattr(module.cutlass, "range_constexpr", range, raising=False)
            if hasattr(module, "cute"):
                monkeypatch.setattr(module.cute.arch, "vote_any_sync", np.any, raising=False)
            if hasattr(module, "DequantizeLoad"):
                unwrapped = inspect.unwrap(module.DequantizeLoad.raise_large)
                monkeypatch.setattr(module.DequantizeLoad, "raise_large", unwrapped)

    def multiply(self, a: Any, b: Any) -> Lanes:
        return Float32(np.float64(a) * np.float64(b))

    def multiply_bf16x2(self, a: Lanes, b: Any) -> Lanes:
        return _rounded(_values(a) * _values(b))

    def fma_bf16x2(self, a: Lanes, b: Any, c: Lanes) -> Lanes:
        return _rounded(_values(a) * _values(b) + _values(c))

    def load_global_if(
        self, condition: Any, address: Lanes, offset: int, num_words: int = 4, *, constant: bool = True
    ) -> list[Lanes]:
        condition = np.broadcast_to(condition, (32,))
        places = np.where(condition, np.asarray(address, np.int64) + offset, 0)
        self.reads += [(int(place), 4 * num_words) for place, wanted in zip(places, condition, strict=True) if wanted]
        words = self._words(self.global_memory, places, num_words)
        return [np.where(condition, word, np.uint32(0)).view(type(word)) for word in words]

    def store_matrix_x4(self, address: Lanes, offset: int, words: list[Lanes], *, transpose: bool) -> None:
        assert not transpose
        places = np.asarray(address, np.int64) + offset
        self.accesses.append(Access("stmatrix", 16, tuple(places.tolist())))
        for i, word in enumerate(words):
            rows = np.asarray(word).astype(np.uint32).reshape(8, 4)
            for row in range(8):
                self.shared_memory.view(np.uint32)[places[8 * i + row] // 4 :][:4] = rows[row]

    def copy_async(self, destination: Lanes, source: Lanes, num_bytes: Lanes) -> None:
        targets, sources = np.asarray(destination, np.int64), np.asarray(source, np.int64)
        self.accesses.append(Access("st", 16, tuple(targets.tolist())))
        for target, place, count in zip(targets, sources, num_bytes, strict=True):
            assert target % 16 == 0 and count in (0, 16)
            self.shared_memory[target : target + 16] = 0
            if count:
                assert place % 16 == 0 and 0 <= place <= self.global_memory.size - 16
                self.reads.append((int(place), 16))
                self.shared_memory[target : target + 16] = self.global_memory[place : place + 16]

    def store_async(self, address: Lanes, values: list[Lanes], barrier: int) -> None:
        self.store_shared(address, 0, values)
        self.sent[barrier] += 32 * 4 * len(values)

    def copy_to_cluster(self, target: int, source: int, num_bytes: int, barrier: int) -> None:
        assert target % 16 == 0 and source % 16 == 0 and num_bytes % 16 == 0
        self.shared_memory[target : target + num_bytes] = self.shared_memory[source : source + num_bytes]
        self.sent[barrier] += num_bytes

    def multiply_high_u32(self, a: Any, b: Any) -> Lanes:
        return Uint32(np.asarray(a, np.uint64) * np.asarray(b, np.uint64) >> np.uint64(32))

    def active_lanes(self) -> int:
        return 2**32 - 1
