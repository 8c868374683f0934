"""The formats of 4- and 8-bit integer codes: W = (code - zero) * scale, with 16-bit scales in the dtype of the
activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.arguments import is_one_of
from cute_kernels.formats.weights.base import WeightFormat, register
from cute_kernels.formats.weights.decoder import ByteDecoder, CodeDecoder, E4m3Decoder, PackedMath
from layouts.numbers import quotient
from layouts.weights.hopper import CODE_BITS

GROUP_SIZES = (16, 32, 64, 128, 256)
SHIPPED_GROUP_SIZES = GROUP_SIZES[1:]  # whose kernels a wheel has: engines take no others
SCALE_DTYPES = (torch.bfloat16, torch.float16)
SCALE_LIMIT = 2.0**27  # what bf16 scales are below: kernels multiply them by 2**101, `SubnormalDecoder`

LOW_NIBBLES, LOW_THREE = 0x0F0F0F0F, 0x07070707
SIGN_MASKS = 0xBA98  # each byte's sign, eight times
ZERO_CODE = 0x88888888  # less a code below 8: the sign, and what is missing to 8


class UnsignedCodes:
    """A mixin, to be listed before `WeightFormat`: codes are unsigned integers."""

    bits: int

    @property
    def symmetric_zero(self) -> int:
        """The code that stands for 0 if there are no zero points: 8 or 128. In formats with shifts, it stands for the
        shift."""
        return 1 << (self.bits - 1)

    @property
    def pad_code(self) -> int:
        return self.symmetric_zero

    @property
    def codes_as_bytes(self) -> bool:
        return self.bits == 4


@dataclass(frozen=True, eq=False)
class IntegerFormat(UnsignedCodes, WeightFormat):
    """Unsigned integer codes. The code for 0 is half their range, or the group's zero point. `integers` returns these
    formats."""

    has_zeros: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def codes_name(self) -> str:
        return f"w{self.bits}"

    @property
    def scales_name(self) -> str:
        return f"g{self.group_size or 'channel'}{'z' if self.has_zeros else ''}"

    @property
    def title(self) -> str:
        where = f"in groups of {self.group_size}" if self.group_size else "by rows"
        return f"INT{self.bits} {where}{' with zero points' if self.has_zeros else ''}"

    @property
    def label(self) -> str:
        return f"{self.bits}-bit"

    @property
    def options(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size or None}

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.bits, self.group_size

    def simplest(self, zeros: torch.Tensor | None) -> tuple[WeightFormat, torch.Tensor | None]:
        """Returns (the format without zero points, None) if all zero points are `symmetric_zero`. If not, returns (the
        format with zero points, ``zeros``)."""
        if zeros is None or bool((zeros == self.symmetric_zero).all()):
            return self.with_zero_points(False), None
        return self.with_zero_points(True), zeros

    def with_zero_points(self, has_zeros: bool) -> WeightFormat:
        return integers(self.bits, self.group_size, has_zeros)

    # -- values --------------------------------------------------------------------------------------------------------

    def activation_dtype(self, scale_dtype: torch.dtype) -> torch.dtype:
        if scale_dtype not in SCALE_DTYPES:
            raise TypeError(f"scales: got dtype {scale_dtype}, want torch.bfloat16 or torch.float16")
        return scale_dtype

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        w = codes.float()
        w -= self.symmetric_zero if zeros is None else zeros.unsqueeze(-1).float()
        w *= scales.unsqueeze(-1).float()
        return w

    def check_values(self, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        check_scales("scales", scales)
        check_zeros("zeros", zeros, self.bits)

    def choose_scales(self, w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Chooses scales for rounding to nearest. A group's range is extended to contain 0.

        Without a zero point, the scale is the smallest with which codes -8..7 (-128..127) cover the range. With a zero
        point, 15 (255) steps of the scale span the range. Scales are rounded up to ``dtype``.
        """
        middle, top = self.symmetric_zero, (1 << self.bits) - 1
        low, high = w.amin(dim=-1).clamp(max=0), w.amax(dim=-1).clamp(min=0)
        # Divided before they are subtracted: high - low may be beyond fp32.
        if self.has_zeros:
            exact = quotient(high, top) - quotient(low, top)
        else:
            exact = torch.maximum(quotient(high, middle - 1), quotient(low, -middle))
        scales = _round_up(exact, dtype)
        limit, reason = SCALE_LIMIT, ", want one below 2**27 in bf16"
        if dtype != torch.bfloat16:
            limit, reason = torch.inf, f", beyond {dtype}: want a wider dtype"
        if bool((scales >= limit).any()):
            raise ValueError(f"w: got a group that wants scale {exact.max().item():g}{reason}")
        if not self.has_zeros:
            return scales, None
        zeros = torch.where(scales > 0, (-low / scales.float()).round().clamp(0, top), float(middle))
        return scales, zeros.to(torch.uint8)

    def choose_codes(self, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        scale = scales.unsqueeze(-1).float()
        zero = self.symmetric_zero if zeros is None else zeros.unsqueeze(-1).float()
        codes = torch.where(scale > 0, w / scale, 0.0).round_().add_(zero).clamp_(0, (1 << self.bits) - 1)
        return codes.to(torch.uint8)

    # -- device --------------------------------------------------------------------------------------------------------

    def decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        from cute_kernels.formats.weights.integer_decode import IntegerDecoder

        return IntegerDecoder(self.bits, dtype, math)

    def byte_decoder(self, math: PackedMath) -> ByteDecoder:
        from cute_kernels.formats.weights.integer_decode import NibbleBytes

        return NibbleBytes()

    def scales_codes(self, dtype: str) -> bool:
        return dtype == "bf16"

    def scaling_decoder(self, dtype: str, math: PackedMath) -> CodeDecoder:
        from cute_kernels.formats.weights.integer_decode import SubnormalDecoder

        return SubnormalDecoder(self.bits, dtype, self.has_zeros)

    def e4m3_decoder(self) -> type[E4m3Decoder] | None:
        return Int4Codes if self.bits == 4 and not self.has_zeros else None


class Int4Codes(E4m3Decoder):
    """Converts a code to the E4M3 number (code - 8) * 2**-9: its byte is the sign and the magnitude of code - 8. 8
    codes take twelve instructions."""

    slots, unit = 96, 512.0

    def fragment(self, words) -> list[Any]:
        (word,), math = words, self.math
        found = []
        for codes, tops in ((word, word << 4), (word >> 4, word)):
            own = codes & math.word(LOW_NIBBLES)
            not_negative = self.permuted(tops, tops, SIGN_MASKS)  # by each code's highest bit
            negative = math.word(ZERO_CODE) - own
            found.append((own & math.word(LOW_THREE) & not_negative) | (negative & ~not_negative))
        return found


def integers(bits: int = 4, group_size: int | None = 128, zero_points: bool = False) -> IntegerFormat:
    """Returns the format of integer codes.

    Args:
        bits: 4 or 8.
        group_size: 16, 32, 64, 128 or 256; None, -1 or 0 for one scale per row.
        zero_points: whether groups have zero points.

    Raises:
        ValueError: there is no such format; the message names the argument.
    """
    if not is_one_of(bits, CODE_BITS):
        raise ValueError(f"bits: got {bits!r}, want 4 or 8")
    found = _INTEGERS.get((bits, _size_of(group_size), bool(zero_points)))
    if found is None:
        wanted = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"group_size: got {group_size!r}, want one of {wanted}, or None or -1 for one scale per row")
    return found


