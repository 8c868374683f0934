"""FP8 (E4M3) weight codes, whose scales are fp32 numbers or powers of two.

E4M3 has three bits of mantissa. Its largest number is 448; it has NaN, but no infinity.

| key | scales | what shares a scale |
|---|---|---|
| `e4m3_gchannelf32` (FP8) | fp32 | a row; a scale of the whole tensor is repeated for each row |
| `e4m3_g128f32` | fp32 | 128 inputs of a row; a scale of a 128 x 128 block is repeated for its 128 rows |
| `e4m3_g128e8m0`, `e4m3_g32e8m0` (MXFP8, OCP Microscaling 1.0) | E8M0: 2**(byte - 127) | 128 or 32 inputs of a row |

Formats with groups of 64 and 32 inputs are for parts of a weight that begin inside a group of 128. Codes are exact in
bf16 and fp16. A code times an fp32 scale is rounded to fp32, then to the activations' dtype, as in PyTorch's
``code.float() * scale``.

A NaN code makes its whole output feature NaN, for every x. So packing gives the code's group a NaN scale. Decoders need
not test for NaN codes, which they read as 480.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from cute_kernels.formats.weights.base import WeightFormat, register
from cute_kernels.formats.weights.byte_scales import E8M0_NAN, PowerScales, WordScales, power_word
from cute_kernels.formats.weights.decoder import ByteDecoder, CodeDecoder, E4m3Decoder, PackedMath
from cute_kernels.formats.weights.integers import SCALE_LIMIT
from layouts.numbers import quotient

MOST = 448.0
NAN_CODE = 0x7F  # and the same with a sign
BOTH_SIGNS, UPPER_BYTES = 0x80008000, 0x4341
# Of a code in the upper byte of 16 bits, (shift to the right, mask of exponent and mantissa then), and what 1 is there.
PLACES = {"bf16": (4, 0x07F007F0), "fp16": (1, 0x3F803F80)}
EXPONENTS = {"bf16": 120, "fp16": 8}  # placed codes are numbers times two to minus this
POWERS = {"bf16": 0x7B807B80, "fp16": 0x5C005C00}  # two to those
UNIT_EXPONENTS = {"bf16": 32, "fp16": 0}  # scaled weights come in units of two to this, so that 2**120 is in range


@dataclass(frozen=True, eq=False)
class Fp8Format(WeightFormat):
    """The base of FP8 formats: a weight is its code's number times its group's scale."""

    bits: int = 8
    group_size: int = 128

    nan_codes: ClassVar[tuple[int, ...]] = (NAN_CODE, 0x80 | NAN_CODE)
    code_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.int8, torch.float8_e4m3fn)

    @property
    def codes_name(self) -> str:
        return "e4m3"

    @property
    def title(self) -> str:
        return f"FP8 in groups of {self.group_size}" if self.group_size else "FP8 by rows"

    @abstractmethod
    def numbers_of(self, scales: torch.Tensor) -> torch.Tensor:
        """Converts stored scales to numbers, fp64."""

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        numbers = codes.contiguous().view(torch.float8_e4m3fn).double()
        return (numbers * self.numbers_of(scales).unsqueeze(-1)).float()

    def choose_scales(self, w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
        scales = self.stored_scales(quotient(w.abs().amax(dim=-1), MOST), dtype)
        self.check_values(scales, None)
        return scales, None

    def choose_codes(self, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """Returns the codes of the nearest numbers, ties to even; magnitudes above 448 saturate."""
        scale = self.numbers_of(scales).unsqueeze(-1)
        ratio = torch.where(scale == 0, w.sign() * 0, w.double() / scale).clamp(-MOST, MOST)
        return ratio.float().to(torch.float8_e4m3fn).view(torch.uint8)

    def decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        return Fp8Decoder(dtype, math)

    def e4m3_decoder(self) -> type[E4m3Decoder]:
        return E4m3Codes


@dataclass(frozen=True, eq=False)
class FloatFp8(WordScales, Fp8Format):
    """FP8 with fp32 scales of groups or of rows. Scales are at most 2**27, so products of limbs times scales do not
    overflow before they are multiplied by the scale of x."""

    bytes_in_e4m3: ClassVar[bool] = True
    byte_exponent: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # A row's scale meets the sums; of groups each weight is multiplied in fp32 and packed again.
        object.__setattr__(self, "decode_cost", 1.75 if self.group_size else 1.0)

    @property
    def scales_name(self) -> str:
        return f"{super().scales_name}f32"

    @property
    def codes_as_bytes(self) -> bool:
        return True

    def stored_scales(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.float().contiguous().view(self.scale_dtype(dtype))

    def numbers_of(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.contiguous().view(torch.float32).double()

    def check_values(self, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        most = float(self.numbers_of(scales).abs().nan_to_num(nan=0.0, posinf=torch.inf).max())
        if most >= SCALE_LIMIT:
            raise ValueError(f"scales: got {most:g}, want fp32 scales below 2**27 = {SCALE_LIMIT:.0f}")

    def with_nan_codes(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        # As fp32: PyTorch 2.11 has no `where` of uint32.
        numbers = scales.contiguous().view(torch.float32).masked_fill(is_nan(codes).any(dim=-1), torch.nan)
        return numbers.view(scales.dtype)

    def byte_decoder(self, math: PackedMath) -> ByteDecoder:
        return Fp8Bytes(math)

    def scales_codes(self, dtype: str) -> bool:
        return bool(self.group_size)

    def scaling_decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        return ScaledFp8Decoder(dtype, math)


@dataclass(frozen=True, eq=False)
class PowerFp8(PowerScales, Fp8Format):
    """FP8 with E8M0 scales of groups. The byte 255 is NaN, and makes weights NaN."""

    @property
    def scales_name(self) -> str:
        return f"{super().scales_name}e8m0"

    @property
    def title(self) -> str:
        return "MXFP8" if self.group_size == 32 else f"{super().title} (E8M0)"

    def numbers_of(self, scales: torch.Tensor) -> torch.Tensor:
        return torch.where(scales == E8M0_NAN, torch.nan, super().numbers_of(scales))

    def with_nan_codes(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.where(is_nan(codes).any(dim=-1), scales.new_tensor(E8M0_NAN), scales)

    def decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        return PowerFp8Decoder(dtype, math)


def is_nan(codes: torch.Tensor) -> torch.Tensor:
    """Returns whether uint8 codes are NaN."""
    return codes & NAN_CODE == NAN_CODE


class Fp8Decoder(CodeDecoder):
    """Decodes FP8 codes to 16-bit floats. Sign, exponent and mantissa are moved to the float's fields: the exponent to
    the lowest bits of its field. A product with a power of two then gives the number, also for subnormal codes. 8 codes
    take 18 instructions."""

    def __init__(self, dtype: str, math: PackedMath) -> None:
        super().__init__(bits=8)
        self.dtype, self.math = dtype, math

    def fragment(self, words, step: int, rows, masks=None) -> list[Any]:
        power = self.math.word(POWERS[self.dtype])
        return [self.math.multiply(pair, power) for pair in self.placed(words, step)]

    def placed(self, words, step: int) -> list[Any]:
        """Returns the packed pairs of the four registers: decoded numbers times 2 ** -`EXPONENTS` [dtype]."""
        first, found = step * self.words_per_step, []
        for word in words[first : first + self.words_per_step]:
            found += [self._placed(word << 8), self._placed(word)]
        return found

    def _placed(self, pair) -> Any:
        shift, mask = PLACES[self.dtype]
        return (pair & self.math.word(BOTH_SIGNS)) | ((pair >> shift) & self.math.word(mask))


class E4m3Codes(E4m3Decoder):
    """Returns E4M3 codes unchanged, in the fragment's order. 8 codes take two instructions."""

    slots = 16

    def fragment(self, words) -> list[Any]:
        # Of bytes a, b of two words: the even ones of a and b in turn, and the odd ones.
        return [self.permuted(words[0], words[1], selector) for selector in (0x6240, 0x7351)]


