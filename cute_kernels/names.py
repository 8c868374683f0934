"""The names of formats, layouts and activations that arguments may have, as types for type checkers.

The functions check the same names at run time. `tests/test_api_types.py` compares these types with the names that
families register.
"""

from __future__ import annotations

from typing import Literal

import torch

Activation = Literal["silu", "gelu", "swiglu", "relu2"]
"""The activation of a product's result. "swiglu" is silu(gate) * up over pairs of columns, "relu2" is max(x, 0)^2."""

Activations = Literal["fp8"]
"""The format to which a product rounds activations; None instead leaves them in 16 bits."""

ModelActivations = Literal["fp8", "16bit"]
"""The format to which a model's layers round activations. None instead: as the checkpoint declares, else 16 bits."""

CacheLayout = Literal["NHD", "HND"]
"""The order of a cache's dimensions: tokens before heads ("NHD"), or heads before tokens ("HND")."""

KvFormatName = Literal[
    "bf16",
    "fp16",
    "int4_g1",
    "int4_g2",
    "int4_g4",
    "int4_g8",
    "int8_tensor",
    "int8_head",
    "int8_channel",
    "int8_token_head",
    "int8_g2",
    "int8_g4",
    "int8_g8",
    "e4m3_tensor",
    "e4m3_head",
    "e4m3_token_head",
    "e5m2",
    "int4_channel32",
    "int4",
    "int8",
    "fp8",
]
"""A key of `cute_kernels.formats.kv.FORMATS` or `ALIASES`, or a format in blocks."""

KvFormats = KvFormatName | tuple[KvFormatName, KvFormatName]
"""One format for K and V, or a pair (K's, V's)."""

MlaFormatName = Literal["mla_bf16", "mla_fp16", "mla_fp8", "mla_model1"]
"""A key of `cute_kernels.mla.formats.FORMATS`."""

WindowSize = int | tuple[int, int]
"""How many keys a query sees, its own included; or FlashAttention's (left, right): how many besides its own on each
side."""

QkvBias = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Biases of the projections to q, k and v, each [heads * head_dim] or None."""
