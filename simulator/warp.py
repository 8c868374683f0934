"""A warp in NumPy: memories and instructions.

A scalar is an array of 32 lanes, and each instruction does what the PTX manual says, in exact arithmetic where the
hardware is exact. Every access to shared memory is kept, so that its bank conflicts can be counted
(:mod:`layouts.banks`), and every read of global memory, so that nothing else is read. Copies are done when they are
asked for, and waiting is done at once: orders are what :mod:`simulator.schedule` is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from simulator.backend import Meanings
from simulator.registers import (
    COLUMN,
    LANES,
    ROW,
    Float32,
    Int32,
    Int64,
    Lanes,
    Register,
    Registers,
    Uint32,
    bf16_bits,
    bf16_values,
    elements,
    from_halves,
    halves,
    lanes_range,
    nearest_bf16,
    permuted_bytes,
    select,
    uniform,
)


def _e4m3_as_f16() -> np.ndarray:
    """The fp16 bits of all E4M3 codes; a NaN's are fp16's."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(codes & 0x7F == 0x7F, np.nan, values)
    return (np.where(codes & 0x80, -values, values)).astype(np.float16).view(np.uint16)


E4M3_AS_F16 = _e4m3_as_f16()


@dataclass(frozen=True)
class Access:
    """One access to shared memory: kind and width as `layouts.banks` has them, byte address per lane."""

    kind: str
    width: int
    addresses: tuple[int, ...]


