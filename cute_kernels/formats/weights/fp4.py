"""FP4 codes (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and a sign) under scales of one byte: MXFP4 and NVFP4.

| key | scales | groups | second level |
|---|---|---|---|
| `e2m1_g32e8m0` (MXFP4, OCP Microscaling 1.0) | E8M0: 2**(byte - 127), at most 2 | 32 | none |
| `e2m1_g32e8m0any` | the same without a limit: weights of more than 12 may need it | 32 | none |
| `e2m1_g16e4m3` (NVFP4) | E4M3, positive | 16 | fp32, one for each row |

Codes, scales and their products are exact in bf16, and codes are exact in E4M3. So few rows of x are multiplied in E4M3
limbs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cute_kernels.formats.weights.base import WeightFormat, register
from cute_kernels.formats.weights.byte_scales import E8M0_MOST, E8M0_NAN, ByteScales, PowerScales, power_word
from cute_kernels.formats.weights.decoder import ByteDecoder, CodeDecoder, E4m3Decoder, PackedMath
from layouts.numbers import ceil_log2, quotient

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8  # bit of a code
E4M3_MOST, E4M3_LEAST = 448.0, 2.0**-9
# Pairs of codes in bits 0 to 3 and 4 to 7 of halves of a word; what copies a code to bits 12 to 15 and 6 to 9; and, of
# these copies, the first one's sign with the second one's exponent and mantissa, which are bf16's lowest ones.
PAIRS = (0x000F000F, 1 << 12 | 1 << 6), (0x00F000F0, 1 << 8 | 1 << 2)
SIGNS_AND_NUMBERS = 0x81C081C0
TWO_TO_126, TWO_TO_120 = 0x7E807E80, 0x7B807B80  # in bf16
HALF, MOST_FOLDED = 0x3F00, 128  # a bf16 number; the E8M0 byte of 2, times 2**126 bf16's largest power of two
E4M3_BITS = 0x1C1C1C1C  # where bytes of E4M3 have E2M1's exponent and mantissa
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531
# Of magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 the E4M3 bytes, low byte first; the same times 2**-6, the 0.5 flushed, and
# what a power of two more adds; bits of magnitudes and signs.
E4M3_ONE = 0x3C383000, 0x4C484440
E4M3_TABLE = (0x0C080000, 0x08080800), (0x1C181410, 0x08080808)
E4M3_SPREAD = 12  # powers of two from there to 2**6
LEAST_BASE = E4M3_SPREAD + 1
MAGNITUDES, SIGNS = 0x77777777, 0x80808080


@dataclass(frozen=True, eq=False)
class Fp4Format(ByteScales, WeightFormat):
    """The base of FP4 formats: a weight is its code's number times its group's scale. Activations are bf16, which holds
    every scale exactly."""

    bits: int = 4
    group_size: int = 32
    bytes_in_e4m3: ClassVar[bool] = True
    byte_exponent: ClassVar[int] = -6

    code_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)

    @property
    def codes_name(self) -> str:
        return "e2m1"

    @property
    def codes_as_bytes(self) -> bool:
        return True

    # -- values --------------------------------------------------------------------------------------------------------

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        levels = torch.tensor(LEVELS, device=codes.device, dtype=torch.float64)
        numbers = torch.cat((levels, -levels))[codes.int()]
        return (numbers * self.numbers_of(scales).unsqueeze(-1)).float()

    def choose_scales(self, w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
        return self.stored_scales(quotient(w.abs().amax(dim=-1), LEVELS[-1]), dtype), None

    def choose_codes(self, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """Returns the codes of the nearest numbers, ties to even codes."""
        levels = torch.tensor(LEVELS, device=w.device, dtype=torch.float64)
        ratio = w.double().abs() / self.numbers_of(scales).unsqueeze(-1)
        middles = (levels[1:] + levels[:-1]) / 2
        below, above = (torch.bucketize(ratio, middles, right=right) for right in (False, True))
        codes = torch.where(below % 2 == 0, below, above)
        return (codes + SIGN * w.signbit()).to(torch.uint8)

    # -- device --------------------------------------------------------------------------------------------------------

    def byte_decoder(self, math: PackedMath) -> ByteDecoder:
        return Fp4Bytes(math)

    def e4m3_decoder(self) -> type[E4m3Decoder]:
        return E2m1Codes


@dataclass(frozen=True, eq=False)
class MxFp4(PowerScales, Fp4Format):
    """MXFP4: an E8M0 scale for every 32 inputs. Scales are at most 2, so that one product decodes and scales. With
    ``any_scale`` they may be larger."""

    any_scale: bool = False

    power_scales: ClassVar[bool] = True
    decode_cost: ClassVar[float] = 1.25
    stream_clocks: ClassVar[float] = 278.0  # an H200's, as all others: bench/results/linear_formats.json
    limb_clocks: ClassVar[float] = 230.0  # with e4m3 of ResidentCost: docs/design/weight_only_few_rows.md

    @property
    def title(self) -> str:
        return "MXFP4"

    @property
    def scales_name(self) -> str:
        return f"g32e8m0{'any' * self.any_scale}"

    def check_values(self, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        if int(scales.max()) > E8M0_MOST:
            raise ValueError(f"scales: got {E8M0_NAN}, which is NaN, want exponents up to {E8M0_MOST}")
        if self.fitting(scales) is not self:
            wanted = f"exponents up to {MOST_FOLDED} in {self.key}, or the format {MXFP4_ANY.key}"
            raise ValueError(f"scales: got {int(scales.max())}, want {wanted}")

    def fitting(self, scales: torch.Tensor) -> WeightFormat:
        return self if self.any_scale or not bool((scales.view(torch.uint8) > MOST_FOLDED).any()) else MXFP4_ANY

    def includes(self, other: WeightFormat) -> bool:
        return other is self or (self.any_scale and other is MXFP4)

    def decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        return MxFp4Decoder(math)

    def scales_codes(self, dtype: str) -> bool:
        return not self.any_scale

    def scaling_decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        return FoldedMxFp4Decoder(math)


@dataclass(frozen=True, eq=False)
class NvFp4(Fp4Format):
    """NVFP4: an E4M3 scale for every 16 inputs, and an fp32 scale for each row."""

    group_size: int = 16
    row_scales: ClassVar[bool] = True
    decode_cost: ClassVar[float] = 1.2
    stream_clocks: ClassVar[float] = 325.0
    limb_clocks: ClassVar[float] = 270.0
    given_scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.float8_e4m3fn)

    @property
    def scales_name(self) -> str:
        return "g16e4m3"

    @property
    def title(self) -> str:
        return "NVFP4"

    def numbers_of(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.view(torch.float8_e4m3fn).double()

    def check_values(self, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        if int(scales.max()) >= 0x7F:
            raise ValueError("scales: got a byte of 127 or more, want positive E4M3 numbers")

    def stored_scales(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.clamp(E4M3_LEAST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)

    def choose_row_scales(self, w: torch.Tensor) -> torch.Tensor:
        """Chooses one power of two for the whole tensor, such that the largest scale of a group is at most 448."""
        most = quotient(w.abs().max().float().clamp(min=2.0**-100), LEVELS[-1] * E4M3_MOST)
        return torch.ldexp(torch.ones_like(most), ceil_log2(most)).expand(len(w)).contiguous()

    def decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        return NvFp4Decoder(math)


class Fp4Decoder(CodeDecoder):
    """Decodes FP4 codes to bf16. The exponent and the mantissa of a code are moved to the lowest bits of bf16's
    exponent and the highest bits of its mantissa. A product with 2**126 then gives the number, also for subnormal
    codes.

    8 codes take nine logic instructions and eight products. Integer multiplications, instead of shifts, move the sign
    and the magnitude, as they run in their own pipe. A warp takes 18 cycles; with two shifts instead, it would take 30.
    """

    def __init__(self, math: PackedMath) -> None:
        super().__init__(bits=4)
        self.math = math

    def fragment(self, words, step: int, rows, masks=None) -> list[Any]:
        return [self.math.multiply(pair, self.math.word(TWO_TO_126)) for pair in self.placed(words[step])]

    def placed(self, codes) -> list[Any]:
        """Returns the packed pairs of the four registers: decoded numbers times 2**-126."""
        math = self.math
        return [
            (word & math.word(pair)) * math.word(copies) & math.word(SIGNS_AND_NUMBERS)
            for word in (codes, codes >> 8)
            for pair, copies in PAIRS
        ]


class MxFp4Decoder(Fp4Decoder):
    """Decodes FP4 with E8M0 scales of any size."""

    def scale_word(self, word) -> Any:
        return power_word(self.math, word)


class FoldedMxFp4Decoder(Fp4Decoder):
    """Decodes and scales FP4 by one product, for E8M0 scales up to 2. The factor is 2**126 times the scale; the
    factor's bf16 exponent is the scale's byte plus 126. 8 codes take nine logic instructions and eight products."""

    scales_weights = True

    def scale_word(self, word) -> Any:
        return (word << 7) + self.math.word(HALF)

    def row_numbers(self, scales, points) -> Any:
        return scales

    def fragment(self, words, step: int, rows, masks=None) -> list[Any]:
        return [self.math.multiply(pair, rows[i % 2]) for i, pair in enumerate(self.placed(words[step]))]


class NvFp4Decoder(Fp4Decoder):
    """Decodes FP4 with E4M3 scales. A scale's byte, shifted left by four bits and read as bf16, is the scale times
    2**-120.
    """

    def scale_word(self, word) -> Any:
        return self.math.multiply(word << 4, self.math.word(TWO_TO_120))


class E2m1Codes(E4m3Decoder):
    """Converts FP4 codes to E4M3. Magnitudes are looked up in a table of eight bytes for each row, then get their
    signs. 8 codes take eleven instructions.

    The scales of a k block's groups are divided by the row's largest scale, and tables are multiplied by the quotients.
    The largest scale is applied later. In the group with the largest scale, the number 6 becomes 384; the largest E4M3
    number is 448. Numbers are exact for scales down to 2**-11 of the largest. Smaller scales are taken as at least
    2**-12 of the largest, with which the smallest number becomes zero. The error is less than 2**-9 of the row's
    largest possible number.
    """

    slots, folds = 88, True

    def fold(self, scales) -> tuple[list[Any], list[Any]]:
        halves = [self._fold_row(scales[half::2]) for half in range(2)]
        tables = list(zip(*(tables for tables, _ in halves), strict=True))
        return tables, [scale for _, scale in halves]

    def _fold_row(self, powers) -> tuple[list[Any], Any]:
        """Returns (tables of a row's groups, the scale that the caller has to apply). powers: E8M0 bytes of the
        groups.
        """
        math, base = self.math, self.math.word(LEAST_BASE)
        for power in powers:
            base = math.most(base, power)
        base, tables = base - math.word(E4M3_SPREAD), []
        for power in powers:
            steps = math.most(power, base) - base
            tables.append(tuple(steps * math.word(step) + math.word(least) for least, step in E4M3_TABLE))
        return tables, math.number((base + math.word(E4M3_SPREAD // 2)) << 23)

    def fragment(self, words, tables=(E4M3_ONE, E4M3_ONE)) -> list[Any]:
        word, math, found = words[0], self.math, []
        places = word & math.word(MAGNITUDES)
        signs = (word << 4) & math.word(SIGNS), word & math.word(SIGNS)
        for selector, table, sign in zip((EVEN_BYTES, ODD_BYTES), tables, signs, strict=True):
            low, high = (math.word(part) for part in table)
            first, second = math.prmt(low, high, places), math.prmt(low, high, places >> 16)
            found.append(self.permuted(first, second, selector) | sign)
        return found


class Fp4Bytes(ByteDecoder):
    """Converts FP4 codes to E4M3, times 2**-6. E2M1's bits are E4M3's sign, lower exponent bits and upper mantissa bit.
    Only the positions of the bits change, so subnormal numbers are converted in the same way. 8 codes take seven
    instructions.
    """

    def __init__(self, math: PackedMath) -> None:
        self.math = math

    def fragment(self, words, masks) -> list[Any]:
        (word,), numbers, signs = words, self.math.word(E4M3_BITS), self.math.word(SIGNS)
        return [(word << 2) & numbers | (word << 4) & signs, (word >> 2) & numbers | word & signs]


MXFP4_ANY, MXFP4, NVFP4 = register(MxFp4(any_scale=True)), register(MxFp4()), register(NvFp4())
