"""Tiny mixtures of experts of transformers, with random weights: blocks, and models of two layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

HIDDEN, INNER, EXPERTS, TOPK = 64, 96, 8, 2
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOPK,
    "tie_word_embeddings": False,
}


def mixtral_model(seed: int = 0) -> Any:
    return _filled(MixtralForCausalLM(MixtralConfig(**COMMON, num_local_experts=EXPERTS)), seed)


def qwen3_model(seed: int = 0) -> Any:
    options: dict[str, Any] = {
        "num_experts": EXPERTS,
        "moe_intermediate_size": INNER,
        "norm_topk_prob": True,
        "head_dim": 16,
    }
    return _filled(Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **options)), seed)


def deepseek_model(seed: int = 0) -> Any:
    options: dict[str, Any] = {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": INNER,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }
    return _filled(DeepseekV3ForCausalLM(DeepseekV3Config(**{**COMMON, "num_key_value_heads": 4}, **options)), seed)


def minimax_model(seed: int = 0) -> Any:
    """Its block gives the router a bias of its own: the experts alone are swapped."""
    return _filled(MiniMaxM2ForCausalLM(MiniMaxM2Config(**COMMON, num_local_experts=EXPERTS, head_dim=16)), seed)


def nemotron_model(seed: int = 0) -> Any:
    """Its experts have no gate, and its block projects what they take: the experts alone are swapped."""
    options: dict[str, Any] = {
        "layers_block_type": ["attention", "moe"],
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": INNER,
        "moe_shared_expert_intermediate_size": INNER,
        "n_group": 2,
        "topk_group": 1,
        "mamba_num_heads": 4,
        "head_dim": 16,
    }
    return _filled(NemotronHForCausalLM(NemotronHConfig(**COMMON, **options)), seed)


def mixtral(seed: int = 0) -> Any:
    return mixtral_model(seed).model.layers[1].mlp


def qwen3(seed: int = 0) -> Any:
    return qwen3_model(seed).model.layers[1].mlp


def deepseek(seed: int = 0) -> Any:
    return deepseek_model(seed).model.layers[1].mlp


ALL = (mixtral, qwen3, deepseek)
MODELS = (mixtral_model, qwen3_model, deepseek_model)


def _filled(model: nn.Module, seed: int) -> nn.Module:
    """Random weights everywhere; routers that prefer some experts to others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if "gate.weight" in name else 1.0 / parameter.shape[-1] ** 0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.bfloat16().eval()
