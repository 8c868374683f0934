"""Llama 4's mixtures, whose router scales what experts take: as modules, and in a model that is quantised and saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf

from cute_kernels import QuantizedMoE, quantize_model
from cute_kernels.gemm.experts.blocks import is_moe_block, refusal
from cute_kernels.gemm.experts.module import QuantizedInputScaledMoE
from cute_kernels.gemm.experts.stored import is_experts
from cute_kernels.integrations.hf_quantizer import register

BF16 = torch.bfloat16
IDS = torch.arange(3, 15)[None]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_local_experts": 4}


def llama4(top_k: int = 1) -> Any:
    torch.manual_seed(0)
    own: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96}
    own |= {"intermediate_size_mlp": 64, "num_experts_per_tok": top_k, "pad_token_id": 0, "moe_layers": [0]}
    model: Any = tf.Llama4ForCausalLM(tf.Llama4TextConfig(**SIZES, **own))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5 if "router" in name else 0.15)
    return model.to(BF16).eval()


def block_of(top_k: int = 1) -> Any:
    return llama4(top_k).model.layers[0].feed_forward


@torch.no_grad()
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_layer_is_the_block_that_it_stands_for(top_k):
    block, x = block_of(top_k), torch.randn(2, 9, 64).to(BF16)
    layer = QuantizedInputScaledMoE.from_block(block, 8, 32)
    (found, logits), (want, own) = layer(x), block(x)
    assert type(layer) is QuantizedInputScaledMoE and torch.equal(logits, own) and found.shape == want.shape
    assert (found - want).float().norm() < 1.5e-2 * want.float().norm()
    assert (found - want / 2).float().norm() > 0.2 * want.float().norm()
    unscaled = QuantizedInputScaledMoE.from_block(scaled_like(block, 0.0), 8, 32)  # every score is a half
    assert (unscaled(x)[0] - found).float().norm() > 0.05 * found.float().norm()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x)[0], found)


def scaled_like(block: Any, factor: float) -> Any:
    other = copy.deepcopy(block)
    other.router.weight.data *= factor
    return other


def test_experts_are_never_called_as_those_of_other_blocks():
    block = block_of()
    assert is_moe_block(block) and refusal(block) is None and not is_experts(block.experts)
    kind = type(block)
    block.__class__ = type("Halved", (kind,), {"forward": lambda self, x: (kind.forward(self, x)[0] / 2, None)})
    assert "Halved is not known to add up what its experts" in str(refusal(block))
    with pytest.raises(TypeError, match="^block: got Llama4TextMoe, want one with a router 'gate'"):
        QuantizedMoE.from_block(block_of())
    other: Any = torch.nn.ModuleDict({"gate": block.router, "experts": block.experts})
    assert not is_moe_block(other)
    experts = type(block_of().experts)
    block = block_of()
    block.experts.__class__ = type("Twice", (experts,), {"forward": lambda self, x: 2 * experts.forward(self, x)})
    assert refusal(block) == "the code of its experts, Twice, is not known"


@torch.no_grad()
def test_a_model_is_quantised_and_saved(tmp_path):
    dense = llama4()
    model: Any = quantize_model(copy.deepcopy(dense), bits=8, group_size=32)
    assert isinstance(model.model.layers[0].feed_forward, QuantizedInputScaledMoE)
    assert isinstance(model.model.layers[0].feed_forward.router, type(dense.model.layers[0].feed_forward.router))
    want, found = dense(IDS).logits.double(), model(IDS).logits
    assert (found.double() - want).norm() < 3e-2 * want.norm()
    model.save_pretrained(tmp_path)
    register()
    again: Any = tf.Llama4ForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    x = torch.randn(9, 64).to(BF16)
    own, other = (each.model.layers[0].feed_forward for each in (model, again))
    assert all(torch.equal(a, b) for a, b in zip(own(x), other(x), strict=True))
