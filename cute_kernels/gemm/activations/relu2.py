"""The squared ReLU, which Nemotron-H uses in MLPs and experts without gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from cute_kernels.gemm.activations.base import ActivationFunction, register

if TYPE_CHECKING:
    from cutlass import Float32

    from cute_kernels.device.float_math import FloatMath


@register
@dataclass(frozen=True)
class Relu2(ActivationFunction):
    """The squared ReLU, max(x, 0)^2. NaN stays NaN."""

    kind: ClassVar[str] = "relu2"

    def reference(self, *values: torch.Tensor) -> torch.Tensor:
        return functional.relu(values[0]).square()

    def device(self, math: FloatMath, *values: Float32) -> Float32:
        positive = math.max_or_nan(values[0], 0.0)
        return positive * positive
