"""Powers of 2 that rows of a tile share. A code times its row's scale, divided by the shared power, fits fp16.

The power is chosen so that the largest of the rows' scales, divided by it, is below 2**6, and its product with a code
below 2**15. Scales from 2**-50 to 2**40 keep 11 significant bits, except scales much smaller than the largest one. The
limit is the largest scale times 2**-29 if only the product is rounded (:mod:`.unpack`), or times 2**-19 if the scale is
rounded, too (:mod:`.rows`). Scales below the limit are rounded to multiples of 2**-30 of the largest scale. Scales
above 2**40 become infinite.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Numeric, Uint32

from cute_kernels.device import numbers, ptx

CODE_EXPONENT = 9  # codes are below 2**9
TOP_EXPONENT = 15  # the greatest exponent of a tile's numbers in fp16
LEAST_EXPONENT, GREATEST_EXPONENT = -40, 40  # limits of the greatest scale's exponent


def exponent_beside(top: Float32) -> Int32:
    """Returns the exponent of the power of 2 that rows share if their largest scale is ``top``."""
    exponent = (numbers.bits(top) >> Uint32(23)).to(Int32) - 127
    exponent = cutlass.min(cutlass.max(exponent, Int32(LEAST_EXPONENT)), Int32(GREATEST_EXPONENT))
    return exponent + (1 + CODE_EXPONENT - TOP_EXPONENT)


def power_of_2(exponent: Numeric) -> Float32:
    return numbers.from_bits((exponent + 127).to(Uint32) << Uint32(23))


def word_of(key_exponent: Int32, value_exponent: Int32) -> Uint32:
    """Packs two fp32 numbers for a part of a tile into a word: K's power of 2, and the exponent of V's power of 2. The
    lower 16 bits of both numbers are zero, so the word holds the upper halves.
    """
    exponent = numbers.bits(value_exponent.to(Float32))
    return numbers.bits(power_of_2(key_exponent)) | (exponent >> Uint32(16))


def powers_in(word: Uint32) -> tuple[Float32, Float32, Float32]:
    """Unpacks a word of :func:`word_of`. Returns (K's power of 2, exponent of V's power of 2, reciprocal of V's power
    of 2).
    """
    exponent = numbers.from_bits(word << Uint32(16))
    return numbers.from_bits(word & Uint32(0xFFFF0000)), exponent, ptx.exp2(-exponent)
