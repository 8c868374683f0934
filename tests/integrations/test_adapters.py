"""Adapters are trained beside quantised layers, by gradients that are those of the dense model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cute_kernels.integrations.transformers as ck
from cute_kernels import QuantizedLinear, quantize_model
from tests.integrations.llamas import small_llama
from tests.moe import blocks

IDS = torch.arange(3, 27).view(2, 12)


class Adapter(nn.Module):
    """What LoRA puts around a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 4, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(4, layer.out_features, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def replaced(model: Any, kind: type, make: Any, names: tuple[str, ...] = ()) -> Any:
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if type(module) is kind and (not names or own in names):
            setattr(model.get_submodule(parent), own, make(module))
    return model


def dense_of(layer: QuantizedLinear) -> nn.Linear:
    dense = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16)
    dense.weight.data = layer.weight.dequantize()
    return dense.requires_grad_(False)


def adapted(model: Any, kind: type) -> Any:
    torch.manual_seed(1)
    return replaced(model.requires_grad_(False), kind, Adapter, ("q_proj", "v_proj", "down_proj"))


def gradients(model: Any, device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = IDS.to(device)
    model(ids, labels=ids).loss.backward()
    return {name: x.grad.double() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("accelerated", [False, True])
def test_adapters_have_the_gradients_of_the_dense_model(accelerated):
    model = quantize_model(small_llama(hidden_size=128, intermediate_size=64, head_dim=64), bits=8, group_size=32)
    dense = replaced(copy.deepcopy(model), QuantizedLinear, dense_of)
    if accelerated:
        ck.accelerate(model, kv_format="bf16")
    found, wanted = gradients(adapted(model, QuantizedLinear)), gradients(adapted(dense, nn.Linear))
    assert found.keys() == wanted.keys() and len(found) == 2 * 3 * 2
    assert all((found[name] - wanted[name]).norm() <= 0.05 * wanted[name].norm() for name in found)


def test_peft_takes_quantised_layers_that_a_configuration_names():
    peft = pytest.importorskip("peft")
    model = quantize_model(small_llama(hidden_size=128, intermediate_size=64, head_dim=64), bits=8, group_size=32)
    dense = replaced(copy.deepcopy(model), QuantizedLinear, dense_of)

    def with_lora(model: Any) -> Any:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        config._register_custom_module({QuantizedLinear: peft.tuners.lora.Linear})
        torch.manual_seed(1)
        return peft.get_peft_model(model, config).train()

    found, wanted = gradients(with_lora(model)), gradients(with_lora(dense))
    assert found.keys() == wanted.keys() and len(found) == 2 * 2 * 2
    assert all((found[name] - wanted[name]).norm() <= 0.05 * wanted[name].norm() for name in found)


def test_experts_say_that_they_have_no_gradient():
    """Rather than that layers before them get the gradients of another model."""
    model = quantize_model(blocks.mixtral_model(), group_size=32)
    with pytest.raises(NotImplementedError, match="^hidden_states: got some that want a gradient, which quantised exp"):
        gradients(model)
    with torch.no_grad():
        assert not model(IDS).logits.requires_grad
