"""The formats of 4- and 8-bit integer codes with a shift: W = (code - m) * scale + shift, where m is half the range of
codes.

These formats hold the weights of HQQ and torchao, whose zero points are no integers. torchao's INT4 has the formula
above. HQQ's formula is W = (code - z) * scale, so shift is (m - z) * scale. Scale and shift have the dtype of the
activations. A stored scale has four bytes: the scale in the lower half, the shift in the upper half. So kernels that
support fp32 scales of groups support these formats. A weight is rounded once, as torchao's own kernels do with a fused
multiply-add.

| key | groups |
|---|---|
| `w4f_g64`, `w8f_g64` | 64 inputs of a row; the other keys end in 16, 32, 128 or 256 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from cute_kernels.formats.weights.base import WeightFormat, register
from cute_kernels.formats.weights.byte_scales import WordScales
from cute_kernels.formats.weights.decoder import ByteDecoder, CodeDecoder, PackedMath
from cute_kernels.formats.weights.integers import GROUP_SIZES, SCALE_LIMIT, UnsignedCodes
from layouts.numbers import quotient
from layouts.weights.hopper import CODE_BITS

FP16_LIMIT = 128.0  # that fp16 scales are below: kernels multiply them by 2**9
# Of packed pairs: codes of rows g and g + 8 in a word of four bits each, and those of bytes 0 and 2, 1 and 3.
NIBBLES, BYTES, UPPER_BYTES = (0x000F000F, 0x00F000F0), 0x00FF00FF, 0x4341
# Of a dtype: exponent of its smallest numbers, in which codes are read; of what decoded codes count; its bits.
SMALLEST = {"bf16": -133, "fp16": -24}
UNIT = {"bf16": -6, "fp16": -9}
MANTISSA, BIAS = {"bf16": 7, "fp16": 10}, {"bf16": 127, "fp16": 15}


@dataclass(frozen=True, eq=False)
class ShiftedFormat(UnsignedCodes, WordScales, WeightFormat):
    """Unsigned codes with a scale and a shift for each group."""

    bits: int = 4
    group_size: int = 64

    decode_cost: ClassVar[float] = 1.4

    @property
    def codes_name(self) -> str:
        return f"w{self.bits}f"

    @property
    def title(self) -> str:
        return f"INT{self.bits} in groups of {self.group_size} with floating zero points"

    @property
    def sums_inputs(self) -> bool:
        return True

    # -- values --------------------------------------------------------------------------------------------------------

    def pairs(self, scales: torch.Tensor, shifts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Packs floating scales and shifts of equal shapes into stored scales; both are rounded to ``dtype``."""
        both = torch.stack((scales.to(dtype), shifts.to(dtype)), dim=-1)
        return both.view(self.scale_dtype(dtype)).squeeze(-1)

    def parts(self, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits stored scales into (scales, shifts)."""
        both = stored.contiguous().unsqueeze(-1).view(self.activation_dtype(stored.dtype))
        return both[..., 0], both[..., 1]

    def stored_scales(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.pairs(values, torch.zeros_like(values), dtype)

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        scale, shift = (part.double().unsqueeze(-1) for part in self.parts(scales))
        return ((codes.double() - self.symmetric_zero) * scale + shift).float()

    def check_values(self, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        own, _ = self.parts(scales)
        limit = SCALE_LIMIT if own.dtype == torch.bfloat16 else FP16_LIMIT
        most = float(own.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).max())
        if most >= limit:
            raise ValueError(f"scales: got {most:g}, want scales below {limit:.0f} in {own.dtype}")

    def choose_scales(self, w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
        """Chooses scales and shifts such that codes span the range of a group. The range need not contain 0."""
        low, high = w.amin(dim=-1).double(), w.amax(dim=-1).double()
        scales = quotient(high - low, (1 << self.bits) - 1)
        scales = self.pairs(scales, low + self.symmetric_zero * scales, dtype)
        self.check_values(scales, None)
        return scales, None

    def choose_codes(self, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        scale, shift = (part.double().unsqueeze(-1) for part in self.parts(scales))
        codes = torch.where(scale > 0, (w - shift) / scale, 0.0).round_().add_(self.symmetric_zero)
        return codes.clamp_(0, (1 << self.bits) - 1).to(torch.uint8)

    # -- device --------------------------------------------------------------------------------------------------------

    def decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        return ShiftedDecoder(self.bits, dtype, math)

    def byte_decoder(self, math: PackedMath) -> ByteDecoder:
        from cute_kernels.formats.weights.integer_decode import NibbleBytes

        return NibbleBytes()

    def scales_codes(self, dtype: str) -> bool:
        return True

    def scaling_decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        return self.decoder(dtype, math)


class ShiftedDecoder(CodeDecoder):
    """Decodes codes to scaled and shifted weights. A code in the low bits of a 16-bit half is a subnormal number. One
    fused multiply-add subtracts half the range of codes exactly; results have the unit 2 ** `UNIT`. A second fused
    multiply-add applies scale and shift. 8 codes of 4 bits take 13 instructions, 8 codes of 8 bits take 12.
    """

    scales_weights = True

    def __init__(self, bits: int, dtype: str, math: PackedMath) -> None:
        super().__init__(bits)
        self.dtype, self.math = dtype, math
        # Of the thread's second row the codes of 4 bits stand four bits further up.
        places = (0, 4) if bits == 4 else (0, 0)
        self.powers = [self._power(UNIT[dtype] - SMALLEST[dtype] - place) for place in places]
        self.half_range = self._power(bits - 1 + UNIT[dtype]) | 0x80008000

    def _power(self, exponent: int) -> int:
        """Returns 2**exponent in both halves of a packed pair."""
        return (BIAS[self.dtype] + exponent << MANTISSA[self.dtype]) * 0x00010001

    def row_numbers(self, scales, points) -> list[Any]:
        """Returns (scale, shift) of each row, as packed pairs. scales: stored scales, as fp32."""
        math, found = self.math, []
        for stored in cast(Any, scales):
            word = math.bits(stored)
            scale, shift = (math.prmt(word, word, math.word(half)) for half in (0x1010, 0x3232))
            found.append((math.multiply(scale, math.word(self._power(-UNIT[self.dtype]))), shift))
        return found

    def fragment(self, words, step: int, rows, masks=None) -> list[Any]:
        """Returns the scaled and shifted weights of a k16 step."""
        math, found = self.math, []
        for i, pair in enumerate(self._pairs(words, step)):
            power, (scale, shift) = math.word(self.powers[i % 2]), rows[i % 2]
            found.append(math.fma(math.fma(pair, power, math.word(self.half_range)), scale, shift))
        return found

    def _pairs(self, words, step: int) -> list[Any]:
        """Extracts the codes of a k16 step. Returns them as packed pairs, one for each of the four registers."""
        math = self.math
        if self.bits == 4:
            word = words[step]
            return [part & math.word(mask) for part in (word, word >> 8) for mask in NIBBLES]
        zero, upper = math.word(0), math.word(UPPER_BYTES)
        return [
            pair
            for word in words[2 * step : 2 * step + 2]
            for pair in (word & math.word(BYTES), math.prmt(word, zero, upper))
        ]


_SHIFTED = {
    (bits, group_size): register(ShiftedFormat(bits, group_size)) for bits in CODE_BITS for group_size in GROUP_SIZES
}


def shifted(bits: int, group_size: int) -> ShiftedFormat:
    """Returns the format of 4- or 8-bit codes in groups of 16, 32, 64, 128 or 256 inputs. Raises KeyError if there is
    none."""
    return _SHIFTED[bits, group_size]