@dataclass
class Warp:
    """Its methods have the names and arguments of `cute_kernels.device.ptx` and `cute_kernels.device.numbers`.

    Attributes:
        shared_memory, global_memory: uint8, addressed from 0. Another CTA of a cluster has its shared memory
            ``cluster_stride`` bytes further on.
        accesses: to shared memory. reads: (first byte, bytes) of every conditional or asynchronous read of global
            memory that was made. sent: bytes of asynchronous stores and copies, by the barrier that counts them.
        prefetched: byte addresses of global memory whose lines were asked for.
        rank: of the CTA in its cluster.
    """

    shared_memory: np.ndarray
    global_memory: np.ndarray
    accesses: list[Access] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    sent: Counter = field(default_factory=Counter)
    prefetched: set[int] = field(default_factory=set)
    rank: int = 0
    cluster_stride: int = 1 << 17
    LOG2_E: float = 1.4426950408889634
    LN_2: float = 0.6931471805599453

    def meanings(self) -> Meanings:
        """What :func:`simulator.running` puts in place."""
        done = ("sync_warp", "fence_proxy", "cp_async_commit_group", "cp_async_wait_group", "griddepcontrol_wait")
        return Meanings(
            instructions=self,
            arch={
                **dict.fromkeys(done, _nothing),
                "shuffle_sync": self.shuffle,
                "shuffle_sync_bfly": self.shuffle_butterfly,
                "vote_any_sync": lambda vote: bool(np.any(vote)),
                "vote_ballot_sync": lambda vote: Uint32(sum(1 << int(i) for i in LANES[np.asarray(vote, bool)])),
                "elect_one": nullcontext,
                "lane_idx": lambda: Int32(LANES),
                "make_warp_uniform": uniform,
                "block_idx_in_cluster": lambda: self.rank,
            },
            cute={"make_rmem_tensor": Registers, "size": len},
            cutlass={
                "min": np.minimum,
                "max": np.maximum,
                "select_": select,
                "range": lanes_range,
                "range_constexpr": range,
            },
            scalars={"Int32": Int32, "Int64": Int64, "Uint32": Uint32, "Float32": Float32, "const_expr": bool},
        )

    # -- memory -------------------------------------------------------------------------------------------------------

    def load_shared(self, address: Lanes, offset: int) -> Lanes:
        return self.load_shared_vector(address, offset, 1)[0]

    def load_shared_vector(self, address: Lanes, offset: int, num_words: int) -> list[Lanes]:
        places = _places(address, offset)
        self.accesses.append(Access("ld", 4 * num_words, tuple(places.tolist())))
        return self._words(self.shared_memory, places, num_words)

    def store_shared(self, address: Lanes, offset: int, values: Sequence[Lanes]) -> None:
        places = _places(address, offset)
        self.accesses.append(Access("st", 4 * len(values), tuple(places.tolist())))
        assert not (places % (4 * len(values))).any(), "misaligned access"
        for i, value in enumerate(values):
            self.shared_memory.view(np.uint32)[places // 4 + i] = np.asarray(value).view(np.uint32)

    def prefetch_line(self, address: Lanes) -> None:
        places = _places(address, 0)
        assert (places < self.global_memory.size).all(), "asked for what is in no array"
        self.prefetched |= set(places.tolist())

    def load_global_words(self, address: Lanes, offset: int, num_words: int, *, constant: bool = True) -> list[Lanes]:
        return self._words(self.global_memory, _places(address, offset), num_words)

    def load_global_if(
        self, condition: ArrayLike, address: Lanes, offset: int, num_words: int = 4, *, constant: bool = True
    ) -> list[Lanes]:
        condition = np.broadcast_to(condition, (32,))
        places = np.where(condition, _places(address, offset), 0)
        self.reads += [(int(place), 4 * num_words) for place, wanted in zip(places, condition, strict=True) if wanted]
        words = self._words(self.global_memory, places, num_words)
        return [np.where(condition, word, np.uint32(0)).view(Register) for word in words]

    def load_global_or(self, condition: ArrayLike, address: Lanes, otherwise: ArrayLike) -> Lanes:
        (words,) = self.load_global_if(condition, address, 0, 1)
        return np.where(condition, words, np.asarray(otherwise).astype(np.uint32)).view(Register)

    def _words(self, memory: np.ndarray, places: np.ndarray, num_words: int) -> list[Lanes]:
        assert not (places % (4 * num_words)).any(), "misaligned access"
        assert places.min() >= 0 and places.max() + 4 * num_words <= memory.size, "access out of bounds"
        words = memory.view(np.uint32)
        return [words[places // 4 + i].view(Register) for i in range(num_words)]

    def load_matrix_x4(self, address: Lanes, offset: int, *, transpose: bool) -> list[Lanes]:
        places = _places(address, offset)
        self.accesses.append(Access("ldmatrix", 16, tuple(places.tolist())))
        chunks = self.shared_memory.view(np.uint16).reshape(-1, 8)[places // 16].reshape(4, 8, 8)
        return [matrix_fragment(matrix.T if transpose else matrix) for matrix in chunks]

    def store_matrix_x4(self, address: Lanes, offset: int, words: Sequence[Lanes], *, transpose: bool) -> None:
        places = _places(address, offset)
        self.accesses.append(Access("stmatrix", 16, tuple(places.tolist())))
        assert not (places % 16).any(), "misaligned access"
        memory = self.shared_memory.view(np.uint16)
        for number, word in enumerate(words):
            matrix = np.empty((8, 8), np.uint16)
            for half in range(2):
                matrix[ROW, 2 * COLUMN + half] = halves(word)[:, half]
            for row, place in enumerate(places[8 * number : 8 * number + 8]):
                memory[place // 2 : place // 2 + 8] = (matrix.T if transpose else matrix)[row]

    # -- asynchronous copies ------------------------------------------------------------------------------------------

    def copy_async(self, destination: Lanes, source: Lanes, num_bytes: ArrayLike) -> None:
        """16 bytes a lane, of which ``num_bytes`` are read and the others become zeros."""
        self.accesses.append(Access("st", 16, tuple(_places(destination, 0).tolist())))
        self._copy(range(32), destination, source, num_bytes)

    def copy_async_if(self, condition: ArrayLike, destination: Lanes, source: Lanes, num_bytes: ArrayLike) -> None:
        self._copy(np.flatnonzero(condition), destination, source, num_bytes)

    def _copy(self, lanes: Iterable[int], destination: Lanes, source: Lanes, num_bytes: ArrayLike) -> None:
        targets, sources = _places(destination, 0), _places(source, 0)
        counts = np.broadcast_to(np.asarray(num_bytes), (32,))
        for lane in lanes:
            target, place, count = int(targets[lane]), int(sources[lane]), int(counts[lane])
            assert target % 16 == 0 and place % 16 == 0 and 0 <= count <= 16
            self.shared_memory[target : target + 16] = 0
            if count:
                assert 0 <= place <= self.global_memory.size - count
                self.reads.append((place, count))
                self.shared_memory[target : target + count] = self.global_memory[place : place + count]

    # -- a cluster ----------------------------------------------------------------------------------------------------

    def address_in(self, address: Lanes, rank: int | Lanes) -> Lanes:
        return address + rank * self.cluster_stride

    def store_in_cluster(self, address: Lanes, offset: int, values: Sequence[Lanes]) -> None:
        self.store_shared(address, offset, values)

    def load_in_cluster(self, address: Lanes, num_words: int) -> list[Lanes]:
        return self.load_shared_vector(address, 0, num_words)

    def store_async(self, address: Lanes, values: list[Lanes], barrier: int) -> None:
        self.store_shared(address, 0, values)
        self.sent[barrier] += 32 * 4 * len(values)

    def copy_to_cluster(self, target: int, source: int, num_bytes: int, barrier: int) -> None:
        target, source = (int(np.asarray(uniform(place)).flat[0]) for place in (target, source))
        assert target % 16 == 0 and source % 16 == 0 and num_bytes % 16 == 0
        self.shared_memory[target : target + num_bytes] = self.shared_memory[source : source + num_bytes]
        self.sent[barrier] += num_bytes

    # -- between lanes ------------------------------------------------------------------------------------------------

    def shuffle(self, value: Lanes, lane: ArrayLike) -> Lanes:
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

    def active_lanes(self) -> int:
        return 2**32 - 1

    # -- bits ---------------------------------------------------------------------------------------------------------

    def pinned(self, x: Lanes) -> Lanes:
        return x

    def bits(self, x: ArrayLike) -> Lanes:
        return Float32(x).view(np.uint32)

    def from_bits(self, x: ArrayLike) -> Lanes:
        return Uint32(x).view(np.float32)

    def multiply_high_u32(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return Uint32(np.asarray(a, np.uint64) * np.asarray(b, np.uint64) >> np.uint64(32))

    def prmt(self, a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
        return permuted_bytes(a, b, selector)

    # -- packed numbers -----------------------------------------------------------------------------------------------

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

    def mul_f16x2(self, a: Lanes, b: ArrayLike) -> Lanes:
        return from_halves((_f16_pair(a) * _f16_pair(b)).view(np.uint16))

    def multiply_bf16x2(self, a: Lanes, b: ArrayLike) -> Lanes:
        return from_halves(nearest_bf16(_bf16_pair(a) * _bf16_pair(b)))

    def fma_bf16x2(self, a: Lanes, b: ArrayLike, c: Lanes) -> Lanes:
        return from_halves(nearest_bf16(_bf16_pair(a) * _bf16_pair(b) + _bf16_pair(c)))

    def e4m3x2_low_to_f16x2(self, x: Lanes) -> Lanes:
        return from_halves(E4M3_AS_F16[np.asarray(x, np.uint32).reshape(32, 1).view(np.uint8)[:, :2]])

    def e4m3x2_high_to_f16x2(self, x: Lanes) -> Lanes:
        return from_halves(E4M3_AS_F16[np.asarray(x, np.uint32).reshape(32, 1).view(np.uint8)[:, 2:]])

    # -- fp32 ---------------------------------------------------------------------------------------------------------

    def absolute(self, x: Lanes) -> Lanes:
        return np.abs(x)

    def fmax(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return np.fmax(Float32(a), Float32(b))

    def fmin(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return np.fmin(Float32(a), Float32(b))

    def min_or_nan(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return Float32(np.minimum(Float32(a), Float32(b)))

    def max_or_nan(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return Float32(np.maximum(Float32(a), Float32(b)))

    def fma(self, a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Lanes:
        return Float32(_double(a) * _double(b) + _double(c))

    def multiply(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return Float32(_double(a) * _double(b))

    def reciprocal(self, x: ArrayLike) -> Lanes:
        return Float32(1.0 / _double(x))

    def reciprocal_root(self, x: ArrayLike) -> Lanes:
        return Float32(1.0 / np.sqrt(_double(x)))

    def exp2(self, x: ArrayLike) -> Lanes:
        return Float32(np.exp2(_double(x)))

    def log2(self, x: ArrayLike) -> Lanes:
        return Float32(np.log2(_double(x)))


def _nothing(*_: object, **__: object) -> None:
    """What is waited for is there."""


def _double(x: ArrayLike) -> np.ndarray:
    return np.asarray(x, np.float64)


def _places(address: ArrayLike, offset: int) -> np.ndarray:
    places = np.asarray(address, np.int64) + offset
    return places if places.shape == (32,) else np.broadcast_to(places, (32,))


def _f16_pair(x: ArrayLike) -> np.ndarray:
    """float16 [32, 2] of a word in each lane, or of one word for all."""
    return halves(np.broadcast_to(np.asarray(x, np.uint32), (32,))).view(np.float16)


def _bf16_pair(word: ArrayLike) -> np.ndarray:
    return elements(np.broadcast_to(np.asarray(word, np.uint32), (32,)), "bf16")


def matrix_fragment(matrix: np.ndarray) -> Lanes:
    """A lane's pair of an 8 x 8 matrix of 16-bit elements: row g, columns 2t and 2t + 1."""
    return from_halves(np.stack([matrix[ROW, 2 * COLUMN], matrix[ROW, 2 * COLUMN + 1]], axis=1))


def mma(c: Sequence[Lanes], a: Sequence[Lanes], b: Sequence[Lanes], dtype: str) -> list[Lanes]:
    """m16n8k8 (two registers of A) or m16n8k16 (four): products and sums exact, one rounding to fp32 at the end.

    A lane is (g, t); rows of A and C are g and g + 8, columns of B are g, and a pair is two inputs or two columns of C.
    """
    left = _matrix_of(a, dtype).reshape(-1, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(16, -1)
    right = _matrix_of(b, dtype).reshape(-1, 8, 4, 2).transpose(0, 2, 3, 1).reshape(-1, 8)
    total = np.array([Float32(value) for value in c], np.float64).reshape(2, 2, 8, 4).transpose(0, 2, 3, 1)
    total = (total.reshape(16, 8) + left @ right).astype(np.float32)
    rows = np.ascontiguousarray(total.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2)).reshape(4, 32)
    return [row.view(Register) for row in rows]


def _matrix_of(words: Sequence[Lanes], dtype: str) -> np.ndarray:
    """The packed pairs of registers as fp64 [registers, 32, 2]."""
    return elements(np.array([np.asarray(word) for word in words]).reshape(-1), dtype).reshape(len(words), 32, 2)
