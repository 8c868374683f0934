"""The decoders of integer codes into the A operand. A thread's 16 bytes hold its fragments of consecutive k16 steps.

The order of the packed codes (:mod:`layouts.weights.hopper`) makes shuffles unnecessary. A code is put into the low
mantissa bits of a float with a fixed exponent, so the float is the code plus an offset (FasterTransformer's magic
numbers). One packed addition subtracts the offset and the zero point together. Both are integers that the float format
holds, so code - zero is exact. 8 codes of 4 bits take 11 instructions (bf16) or 9 (fp16), 8 codes of 8 bits 20 or 8.

A bf16 mantissa holds only seven bits, so 8-bit codes are converted to fp32 first, one at a time. `SubnormalDecoder`
instead reads a code as a subnormal bf16 number, and also scales it.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.formats.weights.decoder import ByteDecoder, CodeDecoder, PackedMath

LOW_NIBBLES, HIGH_NIBBLES = 0x000F000F, 0x00F000F0
BF16_128 = 0x43004300  # a code in its low bits: 128 + code
F16_1024 = 0x64006400  # 1024 + code; 1024 + 16 code for a code four bits further up
MINUS_BF16_128, MINUS_F16_1024, MINUS_F16_64 = 0xC300C300, 0xE400E400, 0xD400D400
F16_SIXTEENTH = 0x2C002C00
BOTH_SIGNS = 0x80008000
BYTES, UPPER_BYTES = 0x00FF00FF, 0x4341  # mask of bytes 0 and 2; what PRMT puts there of bytes 1 and 3
BF16_ONES = 0x3F803F80
BF16_EXPONENT = 0x00800080  # one of both exponents of a packed pair
SUBNORMAL_EXPONENT = -133  # of the unit of subnormal bf16 numbers, and of the smallest normal ones
UNIT_EXPONENT = -32  # of the unit of a `SubnormalDecoder`'s weights
FP32_TWO_TO_23, MINUS_TWO_TO_23 = 0x4B000000, 0xCB000000


SIGNS, UPPER_HALVES = 0x80808080, 0xF0F0F0F0


class NibbleBytes(ByteDecoder):
    """Decodes a 4-bit code to the byte 16 * (code - 8): the code moves to the upper half of the byte, and its highest
    bit is inverted. The lower halves of a word's bytes are codes of row g, the upper halves codes of row g + 8. 8 codes
    take three instructions.
    """

    def masks(self, nothing) -> Any:
        """Returns `SIGNS` in a register. `fragment` masks and inverts in one instruction, which can encode only one of
        the two constants.
        """
        return nothing + Uint32(SIGNS)

    def fragment(self, words, masks) -> list[Any]:
        (word,) = words
        return [((word << 4) ^ masks) & Uint32(UPPER_HALVES), (word ^ masks) & Uint32(UPPER_HALVES)]


class IntegerDecoder(CodeDecoder):
    """Decodes a code less its zero point, exactly.

    Args:
        math: an object of `cute_kernels.device.packed_math` for ``dtype``.
    """

    def __init__(self, bits: int, dtype: str, math: PackedMath):
        super().__init__(bits)
        self.dtype, self.math = dtype, math
        self.symmetric_zero = 1 << (bits - 1)
        self._fragment = {
            (4, "bf16"): self._nibbles_to_bf16,
            (4, "fp16"): self._nibbles_to_f16,
            (8, "bf16"): self._bytes_to_bf16,
            (8, "fp16"): self._bytes_to_f16,
        }[bits, dtype]

    def offsets(self, zeros) -> list[Any]:
        """Returns the number to add to the decoded codes of each of the thread's two rows. zeros: zero points (Uint32
        or integers).
        """
        zeros = [Uint32(zero) for zero in zeros]
        if (self.bits, self.dtype) == (8, "bf16"):
            return [(zero | Uint32(MINUS_TWO_TO_23)).bitcast(Float32) for zero in zeros]
        low, high = zeros
        if (self.bits, self.dtype) == (4, "fp16"):
            # The second row's codes stand four bits further up, where 64 + code / 16 * 16 has its units.
            return [low * Uint32(0x00010001) + Uint32(MINUS_F16_1024), high * Uint32(0x00100010) + Uint32(MINUS_F16_64)]
        magic = MINUS_BF16_128 if self.dtype == "bf16" else MINUS_F16_1024
        return [zero * Uint32(0x00010001) + Uint32(magic) for zero in zeros]

    def masks(self, nothing) -> tuple[Any, Any]:
        """Returns constants for `fragment`, to be made before a loop. nothing: a run-time word that is 0.

        One LOP3 combines a code with two constants, but the instruction can encode only one of them. The assembler
        would load the other constant again for each LOP3: an eighth of all instructions. The assembler does not know
        that ``nothing`` is 0, so a constant that is computed from ``nothing`` stays in a register.
        """
        return Uint32(LOW_NIBBLES) | nothing, Uint32(HIGH_NIBBLES) | nothing

    def row_numbers(self, scales, points) -> list[Any]:
        """Returns the `offsets` of the rows' zero points; scales are not used."""
        return self.offsets(points)

    def fragment(self, words, step: int, offsets, masks=None) -> list[Any]:
        """Returns code - zero, exactly."""
        first = step * self.words_per_step
        masks = masks or (Uint32(LOW_NIBBLES), Uint32(HIGH_NIBBLES))
        return self._fragment(words[first : first + self.words_per_step], offsets, masks)

    def _nibbles_to_bf16(self, words, offsets, masks):
        pairs = [((words[0] >> (4 * i)) & masks[0]) | Uint32(BF16_128) for i in range(4)]
        return [self.math.add(pair, offsets[i % 2]) for i, pair in enumerate(pairs)]

    def _nibbles_to_f16(self, words, offsets, masks):
        registers = []
        for word in (words[0], words[0] >> 8):
            low = (word & masks[0]) | Uint32(F16_1024)
            high = (word & masks[1]) | Uint32(F16_1024)
            registers.append(self.math.add(low, offsets[0]))
            registers.append(ptx.fma_f16x2(high, Uint32(F16_SIXTEENTH), offsets[1]))
        return registers

    def _bytes_to_bf16(self, words, offsets, _masks):
        registers = []
        for word in words:
            floats = [ptx.prmt(word, Uint32(FP32_TWO_TO_23), Uint32(0x7650 + byte)) for byte in range(4)]
            values = [number.bitcast(Float32) + offsets[byte % 2] for byte, number in enumerate(floats)]
            # Integers below 256: all their bits are in the upper half.
            bits = [value.bitcast(Uint32) for value in values]
            registers += [ptx.prmt(bits[i], bits[i + 2], Uint32(0x7632)) for i in range(2)]
        return registers

    def _bytes_to_f16(self, words, offsets, _masks):
        registers = []
        for word in words:
            for row, selector in enumerate((0x5250, 0x5351)):
                pair = ptx.prmt(word, Uint32(F16_1024), Uint32(selector))
                registers.append(self.math.add(pair, offsets[row]))
        return registers


