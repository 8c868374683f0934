"""Routers of transformers with random weights, each with the call of `route` that means the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV4Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from cute_kernels.gemm.experts import Routing

HIDDEN = 64


class Case(NamedTuple):
    """A module, and what it computes."""

    module: Any
    routing: Routing

    @property
    def options(self) -> dict[str, torch.Tensor | None]:
        return {
            "bias": getattr(self.module, "bias", None),
            "correction": getattr(self.module, "e_score_correction_bias", None),
        }


def mixtral() -> Case:
    config = MixtralConfig(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=2)
    return Case(_filled(MixtralTopKRouter(config)), Routing(2, renormalize=True))


def qwen3() -> Case:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
    return Case(_filled(Qwen3MoeTopKRouter(config)), Routing(8, renormalize=True))


def qwen3_as_it_is() -> Case:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=60, num_experts_per_tok=4, norm_topk_prob=False)
    return Case(_filled(Qwen3MoeTopKRouter(config)), Routing(4))


def gpt_oss() -> Case:
    config = GptOssConfig(hidden_size=HIDDEN, num_local_experts=32, num_experts_per_tok=4)
    return Case(_filled(GptOssTopKRouter(config)), Routing(4, renormalize=True))


def olmoe() -> Case:
    config = OlmoeConfig(hidden_size=HIDDEN, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False)
    return Case(_filled(OlmoeTopKRouter(config)), Routing(8))


def deepseek_v3() -> Case:
    options: dict[str, Any] = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    config = DeepseekV3Config(hidden_size=HIDDEN, n_routed_experts=256, num_experts_per_tok=8, **options)
    return Case(_filled(DeepseekV3TopkRouter(config)), Routing(8, "sigmoid", True, 2.5, 8, 4))


def glm4() -> Case:
    options: dict[str, Any] = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
    config = Glm4MoeConfig(hidden_size=HIDDEN, n_routed_experts=160, num_experts_per_tok=8, **options)
    return Case(_filled(Glm4MoeTopkRouter(config)), Routing(8, "sigmoid", True, 1.5))


def deepseek_v4() -> Case:
    config = DeepseekV4Config(hidden_size=HIDDEN, n_routed_experts=256, num_experts_per_tok=6)
    case = Case(_filled(DeepseekV4TopKRouter(config)), Routing(6, "sqrtsoftplus", True, config.routed_scaling_factor))
    assert config.scoring_func == "sqrtsoftplus"
    return case


ALL = (mixtral, qwen3, qwen3_as_it_is, gpt_oss, olmoe, deepseek_v3, glm4, deepseek_v4)


def _filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator) * (0.3 if name == "weight" else 0.2)
    return module.eval()
