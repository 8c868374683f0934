"""Quotients of numbers that share a divisor, rounded as IEEE 754 says: one reciprocal, then a product and two
multiply-adds for each number."""

from __future__ import annotations

import math

import cutlass
from cutlass import Float32, Uint32

from cute_kernels.device import numbers, ptx

# Divisors outside this range are brought nearer to 1, so that no reciprocal and no remainder leaves fp32's range.
SMALL, LARGE, RESCALE = 2.0**-60, 2.0**60, 2.0**64
MANTISSA = 0x7FFFFF


class Divisor:
    """A divisor of several numbers, with quotients rounded as IEEE 754 says.

    If the divisor is 0, negative or NaN, `or_zero` and `tame` make the quotient 0.

    Args:
        step: the divisor.
        largest: the magnitude at which quotients saturate; None if no quotient can be too large.
    """

    def __init__(self, step: Float32, largest: float | None = None):
        finite = (step > 0.0) & (step < math.inf)
        factor = cutlass.select_(step < SMALL, Float32(RESCALE), Float32(1.0))
        self.factor = cutlass.select_(step > LARGE, Float32(1.0 / RESCALE), factor)
        # Dividing by infinity: 0 for both makes every quotient a zero of the right sign.
        self.step = cutlass.select_(finite, numbers.multiply(step, self.factor), Float32(0.0))
        self.reciprocal = cutlass.select_(finite, reciprocal_of(self.step), Float32(0.0))
        self.positive, self.finite = step > 0.0, finite
        self.bound = None if largest is None else numbers.multiply(self.step, Float32(largest))

    def divide(self, value: Float32) -> Float32:
        return quotient_of(self._scaled(value), self.step, self.reciprocal)

    def tame(self, value: Float32) -> Float32:
        """Returns a dividend that can be divided by `tame_step` without special cases; the quotient is that of
        ``value``."""
        value = self._scaled(value)
        value = cutlass.select_(self.finite, value, numbers.multiply(value, Float32(0.0)))
        return self.or_zero(value)

    @property
    def tame_step(self) -> Float32:
        return cutlass.select_(self.finite, self.step, Float32(1.0))

    def _scaled(self, value: Float32) -> Float32:
        value = numbers.multiply(value, self.factor)
        if self.bound is not None:
            value = ptx.fmax(numbers.fmin(value, self.bound), -self.bound)
        return value

    def or_zero(self, quotient: Float32) -> Float32:
        return cutlass.select_(self.positive, quotient, Float32(0.0))


def reciprocal_of(divisor: Float32) -> Float32:
    """Computes 1 / divisor rounded to nearest, for normal divisors with normal reciprocals, by two of Newton's steps.

    For a divisor with the mantissa 0x7FFFFF the steps may end an ulp too low. The reciprocal's mantissa is then 1, so
    the function sets this bit.
    """
    guess = ptx.reciprocal(divisor)
    for _ in range(2):
        guess = ptx.fma(ptx.fma(-divisor, guess, Float32(1.0)), guess, guess)
    stubborn = (numbers.bits(divisor) & MANTISSA) == MANTISSA
    return numbers.from_bits(numbers.bits(guess) | cutlass.select_(stubborn, Uint32(1), Uint32(0)))


def quotient_of(value: Float32, divisor: Float32, reciprocal: Float32, last=None) -> Float32:
    """Returns value / divisor rounded to nearest, from the divisor's correctly rounded reciprocal (Markstein 1990).

    last: the multiply-add that rounds the quotient; default: `ptx.fma`.
    """
    quotient = numbers.multiply(value, reciprocal)
    # The remainder's negative: where all is 0 it is +0, times -1 / divisor -0, and the quotient keeps its sign.
    remainder = ptx.fma(divisor, quotient, -value)
    return (last or ptx.fma)(remainder, -reciprocal, quotient)


def over_constant(value: Float32, divisor: float) -> Float32:
    """Computes value / divisor rounded to nearest, subnormals included, for finite values and a small integer divisor.

    The quotient is computed with a rounded reciprocal, which may round wrongly if the exact quotient lies halfway
    between two subnormals. With an odd divisor there is no such quotient. For an even divisor the function calls
    `numbers.divide`.
    """
    if divisor % 2 == 0:
        return numbers.divide(value, divisor)
    return quotient_of(value, Float32(divisor), Float32(1.0 / divisor))