def packed_power(exponent: int) -> int:
    """Returns 2**exponent in both halves of a packed bf16 pair."""
    return BF16_ONES + exponent * BF16_EXPONENT


class SubnormalDecoder(CodeDecoder):
    """Decodes codes to scaled bf16 weights. One fused multiply-add scales a code and subtracts half the range of codes.
    Zero points take one more instruction.

    A code in the low bits of a 16-bit half is the bf16 number code * 2**-133, so a mask converts it. This is also true
    for 8-bit codes, since the smallest normal numbers have the same spacing as subnormal numbers. One fused
    multiply-add then multiplies by the scale, and subtracts the scale times half the range of codes. Half the range is
    a power of two, so its product with the scale is exact, and weights are rounded once. The product of a zero point
    and a scale need not be exact, so a zero point is subtracted before the multiplication. 2**133 is too large for
    bf16. So decoded weights are 2**-32 times the weights, and accumulators are multiplied by 2**32 (``unit``). This
    requires scales below 2**27. With scaling, 8 codes of 4 bits take 9 instructions, 8 codes of 8 bits take 8; with
    zero points, 13 and 12.

    Marlin and FP6-LLM convert FP8 and FP6 weights, subnormal numbers included, by masks and one product with a power of
    two. Here integers are converted in this way, read as subnormal floats.
    """

    scales_weights = True
    unit = 2.0**-UNIT_EXPONENT

    def __init__(self, bits: int, dtype: str, zero_point: bool = False):
        assert dtype == "bf16", f"dtype {dtype!r} is not bf16"
        super().__init__(bits)
        self.symmetric_zero = 1 << (bits - 1)
        self.zero_point = zero_point
        self._pairs = self._nibbles if bits == 4 else self._bytes
        # Of the thread's second row the codes of 4 bits stand four bits further up.
        self.places = (0, 4 if bits == 4 else 0)
        self.factors = [packed_power(UNIT_EXPONENT - SUBNORMAL_EXPONENT - place) for place in self.places]
        self.half_range = packed_power(bits - 1 + UNIT_EXPONENT) ^ BOTH_SIGNS

    def row_numbers(self, scales, points) -> list[Any]:
        """Returns (factor, offset) for the codes of each row. Without ``scales`` the scale is 1.

        points: zero points; not used for symmetric weights.
        """
        rows = [(Uint32(factor), self._offset(points, row)) for row, factor in enumerate(self.factors)]
        if scales is None:
            return rows
        if self.zero_point:
            return [(ptx.mul_bf16x2(scales[i], factor), offset) for i, (factor, offset) in enumerate(rows)]
        return [tuple(ptx.mul_bf16x2(scales[i], number) for number in row) for i, row in enumerate(rows)]

    def _offset(self, points, row: int):
        """Returns the number to add to a row's codes. With zero points, it is added before codes are scaled. Without
        zero points, it is added by the multiply-add that scales codes.
        """
        if not self.zero_point:
            return Uint32(self.half_range)
        return points[row] * Uint32(0x00010001 << self.places[row]) | Uint32(BOTH_SIGNS)

    def fragment(self, words, step: int, rows, masks=None) -> list[Any]:
        """Returns the scaled weights of a k16 step, divided by ``unit``."""
        first = step * self.words_per_step
        pairs = self._pairs(words[first : first + self.words_per_step])
        return [self._scaled(pair, *rows[i % 2]) for i, pair in enumerate(pairs)]

    def _scaled(self, pair, factor, offset):
        if self.zero_point:
            return ptx.mul_bf16x2(ptx.add_bf16x2(pair, offset), factor)
        return numbers.fma_bf16x2(pair, factor, offset)

    def _nibbles(self, words) -> list[Any]:
        return [word & Uint32(mask) for word in (words[0], words[0] >> 8) for mask in (LOW_NIBBLES, HIGH_NIBBLES)]

    def _bytes(self, words) -> list[Any]:
        upper = Uint32(UPPER_BYTES)
        return [pair for word in words for pair in (word & Uint32(BYTES), ptx.prmt(word, Uint32(0), upper))]
