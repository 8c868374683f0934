"""The launch arguments of the norm kernels; no other module lists them.

Tensor: out [rows, n], of the configuration's dtype. Addresses, multiples of 16 bytes: x and residual, whose rows are
x_stride and residual_stride elements apart; total [rows, n], the tensor for their sum; weight and bias [n]. Arguments
that a configuration does not use are not read. inverse_n: 1 / n. For a layer's inputs (`NormConfig.inputs`) there are
also order, int32 [n], and factors [n] in x's dtype.
"""

from __future__ import annotations

from cute_kernels.norm.config import NormConfig
from cute_kernels.runtime.launch_arguments import LaunchArguments, arguments, joined

NORM = joined(
    arguments("tensor", "out"),
    arguments("address", "x", "residual", "total", "weight", "bias"),
    arguments("int32", "x_stride", "residual_stride"),
    arguments("float32", "inverse_n", "eps", "weight_offset"),
)
INPUTS = arguments("address", "order", "factors")


def norm_arguments(config: NormConfig) -> LaunchArguments:
    """Returns the arguments of a configuration's kernel."""
    return joined(NORM.arguments, INPUTS) if config.inputs else NORM
