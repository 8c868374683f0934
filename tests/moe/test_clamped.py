"""Experts with biases and a clamped SwiGLU: against fp64, with ids of other ranks, without tokens, and as modules."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.gemm import quantized_linear
from cute_kernels.gemm.experts import ClampedSwiglu, PackedExperts, QuantizedRoutedExperts, fused_moe, quantize_experts
from cute_kernels.gemm.experts.blocks import experts_refusal

EXPERTS, HIDDEN, INNER, TOPK = 4, 96, 80, 2
BF16 = torch.bfloat16


def layer(seed: int = 0) -> tuple[PackedExperts, PackedExperts, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    gate_up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.5, torch.randn(EXPERTS, HIDDEN, INNER)
    biases = torch.randn(EXPERTS, 2 * INNER).to(BF16), torch.randn(EXPERTS, HIDDEN).to(BF16)
    options: dict[str, Any] = {"format": "mxfp4", "dtype": BF16}
    return quantize_experts(gate_up, **options), quantize_experts(down, **options), biases


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weights = torch.randn(count, HIDDEN).to(BF16), torch.rand(count, TOPK)
    ids = torch.randint(-1, EXPERTS + 1, (count, TOPK))
    ids[0] = torch.tensor([3, 1])
    return x, weights, ids


def exact(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, seed: int = 0) -> torch.Tensor:
    gate_up, down, biases = layer(seed)
    first, second = (each.dequantize(torch.float64) for each in (gate_up, down))
    y = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token in range(len(x)):
        for share, e in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            if 0 <= e < EXPERTS:
                gate, up = (first[e] @ x[token].double() + biases[0][e].double()).view(-1, 2).unbind(-1)
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                hidden = (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)).to(BF16).double()
                y[token] += share * (second[e] @ hidden + biases[1][e].double())
    return y


def by_layer(parts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    gate_up, down, biases = parts
    own = {"activation": ClampedSwiglu(), "gate_up_bias": biases[0], "down_bias": biases[1]}
    return fused_moe(x, gate_up, down, weights, ids, **own, **options)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("count", [1, 37])
def test_a_layer_is_its_formula_and_ids_of_no_expert_add_nothing(count, invariant):
    parts = layer()
    x, weights, ids = tokens(count)
    found = by_layer(parts, x, weights, ids, batch_invariant=invariant)
    want = exact(x, weights, ids)
    gates = x.double() @ parts[0].dequantize(torch.float64).flatten(0, 1).T
    assert gates.abs().max() > 20  # the clamps are reached
    assert found.dtype == BF16 and (found.double() - want).norm() < 4e-3 * want.norm()


def test_no_tokens_and_no_expert_of_this_rank():
    x, weights, ids = tokens(5)
    assert by_layer(layer(), x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)
    assert not by_layer(layer(), x, weights, torch.full_like(ids, -1)).any()


def test_gates_have_no_lower_limit_and_ups_are_shifted():
    pairs = torch.tensor([[-30.0, 0.0], [30.0, 30.0], [-30.0, 30.0], [1.0, -30.0]])
    want = [-30 / (1 + torch.exp(torch.tensor(30 * 1.702))), 56 / (1 + torch.exp(torch.tensor(-7 * 1.702)))]
    found = ClampedSwiglu().of_rows(pairs)[:, 0]
    assert torch.allclose(found[:2], torch.stack(want)) and found[2] == 8 * found[0] and found[3] < -5 * 0.84


def test_state_dicts_keep_the_biases_and_miss_them_by_name():
    gate_up, down, biases = layer()
    module = QuantizedRoutedExperts(gate_up, down, biases, ClampedSwiglu())
    other = QuantizedRoutedExperts(*layer(1), ClampedSwiglu())
    state = module.state_dict()
    other.load_state_dict(state)
    x, weights, ids = tokens(9)
    assert torch.equal(other(x, ids, weights), module(x, ids, weights))
    del state["down.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"down.bias\""):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"down\.bias: got torch.float32 \[3\], want a floating \[4, 96\]"):
        other.load_state_dict(state | {"down.bias": torch.zeros(3)})
    without = QuantizedRoutedExperts(gate_up, down)
    with pytest.raises(RuntimeError, match=r"gate_up\.bias: got biases of experts, want none"):
        without.load_state_dict(module.state_dict())


def test_biases_and_activations_are_refused_by_name():
    gate_up, down, biases = layer()
    x, weights, ids = tokens(2)
    with pytest.raises(ValueError, match=r"^down: got shape \[96, 80\], want \[.., 160\].* activation is 'gelu'"):
        fused_moe(x, gate_up, down, weights, ids, activation="gelu")
    with pytest.raises(ValueError, match=r"^down_bias: got shape \[4, 160\], want \[4, 96\]"):
        fused_moe(x, gate_up, down, weights, ids, down_bias=biases[0])
    with pytest.raises(ValueError, match="^activation: got None, want 'silu'"):
        QuantizedRoutedExperts(gate_up, down, biases, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^bias: got torch.bfloat16 \[4, 96\], want a floating \[4, 160\]"):
        QuantizedRoutedExperts(gate_up, down, (biases[1], biases[1]), ClampedSwiglu())
    with pytest.raises(ValueError, match=r"^bias: got a tensor without data \(meta\), want one on a CPU"):
        QuantizedRoutedExperts(gate_up, down, (biases[0].to("meta"), biases[1]), ClampedSwiglu())
    with pytest.raises(ValueError, match="^bias: got values that are not finite"):
        QuantizedRoutedExperts(gate_up, down, (biases[0] * torch.inf, biases[1]), ClampedSwiglu())


@pytest.mark.parametrize("numbers", [{"limit": -1.0}, {"limit": 0}, {"limit": torch.nan}, {"alpha": torch.inf}])
def test_numbers_that_no_clamp_has_are_refused_by_name(numbers):
    gate_up, down, biases = layer()
    own, wanted = ClampedSwiglu(**numbers), r"^activation: got 'clamped_swiglu\(.*\)' for .*, want (a positive|finite)"
    with pytest.raises(ValueError, match=wanted):
        fused_moe(tokens(2)[0], gate_up, down, *tokens(2)[1:], activation=own)
    with pytest.raises(ValueError, match=wanted):
        quantized_linear(tokens(2)[0], gate_up[0], activation=own)
    with pytest.raises(ValueError, match=wanted):
        QuantizedRoutedExperts(gate_up, down, biases, own)


def test_a_compiled_layer_is_one_operator_whose_activation_is_named():
    parts = layer()
    x, weights, ids = tokens(3)
    compiled = torch.compile(lambda x, weights, ids: by_layer(parts, x, weights, ids), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weights, ids), by_layer(parts, x, weights, ids))
    own = torch.ops.cute_kernels.fused_moe.default._schema
    assert {"activation", "gate_up_bias", "down_bias"} <= {each.name for each in own.arguments}


SIZES = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), EXPERTS)
SIZES |= dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INNER)
LIMITED: dict[str, tuple[str, ClampedSwiglu]] = {
    "deepseek_v4": ("DeepseekV4Experts", ClampedSwiglu(1.0, 2.0, 0.0)),
    "glm5_next": ("Glm5NextTextExperts", ClampedSwiglu(1.0, 2.0, 0.0)),
    "minimax_m3_vl": ("MiniMaxM3VLExperts", ClampedSwiglu(1.702, 2.0, 1.0)),
}


def experts_of(model: str, name: str, **options: Any) -> Any:
    """A module of experts of transformers, whose gates come before ups."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    config = SimpleNamespace(**SIZES, hidden_size=HIDDEN, hidden_act="silu", swiglu_limit=2.0, swiglu_alpha=1.702)
    config._experts_implementation = "eager"
    experts = getattr(module, name)(config, **options)
    for number, parameter in enumerate(experts.parameters()):
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(number))
    return experts.bfloat16().eval()


@pytest.mark.parametrize("model", LIMITED)
def test_experts_with_limits_are_known_by_their_attributes(model):
    name, activation = LIMITED[model]
    experts = experts_of(model, name)
    layer = QuantizedRoutedExperts.from_experts(experts, 8, 32)
    assert layer.activation == activation
    x, weights, ids = tokens(9)
    ids = ids.clamp(0, EXPERTS - 1)
    want = experts(x, ids, weights.to(BF16)).double()
    assert (layer(x, ids, weights).double() - want).norm() < 2e-2 * want.norm()


def test_a_clamp_after_silu_is_another_activation():
    reason = experts_refusal(experts_of("step3p7", "Step3p7Experts", swiglu_limit=7.0))
    assert reason is not None and "limits that are not known to be those of clamped_swiglu(1.0,7.0,0.0)" in reason


def test_a_layer_that_was_pickled_before_it_had_an_activation_is_gated_silu():
    gate_up, down, _ = layer()
    module = QuantizedRoutedExperts(gate_up, down)
    x, weights, ids = tokens(3)
    want = module(x, ids, weights)
    del module.activation
    assert torch.equal(pickle.loads(pickle.dumps(module))(x, ids, weights), want)
