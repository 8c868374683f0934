"""Hugging Face transformers (5.x): an attention implementation and a KV cache that decode through `decode_attention`.

    import cute_kernels.integrations.transformers as integration

    integration.register()
    model = LlamaForCausalLM(config, ...)
    model.set_attn_implementation(integration.ATTENTION_NAME)
    cache = integration.DecodeCache("int4_g4", max_seq_len=8192)
    model(input_ids, past_key_values=cache)                    # prefill: exact, then quantised into the cache
    model(next_id, past_key_values=cache)                      # decode: reads the packed rows

`DecodeCache.update` does not return K and V but a handle to the packed rows, which only this attention implementation
understands. Prefill attends to the K and V it has just computed; only later tokens see the quantised ones.

The attention implementation takes what transformers' SDPA takes, and computes the same: encoders, cross-attention,
every mask and every cache of transformers. Read on in `masks` (what a mask says), `attend` (which path a call takes),
`handle` and `cache`.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from cute_kernels.integrations.transformers.attend import attention
from cute_kernels.integrations.transformers.cache import DecodeCache, DecodeCacheLayer
from cute_kernels.integrations.transformers.handle import ATTENTION_NAME, CachedTokens
from cute_kernels.integrations.transformers.masks import make_mask

__all__ = ["ATTENTION_NAME", "CachedTokens", "DecodeCache", "DecodeCacheLayer", "attention", "make_mask", "register"]


def register() -> None:
    """Makes `attn_implementation="cute_kernels"` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, make_mask)
