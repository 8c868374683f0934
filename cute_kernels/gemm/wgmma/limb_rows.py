"""Device code that makes limbs from rows of x: two signed limbs of 8 bits for each input, and a scale for each 128
inputs.

The MMAs of bytes in :mod:`.limbs` read limbs. The largest of 128 inputs decides the power of two by which all 128 are
scaled. A scaled input is a 16-bit fixed-point number: 256 times a high limb plus a low limb, both from -128 to 127.
Inputs of at least a 64th of the largest (an 8th with fp16) are exact. Smaller inputs are off by at most 2**-15 of the
largest. If 128 inputs contain an infinity or NaN, their scale is NaN.

A half warp makes the limbs of 128 inputs of a row; each lane has 8 inputs. In memory, 128 high limbs lie before 128 low
limbs. The limbs of the first eight and the second eight of 16 inputs are interleaved, so two lanes exchange limbs.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import lanes, numbers, ptx

PIECE_BYTES = 16  # bytes of x that a lane has: 8 inputs
GROUP_LANES = 16
FRACTION_BITS = 23  # of an fp32 number
INFINITY = 255 << FRACTION_BITS
# Fixed-point numbers stay below 2**15 - 128, since a signed high limb cannot be 128. So a magnitude less than 2**-7
# below a power of two is treated as that power.
TOP_EXPONENT, ROUND_UP = 14, 1 << FRACTION_BITS - 7
LEAST_EXPONENT = 127 - 100  # biased; of the least group maximum that has a scale: smaller scales are no fp32
CODE_UNIT_BITS = 4  # bytes of codes are 16 times the codes
# Of limbs in E4M3, which need no such care. The product of an FP4 code, in bytes of 2**-6, with a group's largest input
# is at least the code and less than twice it, so the largest scales overflow no earlier than results.
E4M3_TOP_EXPONENT, E4M3_ROUND_UP = 6, 0
MAGIC = 0x4B400000  # 1.5 * 2**23: added to a float it leaves the nearest integer in the lower bits


class RowLimbs:
    """Makes the limbs of a lane's 8 inputs of a row. Callers store the limbs.

    Attributes:
        unit_bits: log2 of the byte to which the weight's decoder converts a code of the number 1.
        top_exponent: the exponent that a group's largest input has in fixed point.
        round_up: an integer that is added to the bits of the largest magnitude before the exponent is taken.
    """

    def __init__(
        self,
        dtype: str,
        *,
        unit_bits: int = CODE_UNIT_BITS,
        top_exponent: int = TOP_EXPONENT,
        round_up: int = ROUND_UP,
    ):
        self.dtype, self.unit_bits, self.top_exponent, self.round_up = dtype, unit_bits, top_exponent, round_up

    @cute.jit
    def load(self, x, row, piece, row_pieces):
        """Loads a lane's 8 inputs, packed; inputs after the end of the row are 0."""
        words = cute.make_rmem_tensor(4, Uint32)
        words.fill(0)
        if piece < row_pieces:
            loaded = ptx.load_global_words(x + (Int64(row) * row_pieces + piece) * PIECE_BYTES, 0, 4, constant=False)
            for i in cutlass.range_constexpr(4):
                words[i] = loaded[i]
        return [words[i] for i in range(4)]

    def largest(self, words) -> Any:
        """Returns the bits of the largest magnitude among a lane's inputs. The bits are compared as integers, so
        infinity and NaN are the largest.
        """
        values = [half for word in words for half in self.to_floats(word)]
        return lanes.in_pairs(cutlass.max, [Int32(numbers.bits(ptx.absolute(value))) for value in values])

    def of_group(self, largest) -> Any:
        """Returns the bits of the largest magnitude in a group. 16 lanes hold the inputs of the group."""
        return lanes.over_lanes(cutlass.max, largest, lanes.neighbours(GROUP_LANES))

    def limbs(self, words, factor, lane) -> list[Any]:
        """Returns limbs of the 16 inputs that a lane and its neighbour have. Even lanes get the 16 high limbs, odd
        lanes the 16 low limbs."""
        values = [half for word in words for half in self.to_floats(word)]
        fixed = [Uint32(numbers.bits(ptx.fma(value, factor, Uint32(MAGIC).bitcast(Float32)))) for value in values]
        low = self.bytes_of(fixed, 0)
        high = self.bytes_of([one + Uint32(128) for one in fixed], 1)
        odd = (lane & 1) == 1
        own = [cutlass.select_(odd, b, a) for a, b in zip(high, low, strict=True)]
        given = [cutlass.select_(odd, a, b) for a, b in zip(high, low, strict=True)]
        came = [cute.arch.shuffle_sync_bfly(word, offset=1) for word in given]
        first = [cutlass.select_(odd, b, a) for a, b in zip(own, came, strict=True)]
        second = [cutlass.select_(odd, a, b) for a, b in zip(own, came, strict=True)]
        return [ptx.prmt(first[i], second[i], Uint32(selector)) for i in range(2) for selector in (0x5140, 0x7362)]

    def scales_of(self, largest) -> tuple[Any, Any]:
        """Returns (the power of two by which inputs become fixed-point numbers, the bits of the scale). The scale is
        the reciprocal of that power, divided by 2 ** `unit_bits`."""
        exponent = cutlass.max((largest + self.round_up) >> FRACTION_BITS, LEAST_EXPONENT)
        factor = Uint32((254 + self.top_exponent - exponent) << FRACTION_BITS).bitcast(Float32)
        scale = (exponent - self.top_exponent - self.unit_bits) << FRACTION_BITS
        finite = largest < INFINITY
        return factor, cutlass.select_(finite, Uint32(scale), Uint32(0x7FFFFFFF))

    def bytes_of(self, words, byte: int) -> list[Any]:
        """Returns one byte of each of eight words, packed."""
        pair = byte | (4 + byte) << 4
        halves = [ptx.prmt(words[i], words[i + 1], Uint32(pair)) for i in range(0, 8, 2)]
        return [ptx.prmt(halves[i], halves[i + 1], Uint32(0x5410)) for i in (0, 2)]

    def to_floats(self, word) -> list[Any]:
        """Returns both elements of a packed pair as fp32."""
        if self.dtype == "bf16":
            return [ptx.bf16x2_low_to_float(word), ptx.bf16x2_high_to_float(word)]
        return [ptx.half2_low_to_float(word), ptx.half2_high_to_float(word)]
