"""The SwiGLU of a clamped gate and a clamped, shifted up, which gpt-oss, MiniMax M3, DeepSeek V4 and GLM 5 have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from cute_kernels.gemm.activations.base import ActivationFunction, register

if TYPE_CHECKING:
    from cutlass import Float32

    from cute_kernels.device.float_math import FloatMath


@register
@dataclass(frozen=True)
class ClampedSwiglu(ActivationFunction):
    """Clamped SwiGLU: gate * sigmoid(alpha * gate) * (up + shift), with gate clamped from above and up clamped on both
    sides.

    | model | alpha | limit | shift |
    |---|---|---|---|
    | gpt-oss, MiniMax M3 | 1.702 | 7 | 1 |
    | DeepSeek V4, GLM 5 | 1 | the model's | 0 |

    NaN stays NaN.

    Args:
        alpha: the factor of gates in the sigmoid.
        limit: positive; gates are clamped to at most limit, ups to -limit .. limit.
        shift: added to clamped ups.
    """

    alpha: float = 1.702
    limit: float = 7.0
    shift: float = 1.0
    kind: ClassVar[str] = "clamped_swiglu"
    gated: ClassVar[bool] = True

    def wanted_numbers(self) -> str:
        return super().wanted_numbers() or ("" if self.limit > 0 else "a positive limit")

    def reference(self, *values: torch.Tensor) -> torch.Tensor:
        gate, up = values[0].clamp(max=self.limit), values[1].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.shift)

    def device(self, math: FloatMath, *values: Float32) -> Float32:
        gate = math.min_or_nan(values[0], self.limit)
        up = math.max_or_nan(math.min_or_nan(values[1], self.limit), -self.limit)
        if self.shift:
            up = up + self.shift
        return gate * math.sigmoid(gate, self.alpha) * up
