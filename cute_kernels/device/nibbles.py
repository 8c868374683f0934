"""Quantising to 4 bits without the roundings of a quotient.

A code is the integer nearest to an fp32 quotient. Here two products with reciprocals a hair above and a hair below the
divisor's stand for it: the rounded quotient lies between them, so where both round to the same integer that is the
code. They seldom differ: where a quotient is within some 2**-19 of halfway between two codes.

The products are made subnormal, so that the multiplication itself rounds to integers, ties to even: fp32 numbers below
2**-126 are multiples of 2**-149, and their bits say of which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Uint32

from cute_kernels.device import numbers, ptx

HAIR = 2.0**-21  # more than what a reciprocal and the roundings of quotient and product are off by: 7 * 2**-24
SHRUNK = 2.0**-60  # what differences are scaled by, so that reciprocals need not be subnormal, too
UNIT = 2.0**-89  # that of the reciprocals: 2**-149 / SHRUNK


def quotients(values: Sequence[Any], shift: Float32, step: Float32) -> tuple[list[Uint32], list[Uint32]]:
    """The integers nearest to (value - shift) / step and a hair more, and to that and a hair less.

    As signed integers; a negative one is some negative number, and one above 2**23 some larger one. ``step`` is a
    positive fp16. By a step of 0 they mean nothing.
    """
    reciprocal = ptx.reciprocal(step)
    above, below = (numbers.multiply(reciprocal, Float32(UNIT * (1.0 + hair))) for hair in (HAIR, -HAIR))
    minus = numbers.multiply(shift, Float32(-SHRUNK))
    differences = [ptx.fma(value, Float32(SHRUNK), minus) for value in values]
    upper, lower = ([numbers.bits(numbers.multiply(d, factor)) for d in differences] for factor in (above, below))
    return upper, lower


def pack(codes: Sequence[Any]) -> Uint32:
    """Up to 8 signed integers, each brought into 0 to 15, as nibbles of a word; their number is even."""
    word = Uint32(0)
    for i in reversed(range(0, len(codes), 2)):
        word = numbers.pack_nibbles(codes[i], codes[i + 1], word)
    return word
