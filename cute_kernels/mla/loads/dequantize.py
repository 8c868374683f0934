"""Converts E4M3 to bf16 by placing bits: two prmt, two shifts, two lop3 for four codes, then packed bf16 products.

A code's sign goes to bit 15 of a bf16, its exponent and mantissa to bits 10 to 4. This bf16 is the code's value times
2**-120. It is a subnormal if the code is an E4M3 subnormal, so a product with 2**120 is exact for all codes. Scales
contain the factor 2**120, unless they are too large to contain it. Products with a scale that is too large are
multiplied by 2**120 in a separate step. Warps without such a scale skip this step. prmt extends a byte by eight copies
of its sign; a shift by 4 then puts all bits in place. (Bit placement with an exponent correction: Marlin's FP8 kernels,
Frantar et al. and Neural Magic 2024.) The NaN codes 0x7f and 0xff read as +-480.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from cute_kernels.device import numbers, ptx

PAIRS = (0x9180, 0xB3A2)  # prmt selectors: bytes 0 and 1, or 2 and 3, each as a sign-extended half
EXPONENTS = 0x0404  # prmt selector of byte 0, twice
PLACES = 0x87F087F0  # of the bits of two codes
ONE, TWO_POWER_120 = 0x3F803F80, 0x7B807B80  # pairs of bf16
LARGE = 2.0**7  # the least scale of fp32 that does not contain 2**120
UNIT_EXPONENT = 120  # of it
LOW_BITS, HIGH_BITS = 0x7F7F7F7F, 0x80808080  # of four exponents
CARRY = (0x80 - (254 - UNIT_EXPONENT + 1 - 0x80)) * 0x01010101  # into the high bit of exponents that cannot contain it


@dataclass(frozen=True)
class Factors:
    """The factors of a token's codes; run-time values.

    Attributes:
        scales: one or two words for each scale. A word holds the same bf16 number twice; with two words, the two
            numbers add up to the scale.
        large: words with a bit for each scale. The bit is set if the scale is too large to contain the factor 2**120,
            so that products need a separate multiplication by it.
    """

    scales: list[list[Uint32]]
    large: list[Uint32]


@dataclass(frozen=True)
class Dequantizer:
    """Multiplies the four codes of a word by their scale.

    Attributes:
        scales: as in `policies.Decode`.
        num_words: words of a token's scales.
        exponents: whether scales are stored as UE8M0, the exponents of powers of 2, four in a word; else as fp32.
    """

    scales: str
    num_words: int
    exponents: bool = False

    @property
    def any_scale(self) -> bool:
        """Whether there may be scales that are too large to contain 2**120."""
        return self.scales != "power_of_2"

    def factors(self, words: cute.Tensor, count: int) -> Factors:
        """Returns the factors of a token's first ``count`` scales. words: the token's scales as stored.

        An fp32 scale becomes a sum of two bf16, with a relative error of at most 2**-17, or one bf16 if ``scales``
        is "power_of_2". A UE8M0 exponent is moved to the exponent bits of a bf16.
        """
        of_all = self._of_exponents if self.exponents else self._of_numbers
        return of_all([Uint32(words[i]) for i in range(self.num_words)], count)

    def _of_exponents(self, words: list[Uint32], count: int) -> Factors:
        # Four at a time: none carries into its neighbour.
        large = [word & ((word & Uint32(LOW_BITS)) + Uint32(CARRY)) & Uint32(HIGH_BITS) for word in words]
        contained = [
            word + Uint32(UNIT_EXPONENT * 0x01010101) - (high >> 7) * Uint32(UNIT_EXPONENT)
            for word, high in zip(words, large, strict=True)
        ]
        # The byte above a zero byte, twice, is a pair of exponents one bit too far to the left.
        selectors = [Uint32(EXPONENTS | 0x1010 * (index % 4)) for index in range(count)]
        pairs = [ptx.prmt(contained[i // 4], Uint32(0), selector) >> 1 for i, selector in enumerate(selectors)]
        return Factors([[pair] for pair in pairs], large)

    def _of_numbers(self, words: list[Uint32], count: int) -> Factors:
        numbers_of = [word.bitcast(Float32) for word in words[:count]]
        which = [ptx.absolute(scale) >= Float32(LARGE) for scale in numbers_of]
        bits = [cutlass.select_(one, Uint32(1 << i), Uint32(0)) for i, one in enumerate(which)]
        return Factors(
            [self._of_number(scale, one) for scale, one in zip(numbers_of, which, strict=True)], [reduce(or_, bits)]
        )

    def _of_number(self, scale, large) -> list[Uint32]:
        unit = Float32(2.0**UNIT_EXPONENT)
        if self.any_scale:
            unit = cutlass.select_(large, Float32(1.0), unit)
        scale = numbers.multiply(scale, unit)
        high = ptx.pack_bf16x2(scale, scale)
        if not self.any_scale:
            return [high]
        rest = scale - ptx.bf16x2_low_to_float(high)
        return [high, ptx.pack_bf16x2(rest, rest)]

    def word(self, codes: Uint32, factors: list[Uint32]) -> list[Uint32]:
        """Returns four codes times their scale: two words of two bf16, in the order of the codes."""
        return [self._pair(ptx.prmt(codes, Uint32(0), Uint32(selector)), factors) for selector in PAIRS]

    def _pair(self, spread: Uint32, factors: list[Uint32]) -> Uint32:
        placed = (spread << 4) & PLACES
        if len(factors) == 1:
            return numbers.multiply_bf16x2(placed, factors[0])
        high, low = factors
        return numbers.fma_bf16x2(placed, high, numbers.multiply_bf16x2(placed, low))

    def raised(self, products: list[Uint32], factors: Factors, index: int) -> list[Uint32]:
        """Multiplies products by 2**120, unless their scale, the ``index``-th, already contains that factor."""
        word, bit = (index // 4, 8 * (index % 4) + 7) if self.exponents else (0, index)
        large = (factors.large[word] >> bit & Uint32(1)) != 0
        power = cutlass.select_(large, Uint32(TWO_POWER_120), Uint32(ONE))
        return [numbers.multiply_bf16x2(product, power) for product in products]
