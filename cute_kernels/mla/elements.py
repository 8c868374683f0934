"""The two kinds of 16-bit numbers that queries, tiles, weights and results are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass import BFloat16, Float16

from cute_kernels.device import ptx


@dataclass(frozen=True)
class ElementType:
    """One of them.

    Attributes:
        type: of tensors.
        pack: two fp32, rounded to nearest, into a word, the first in the lower half.
    """

    type: Any
    pack: Callable[..., Any]


BF16, FP16 = ElementType(BFloat16, ptx.pack_bf16x2), ElementType(Float16, ptx.pack_f16x2)


def of_name(dtype: str) -> ElementType:
    """Of "bf16" or "fp16"."""
    return {"bf16": BF16, "fp16": FP16}[dtype]
