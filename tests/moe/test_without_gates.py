"""Experts without a gate, Nemotron-H's: against fp64, as modules, and in a model that is quantised and saved."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

from cute_kernels import fused_moe, quantize_model
from cute_kernels.gemm.activations import Relu2, activation_named
from cute_kernels.gemm.experts import PackedExperts, QuantizedRoutedExperts, quantize_experts
from cute_kernels.gemm.experts.blocks import experts_refusal
from cute_kernels.gemm.experts.stored import known_experts
from cute_kernels.integrations.hf_quantizer import register
from tests.launchers import recording
from tests.moe import blocks

EXPERTS, HIDDEN, INNER, TOPK = 4, 96, 80, 2
BF16 = torch.bfloat16
IDS = torch.arange(3, 15)[None]


def weights(format: str = "w4g32") -> tuple[PackedExperts, PackedExperts]:
    torch.manual_seed(0)
    dense = torch.randn(EXPERTS, INNER, HIDDEN) / HIDDEN**0.5, torch.randn(EXPERTS, HIDDEN, INNER)
    first, second = (quantize_experts(each, dtype=BF16, format=format) for each in dense)
    return first, second


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(count)
    ids = torch.randint(-1, EXPERTS + 1, (count, TOPK))
    ids[0] = torch.tensor([3, 1])
    return torch.randn(count, HIDDEN).to(BF16), torch.rand(count, TOPK), ids


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["relu2", "gelu", "silu"])
def test_a_layer_is_its_formula_and_ids_of_no_expert_add_nothing(activation, biased):
    (up, down), (x, shares, ids) = weights(), tokens(9)
    own, biases = activation_named(activation), [torch.randn(EXPERTS, n).to(BF16) for n in (INNER, HIDDEN)]
    assert own is not None
    want = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, slot in (ids < EXPERTS).logical_and(ids >= 0).nonzero().tolist():
        e = int(ids[token, slot])
        sums = up[e].dequantize().double() @ x[token].double() + biased * biases[0][e].double()
        hidden = own.reference(sums).to(BF16).double()
        want[token] += shares[token, slot] * (down[e].dequantize().double() @ hidden + biased * biases[1][e].double())
    given: dict[str, Any] = {"activation": activation}
    if biased:
        given |= {"gate_up_bias": biases[0], "down_bias": biases[1]}
    found = fused_moe(x, up, down, shares, ids, **given)
    assert found.dtype == BF16 and (found.double() - want).norm() < 4e-3 * want.norm()
    compiled = torch.compile(fused_moe, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, up, down, shares, ids, **given), found)


@pytest.mark.parametrize("activation", ["relu2", "gelu", "silu", "swiglu"])
def test_stores_of_entries_hold_every_activation_but_the_gated_one_that_a_number_chooses(activation):
    """They have no other place where one that a launch's number chooses would be applied."""
    first = quantize_experts(torch.zeros(8, 256, 256), dtype=BF16, format="w4g128")
    shares, ids = torch.ones(1, 4), torch.tensor([[0, 3, 2, 1]])
    inner = 128 if activation == "swiglu" else 256
    second = quantize_experts(torch.zeros(8, 256, inner), dtype=BF16, format="w4g128")
    with recording() as cache:
        fused_moe(
            torch.zeros(1, 256, dtype=BF16), first, second, shares, ids, activation=activation, batch_invariant=True
        )
    config = next(spec.config for spec, _ in cache.loaded if "entries" in spec.symbol)
    own = activation_named(activation)
    assert own is not None and config.store.activation == (None if own.gated else own)


def test_rows_that_an_activation_has_no_use_for_are_refused():
    up, down = weights()
    with pytest.raises(ValueError, match=r"^down: got shape \[96, 80\], want \[.., 40\], half of .* is 'swiglu'"):
        QuantizedRoutedExperts(up, down)
    odd = quantize_experts(torch.randn(EXPERTS, INNER + 1, HIDDEN), dtype=BF16)
    with pytest.raises(ValueError, match="^activation: got 'swiglu' for a weight of 81 rows, want an even"):
        fused_moe(*tokens(2)[:1], odd, down, *tokens(2)[1:])
    with pytest.raises(ValueError, match=r"^down: got shape \[96, 80\], want \[.., 81\], all of"):
        fused_moe(*tokens(2)[:1], odd, down, *tokens(2)[1:], activation=Relu2())


# -- Nemotron-H --------------------------------------------------------------------------------------------------------


def experts_of(function: str = "relu2") -> Any:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    sizes = {"n_routed_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    config: Any = SimpleNamespace(**sizes, moe_latent_size=None, mlp_hidden_act=function)
    config._experts_implementation = "eager"
    experts = NemotronHExperts(config)
    for number, parameter in enumerate(experts.parameters()):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(number))
    return experts.bfloat16().eval()


@pytest.mark.parametrize("function", ["relu2", "gelu", "silu"])
def test_a_module_of_them_is_known_by_what_it_holds(function):
    experts = experts_of(function)
    layer = QuantizedRoutedExperts.from_experts(experts, 8, 32)
    assert layer.activation.name == function and layer.gate_up.shape == (INNER, HIDDEN)
    x, shares, ids = tokens(9)
    ids = ids.clamp(0, EXPERTS - 1)
    want = experts(x, ids, shares.to(BF16)).double()
    assert (layer(x, ids, shares).double() - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize("function", ["relu", "gelu_new", "tanh"])
def test_another_function_is_not(function):
    assert known_experts(experts_of(function)) is None
    with pytest.raises(TypeError, match="^experts: got NemotronHExperts, want .* up_proj .* with relu2"):
        QuantizedRoutedExperts.from_experts(experts_of(function))


def test_experts_that_do_more_are_refused():
    experts = experts_of()
    kind = type(experts)
    experts.__class__ = type("Halved", (kind,), {"forward": lambda self, *given: kind.forward(self, *given) / 2})
    assert experts_refusal(experts) == "the code of its experts, Halved, is not known"


@torch.no_grad()
def test_a_model_is_quantised_and_saved(tmp_path):
    dense = blocks.nemotron_model()
    model: Any = quantize_model(copy.deepcopy(dense), bits=8, group_size=32)
    experts = [module for module in model.modules() if isinstance(module, QuantizedRoutedExperts)]
    assert [each.activation for each in experts] == [Relu2()]
    want, found = dense(IDS).logits.double(), model(IDS).logits
    assert (found.double() - want).norm() < 3e-2 * want.norm()
    model.save_pretrained(tmp_path)
    register()
    assert torch.equal(tf.NemotronHForCausalLM.from_pretrained(tmp_path, dtype=BF16)(IDS).logits, found)
