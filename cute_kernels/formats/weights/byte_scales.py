"""Mixins of weight formats for scales of one byte, which bf16 holds exactly, and for scales of four bytes. Formats with
different codes share them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from cute_kernels.formats.weights.decoder import PackedMath
from layouts.numbers import ceil_log2

E8M0_BIAS, E8M0_MOST, E8M0_NAN = 127, 254, 255


class ByteScales:
    """A mixin, to be listed before `WeightFormat`: scales are bytes, activations are bf16."""

    scale_bytes: ClassVar[int] = 1
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)

    @abstractmethod
    def numbers_of(self, scales: torch.Tensor) -> torch.Tensor:
        """Converts stored scales to numbers, fp64."""

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def activation_dtype(self, scale_dtype: torch.dtype) -> torch.dtype:
        if scale_dtype != torch.uint8:
            raise TypeError(f"scales: got dtype {scale_dtype}, want torch.uint8, a byte for each")
        return torch.bfloat16


class WordScales:
    """A mixin, to be listed before `WeightFormat`: scales are four bytes.

    Scales are stored as int32 for bf16 activations and as uint32 for fp16 ones, so that a module's ``half()`` and
    ``to(dtype)`` do not round them.
    """

    scale_bytes: ClassVar[int] = 4

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int32 if dtype == torch.bfloat16 else torch.uint32

    def activation_dtype(self, scale_dtype: torch.dtype) -> torch.dtype:
        if scale_dtype not in (torch.int32, torch.uint32):
            wanted = "four bytes as torch.int32, or as torch.uint32 for fp16 activations"
            raise TypeError(f"scales: got dtype {scale_dtype}, want {wanted}")
        return torch.bfloat16 if scale_dtype == torch.int32 else torch.float16


class PowerScales(ByteScales):
    """A mixin, to be listed before `WeightFormat`: scales are E8M0 bytes, 2**(byte - 127); 255 is NaN."""

    given_scale_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.uint8, torch.float8_e8m0fnu)

    def numbers_of(self, scales: torch.Tensor) -> torch.Tensor:
        return torch.exp2(scales.double() - E8M0_BIAS)

    def stored_scales(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rounds each value up to a power of two, and returns the byte of this power."""
        return ceil_log2(values.clamp(2.0**-E8M0_BIAS, 2.0**E8M0_BIAS)).add(E8M0_BIAS).to(torch.uint8)


def power_word(math: PackedMath, word: Any) -> Any:
    """Returns the bf16 number of an E8M0 byte up to 254, in the low half of a word."""
    # 2**-127 is subnormal in bf16: the bit below those of the exponent.
    return word << 7 | (math.word(1) - (word + 255 >> 8)) << 6
