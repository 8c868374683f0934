"""A transformers model with its Linear layers quantised: swapped, run, saved and loaded as any model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from cute_kernels import QuantizedLinear, quantize_model
from cute_kernels.integrations import hf_quantizer
from cute_kernels.integrations.checkpoints import load_quantized_linears
from tests.integrations.llamas import small_llama

IDS = torch.arange(24).view(2, 12)


def llama(seed: int = 0) -> LlamaForCausalLM:
    return small_llama(seed, hidden_size=128, intermediate_size=192, tie_word_embeddings=False)


def dequantised(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same model with dense layers of the quantised values."""
    dense = llama()
    dense.load_state_dict(
        {name: t for name, t in model.state_dict().items() if name in dense.state_dict()}, strict=False
    )
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            layer = dense.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            layer.weight.data = module.weight.dequantize()
    return dense


@pytest.mark.parametrize("bits", [4, 8])
def test_it_computes_what_a_dense_model_of_the_same_weights_does(bits):
    model = llama()
    quantize_model(model, bits=bits, group_size=64)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
    assert type(model.lm_head) is nn.Linear
    with torch.no_grad():
        got, want = model(IDS).logits.float(), dequantised(model)(IDS).logits.float()
    assert (got - want).norm() <= 0.02 * want.norm()


def test_its_quantised_layers_load_into_a_dense_model(tmp_path):
    model = llama()
    quantize_model(model, zero_point=True)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = llama(seed=1)
    load_quantized_linears(other, tmp_path)
    result = other.load_state_dict(load_file(tmp_path / "model.safetensors"))  # embeddings, norms and head
    assert not result.missing_keys and not result.unexpected_keys
    with torch.no_grad():
        assert torch.equal(other(IDS).logits, model(IDS).logits)
    hf_quantizer.register()
    other.save_pretrained(tmp_path / "saved")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert again.keys() == other.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in other.state_dict().items())
