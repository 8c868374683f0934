"""Bit-level models of the PTX instructions that are used in fast number conversions.

A `Machine` executes instructions on NumPy arrays of 32-bit words (one element per simulated thread) and counts them.
Packed 16-bit arithmetic rounds once, to nearest even, from an exact result, and keeps subnormals, as the hardware does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class FloatFormat:
    """A 16-bit binary floating format.

    Args:
        name: PTX suffix.
        precision: significand bits, the hidden one included.
        min_exponent: exponent of the smallest normal number.
    """

    name: str
    precision: int
    min_exponent: int

    def decode(self, bits: npt.ArrayLike) -> np.ndarray:
        """Converts uint16 patterns to float64."""
        halves = np.asarray(bits, dtype=np.uint16)
        if self.name == "f16":
            return halves.view(np.float16).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def encode(self, values: npt.ArrayLike) -> np.ndarray:
        """Rounds float64 numbers once to the nearest patterns, uint16; ties go to even."""
        values = np.asarray(values, dtype=np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            _, exponent = np.frexp(values)
            quantum = np.maximum(exponent - self.precision, self.min_exponent - self.precision + 1)
            rounded = np.ldexp(np.rint(np.ldexp(values, -quantum)), quantum)
            rounded = np.where(np.isfinite(values) & (values != 0), rounded, values)
            if self.name == "f16":
                return rounded.astype(np.float16).view(np.uint16)
            return (rounded.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


F16 = FloatFormat("f16", 11, -14)
BF16 = FloatFormat("bf16", 8, -126)


def lanes(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the low 16 bits, the high 16 bits) of each word."""
    words = np.asarray(words, dtype=np.uint32)
    return (words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)


def join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Joins 16-bit halves into words."""
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def splat(pattern: int) -> int:
    """Returns a word with a 16-bit constant in both halves."""
    return pattern | pattern << 16


@dataclass
class Machine:
    """Executes and counts instructions.

    Args:
        counts: the number of executed instructions, by mnemonic.
    """

    counts: Counter[str] = field(default_factory=Counter)

    def prmt(self, a: np.ndarray, b: np.ndarray | int, selector: int) -> np.ndarray:
        """Builds words from the eight bytes of a and b, which have the indices 0 to 3 (a) and 4 to 7 (b). Nibble i of
        ``selector`` is the index of the byte that becomes byte i of the word. Nibbles must be below 8.
        """
        self.counts["prmt"] += 1
        source = np.asarray(a, dtype=np.uint64) | np.asarray(b, dtype=np.uint64) << np.uint64(32)
        out = np.zeros(np.shape(a), dtype=np.uint32)
        for i in range(4):
            nibble = selector >> 4 * i & 0xF
            if nibble > 7:
                raise ValueError(f"selector {selector:#06x} replicates a sign; only plain byte selection is modelled")
            out |= (source >> np.uint64(8 * nibble) & np.uint64(0xFF)).astype(np.uint32) << np.uint32(8 * i)
        return out

    def lop3(self, a: np.ndarray, b: np.ndarray | int, c: np.ndarray | int, table: int) -> np.ndarray:
        """Applies a bitwise function to three words. table: the function as one byte: its result for a = 0xF0, b = 0xCC
        and c = 0xAA.
        """
        self.counts["lop3"] += 1
        words = [np.asarray(word, dtype=np.uint32) for word in (a, b, c)]
        out = np.zeros(np.shape(a), dtype=np.uint32)
        for row in range(8):
            if table >> row & 1:
                term = np.full(np.shape(a), 0xFFFFFFFF, dtype=np.uint32)
                for place, word in enumerate(words):
                    term &= word if row >> (2 - place) & 1 else ~word
                out |= term
        return out

    def shr(self, a: np.ndarray, count: int) -> np.ndarray:
        """Shifts words right by ``count`` bits. The high bits become 0."""
        self.counts["shift"] += 1
        return np.asarray(a, dtype=np.uint32) >> np.uint32(count)

    def shl(self, a: np.ndarray, count: int) -> np.ndarray:
        """Shifts words left by ``count`` bits."""
        self.counts["shift"] += 1
        return np.asarray(a, dtype=np.uint32) << np.uint32(count)

    def sub2(self, a: np.ndarray, b: int, form: FloatFormat) -> np.ndarray:
        """Subtracts a 16-bit constant pattern from both halves of each word."""
        self.counts[f"sub.{form.name}x2"] += 1
        return self._packed(a, lambda x: exact_sum(x, -form.decode(np.uint16(b))), form)

    def mul2(self, a: np.ndarray, b: int, form: FloatFormat) -> np.ndarray:
        """Multiplies both halves of each word by a 16-bit constant pattern."""
        self.counts[f"mul.{form.name}x2"] += 1
        return self._packed(a, lambda x: x * form.decode(np.uint16(b)), form)

    def fma2(self, a: np.ndarray, b: int, c: int, form: FloatFormat) -> np.ndarray:
        """Computes ``a * b + c`` for both halves of each word, rounded once. b, c: 16-bit constant patterns."""
        self.counts[f"fma.{form.name}x2"] += 1
        factor, addend = form.decode(np.uint16(b)), form.decode(np.uint16(c))
        return self._packed(a, lambda x: exact_sum(x * factor, addend), form)

    def sub_f32(self, a: np.ndarray, b: float) -> np.ndarray:
        """Subtracts a constant from words that are read as fp32."""
        self.counts["sub.f32"] += 1
        with np.errstate(invalid="ignore"):
            return (np.asarray(a, dtype=np.uint32).view(np.float32) - np.float32(b)).view(np.uint32)

    @staticmethod
    def _packed(words: np.ndarray, operation, form: FloatFormat) -> np.ndarray:
        low, high = lanes(words)
        return join(form.encode(operation(form.decode(low))), form.encode(operation(form.decode(high))))


def exact_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns ``a + b`` in float64.

    Raises:
        ArithmeticError: the sum is not exact in float64, so that rounding it again could differ from the hardware.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        part = total - a
        lost = (a - (total - part)) + (b - part)
    if np.any((lost != 0) & np.isfinite(total)):
        raise ArithmeticError("the exact result does not fit float64; the model would round twice")
    return total
