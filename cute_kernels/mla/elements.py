"""The two kinds of 16-bit numbers that queries, tiles, weights and results are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cutlass import BFloat16, Float16, Float32, Numeric, Uint32

from cute_kernels.device import ptx


@dataclass(frozen=True)
class ElementType:
    """One kind of 16-bit numbers.

    Attributes:
        type: the CuTe type of tensors of such numbers.
        pack: a function that rounds two fp32 numbers to nearest and packs them into a word, the first in the lower
            half.
    """

    type: type[Numeric]
    pack: Callable[[Float32, Float32], Uint32]


def _pack_bf16(low: Float32, high: Float32) -> Uint32:
    return ptx.pack_bf16x2(low, high)


def _pack_fp16(low: Float32, high: Float32) -> Uint32:
    return ptx.pack_f16x2(low, high)


BF16, FP16 = ElementType(BFloat16, _pack_bf16), ElementType(Float16, _pack_fp16)


def of_name(dtype: str) -> ElementType:
    """Returns the element type called "bf16" or "fp16"."""
    return {"bf16": BF16, "fp16": FP16}[dtype]
