"""Small transformers models with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers of four heads on two KV heads, in bf16; ``changes`` to its configuration."""
    torch.manual_seed(seed)
    small = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**small, **changes})).bfloat16().eval()
