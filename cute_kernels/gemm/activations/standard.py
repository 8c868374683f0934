"""The standard activations SiLU, exact GELU and SwiGLU. A kernel has code for all of them; an argument of its launch,
``number``, says which to apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from cute_kernels.gemm.activations.base import ActivationFunction, register

if TYPE_CHECKING:
    from cutlass import Float32

    from cute_kernels.device.float_math import FloatMath

# log2 of the normal distribution's tail beyond m, by powers of m: weighted for `gelu`, fitted to m = 9.
LOG2_TAIL = (-0.99999905, -1.1511477, -0.45891485, -0.053249456, 0.0079946239, -0.00074869645, 3.1395331e-05)
GELU_END = 14.0  # where the tail is 2**-112: from there on gelu(x) is x, and gelu(-x) as good as 0


@register
@dataclass(frozen=True)
class Silu(ActivationFunction):
    """SiLU: x / (1 + exp(-x))."""

    kind: ClassVar[str] = "silu"
    number: ClassVar[int] = 1

    def reference(self, *values: torch.Tensor) -> torch.Tensor:
        return functional.silu(values[0])

    def device(self, math: FloatMath, *values: Float32) -> Float32:
        (x,) = values
        return x * math.sigmoid(x)


@register
@dataclass(frozen=True)
class Gelu(ActivationFunction):
    """The exact GELU: x (1 + erf(x / sqrt 2)) / 2."""

    kind: ClassVar[str] = "gelu"
    number: ClassVar[int] = 2

    def reference(self, *values: torch.Tensor) -> torch.Tensor:
        return functional.gelu(values[0])

    def device(self, math: FloatMath, *values: Float32) -> Float32:
        """Computes max(x, 0) - |x| P(|x|), where P(m) is the normal distribution's tail beyond m. So no digits cancel
        for negative x.

        log2 P is nearly a parabola, so a polynomial and one exp2 compute P. The error is at most 2.7e-7, and at most
        3.6e-7 times |x|. With 1 + erf in fp32 it would be 1.2e-6. The code takes 10 instructions, one of which is slow.
        With erfc as exp(-z**2) times a polynomial of 1 / (1 + 0.3276 z), it would take 14, two of which are slow.
        """
        (x,) = values
        magnitude = math.min_or_nan(math.absolute(x), GELU_END)  # infinity times 0 is NaN, and NaN stays
        tail = math.number(LOG2_TAIL[-1])
        for factor in reversed(LOG2_TAIL[:-1]):
            tail = math.fma(tail, magnitude, factor)
        return math.fma(-magnitude, math.exp2(tail), math.max(x, 0.0))


@register
@dataclass(frozen=True)
class Swiglu(ActivationFunction):
    """SwiGLU: silu(gate) * up."""

    kind: ClassVar[str] = "swiglu"
    gated: ClassVar[bool] = True
    number: ClassVar[int] = 3

    def reference(self, *values: torch.Tensor) -> torch.Tensor:
        gate, up = values
        return functional.silu(gate) * up

    def device(self, math: FloatMath, *values: Float32) -> Float32:
        gate, up = values
        return gate * math.sigmoid(gate) * up


STANDARD: tuple[ActivationFunction, ...] = (Silu(), Gelu(), Swiglu())
"""The standard activations, in the order of their numbers. Kernels refer to this tuple, so their keys cover the
formulas."""
