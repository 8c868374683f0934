"""`HopperMath`, the arithmetic of code decoders: words, byte permutations, packed pairs of 16-bit floats.

A weight format receives such an object as an argument, so that the format's file can be imported without the compiler.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Uint32

from cute_kernels.device import numbers, ptx


class HopperMath:
    """The arithmetic of packed pairs on sm_90 and later. Results are rounded once to ``dtype``, "bf16" or "fp16"."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def word(self, value: int | Uint32) -> Uint32:
        """Returns the value as a Uint32, on which Python's operators work."""
        return Uint32(value)

    def bits(self, number: Float32) -> Uint32:
        return Uint32(number.bitcast(Uint32))

    def number(self, bits: Uint32) -> Float32:
        """Returns the fp32 number with these bits."""
        return Float32(bits.bitcast(Float32))

    def most(self, a: Uint32, b: Uint32) -> Uint32:
        return Uint32(cutlass.max(a, b))

    def prmt(self, a: Uint32, b: Uint32, selector: Uint32) -> Uint32:
        """Selects four of the eight bytes of a and b. Nibble i of the selector's lower 16 bits is the index of the byte
        that becomes byte i.
        """
        return ptx.prmt(a, b, selector)

    def add(self, a: Uint32, b: Uint32) -> Uint32:
        return ptx.add_bf16x2(a, b) if self.dtype == "bf16" else ptx.add_f16x2(a, b)

    def multiply(self, a: Uint32, b: Uint32) -> Uint32:
        return ptx.mul_bf16x2(a, b) if self.dtype == "bf16" else ptx.mul_f16x2(a, b)

    def fma(self, a: Uint32, b: Uint32, c: Uint32) -> Uint32:
        """Returns a * b + c of packed pairs, each rounded once."""
        return numbers.fma_bf16x2(a, b, c) if self.dtype == "bf16" else ptx.fma_f16x2(a, b, c)

    def scaled(self, number: Float32, factor: float) -> Float32:
        return numbers.multiply(number, Float32(factor))

    def scaled_pair(self, pair: Uint32, factor: Float32) -> Uint32:
        """Multiplies both numbers of a pair by an fp32 factor. Products are rounded to fp32, subnormals kept, then to
        ``dtype``."""
        if self.dtype == "bf16":
            low, high, pack = ptx.bf16x2_low_to_float(pair), ptx.bf16x2_high_to_float(pair), ptx.pack_bf16x2
        else:
            low, high, pack = ptx.half2_low_to_float(pair), ptx.half2_high_to_float(pair), ptx.pack_f16x2
        return pack(numbers.multiply(low, factor), numbers.multiply(high, factor))
