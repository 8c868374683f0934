"""A register of a warp: an array of 32 lanes; scalar types are casts to one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike

LANES = np.arange(32, dtype=np.int32)
ROW, COLUMN = LANES // 4, LANES % 4  # g and t: a lane's place in MMA fragments
Lanes: TypeAlias = np.ndarray
"""What instructions take and give: a `Register`, whose arithmetic gives what type checkers know as an array alone."""

T = TypeVar("T")


class Register(np.ndarray):
    """A value per lane. A branch must be taken by all lanes or by none."""

    def bitcast(self, scalar: Scalar) -> Lanes:
        return self.view(scalar.dtype)

    def to(self, scalar: Scalar) -> Lanes:
        return scalar(self)

    def __bool__(self) -> bool:
        taken = np.asarray(self)
        assert taken.all() or not taken.any(), "a branch that diverges"
        return bool(taken.all())

    def __index__(self) -> int:
        values = np.asarray(self)
        assert (values == values.flat[0]).all(), "lanes differ where one number is wanted"
        return int(values.flat[0])


@dataclass(frozen=True)
class Scalar:
    """Stands for a DSL scalar type: a cast to 32 lanes of it."""

    dtype: type[np.number]

    def __call__(self, value: ArrayLike) -> Any:
        """A `Register`, which kernels take for the DSL's scalar that they ask for: hence no type of its own."""
        if isinstance(value, np.ndarray) and value.shape == (32,):  # most are
            cast = value.astype(self.dtype)
            return cast if type(cast) is Register else cast.view(Register)
        if type(value) is int:  # the others
            return _everywhere(self, value).copy()
        return self._of(value)

    def _of(self, value: ArrayLike) -> Register:
        if isinstance(value, int) and issubclass(self.dtype, np.integer):
            value = np.uint64(value % 2**64)  # of any size and sign: what is kept are its lowest bits
        register = np.empty(32, self.dtype).view(Register)
        np.copyto(register, np.asarray(value), casting="unsafe")
        return register

    def __instancecheck__(self, value: object) -> bool:
        """Whether a value is a register of this type, for kernels that ask what kind of address they were given."""
        return isinstance(value, Register) and value.dtype == self.dtype


@functools.lru_cache(maxsize=1 << 16)
def _everywhere(scalar: Scalar, value: int) -> Register:
    """The register that has it in all lanes, of which everyone gets a copy: it may be added to in place."""
    return scalar._of(value)


Int32, Int64, Uint32, Uint64 = (Scalar(dtype) for dtype in (np.int32, np.int64, np.uint32, np.uint64))
Float32 = Scalar(np.float32)


class Registers(list):
    """A register tensor: `cute.make_rmem_tensor(n, dtype)`."""

    def __init__(self, count: int, dtype: Scalar):
        super().__init__(np.zeros((count, 32), dtype.dtype).view(Register))
        self.dtype = dtype

    def fill(self, value: float) -> None:
        self[:] = [self.dtype(value) for _ in self]


def select(condition: ArrayLike, chosen: ArrayLike, other: ArrayLike) -> Lanes:
    """`cutlass.select_`, by lane."""
    return np.where(condition, chosen, other).view(Register)


def uniform(value: T) -> T:
    """A value that is the same in all lanes; `cute.arch.make_warp_uniform`."""
    values = np.asarray(value)
    assert (values == values.flat[0]).all(), "lanes of a warp differ"
    return value


def lanes_range(*bounds: ArrayLike, unroll: int = 1) -> range:
    """`cutlass.range` of bounds that are the same in all lanes."""
    return range(*(int(np.asarray(uniform(bound)).flat[0]) for bound in bounds))


# -- pairs of 16 bits in a word ----------------------------------------------------------------------------------------


def halves(word: ArrayLike) -> np.ndarray:
    """The two 16-bit halves of each word, low first: uint16 [words, 2]."""
    return np.ascontiguousarray(np.asarray(word, np.uint32)).view(np.uint16).reshape(-1, 2)


def permuted_bytes(a: ArrayLike, b: ArrayLike, selector: ArrayLike) -> Lanes:
    """`prmt`: four bytes of two words by the lowest nibbles of a selector, whose bit 3 asks for copies of a sign."""
    pair = np.empty((32, 2), np.uint32)
    pair[:, 0], pair[:, 1] = Uint32(a), Uint32(b)
    nibbles = np.asarray(Uint32(selector))[:, None] >> _NIBBLES
    chosen = pair.view(np.uint8)[_EACH_LANE, nibbles & 7]
    signs = nibbles & 8
    if signs.any():
        chosen = np.where(signs != 0, 0 - (chosen >> 7), chosen).astype(np.uint8)
    return chosen.view(np.uint32).reshape(32).view(Register)


_NIBBLES, _EACH_LANE = np.arange(0, 16, 4, dtype=np.uint32), LANES[:, None]


def from_halves(pair: np.ndarray) -> Lanes:
    """Words of 16-bit halves [32, 2]."""
    return np.ascontiguousarray(pair, dtype=np.uint16).view(np.uint32).reshape(32).view(Register)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to nearest-even bf16, as uint16 (no NaN)."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """bf16 as fp32."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def elements(word: ArrayLike, dtype: str) -> np.ndarray:
    """The packed pair of each word as fp64 [words, 2]; ``dtype`` is "f16" or "bf16"."""
    pair = halves(word)
    values = pair.view(np.float16) if dtype == "f16" else bf16_values(pair)
    return values.astype(np.float64)


def nearest_bf16(values: np.ndarray) -> np.ndarray:
    """fp64 to nearest-even bf16 in one rounding, as uint16: fp32 keeps what decides a tie, by rounding to odd."""
    near = values.astype(np.float32)
    inexact = near.astype(np.float64) != values
    away = np.abs(near.astype(np.float64)) > np.abs(values)
    truncated = np.where(away, np.nextafter(near, np.float32(0)), near)
    odd = (truncated.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)
    return bf16_bits(odd)
