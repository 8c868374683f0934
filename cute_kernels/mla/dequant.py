"""E4M3 to bf16 by placing bits: two prmt, two shifts, two lop3 for four codes, then packed bf16 products.

A code's sign goes to bit 15, its exponent and mantissa to bits 10 to 4 of a bf16: that is the code's value times
2**-120, a bf16 subnormal where the code is an E4M3 subnormal, so that one product with 2**120 is exact for all codes.
A byte under eight copies of its sign is a code whose sign is there already: shifted by 4, all bits are in place.
(Bit placement with an exponent correction: Marlin's FP8 kernels, Frantar et al. and Neural Magic 2024.) The NaN codes
0x7f and 0xff read as +-480.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Uint32

from cute_kernels.device import numbers, ptx

PAIRS = (0x9180, 0xB3A2)  # prmt selectors: bytes 0 and 1, or 2 and 3, each as a sign-extended half
EXPONENTS = 0x0404  # prmt selector of byte 0, twice
PLACES = 0x87F087F0  # of the bits of two codes
TWO_POWER_120 = 0x7B807B80  # a pair of bf16


@dataclass(frozen=True)
class Dequantizer:
    """What the four codes of a word and their scale make.

    scales: as in `MlaConfig`. exponents: whether scales are stored as UE8M0, the exponents of powers of 2, four in a
    word; else as fp32.
    """

    scales: str
    exponents: bool = False

    def factors(self, words: Any, index: int) -> list[Uint32]:
        """A token's ``index``-th scale, of its words, as packed pairs of bf16 that :meth:`word` multiplies with.

        fp32 scales become a sum of two bf16, which is the scale to within 2**-17 of it. Exponents are moved to where
        bf16 has its own: the smallest, 2**-127, then counts as 0.
        """
        if self.exponents:
            # The byte above a zero byte, twice, is a pair of exponents one bit too far to the left.
            selector = EXPONENTS | 0x1010 * (index % 4)
            return [self._raised(ptx.prmt(Uint32(words[index // 4]), Uint32(0), Uint32(selector)) >> 1)]
        scale = Uint32(words[index]).bitcast(Float32)
        if self.scales == "power_of_2":
            scaled = numbers.multiply(scale, Float32(2.0**120))
            return [ptx.pack_bf16x2(scaled, scaled)]
        high = ptx.pack_bf16x2(scale, scale)
        rest = scale - ptx.bf16x2_low_to_float(high)
        return [high, ptx.pack_bf16x2(rest, rest)]

    def _raised(self, factor: Uint32) -> Uint32:
        """A pair of powers of 2 in bf16, times 2**120 if that is folded into them."""
        return factor + Uint32(120 << 7 | 120 << 23) if self.scales == "power_of_2" else factor

    def word(self, codes: Uint32, factors: list[Uint32]) -> list[Uint32]:
        """Four codes times their scale: two words of two bf16, in the order of the codes."""
        return [self._pair(ptx.prmt(codes, Uint32(0), Uint32(selector)), factors) for selector in PAIRS]

    def _pair(self, spread: Uint32, factors: list[Uint32]) -> Uint32:
        placed = (spread << 4) & PLACES
        if self.scales == "power_of_2":
            return numbers.multiply_bf16x2(placed, factors[0])
        value = numbers.multiply_bf16x2(placed, Uint32(TWO_POWER_120))
        if len(factors) == 1:
            return numbers.multiply_bf16x2(value, factors[0])
        high, low = factors
        return numbers.fma_bf16x2(value, high, numbers.multiply_bf16x2(value, low))
