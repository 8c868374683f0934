"""Hugging Face transformers (5.x): a model that decodes by the kernels, in three lines.

    import cute_kernels.integrations.transformers as ck

    ck.accelerate(model, weights="w4g128")
    model.generate(**inputs)

`accelerate` combines parts that can also be used alone: ``attn_implementation="cute_kernels"`` (`register`) and
`DecodeCache`, whose packed rows only this attention reads. Prefill attends to the keys and values
that it has just computed; only later tokens see the quantised ones.

The attention implementation takes the arguments of transformers' SDPA and computes the same results. It supports
encoders, cross-attention, and every mask and cache of transformers. Read on in `masks` (what a mask hides), `attend`
(which path a call takes), `columns` (which tokens are cached), `cache`, `cache_layer`, `graphs` (recorded steps),
`ahead` (steps begun early) and `accelerated`.
"""

from __future__ import annotations

from cute_kernels.integrations.transformers.accelerated import Acceleration, accelerate, register, restore
from cute_kernels.integrations.transformers.attend import attention
from cute_kernels.integrations.transformers.budget import choose_formats
from cute_kernels.integrations.transformers.cache import DecodeCache
from cute_kernels.integrations.transformers.cache_layer import ATTENTION_NAME, CachedTokens, DecodeCacheLayer
from cute_kernels.integrations.transformers.calibrate import calibrate, calibrate_cache
from cute_kernels.integrations.transformers.masks import make_mask

__all__ = [
    "ATTENTION_NAME",
    "Acceleration",
    "CachedTokens",
    "DecodeCache",
    "DecodeCacheLayer",
    "accelerate",
    "attention",
    "calibrate",
    "calibrate_cache",
    "choose_formats",
    "make_mask",
    "register",
    "restore",
]
