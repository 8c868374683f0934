"""The launch arguments of the norm kernels. Arguments that a configuration does not use are not read.

| argument | type | contents |
|---|---|---|
| out | tensor | the results [rows, n], in the configuration's dtype |
| x, residual | addresses | rows that are x_stride and residual_stride elements apart |
| total | address | [rows, n], where the sum of x and residual is stored |
| weight, bias | addresses | [n] |
| inverse_n | number | 1 / n |
| eps, weight_offset | numbers | as in the call |
| order | address | int32 [n], only with `NormConfig.inputs` |
| factors | address | [n] in x's dtype, only with `NormConfig.inputs` |

Addresses are multiples of 16 bytes.
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
