"""The arguments that norm kernels are launched with; they are listed nowhere else.

Tensor: out [rows, n], of the configuration's dtype. Addresses, on 16 bytes: x and residual, whose rows are x_stride and
residual_stride elements apart; total [rows, n], their sum; weight and bias [n]. Those that a configuration has no use
for are not read. inverse_n: 1 / n. Of rows that are made for a layer's inputs: order, int32 [n], and factors [n], as x.
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
