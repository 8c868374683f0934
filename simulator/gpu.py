"""A GPU in NumPy, a warp at a time: runs whole kernels that move rows of global memory, instruction by instruction.

Each instruction does what the PTX manual says, to the bit where quotients and roundings depend on it, and every access
to global memory must lie inside an array that was put there. A branch must be taken by all lanes of the warp or by
none, so the kernels' few divergent ones are only simulated where they do not diverge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from simulator.backend import Meanings
from simulator.registers import (
    LANES,
    Float32,
    Int32,
    Int64,
    Lanes,
    Register,
    Registers,
    Uint32,
    Uint64,
    halves,
    lanes_range,
    permuted_bytes,
    select,
)

GUARD = 256  # bytes between arrays that nobody may touch


def exact_fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Lanes:
    """a * b + c rounded once to fp32.

    The product is exact in fp64. Rounding the sum to fp64 and then to fp32 gives another result than rounding once only
    where the former is halfway between two fp32 numbers; where these are, is another question below the normal ones.
    """
    a, b, c = (np.asarray(x, np.float32) for x in (a, b, c))
    product = np.multiply(a, b, dtype=np.float64)
    total = np.asarray(product + c)
    halfway = (total.view(np.int64) & _BELOW_FP32) == _HALF_OF_FP32
    small = np.abs(total) < _NORMAL
    if halfway.any() or (small.any() and total[small].any()):
        total = _rounded_to_odd(product, np.asarray(c, np.float64), total)
    return total.astype(np.float32).view(Register) if total.shape else Float32(total)


_BELOW_FP32, _HALF_OF_FP32 = (1 << 29) - 1, 1 << 28  # bits of fp64 that fp32 lacks; what they are halfway
_NORMAL = 2.0**-126


def _rounded_to_odd(product: np.ndarray, c: np.ndarray, total: np.ndarray) -> np.ndarray:
    """product + c, whose sum in fp64 is ``total``, rounded to odd, which keeps a second rounding honest."""
    part = total - product
    error = (product - (total - part)) + (c - part)
    if not error.any():
        return total
    inexact = np.isfinite(total) & (error != 0)
    bits = np.ascontiguousarray(total).view(np.int64)
    toward = np.where((error > 0) == (total > 0), 0, -1)  # truncated towards zero, then the last bit set
    odd = ((bits + np.where(inexact, toward, 0)) | 1).view(np.float64)
    return np.where(inexact & (total != 0), odd, total)


def bytes_to_words(pairs: np.ndarray) -> Lanes:
    """Bytes [32, n <= 4] of each lane as words."""
    padded = np.zeros((32, 4), np.uint8)
    padded[:, : pairs.shape[1]] = pairs
    return padded.view(np.uint32).reshape(32).view(Register)


def rounded(values: Sequence[ArrayLike], dtype: torch.dtype, limit: float | None = None) -> np.ndarray:
    """fp32 values of each lane rounded to a narrow dtype, saturating at ``limit``: bytes [32, n * itemsize]."""
    x = torch.from_numpy(np.stack([np.asarray(value, np.float32) for value in values], axis=1))
    x = x if limit is None else torch.where(x.isnan(), x, x.clamp(-limit, limit))
    return x.to(dtype).view(torch.uint8).numpy()


@dataclass
class Gpu:
    """Global memory and instructions: its methods have the names and arguments of `device.ptx` and `device.numbers`.

    Attributes:
        memory: bytes; owner: which of them belong to an array, as no others are read; end: of the last one.
        block, warp: where the kernel runs now.
        models: as `Meanings.modules`.
    """

    memory: np.ndarray = field(default_factory=lambda: np.empty(1 << 22, np.uint8))
    owner: np.ndarray = field(default_factory=lambda: np.zeros(1 << 22, bool))
    end: int = 4096
    block: tuple[int, int, int] = (0, 0, 0)
    warp: int = 0
    models: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)

    # -- setting up --------------------------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor | None, misalign: int = 0) -> int:
        """Copies the memory under a tensor, gaps of its strides included, to the GPU; its address, 0 for None."""
        if tensor is None:
            return 0
        raw = _storage(tensor)
        start = self.end + GUARD + misalign
        self.memory[start : start + raw.size] = raw
        self.owner[start : start + raw.size] = True
        self.end = -(-(start + raw.size) // GUARD) * GUARD
        return start

    def get(self, address: int, tensor: torch.Tensor) -> None:
        """Copies back to the memory under a tensor what `put` took from it."""
        raw = _storage(tensor)
        raw[:] = self.memory[address : address + raw.size]

    def meanings(self) -> Meanings:
        """What :func:`simulator.running` puts in place."""
        arch = {
            "shuffle_sync": lambda value, lane: value[np.broadcast_to(np.asarray(lane), (32,)) % 32],
            "shuffle_sync_bfly": lambda value, offset: value[LANES ^ offset],
            "vote_any_sync": lambda predicate: bool(np.any(predicate)),
            "vote_ballot_sync": lambda vote: Uint32(sum(1 << int(i) for i in LANES[np.asarray(vote, bool)])),
            "popc": lambda word: Int32([int(bits).bit_count() for bits in np.asarray(word)]),
            "block_idx": lambda: tuple(Int32(i) for i in self.block),
            "warp_idx": lambda: Int32(self.warp),
            "thread_idx": lambda: (Int32(32 * self.warp + LANES), Int32(0), Int32(0)),
            "lane_idx": lambda: Int32(LANES),
            "make_warp_uniform": lambda value: value,
        }
        return Meanings(
            instructions=self,
            arch=arch,
            cute={"make_rmem_tensor": Registers, "ceil_div": lambda a, b: -(-a // b)},
            cutlass={
                "min": np.minimum,
                "max": np.maximum,
                "select_": select,
                "range": lanes_range,
                "range_constexpr": range,
            },
            scalars={
                "Int32": Int32,
                "Int64": Int64,
                "Uint32": Uint32,
                "Uint64": Uint64,
                "Float32": Float32,
                "const_expr": bool,
            },
            modules=self.models,
        )

    # -- what keeps the compiler from knowing more than it should ------------------------------------------------------

    def pinned(self, value: Lanes) -> Lanes:
        return value

    def active_lanes(self) -> Lanes:
        return Uint32(2**32 - 1)

    def multiply_high_u32(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return Uint32(np.asarray(a, np.uint64) * np.asarray(b, np.uint64) >> np.uint64(32))

    # -- memory ------------------------------------------------------------------------------------------------------

    def _places(self, address: ArrayLike, offset: int, num_bytes: int) -> np.ndarray:
        places = np.asarray(address, np.int64) + offset
        assert not (places % num_bytes).any(), "misaligned access"
        spans = places[:, None] + np.arange(num_bytes)
        assert self.owner[spans].all(), "access outside every array"
        return spans

    def prefetch_line(self, address: ArrayLike) -> None:
        self._places(Int64(address) & ~3, 0, 4)  # of an array: else it would ask for something that nobody reads

    def load_global_words(
        self, address: ArrayLike, offset: int, num_words: int, *, constant: bool = True
    ) -> list[Lanes]:
        data = self.memory[self._places(address, offset, 4 * num_words)]
        return [
            np.ascontiguousarray(data[:, 4 * i : 4 * i + 4]).view(np.uint32).reshape(32).view(Register)
            for i in range(num_words)
        ]

    def load_global_part(self, address: ArrayLike, offset: int, num_bytes: int) -> Lanes:
        return bytes_to_words(self.memory[self._places(address, offset, num_bytes)])

    def store_global_words(self, address: ArrayLike, offset: int, words: Sequence[ArrayLike]) -> None:
        data = np.stack([np.asarray(Uint32(word)) for word in words], axis=1).view(np.uint8)
        self.memory[self._places(address, offset, 4 * len(words))] = data

    def store_global_part(self, address: ArrayLike, offset: int, value: ArrayLike, num_bytes: int) -> None:
        data = np.asarray(Uint32(value)).reshape(32, 1).view(np.uint8)[:, :num_bytes]
        self.memory[self._places(address, offset, num_bytes)] = data

    # -- bits --------------------------------------------------------------------------------------------------------

    def prmt(self, a: ArrayLike, b: ArrayLike, selector: ArrayLike) -> Lanes:
        return permuted_bytes(a, b, selector)

    def bits(self, x: ArrayLike) -> Lanes:
        return np.ascontiguousarray(np.asarray(Float32(x))).view(np.uint32).view(Register)

    def from_bits(self, x: ArrayLike) -> Lanes:
        return np.ascontiguousarray(np.asarray(Uint32(x))).view(np.float32).view(Register)

    def multiply_high(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        products = [int(x) * int(y) >> 64 for x, y in zip(np.asarray(Uint64(a)), np.asarray(Uint64(b)), strict=True)]
        return np.array(products, np.uint64).view(Register)

    # -- conversions -------------------------------------------------------------------------------------------------

    def half2_low_to_float(self, x: ArrayLike) -> Lanes:
        return Float32(halves(x).view(np.float16)[:, 0])

    def half2_high_to_float(self, x: ArrayLike) -> Lanes:
        return Float32(halves(x).view(np.float16)[:, 1])

    def bf16x2_low_to_float(self, x: ArrayLike) -> Lanes:
        return self.from_bits(Uint32(x) << 16)

    def bf16x2_high_to_float(self, x: ArrayLike) -> Lanes:
        return self.from_bits(Uint32(x) & 0xFFFF0000)

    def pack_f16x2(self, low: ArrayLike, high: ArrayLike) -> Lanes:
        return bytes_to_words(rounded([low, high], torch.float16))

    def pack_bf16x2(self, low: ArrayLike, high: ArrayLike) -> Lanes:
        return bytes_to_words(rounded([low, high], torch.bfloat16))

    def pack_e4m3x2(self, low: ArrayLike, high: ArrayLike) -> Lanes:
        return bytes_to_words(rounded([low, high], torch.float8_e4m3fn, 448.0))

    def pack_e5m2x2(self, low: ArrayLike, high: ArrayLike) -> Lanes:
        return bytes_to_words(rounded([low, high], torch.float8_e5m2, 57344.0))

    def e4m3x2_to_f16x2(self, x: ArrayLike) -> Lanes:
        codes = torch.from_numpy(np.asarray(Uint32(x)).reshape(32, 1).view(np.uint8)[:, :2].copy())
        return bytes_to_words(codes.view(torch.float8_e4m3fn).half().view(torch.uint8).numpy())

    def to_float(self, x: ArrayLike) -> Lanes:
        return Float32(Int32(x))

    # -- arithmetic --------------------------------------------------------------------------------------------------

    def fma(self, a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Lanes:
        return exact_fma(a, b, c)

    def fma_in_unit(self, a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Lanes:
        return np.fmin(np.fmax(exact_fma(a, b, c), Float32(0.0)), Float32(1.0))

    def multiply(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return Float32(a) * Float32(b)

    def add(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return Float32(a) + Float32(b)

    def divide(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return Float32(a) / Float32(b)

    def reciprocal(self, x: ArrayLike) -> Lanes:
        """An ulp low, right, or an ulp high, by lane; subnormals are flushed."""
        right = Float32(1.0) / Float32(x)
        normal = np.isfinite(right) & (np.abs(right) >= 2.0**-126)
        off = (right.view(np.int32) + np.where(normal, LANES % 3 - 1, 0).astype(np.int32)).view(np.float32)
        return np.where(normal | ~np.isfinite(right), off, Float32(0.0)).view(Register)

    def absolute(self, x: ArrayLike) -> Lanes:
        return np.abs(x)

    def fmax(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return np.fmax(Float32(a), Float32(b))

    def fmin(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return np.fmin(Float32(a), Float32(b))

    def max_or_nan(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return np.maximum(Float32(a), Float32(b))

    def min_or_nan(self, a: ArrayLike, b: ArrayLike) -> Lanes:
        return np.minimum(Float32(a), Float32(b))

    def reciprocal_root(self, x: ArrayLike) -> Lanes:
        return Float32(np.asarray(x, np.float64) ** -0.5)

    def cosine(self, x: ArrayLike) -> Lanes:
        return Float32(np.cos(np.asarray(x, np.float64)))

    def sine(self, x: ArrayLike) -> Lanes:
        return Float32(np.sin(np.asarray(x, np.float64)))


def _storage(tensor: torch.Tensor) -> np.ndarray:
    """All bytes between a tensor's first and last element, as a view."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    count = span if tensor.numel() else 0
    flat = tensor.as_strided((count,), (1,))
    return flat.view(torch.uint8).numpy() if math.prod(flat.shape) else np.empty(0, np.uint8)
