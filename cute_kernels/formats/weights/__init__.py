"""Weight formats, which say how weights of linear layers and experts are stored as bytes. Each format is one object,
and there is one registry.

A format has codes, scales and, in some formats, zero points. It defines which weights they stand for, how weights are
quantised, how a kernel decodes codes, and how long decoding takes. `PackedWeight`, configurations, operators, tuned
tables and tests carry the object or its key. A new format is one file that registers it: see docs/add_weight_format.md.
"""

from __future__ import annotations

from cute_kernels.formats.weights.base import WeightFormat, named, register, registered_formats, weight_format
from cute_kernels.formats.weights.fp4 import MXFP4, NVFP4
from cute_kernels.formats.weights.fp8 import FP8, FP8_BLOCK, FP8_POWER_BLOCK, MXFP8
from cute_kernels.formats.weights.integers import GROUP_SIZES, SHIPPED_GROUP_SIZES, IntegerFormat, integers
from cute_kernels.formats.weights.shifted import ShiftedFormat, shifted

__all__ = [
    "FP8",
    "FP8_BLOCK",
    "FP8_POWER_BLOCK",
    "GROUP_SIZES",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "SHIPPED_GROUP_SIZES",
    "IntegerFormat",
    "ShiftedFormat",
    "WeightFormat",
    "integers",
    "register",
    "registered_formats",
    "shifted",
    "weight_format",
]

named(mxfp4=MXFP4, nvfp4=NVFP4, fp8=FP8, fp8_block=FP8_BLOCK, fp8_block_e8m0=FP8_POWER_BLOCK, mxfp8=MXFP8)
