"""Models that cache latents decode by `mla_decode` what they compute with eager attention over transformers' cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import cute_kernels.integrations.transformers as ck
from cute_kernels import QuantizedLinear
from cute_kernels.integrations.transformers import latents
from cute_kernels.integrations.transformers.norms import replace_norms
from cute_kernels.runtime import operator
from tests.integrations.architectures import DECODERS, VOCABULARY
from tests.integrations.test_accelerate import CACHES_LATENTS, NEW, assert_same_choices, generate, record_on_cpu
from tests.observed import calls_of

pytestmark = pytest.mark.skipif(not CACHES_LATENTS, reason="caches keys and values in this release of transformers")

DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 48}
IDS = torch.randint(3, VOCABULARY, (2, 22), generator=torch.Generator().manual_seed(5))
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[0, :4] = 0
PROMPT_MASK = torch.ones(2, 13, dtype=torch.long)
PROMPT_MASK[0, :5] = 0


def built(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    return DECODERS["deepseek-v3"].build(dtype, **{**DIMS, **changes})


@torch.no_grad()
def logits_of(model: Any, cache: Any, mask: torch.Tensor) -> torch.Tensor:
    """Of a first turn, steps, turns of 3 and 17 tokens' kinds; padding left out."""
    found, end = [], 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for size in (5, 1, 1, 3, 1, 11):
        start, end = end, end + size
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        found.append(model(IDS[:, start:end], past_key_values=cache, **given).logits)
    return torch.cat(found, dim=1)[mask.bool()].double()


@pytest.mark.parametrize("q_lora_rank", [None, 32])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("dtype", "kv_format", "most"),
    [(torch.bfloat16, "mla_bf16", 3e-2), (torch.float16, "mla_fp16", 4e-3), (torch.bfloat16, "mla_fp8", 8e-2)],
)
def test_latents_decode_to_what_the_model_computes(dtype, kv_format, most, padded, q_lora_rank):
    model = built(dtype, q_lora_rank=q_lora_rank)
    mask = LEFT_PADDED if padded else torch.ones_like(IDS)
    model.set_attn_implementation("eager")
    replace_norms(model)
    want = logits_of(model, transformers.DynamicCache(), mask)
    ck.accelerate(model, kv_format=kv_format)
    cache = ck.DecodeCache(kv_format, capacity=8)  # it grows
    got = logits_of(model, cache, mask)
    assert (got - want).norm() <= most * want.norm()
    row = {"mla_bf16": 1152, "mla_fp16": 1152, "mla_fp8": 656}[kv_format]
    assert cache.num_bytes == 2 * IDS.numel() * row
    ck.restore(model)
    assert not any("expand_kv" in vars(module) for module in model.modules())


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_generate_replays_steps_over_latents(padded, monkeypatch):
    monkeypatch.setattr(operator, "needs_dispatch", lambda **tensors: True)  # as operators, which can be traced
    model = built()
    mask = PROMPT_MASK if padded else torch.ones_like(PROMPT_MASK)
    model.set_attn_implementation("eager")
    replace_norms(model)
    want = generate(model, mask)
    ck.accelerate(model, kv_format="mla_bf16")
    replay = record_on_cpu(model)
    got = generate(model, mask)
    assert_same_choices(got, want)
    assert (replay.reason, replay.replays) == (None, NEW - 2)


def test_steps_are_absorbed_and_other_passes_are_expanded():
    model = built()
    ck.accelerate(model, kv_format="mla_bf16")
    with calls_of(latents.mla_decode) as calls:
        logits_of(model, ck.DecodeCache("mla_bf16"), torch.ones_like(IDS))
    assert [call.arguments["q"].shape[1] for call in calls] == [size for size in (1, 1, 3, 1, 11) for _ in range(2)]
    handle = model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda module, given, out: 2 * out)
    with calls_of(latents.mla_decode) as calls:
        logits_of(model, ck.DecodeCache("mla_bf16"), torch.ones_like(IDS))
    assert [call.arguments["q"].shape[1] for call in calls] == [1, 1, 3, 1, 11]  # the other layer's
    handle.remove()


def test_the_projection_of_latents_stays_and_a_quantised_one_is_read():
    model = built()
    ck.accelerate(model, kv_format="mla_bf16", weights="w8g64")
    attention = model.model.layers[0].self_attn
    assert type(attention.kv_b_proj) is nn.Linear and isinstance(attention.o_proj, QuantizedLinear)
    cache = ck.DecodeCache("mla_bf16")
    want = logits_of(model, cache, LEFT_PADDED)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = QuantizedLinear.from_linear(layer.self_attn.kv_b_proj, 8, 64)
    got = logits_of(model, ck.DecodeCache("mla_bf16"), LEFT_PADDED)
    assert 0 < (got - want).norm() <= 5e-2 * want.norm()
    projection: Any = attention.kv_b_proj
    unpacked = attention.expand_kv.weight()
    assert torch.equal(unpacked, projection.weight.dequantize())
    again = logits_of(model, ck.DecodeCache("mla_bf16"), LEFT_PADDED)
    assert attention.expand_kv.weight() is unpacked and torch.equal(again, got)
    with torch.no_grad():
        projection.scales.mul_(2)
    assert torch.equal(attention.expand_kv.weight(), projection.weight.dequantize())
    assert not torch.equal(attention.expand_kv.weight(), unpacked)
    projection.input_scale = torch.full((512,), 2.0, dtype=torch.bfloat16)
    assert torch.equal(attention.expand_kv.weight(), 2 * projection.weight.dequantize())


@pytest.mark.parametrize(
    ("changes", "kv_format", "message"),
    [
        ({}, "int4_g4", "kv_format: got 'int4_g4' for DeepseekV3ForCausalLM, whose DeepseekV3Attention caches latents"),
        ({}, {0: "bf16", -1: "int4_g4"}, "caches latents, want one of 'mla_bf16', 'mla_fp16', 'mla_fp8', or None"),
        ({"kv_lora_rank": 256}, "mla_bf16", "has latents and rotated keys of 256 and 64 columns, which want to be 512"),
        ({}, "mla_fp16", "kv_format: got 'mla_fp16', want the format of the model's torch.bfloat16"),
    ],
)
def test_other_formats_and_latents_are_refused_by_name(changes, kv_format, message):
    model = built(**changes)
    with pytest.raises((TypeError, ValueError), match=message):
        ck.accelerate(model, kv_format=kv_format)
        model.generate(IDS, max_new_tokens=2)


def test_latents_of_other_models_are_refused_by_name():
    with pytest.raises(ValueError, match="kv_format: got 'mla_fp8', want a format of keys and values"):
        ck.accelerate(DECODERS["llama"].build(torch.bfloat16), kv_format="mla_fp8")
    model = built()
    ck.register()
    model.set_attn_implementation(ck.ATTENTION_NAME)
    with pytest.raises(AttributeError, match="a DecodeCache hands out packed rows"), torch.no_grad():
        model(IDS, past_key_values=ck.DecodeCache("mla_bf16"))