def _size_of(group_size: object) -> Any:
    """Returns the group size: 0 for one scale per row, None for an invalid argument."""
    if group_size is None or (is_one_of(group_size, (0, -1))):
        return 0
    return group_size if is_one_of(group_size, GROUP_SIZES) else None


_INTEGERS = {
    (bits, group_size, zero_points): register(IntegerFormat(bits, group_size, zero_points))
    for bits in CODE_BITS
    for group_size in (0, *GROUP_SIZES)
    for zero_points in (False, True)
}


# -- checks ------------------------------------------------------------------------------------------------------------


def check_scales(name: str, scales: torch.Tensor) -> None:
    """Raises ValueError if a bf16 scale is 2**27 or more, too large for the kernels. Usual scales are far smaller.

    Waits for a GPU. Meta tensors are not checked. NaN is accepted and makes results NaN.
    """
    if scales.dtype != torch.bfloat16 or scales.is_meta or not scales.numel():
        return
    least, most = _range_of(scales)
    if math.isnan(most):
        least, most = _range_of(scales.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))
    largest = max(-least, most)
    if largest >= SCALE_LIMIT:
        raise ValueError(f"{name}: got a scale of {largest:g}, want bf16 scales below 2**27 = {SCALE_LIMIT:.0f}")


def check_zeros(name: str, zeros: torch.Tensor | None, bits: int) -> None:
    """Raises ValueError if kernels cannot subtract one of the zero points, uint8, from codes of ``bits`` bits. Waits
    for a GPU.

    8-bit codes may have any zero point. 4-bit codes may have zero points up to 16. In a fragment's second row, zero
    points are shifted left by four bits. There, zero points above 16 would not be subnormal bf16 numbers
    (`SubnormalDecoder`). Checkpoints have no zero points above 16.
    """
    top = 1 << bits
    if zeros is not None and bits < 8 and int(zeros.max()) > top:
        raise ValueError(f"{name}: got the zero point {int(zeros.max())}, want 0 to {top} for {bits}-bit codes")


def _range_of(numbers: torch.Tensor) -> list[float]:
    """Returns [smallest, largest] of the numbers, or NaN if any number is NaN, without copying them."""
    return torch.stack((numbers.amin(), numbers.amax())).tolist()


# -- numbers -----------------------------------------------------------------------------------------------------------


def _round_up(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds ``values``, fp32 and not negative, up to numbers of a 16-bit ``dtype``."""
    rounded = values.to(dtype)
    return (rounded.view(torch.int16) + (rounded.float() < values)).view(dtype)
