"""Division by numbers that the host knows, without dividing: on the device that would take some 100 clocks."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import numbers


@dataclass(frozen=True)
class Divisor:
    """A positive int32 d that many non-negative int32 n are divided by: n // d is n * multiplier // 2**(31 + shift).

    With 2**(shift - 1) < d <= 2**shift and multiplier the least integer that is not below 2**(31 + shift) / d, the
    product is too large by less than n * d / d <= 2**31 of 2**(31 + shift) / d: the quotient is exact (Granlund and
    Montgomery 1994). 32 bits hold the multiplier and 2 n, whose product's upper half wants a shift alone.
    """

    value: Int32
    multiplier: Uint32  # Uint32
    shift: Uint32  # Uint32, 0 to 31

    @staticmethod
    def of(value) -> Divisor:
        """Found once a launch, on the host."""
        shift = Int32(0)
        for power in range(31):
            shift = shift + cutlass.select_(value > 2**power, Int32(1), Int32(0))
        multiplier = ((Int64(1) << (Int64(shift) + 31)) + (Int64(value) - 1)) // Int64(value)
        return Divisor(value, Uint32(multiplier), Uint32(shift))

    def divide(self, number) -> tuple[Uint32, Uint32]:
        """Returns (quotient, remainder) of a Uint32 below 2**31, as Uint32."""
        quotient = numbers.multiply_high_u32(number << 1, self.multiplier) >> self.shift
        return quotient, number - quotient * Uint32(self.value)

    def divide_int(self, number) -> tuple[Int32, Int32]:
        """Returns (quotient, remainder) of an int32 that is not negative, as Int32."""
        quotient = Int32(numbers.multiply_high_u32(Uint32(number) << 1, self.multiplier) >> self.shift)
        return quotient, number - quotient * self.value
