"""A warp in NumPy: runs the readers of decode attention on the CPU, instruction by instruction.

The readers are plain Python over DSL scalars and `device.ptx`. Here a scalar is an array of 32 lanes, and each
instruction does what the PTX manual says, in exact arithmetic where the hardware is exact. Every access to shared
memory is kept, so that its bank conflicts can be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.device import lanes

LANES = np.arange(32, dtype=np.int32)
Lanes = Any  # what instructions take and give: a `_Lanes`, which type checkers lose sight of in arithmetic

ROW, COLUMN = LANES // 4, LANES % 4  # g and t: a lane's place in MMA fragments


E4M3_AS_F16 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().numpy().view(np.uint16)


class _Lanes(np.ndarray):
    """One register: a value per lane."""

    def bitcast(self, scalar: Scalar) -> Lanes:
        return self.view(scalar.dtype)

    def to(self, scalar: Scalar) -> Lanes:
        return scalar(self)


@dataclass(frozen=True)
class Scalar:
    """Stands for a DSL scalar type: a cast to 32 lanes of it."""

    dtype: Any

    def __call__(self, value: Any) -> Lanes:
        return np.broadcast_to(np.asarray(value), (32,)).astype(self.dtype).view(_Lanes)


Int32, Int64, Uint32, Float32 = (Scalar(dtype) for dtype in (np.int32, np.int64, np.uint32, np.float32))


class Registers(list):
    """A register tensor: `cute.make_rmem_tensor(n, dtype)`."""

    def __init__(self, count: int, dtype: Scalar):
        super().__init__(dtype(0) for _ in range(count))
        self.dtype = dtype

    def fill(self, value: float) -> None:
        self[:] = [self.dtype(value) for _ in self]


@dataclass(frozen=True)
class Access:
    """One access to shared memory: kind and width as `layouts.banks` has them, byte address per lane."""

    kind: str
    width: int
    addresses: tuple[int, ...]


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to nearest-even bf16, as uint16 (no NaN)."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def halves(word: np.ndarray) -> np.ndarray:
    """The two 16-bit halves of each lane's word, low first: uint16 [32, 2]."""
    return np.ascontiguousarray(np.asarray(word, np.uint32)).view(np.uint16).reshape(32, 2)


def from_halves(pair: np.ndarray) -> Lanes:
    return np.ascontiguousarray(pair, dtype=np.uint16).view(np.uint32).reshape(32).view(_Lanes)


def elements(word: np.ndarray, dtype: str) -> np.ndarray:
    """A lane's packed pair as fp64 [32, 2]; ``dtype`` is "f16" or "bf16"."""
    pair = halves(word)
    values = pair.view(np.float16) if dtype == "f16" else bf16_values(pair)
    return values.astype(np.float64)


