"""Activations of products: one class for each, with its formula in torch and on the device.

Kernels choose among the standard ones by a number of the launch. Any other activation is part of the configuration, so
it has kernels of its own. A new activation takes one file that registers its class. It then works in every product,
dense or of experts, and in the references. All kernels apply activations by `cute_kernels.gemm.activate`.
"""

from __future__ import annotations

from cute_kernels.gemm.activations.base import (
    ActivationFunction,
    activation_named,
    config_of,
    experts_activation,
    name_of,
    number_of,
    out_features,
    register,
    registered,
)
from cute_kernels.gemm.activations.clamped_swiglu import ClampedSwiglu
from cute_kernels.gemm.activations.relu2 import Relu2
from cute_kernels.gemm.activations.standard import STANDARD, Gelu, Silu, Swiglu

__all__ = [
    "STANDARD",
    "ActivationFunction",
    "ClampedSwiglu",
    "Gelu",
    "Relu2",
    "Silu",
    "Swiglu",
    "activation_named",
    "config_of",
    "experts_activation",
    "name_of",
    "number_of",
    "out_features",
    "register",
    "registered",
]
