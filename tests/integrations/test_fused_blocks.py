"""Fused blocks compute what a model's own code computes, and stand aside wherever they could not."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

import cute_kernels.integrations.transformers as ck
from cute_kernels import QuantizedLinear, Rope, quantize_model
from cute_kernels.gemm import ops
from cute_kernels.integrations.transformers import blocks, deferral, fuse, patterns
from cute_kernels.integrations.transformers.blocks import OrderedInputs
from cute_kernels.integrations.transformers.deferral import Sum
from cute_kernels.integrations.transformers.known_code import method_code
from cute_kernels.integrations.transformers.merged import PartOfPair, interleave, is_merged, merge, unmerge
from cute_kernels.integrations.transformers.norms import replace_norms
from cute_kernels.integrations.transformers.ropes import rope_of
from tests.integrations.architectures import DECODERS, VOCABULARY
from tests.observed import calls_of

IDS = torch.randint(3, VOCABULARY, (2, 22), generator=torch.Generator().manual_seed(5))
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[0, :4] = 0

# Blocks of two layers that run fused: attention, MLPs of quantised weights, layers.
FUSED = {
    "llama": (2, 2, 2),
    "llama, biases": (2, 2, 2),
    "qwen2": (2, 2, 2),
    "qwen3": (2, 2, 2),
    "mistral, window": (2, 2, 2),
    "mistral": (2, 2, 2),
    "ministral": (2, 2, 2),
    "phi-3": (2, 2, 2),
    "gemma": (2, 0, 2),  # its activation is a GELU
    "gemma 2": (2, 0, 2),
    "gemma 3": (2, 0, 2),
    "mixtral": (2, 0, 2),
    "qwen3-moe": (2, 0, 2),
    "granite": (2, 2, 0),  # it scales what it adds
    "smollm 3": (0, 2, 2),  # some of its layers do not rotate
    "olmo 2": (0, 2, 0),
    "glm-4": (0, 2, 0),  # it rotates neighbours
    "gpt-neox": (0, 0, 0),
    "llama 4": (0, 0, 0),
}


def built(name: str, weights: bool = False) -> Any:
    """A model whose norms run as accelerated ones do: what is compared is the blocks alone."""
    if not DECODERS[name].available:
        pytest.skip("not in this release of transformers")
    model = DECODERS[name].build(torch.bfloat16)
    torch.manual_seed(1)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            nn.init.normal_(module.weight, 0.0 if "Gemma" in type(module).__name__ else 1.0, 0.3)
        elif isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)
    if weights:
        quantize_model(model, group_size=32)
    ck.register()
    model.set_attn_implementation(ck.ATTENTION_NAME)
    replace_norms(model)
    return model


def accelerated(name: str = "llama") -> Any:
    """A copy of its own of a model with quantised weights that was accelerated once."""
    return copy.deepcopy(_accelerated(name))


@functools.cache
def _accelerated(name: str) -> Any:
    model = built(name, weights=True)
    ck.accelerate(model, kv_format="bf16")
    return model


@torch.no_grad()
def logits_of(model: Any, mask: torch.Tensor, kv_format: Any = "bf16") -> Any:
    """Of a first turn, steps and a turn of several tokens, by a `DecodeCache`; padding left out."""
    cache, found, end = ck.DecodeCache(kv_format), [], 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for size in (14, 1, 1, 5, 1):
        start, end = end, end + size
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        found.append(model(IDS[:, start:end], past_key_values=cache, **given).logits)
    return torch.cat(found, dim=1)[mask.bool()].double()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", FUSED)
def test_fused_blocks_compute_what_the_model_does(name):
    model, masks = built(name, weights=True), {"full": torch.ones_like(IDS), "padded": LEFT_PADDED}
    want = {rows: logits_of(model, mask) for rows, mask in masks.items()}
    summary = ck.accelerate(model, kv_format="bf16")
    counts = [
        sum(type(vars(module).get("forward")) is kind for module in model.modules())
        for kind in (blocks.AttentionBlock, blocks.MlpBlock, blocks.LayerBlock)
    ]
    assert tuple(counts) == FUSED[name], str(summary)
    for rows, mask in masks.items():
        assert relative_error(logits_of(model, mask), want[rows]) <= 3e-2, rows
    ck.restore(model)
    assert torch.equal(logits_of(_with_norms(model), LEFT_PADDED), want["padded"])


@pytest.mark.parametrize("form", ["fp8", "w4g128"])
def test_fused_blocks_round_what_their_layers_round(form):
    model, plain = built("llama, biases", weights=False), built("llama, biases", weights=False)
    quantize_model(model, format=form, activations="fp8")
    quantize_model(plain, format=form)
    mask = torch.ones_like(IDS)
    want, in_16_bits = logits_of(model, mask), logits_of(plain, mask)
    summary = ck.accelerate(model, kv_format="bf16")
    assert any(type(vars(module).get("forward")) is blocks.MlpBlock for module in model.modules()), str(summary)
    got, other = logits_of(model, mask), relative_error(in_16_bits, want)
    assert relative_error(got, want) < other / 2
    with pytest.raises(ValueError, match="activations: got 'fp8' with weights None"):
        ck.accelerate(model, activations="fp8")


@pytest.mark.parametrize("alike", [True, False])
def test_layers_with_one_static_scale_are_one_launch_and_others_keep_their_own(alike):
    """As checkpoints have them: layers of one input were calibrated with the same numbers."""
    model = built("llama, biases", weights=False)
    quantize_model(model, format="fp8", activations="fp8")
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    for number, layer in enumerate(layers):
        layer.activation_scale = torch.tensor(0.02 if alike else 0.02 / (1 + number))
    mask, state = torch.ones_like(IDS), {key: value.clone() for key, value in model.state_dict().items()}
    want = logits_of(model, mask)
    ck.accelerate(model, kv_format="bf16")
    fused = [type(vars(module).get("forward")) is blocks.MlpBlock for module in model.modules()]
    assert any(fused) == alike and relative_error(logits_of(model, mask), want) < 3e-2
    found = model.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)
    ck.restore(model)
    assert torch.equal(logits_of(_with_norms(model), mask), want)


@pytest.mark.parametrize("own", ["proj", "gate_proj", "up_proj", "v_proj"])
def test_layers_whose_settings_are_changed_later_compute_with_them(own):
    """All layers at once, or one of those that are computed together."""
    model = accelerated()
    changed = [layer for name, layer in model.named_modules() if name.endswith(own)]

    def settings() -> list[tuple[Any, bool]]:
        with calls_of(ops.check) as calls:
            logits_of(model, torch.ones_like(IDS))
        return [(call.arguments["call"].activations, call.arguments["call"].batch_invariant) for call in calls]

    for layer in changed:
        layer.activations, layer.batch_invariant = "fp8", True
    found = settings()
    assert found.count(("fp8", True)) == (len(found) if own == "proj" else 5 * len(changed))
    for layer in changed:
        layer.activations, layer.batch_invariant = None, False
    assert {*settings()} == {(None, False)}
    scale = torch.tensor(0.5)
    for layer in changed:
        layer.activations, layer.activation_scale = "fp8", scale
    with calls_of(ops.check) as calls:
        logits_of(model, torch.ones_like(IDS))
    given = [call.arguments["call"] for call in calls]
    assert sum(call.activation_scale is not None for call in given) == sum(call.activations == "fp8" for call in given)
    assert sum(call.activations == "fp8" for call in given) == found.count(("fp8", True))
    assert all(call.activation_scale is None or call.activation_scale == 0.5 for call in given)


def _with_norms(model: Any) -> Any:
    replace_norms(model)
    return model


@pytest.mark.parametrize("kv_format", ["int4_g4", "int8_token_head", {0: "bf16", -1: ("int8_token_head", "int4_g4")}])
def test_fused_blocks_over_coded_caches(kv_format):
    model = built("qwen3", weights=True)
    want = logits_of(model, LEFT_PADDED, kv_format)
    ck.accelerate(model, kv_format=kv_format)
    assert any(isinstance(vars(module).get("forward"), blocks.AttentionBlock) for module in model.modules())
    assert relative_error(logits_of(model, LEFT_PADDED, kv_format), want) <= 6e-2  # keys near the middle of two codes


@pytest.mark.parametrize("weights", [False, True], ids=["bf16", "w4"])
def test_restoring_gives_every_tensor_back(weights):
    model = built("llama, biases", weights)
    before = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
    kinds = {name: type(module) for name, module in model.named_modules()}
    ck.accelerate(model, kv_format="bf16")
    accelerated = model.state_dict()
    ck.restore(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    for state in (accelerated, model.state_dict()):
        assert state.keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value, name
    layer: Any = model.model.layers[0].self_attn
    places = [(x.codes if weights else x.weight).untyped_storage().data_ptr() for x in (layer.q_proj, layer.k_proj)]
    assert places[0] != places[1]


@pytest.mark.parametrize("weights", [False, True], ids=["bf16", "w4"])
def test_a_saved_model_is_the_same_whether_it_is_accelerated(weights, tmp_path):
    model = built("llama", weights)
    ck.restore(model)
    model.save_pretrained(tmp_path / "before")
    ck.accelerate(model, kv_format="bf16")
    model.save_pretrained(tmp_path / "after")
    ck.register()
    found = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each, dtype=torch.bfloat16).state_dict()
        for each in ("before", "after")
    ]
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        same = torch.equal(value, found[1][name]) if isinstance(value, torch.Tensor) else value == found[1][name]
        assert same, name


def test_layers_that_are_changed_behind_a_block_are_used():
    model = built("llama")
    want = logits_of(model, LEFT_PADDED)
    ck.accelerate(model, kv_format="bf16")
    for change in (_scale_in_place, _other_weight, _other_layer, _hook, _hook_on_a_layer, _other_frequencies):
        before = logits_of(model, LEFT_PADDED)
        change(model.model if change is _other_frequencies else model.model.layers[0])
        got = logits_of(model, LEFT_PADDED)
        own = copy.deepcopy(model.state_dict())
        ck.restore(model)
        want = logits_of(_with_norms(model), LEFT_PADDED)
        ck.accelerate(model, kv_format="bf16")
        assert own.keys() == model.state_dict().keys()
        assert relative_error(got, want) <= 3e-2 < relative_error(before, want), change.__name__


def _scale_in_place(layer: Any) -> None:
    layer.self_attn.v_proj.weight.data.mul_(-2)


def _other_weight(layer: Any) -> None:
    layer.self_attn.v_proj.weight = nn.Parameter(layer.self_attn.v_proj.weight.detach() * -2)


def _other_layer(layer: Any) -> None:
    old = layer.self_attn.v_proj
    layer.self_attn.v_proj = nn.Linear(*reversed(old.weight.shape), bias=False, dtype=old.weight.dtype)


def _hook(layer: Any) -> None:
    layer.self_attn.v_proj.register_forward_hook(lambda module, given, out: -2 * out)


def _other_frequencies(model: Any) -> None:
    model.rotary_emb.inv_freq.mul_(0.3)


def _hook_on_a_layer(layer: Any) -> None:
    layer.register_forward_hook(lambda module, given, out: out.mul_(-2))


def test_a_norm_is_not_taken_from_a_sum_that_was_changed_since():
    model = built("llama")
    ck.accelerate(model, kv_format="bf16")
    x = torch.randn(3, 128).bfloat16()
    norm = model.model.layers[1].input_layernorm
    with torch.no_grad():
        total = blocks.add_with_next_norm(x, x, norm)
        first = norm(total)
        assert torch.equal(first, norm(total.clone()))
        assert not torch.equal(model.model.norm(total), first)
        total.mul_(-1)
        assert torch.equal(norm(total), -first)


def test_hidden_states_are_those_of_the_layers():
    model = built("llama")
    with torch.no_grad():
        want = model(IDS, output_hidden_states=True).hidden_states
        ck.accelerate(model, kv_format="bf16")
        got = model(IDS, output_hidden_states=True, past_key_values=ck.DecodeCache("bf16")).hidden_states
    assert len(got) == len(want) == 3
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(ours.double(), theirs.double()) <= 2e-2


def test_gradients_and_training_take_the_own_path():
    model = built("llama")
    ck.accelerate(model, kv_format="bf16")
    model(IDS).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0


@pytest.mark.parametrize("n", [64, 96, 160])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("bits", [4, 8])
def test_interleaved_layers_are_made_again_bit_for_bit(n, zeros, bits):
    torch.manual_seed(n + bits)
    layers = [_quantized(n, 96, bits, zeros) for _ in range(2)]
    pair = interleave(layers)
    assert pair is not None
    x = torch.randn(3, 96).bfloat16()
    for half, layer in enumerate(layers):
        part = PartOfPair(pair, (half,))
        again = part.separate()
        for name in ("codes", "scales", "zeros", "bias"):
            ours, theirs = getattr(part, name), getattr(layer, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or (torch.equal(ours, theirs) and torch.equal(getattr(again, name), theirs))
        assert torch.equal(part(x), layer(x)) and part.weight.shape == (n, 96)
        state = part.state_dict()
        assert state.keys() == layer.state_dict().keys()
        assert not layer.load_state_dict(state).missing_keys
    both = _quantized(2 * n, 96, bits, zeros)
    pair = interleave([both])
    assert pair is not None
    part = PartOfPair(pair, (0, 1))
    assert torch.equal(part.codes, both.codes) and torch.equal(part(x), both(x))
    with pytest.raises(RuntimeError, match="accelerated, want restore"):
        part.load_state_dict(both.state_dict())


def test_parts_of_a_pair_have_state_dicts_that_share_no_memory():
    """Files refuse shared memory, and a scale of all activations is one tensor of the pair."""
    layers = [QuantizedLinear.from_linear(nn.Linear(96, 80, dtype=torch.bfloat16), format="fp8") for _ in range(2)]
    for layer in layers:
        layer.activations, layer.activation_scale = "fp8", torch.tensor(0.5)
    pair = interleave(layers)
    assert pair is not None
    states = [PartOfPair(pair, (half,)).state_dict() for half in (0, 1)]
    assert states[0]["activation_scale"] == states[1]["activation_scale"] == 0.5
    places = [tensor.data_ptr() for state in states for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "fp8", "fp8_block", "w8fg32", "w4g16z"])
def test_interleaved_layers_of_other_formats_are_made_again_bit_for_bit(form):
    torch.manual_seed(0)
    layers = [QuantizedLinear.from_linear(nn.Linear(96, 80, dtype=torch.bfloat16), format=form) for _ in range(2)]
    pair = interleave(layers)
    assert pair is not None
    for half, layer in enumerate(layers):
        again = PartOfPair(pair, (half,)).separate()
        assert all(torch.equal(again.state_dict()[name], own) for name, own in layer.state_dict().items())


def _quantized(n: int, k: int, bits: int = 4, zeros: bool = False, **options: Any) -> QuantizedLinear:
    linear = nn.Linear(k, n, dtype=torch.bfloat16)
    return QuantizedLinear.from_linear(linear, bits, options.get("group_size", 32), zeros)


def test_layers_interleaved_in_another_order_are_made_again_bit_for_bit():
    torch.manual_seed(3)
    layers, order = [_quantized(160, 96, zeros=True) for _ in range(2)], torch.randperm(160).int()
    for layer in layers:
        layer.bias = torch.randn(160).bfloat16()
    pair, x = interleave(layers, order), torch.randn(3, 96).bfloat16()
    assert pair is not None
    wanted = torch.stack([layer(x)[:, order.long()] for layer in layers], dim=-1).flatten(1)
    assert torch.equal(pair(x), wanted)
    for half, layer in enumerate(layers):
        part = PartOfPair(pair, (half,), order)
        assert torch.equal(part(x), layer(x)) and torch.equal(part.separate()(x), layer(x))
        assert part.bias is not None and layer.bias is not None
        assert torch.equal(part.codes, layer.codes) and torch.equal(part.bias, layer.bias)


def in_act_order(layer: QuantizedLinear) -> None:
    """Another layer, whose packed inputs are these of x."""
    layer.perm = torch.randperm(layer.in_features).int()


def ordered_llama() -> Any:
    """A quantised model, all of whose layers have their inputs in act-order; those of one input in the same one."""
    model = built("llama", weights=True)
    torch.manual_seed(4)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        for one in (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj):
            in_act_order(one)
        for first, *others in inputs:
            for other in others:
                other.perm = first.perm.clone()
    return model


def _another_order(down: QuantizedLinear) -> None:
    in_act_order(down)


def _another_order_in_place(down: QuantizedLinear) -> None:
    assert down.perm is not None
    down.perm.copy_(down.perm.flip(0))


def _no_order(down: QuantizedLinear) -> None:
    down.perm = None


def _scaled_inputs(down: QuantizedLinear) -> None:
    down.input_scale = torch.full((down.in_features,), -2.0, dtype=down.scales.dtype)


def _other_codes(down: QuantizedLinear) -> None:
    down.codes = down.codes.flip(0)


def _hooked(down: QuantizedLinear) -> None:
    down.register_forward_pre_hook(lambda module, given: (given[0].roll(1, -1),))


@pytest.mark.parametrize(
    "change", [None, _another_order, _another_order_in_place, _no_order, _scaled_inputs, _other_codes, _hooked]
)
def test_a_down_projection_in_act_order_gets_its_inputs_in_that_order(change):
    """From the rows of gate and up, which stand in it; or as the layer itself has it, once that wants another one."""
    model = ordered_llama()
    before = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
    want = logits_of(model, LEFT_PADDED)
    ck.accelerate(model, kv_format="bf16")
    mlp = model.model.layers[0].mlp
    block, x = mlp.forward, torch.randn(2, 128).bfloat16()
    assert isinstance(block, blocks.MlpBlock) and block.down is not None
    assert relative_error(logits_of(model, LEFT_PADDED), want) <= 3e-2
    with torch.no_grad():
        first = mlp(x)
        if change is not None:
            change(mlp.down_proj)
        with calls_of(QuantizedLinear.forward) as calls:
            got = mlp(x)
        assert bool(calls) == (change not in (None, _other_codes)), "whether the block serves it still"
        wanted = block.own(x)
    assert relative_error(got.double(), wanted.double()) <= 1e-2
    assert change is None or relative_error(first.double(), wanted.double()) > 0.5
    if change is None:
        ck.restore(model)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name], name


def test_a_copy_of_a_model_in_act_order_and_one_that_was_moved_stay_fused():
    model = ordered_llama()
    ck.accelerate(model, kv_format="bf16")
    want = logits_of(model, LEFT_PADDED)
    for one in (copy.deepcopy(model), model):
        for layer in one.model.layers:
            layer.mlp._apply(torch.clone)
        with calls_of(OrderedInputs.__call__, Sum.given) as calls:
            assert torch.equal(logits_of(one, LEFT_PADDED), want)
        given = [call.arguments for call in calls if call.function is not OrderedInputs.__call__]
        # With the sum of the residual, where the next layer's norm is put in order as well.
        sums = [of for of in given if of["product"].in_order and of["self"].takes(of["x"], of["product"])]
        assert len(calls) - len(given) + len(sums) == 5 * len(one.model.layers), "one for each turn"


@pytest.mark.parametrize("kind", ["dense", "quantised"])
def test_merged_layers_are_views_of_one(kind):
    torch.manual_seed(0)
    make: Any = _quantized if kind == "quantised" else lambda n, k: nn.Linear(k, n, dtype=torch.bfloat16)
    parts = [make(128, 96), make(64, 96), make(64, 96)]
    x = torch.randn(3, 96).bfloat16()
    with torch.no_grad():
        want = torch.cat([part(x) for part in parts], dim=-1)
        merged: Any = merge(parts)
        assert is_merged(merged, parts)
        assert torch.equal(torch.cat([part(x) for part in parts], dim=-1), want)
        assert relative_error(merged(x).double(), want.double()) < 1e-3
        parts[1].load_state_dict(make(64, 96).state_dict())  # copied into the merged one
        assert is_merged(merged, parts)
        assert relative_error(merged(x)[:, 128:192].double(), parts[1](x).double()) < 1e-3
        parts[2].load_state_dict(make(64, 96).state_dict(), assign=True)
        assert not is_merged(merged, parts)
        unmerge(parts)
        assert not is_merged(merged, parts[:1])


@pytest.mark.parametrize(
    "parts",
    [
        lambda: [_quantized(128, 96), _quantized(64, 96, 8)],
        lambda: [_quantized(128, 96), _quantized(64, 96, zeros=True)],
        lambda: [_quantized(128, 96), _quantized(64, 96, group_size=64)],
        lambda: [_quantized(96, 96), _quantized(64, 96)],
        lambda: [_quantized(128, 96), nn.Linear(96, 64)],
        lambda: [nn.Linear(96, 64), nn.Linear(96, 64, bias=False)],
        lambda: [nn.Linear(96, 64), nn.Linear(96, 64, dtype=torch.bfloat16)],
        lambda: [(one := nn.Linear(96, 64)), one],
    ],
)
def test_layers_of_other_forms_are_not_merged(parts):
    layers = parts()

    def places() -> list[int]:
        return [x.data_ptr() for layer in layers for x in (*layer.parameters(), *layer.buffers())]

    before = places()
    assert merge(layers) is None and places() == before


ROPES: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({"rope_type": "default", "rope_theta": 5e5}, True),
    "linear": ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, True),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        True,
    ),
    "yarn": ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}, True),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, False),
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_rope_is_the_models_own_or_none(kind):
    parameters, known = ROPES[kind]
    model = DECODERS["llama"].build(torch.bfloat16, rope_parameters=parameters)
    rotary = model.model.rotary_emb
    found = rope_of(rotary)
    assert (found is not None) == known
    if found is None:
        return
    rope = found.rope
    positions = torch.arange(256)[None]
    cos, sin = rotary(torch.zeros(1), positions)
    for ours, theirs in zip(rope.rotation(positions), (cos, sin), strict=True):
        assert (ours - theirs[..., :32].double()).abs().max() < 1e-4
    assert found.is_current
    rotary.inv_freq.mul_(1.01)
    assert not found.is_current and rope_of(rotary) is None


def test_a_block_that_computes_something_else_stays_and_is_named(monkeypatch):
    model = built("llama", weights=True)
    want = logits_of(model, LEFT_PADDED)
    act = deferral.quantized_linear
    monkeypatch.setattr(deferral, "quantized_linear", lambda *args, **options: -act(*args, **options))
    found = rope_of(model.model.rotary_emb)
    assert found is not None
    monkeypatch.setattr(fuse, "rope_of", lambda *args: replace(found, rope=Rope(64, 300.0)))
    summary = str(ck.accelerate(model, kv_format="bf16"))
    assert "LlamaMLP: ArithmeticError: a relative error of 2" in summary and "LlamaAttention: Arith" in summary
    assert not any(isinstance(module, PartOfPair) for module in model.modules())
    assert torch.equal(logits_of(model, LEFT_PADDED), want)


def test_code_that_differs_in_what_it_calls_is_other_code():
    glm = modeling_glm4.Glm4Attention
    llama = modeling_llama.LlamaAttention
    assert glm.forward.__code__.co_code == llama.forward.__code__.co_code  # its rotation is of neighbours
    assert method_code(glm) != method_code(llama)

    class Doubled(modeling_llama.LlamaMLP):
        def forward(self, x):
            return 2 * super().forward(x)

    assert patterns.recognise(Doubled(DECODERS["llama"].build().config), patterns.MLPS) is None


@pytest.mark.parametrize("part", ["Model", "DecoderLayer", "Attention", "MLP", "RotaryEmbedding", "RMSNorm"])
def test_a_subclass_with_a_known_name_and_other_code_is_left(monkeypatch, part):
    """What it computes is what the model computes, to the last bit where the blocks were all there was."""
    home = modeling_llama
    known = getattr(home, f"Llama{part}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = known.forward(self, *args, **kwargs)
        if isinstance(found, torch.Tensor):
            return 2 * found
        return (2 * found[0], *found[1:]) if isinstance(found, tuple) else found

    monkeypatch.setattr(home, known.__name__, type(known.__name__, (known,), {"forward": forward}))
    model = built("llama", weights=True)
    want = logits_of(model, LEFT_PADDED)
    ck.accelerate(model, kv_format="bf16")
    own = [module for module in model.modules() if inspect.unwrap(type(module).forward) is forward]
    assert own and all(type(module).__name__ == known.__name__ for module in own)
    assert not any("forward" in vars(module) for module in own)
    found = logits_of(model, LEFT_PADDED)
    assert (found - want).norm() <= 0.05 * want.norm()


def test_blocks_can_be_left_as_they_are():
    model = built("llama", weights=True)
    summary = ck.accelerate(model, kv_format="bf16", fuse_blocks=False)
    assert not any(isinstance(vars(module).get("forward"), blocks.Block) for module in model.modules())
    assert "as before" in str(summary)


def test_memory_is_not_taken_twice():
    model = built("llama", weights=True)

    def held() -> int:
        gc.collect()
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(model)}.values())

    before = held()
    ck.accelerate(model, kv_format="bf16")
    assert held() <= 1.1 * before


def _tensors(model: Any) -> list[torch.Tensor]:
    found = [x for module in model.modules() for x in (*module._parameters.values(), *module._buffers.values())]
    found += [x for module in model.modules() if isinstance(module, PartOfPair) for x in module.pair[0].buffers()]
    found += [
        x
        for module in model.modules()
        if isinstance(block := vars(module).get("forward"), blocks.AttentionBlock) and block.merged is not None
        for x in (*block.merged.parameters(), *block.merged.buffers())
    ]
    return [x for x in found if x is not None]


def test_rounded_frequencies_are_named():
    """`model.to` rounds those of a rotary embedding to the model's dtype, `from_pretrained` does not."""
    model = DECODERS["llama"].build(torch.bfloat16).to(torch.bfloat16)
    assert "LlamaAttention has rotary frequencies in torch.bfloat16, want float32" in str(ck.accelerate(model))


def test_blocks_are_compared_whatever_the_default_device_is():
    """The noise is made on the CPU: a generator of its own cannot make it anywhere else."""
    model = DECODERS["llama"].build(torch.bfloat16)
    with torch.device("meta"):
        summary = str(ck.accelerate(model, kv_format="bf16"))
    assert "fused: 2 attention, 2 layer" in summary
