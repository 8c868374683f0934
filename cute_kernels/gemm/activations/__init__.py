"""Activations of products: one class for each, with its formula in torch and on the device.

A launch's argument selects a standard activation by its number. Any other activation is part of a configuration, so it
has its own kernels. A new activation takes one file that registers its class. It then works in every product, dense or
of experts, and in the references. All kernels apply activations by `cute_kernels.gemm.activate`.
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
