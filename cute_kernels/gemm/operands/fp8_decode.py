"""Decodes codes of weights to E4M3, exactly: the A operand of FP8 products. There are no GPU types here.

A thread's codes of a k16 step, in the blob of `layouts.weights.hopper`, are those of its rows g and g + 8 for inputs
2t, 2t + 8, 2t + 1 and 2t + 9, which is the order in which x lies for these products (`.fp8_rows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.formats.weights.decoder import PackedMath

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cutlass import Uint32

LOW_NIBBLES, LOW_THREE, SIGNS = 0x0F0F0F0F, 0x07070707, 0x80808080
MAGNITUDES = 0x77777777  # of nibbles whose fourth bit is the sign
# Of E2M1's magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 the E4M3 bytes, low byte first.
E2M1_LOW, E2M1_HIGH = 0x3C383000, 0x4C484440
# Of bytes a, b of two words: the even ones of a and b in turn, and the odd ones.
EVEN, ODD = 0x6240, 0x7351
EVEN_IN_ORDER, ODD_IN_ORDER = 0x6420, 0x7531
SIGN_MASKS = 0xBA98  # each byte's sign, eight times
ZERO_CODE = 0x88888888  # less a code below 8: the sign, and what is missing to 8


class E4m3Decoder(ABC):
    """Decodes codes of one kind to E4M3.

    Attributes:
        unit: what 1 in a decoded weight counts.
    """

    unit: ClassVar[float] = 1.0

    def __init__(self, math: PackedMath) -> None:
        self.math = math

    @abstractmethod
    def fragment(self, words: Sequence[Uint32]) -> list[Uint32]:
        """Two registers of the A operand, of rows g and g + 8 of a k16 step, from a thread's codes in ``words``."""

    def permuted(self, a: Uint32, b: Uint32, selector: int) -> Uint32:
        return self.math.prmt(a, b, self.math.word(selector))


class E4m3Codes(E4m3Decoder):
    """Codes that are E4M3: 8 of them take two instructions."""

    def fragment(self, words: Sequence[Uint32]) -> list[Uint32]:
        return [self.permuted(words[0], words[1], selector) for selector in (EVEN, ODD)]


class E2m1Codes(E4m3Decoder):
    """Codes whose magnitudes are looked up in a table of eight bytes, then signed: 8 of them take nine instructions."""

    def fragment(self, words: Sequence[Uint32]) -> list[Uint32]:
        word, math = words[0], self.math
        places = word & math.word(MAGNITUDES)
        low, high = math.word(E2M1_LOW), math.word(E2M1_HIGH)
        first, second = math.prmt(low, high, places), math.prmt(low, high, places >> 16)
        found = [self.permuted(first, second, selector) for selector in (EVEN_IN_ORDER, ODD_IN_ORDER)]
        signs = (word << 4) & math.word(SIGNS), word & math.word(SIGNS)
        return [number | sign for number, sign in zip(found, signs, strict=True)]


class Int4Codes(E4m3Decoder):
    """Codes less 8 as E4M3's smallest numbers, multiples of 2**-9: their sign, and their magnitude as it is. 8 codes
    take twelve instructions."""

    unit: ClassVar[float] = 512.0

    def fragment(self, words: Sequence[Uint32]) -> list[Uint32]:
        (word,), math = words, self.math
        found = []
        for codes, tops in ((word, word << 4), (word >> 4, word)):
            own = codes & math.word(LOW_NIBBLES)
            not_negative = self.permuted(tops, tops, SIGN_MASKS)  # by each code's highest bit
            negative = math.word(ZERO_CODE) - own
            found.append((own & math.word(LOW_THREE) & not_negative) | (negative & ~not_negative))
        return found


_DECODERS: dict[str, type[E4m3Decoder]] = {"e4m3": E4m3Codes, "e2m1": E2m1Codes, "w4": Int4Codes}


def e4m3_decoder(form: WeightFormat, math: PackedMath) -> E4m3Decoder:
    """The decoder of a format's codes to E4M3, for formats that `fp8_config.fp8_problem` accepts."""
    return _DECODERS[form.codes_name](math)
