"""A warp of a warpgroup in NumPy: wgmma with A in registers and B through a descriptor, as the PTX manual has them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cute_kernels.device import wgmma
from simulator import Meanings
from tests.attention.warp import COLUMN, ROW, Access, Float32, Int32, Lanes, elements, halves
from tests.linear.warp import LinearWarp

SWIZZLE_BYTES = 1024  # eight rows of 128 bytes, among which pieces of 16 bytes change places


def swizzled(place: np.ndarray) -> np.ndarray:
    """Where 128-byte swizzling puts a byte: address bits 4 to 6 change by bits 7 to 9."""
    return place ^ (place >> 3 & 0x70)


def put_tma_tile(shared: np.ndarray, start: int, tma_tile: np.ndarray) -> None:
    """What TMA does with a TMA tile [rows, 64] of 16-bit elements: row by row, swizzled."""
    assert start % SWIZZLE_BYTES == 0 and tma_tile.shape[1] == 64
    rows, columns = np.indices(tma_tile.shape)
    shared.view(np.uint16)[swizzled(start + 128 * rows + 2 * columns) // 2] = tma_tile


def take_tma_tile(shared: np.ndarray, start: int, num_rows: int) -> np.ndarray:
    """What TMA finds in a TMA tile of 16-bit elements, [num_rows, 64]."""
    assert start % SWIZZLE_BYTES == 0
    rows, columns = np.indices((num_rows, 64))
    return shared.view(np.uint16)[swizzled(start + 128 * rows + 2 * columns) // 2]


E4M3_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


def e4m3_numbers(codes: np.ndarray) -> np.ndarray:
    """What bytes of E4M3 stand for, fp64."""
    return E4M3_NUMBERS[codes]


@functools.cache
def places_of_bytes(columns: int) -> np.ndarray:
    """Where each of 32 bytes of B's columns lies in rows of 128 bytes, [columns, 32, (eight rows, bytes in them)]."""
    n, k = np.indices((columns, 32))
    return np.stack([n // 8, n % 8 * 128 + k], axis=-1)


@functools.cache
def places_of_sums(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of each lane's sums, [count, 32]."""
    i = np.arange(count)[:, None]
    return ROW + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * COLUMN + i % 2


@dataclass
class WarpgroupWarp(LinearWarp):
    """Also stands for `cute_kernels.device.wgmma`; MMAs are done at once, and registers may not be changed early."""

    def meanings(self) -> Meanings:
        # Descriptors are plain integer arithmetic and stay as they are.
        names = ("fence", "commit", "wait", "wait_for", "mma", "multiply_bytes", "multiply_e4m3", "wait_for_dots")
        return replace(super().meanings(), modules={wgmma: {name: getattr(self, name) for name in names}})

    def mul_f16x2(self, a: Lanes, b: Lanes) -> Lanes:
        return self.pack_f16x2(*(elements(a, "f16") * elements(b, "f16")).T)

    def store_matrix_x4(self, address: Lanes, offset: int, words: Sequence[Lanes], *, transpose: bool) -> None:
        places = np.asarray(address, np.int64) + offset
        self.accesses.append(Access("stmatrix", 16, tuple(places.tolist())))
        assert not (places % 16).any(), "misaligned access"
        memory = self.shared_memory.view(np.uint16)
        for number, word in enumerate(words):
            matrix = np.empty((8, 8), np.uint16)
            for half in range(2):
                matrix[ROW, 2 * COLUMN + half] = halves(word)[:, half]
            for row, place in enumerate(places[8 * number : 8 * number + 8]):
                memory[place // 2 : place // 2 + 8] = (matrix.T if transpose else matrix)[row]

    def store_shared_half(self, address: Lanes, offset: int, word: Lanes) -> None:
        places = np.asarray(address, np.int64) + offset
        self.accesses.append(Access("st", 2, tuple(places.tolist())))
        assert not (places % 2).any(), "misaligned access"
        self.shared_memory.view(np.uint16)[places // 2] = halves(word)[:, 0]

    def reciprocal(self, x: Lanes) -> Lanes:
        return Float32(1.0 / np.asarray(x, np.float64))

    def fence(self, registers: Sequence[Lanes]) -> list[Lanes]:
        return list(registers)

    def commit(self) -> None:
        pass

    def wait(self, pending: int) -> None:
        pass

    def wait_for_dots(self, dots: Sequence[Lanes], pending: int) -> list[Lanes]:
        return list(dots)

    def wait_for(self, acc: Sequence[Lanes], pending: int) -> list[Lanes]:
        return list(acc)

    def multiply_bytes(self, acc: Sequence[Lanes], count: int, a: Sequence[Lanes], b_low: Lanes) -> list[Lanes]:
        products = self.byte_products(count, a, b_low, lambda codes: codes.view(np.int8).astype(np.float64))
        return [Int32(value.astype(np.int64) + (np.int64(acc[i]) if acc else 0)) for i, value in enumerate(products)]

    def multiply_e4m3(self, acc: Sequence[Lanes], count: int, a: Sequence[Lanes], b_low: Lanes) -> list[Lanes]:
        products = self.byte_products(count, a, b_low, e4m3_numbers)
        return [Float32(value + (np.float64(acc[i]) if acc else 0)) for i, value in enumerate(products)]

    def byte_products(
        self, count: int, a: Sequence[Lanes], b_low: Lanes, numbers_of: Callable[[np.ndarray], np.ndarray]
    ) -> list[np.ndarray]:
        """Each sum of A B^T of bytes, A [16, 32] of registers, B [2 * count, 32] behind a descriptor. fp64 is exact."""
        left = np.zeros((16, 32), np.uint8)
        for register, word in enumerate(a):
            column = 16 * (register // 2) + 4 * COLUMN
            four = np.ascontiguousarray(np.asarray(word, np.uint32)).view(np.uint8).reshape(32, 4)
            left[(ROW + 8 * (register % 2))[:, None], column[:, None] + np.arange(4)] = four
        start, stride = self.described(int(np.unique(b_low).item()))
        places = places_of_bytes(2 * count)
        right = self.shared_memory[swizzled(start + places[..., 0] * stride + places[..., 1])]
        return list((numbers_of(left) @ numbers_of(right).T)[places_of_sums(count)])

    def mma(self, acc: Sequence[Lanes], a: Sequence[Lanes], b_low: Lanes, *, dtype: str) -> list[Lanes]:
        columns = 2 * len(acc)
        left = np.zeros((16, 16))
        for register, word in enumerate(a):
            for half in range(2):
                place = ROW + 8 * (register % 2), 8 * (register // 2) + 2 * COLUMN + half
                left[place] = elements(word, dtype)[:, half]
        right = self.b_operand(int(np.unique(b_low).item()), columns, dtype)
        total = left @ right.T
        return [
            Float32(np.float64(value) + sums) for value, sums in zip(acc, total[places_of_sums(len(acc))], strict=True)
        ]

    def described(self, low: int) -> tuple[int, int]:
        """Start and stride of eight rows of what a descriptor describes."""
        high = wgmma.DESCRIPTOR_HIGH
        assert high >> 30 == 1, "want 128-byte swizzling"
        return (low & 0x3FFF) * 16, (high & 0x3FFF) * 16

    def b_operand(self, low: int, columns: int, dtype: str) -> np.ndarray:
        """B [columns, 16] behind a descriptor, K-major."""
        start, stride = self.described(low)
        n, k = np.indices((columns, 16))
        bits = self.shared_memory.view(np.uint16)[swizzled(start + n // 8 * stride + n % 8 * 128 + 2 * k) // 2]
        if dtype == "f16":
            return bits.view(np.float16).astype(np.float64)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