@dataclass
class Warp:
    """Memories and instructions; its methods have the names and arguments of `cute_kernels.device.ptx`.

    Args:
        shared_memory, global_memory: uint8 arrays, addressed from 0.
    """

    shared_memory: np.ndarray
    global_memory: np.ndarray
    accesses: list[Access] = field(default_factory=list)
    LOG2_E: float = 1.4426950408889634
    LN_2: float = 0.6931471805599453

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Puts this warp in place of the GPU behind the readers' modules."""
        arch = SimpleNamespace(shuffle_sync=self.shuffle, shuffle_sync_bfly=self.shuffle_butterfly)
        replaced = {
            "ptx": self,
            "cutlass": SimpleNamespace(min=np.minimum, max=np.maximum, select_=select),
            "cute": SimpleNamespace(make_rmem_tensor=Registers, arch=arch),
            "Int32": Int32,
            "Int64": Int64,
            "Uint32": Uint32,
            "Float32": Float32,
        }
        for module in (lanes, *modules):
            for name in replaced.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, replaced[name])

    # -- memory ------------------------------------------------------------------------------------------------------

    def load_shared(self, address: Lanes, offset: int) -> Lanes:
        return self.load_shared_vector(address, offset, 1)[0]

    def load_shared_vector(self, address: Lanes, offset: int, num_words: int) -> list[Lanes]:
        places = np.asarray(address, np.int64) + offset
        self.accesses.append(Access("ld", 4 * num_words, tuple(places.tolist())))
        return self._words(self.shared_memory, places, num_words)

    def store_shared(self, address: Lanes, offset: int, values: Sequence[Lanes]) -> None:
        places = np.asarray(address, np.int64) + offset
        self.accesses.append(Access("st", 4 * len(values), tuple(places.tolist())))
        assert not (places % (4 * len(values))).any(), "misaligned access"
        for i, value in enumerate(values):
            self.shared_memory.view(np.uint32)[places // 4 + i] = np.asarray(value).view(np.uint32)

    def load_global_words(self, address: Lanes, offset: int, num_words: int, *, constant: bool = True) -> list[Lanes]:
        return self._words(self.global_memory, np.asarray(address, np.int64) + offset, num_words)

    def _words(self, memory: np.ndarray, places: np.ndarray, num_words: int) -> list[Lanes]:
        assert not (places % (4 * num_words)).any(), "misaligned access"
        assert places.min() >= 0 and places.max() + 4 * num_words <= memory.size, "access out of bounds"
        words = memory.view(np.uint32)
        return [words[places // 4 + i].view(_Lanes) for i in range(num_words)]

    def load_matrix_x4(self, address: Lanes, offset: int, *, transpose: bool) -> list[Lanes]:
        places = np.asarray(address, np.int64) + offset
        self.accesses.append(Access("ldmatrix", 16, tuple(places.tolist())))
        chunks = self.shared_memory.view(np.uint16).reshape(-1, 8)[places // 16].reshape(4, 8, 8)
        return [matrix_fragment(matrix.T if transpose else matrix) for matrix in chunks]

    # -- between lanes -----------------------------------------------------------------------------------------------

    def shuffle(self, value: Lanes, lane: Any) -> Lanes:
        return value[np.broadcast_to(np.asarray(lane), (32,)) % 32]

    def shuffle_butterfly(self, value: Lanes, offset: int) -> Lanes:
        return value[LANES ^ offset]

    def transpose_8x8(self, x: Lanes) -> Lanes:
        matrix = np.empty((8, 8), np.uint16)
        for half in range(2):
            matrix[ROW, 2 * COLUMN + half] = halves(x)[:, half]
        return matrix_fragment(matrix.T)

    def mma_m16n8k16(self, c: Sequence[Lanes], a: Sequence[Lanes], b: Sequence[Lanes], *, dtype: str) -> list[Lanes]:
        return mma(c, a, b, dtype)

    def mma_m16n8k8(self, c: Sequence[Lanes], a: Sequence[Lanes], b: Sequence[Lanes], *, dtype: str) -> list[Lanes]:
        return mma(c, a, b, dtype)

    # -- arithmetic --------------------------------------------------------------------------------------------------

    def prmt(self, a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
        data = np.stack([Uint32(a), Uint32(b)], axis=1).view(np.uint8).reshape(32, 8)
        select = np.asarray(Uint32(selector))
        chosen = [data[LANES, select >> 4 * i & 7] for i in range(4)]
        # Bit 3 of a selector asks for eight copies of the byte's sign.
        chosen = [np.where(select >> 4 * i & 8, -(byte >> 7) & 0xFF, byte) for i, byte in enumerate(chosen)]
        chosen = [byte.astype(np.uint8) for byte in chosen]
        return np.ascontiguousarray(np.stack(chosen, axis=1)).view(np.uint32).reshape(32).view(_Lanes)

    def half2_low_to_float(self, x: Lanes) -> Lanes:
        return Float32(halves(x).view(np.float16)[:, 0])

    def half2_high_to_float(self, x: Lanes) -> Lanes:
        return Float32(halves(x).view(np.float16)[:, 1])

    def bf16x2_low_to_float(self, x: Lanes) -> Lanes:
        return Float32(bf16_values(halves(x)[:, 0]))

    def bf16x2_high_to_float(self, x: Lanes) -> Lanes:
        return Float32(bf16_values(halves(x)[:, 1]))

    def pack_f16x2(self, low: Lanes, high: Lanes) -> Lanes:
        return from_halves(np.stack([low, high], axis=1).astype(np.float16).view(np.uint16))

    def pack_bf16x2(self, low: Lanes, high: Lanes) -> Lanes:
        return from_halves(bf16_bits(np.stack([low, high], axis=1)))

    def add_f16x2(self, a: Lanes, b: Lanes) -> Lanes:
        return from_halves((halves(a).view(np.float16) + halves(b).view(np.float16)).view(np.uint16))

    def e4m3x2_low_to_f16x2(self, x: Lanes) -> Lanes:
        return from_halves(E4M3_AS_F16[np.asarray(x, np.uint32).reshape(32, 1).view(np.uint8)[:, :2]])

    def e4m3x2_high_to_f16x2(self, x: Lanes) -> Lanes:
        return from_halves(E4M3_AS_F16[np.asarray(x, np.uint32).reshape(32, 1).view(np.uint8)[:, 2:]])

    def pinned(self, x: Lanes) -> Lanes:
        return x

    def absolute(self, x: Lanes) -> Lanes:
        return np.abs(x)

    def fmax(self, a: Any, b: Any) -> Lanes:
        return np.fmax(Float32(a), Float32(b))

    def fma(self, a: Any, b: Any, c: Any) -> Lanes:
        return Float32(np.float64(a) * np.float64(b) + np.float64(c))

    def exp2(self, x: Any) -> Lanes:
        return Float32(np.exp2(np.float64(x)))

    def log2(self, x: Any) -> Lanes:
        return Float32(np.log2(np.float64(x)))


def select(condition: Any, chosen: Any, other: Any) -> Lanes:
    return np.where(condition, chosen, other).view(_Lanes)


def matrix_fragment(matrix: np.ndarray) -> Lanes:
    """A lane's pair of an 8 x 8 matrix of 16-bit elements: row g, columns 2t and 2t + 1."""
    return from_halves(np.stack([matrix[ROW, 2 * COLUMN], matrix[ROW, 2 * COLUMN + 1]], axis=1))


def mma(c: Sequence[Any], a: Sequence[Any], b: Sequence[Any], dtype: str) -> list[Lanes]:
    """m16n8k8 (two registers of A) or m16n8k16 (four): products and sums exact, one rounding to fp32 at the end."""
    left, right, total = np.zeros((16, 8 * len(b))), np.zeros((8 * len(b), 8)), np.zeros((16, 8))
    for register, word in enumerate(a):
        for half in range(2):
            left[ROW + 8 * (register % 2), 8 * (register // 2) + 2 * COLUMN + half] = elements(word, dtype)[:, half]
    for register, word in enumerate(b):
        for half in range(2):
            right[8 * register + 2 * COLUMN + half, ROW] = elements(word, dtype)[:, half]
    places = [(ROW + 8 * (i // 2), 2 * COLUMN + i % 2) for i in range(4)]
    for value, place in zip(c, places, strict=True):
        total[place] = Float32(value)
    total += left @ right
    return [Float32(total[place]) for place in places]
