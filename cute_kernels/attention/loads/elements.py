"""The two kinds of 16-bit numbers that operands and results are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cutlass import BFloat16, Float16, Float32, Numeric, Uint32

from cute_kernels.device import ptx


@dataclass(frozen=True)
class Elements:
    """One kind of 16-bit numbers.

    Attributes:
        type: the element type of tensors.
        pack: a function that rounds two fp32 numbers to nearest and packs them into a word, the first in the lower
            half.
        halves: two functions; the first returns a word's lower half as fp32, the second its upper half.
    """

    type: type[Numeric]
    pack: Callable[..., Uint32]
    halves: tuple[Callable[..., Float32], Callable[..., Float32]]


def of_name(dtype: str) -> Elements:
    """Returns the element type called "bf16" or "fp16"."""
    return {
        "bf16": Elements(BFloat16, ptx.pack_bf16x2, (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float)),
        "fp16": Elements(Float16, ptx.pack_f16x2, (ptx.half2_low_to_float, ptx.half2_high_to_float)),
    }[dtype]