class Fp8Bytes(ByteDecoder):
    """Returns E4M3 codes unchanged, as bytes."""

    def __init__(self, math: PackedMath) -> None:
        self.codes = E4m3Codes(math)

    def fragment(self, words, masks) -> list[Any]:
        return self.codes.fragment(words)


class PowerFp8Decoder(Fp8Decoder):
    """Decodes FP8 with E8M0 scales, in bf16."""

    def scale_word(self, word) -> Any:
        math = self.math
        nan = (word + math.word(1)) >> 8  # 255 is infinity so far: a bit of the mantissa makes it NaN
        return power_word(math, word) | nan << 6


class ScaledFp8Decoder(Fp8Decoder):
    """Decodes FP8 times an fp32 scale. Products are rounded to fp32, then to the activations' dtype. 8 codes take 34
    instructions."""

    scales_weights = True

    def __init__(self, dtype: str, math: PackedMath) -> None:
        super().__init__(dtype, math)
        self.unit = 2.0 ** UNIT_EXPONENTS[dtype]

    def row_numbers(self, scales, points) -> Any:
        """Returns, for each row, the factor by which `fragment` multiplies the results of `placed`. scales: fp32."""
        exponent = EXPONENTS[self.dtype] - UNIT_EXPONENTS[self.dtype]
        return [self.math.scaled(scale, 2.0**exponent) for scale in cast(Any, scales)]

    def fragment(self, words, step: int, rows, masks=None) -> list[Any]:
        return [self.math.scaled_pair(pair, rows[i % 2]) for i, pair in enumerate(self.placed(words, step))]


FP8 = register(FloatFp8(group_size=0))
FP8_BLOCK = register(FloatFp8(group_size=128))
FP8_POWER_BLOCK = register(PowerFp8(group_size=128))
MXFP8 = register(PowerFp8(group_size=32))
for _size in (32, 64):
    register(FloatFp8(group_size=_size))
register(PowerFp8(group_size=64))
