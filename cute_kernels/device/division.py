"""`Divisor`, which divides by a value that the host knows, with one multiplication. An integer division would take some
100 clocks on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import numbers


@dataclass(frozen=True)
class Divisor:
    """A positive int32 divisor d. For non-negative int32 n, n // d is computed as n * multiplier // 2**(31 + shift).

    Let 2**(shift - 1) < d <= 2**shift, and let multiplier be the smallest integer that is not below 2**(31 + shift) /
    d. Then the quotient is exact for n < 2**31 (Granlund and Montgomery 1994). Multiplier and 2 n fit in 32 bits, so
    the quotient is the upper half of their product, shifted by ``shift``.
    """

    value: Int32
    multiplier: Uint32  # Uint32
    shift: Uint32  # Uint32, 0 to 31

    @staticmethod
    def of(value) -> Divisor:
        """Makes the divisor for a value from 1 to 2**31 - 1, once per launch on the host."""
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
