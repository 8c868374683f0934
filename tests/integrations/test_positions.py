"""Models that place tokens in other ways than one rotation by one set of frequencies: every kind of RoPE that
transformers has, beyond the length that it was trained for, and the positions of images beside text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import cute_kernels.integrations.transformers as ck
from cute_kernels.integrations.transformers.norms import replace_norms
from tests.integrations.architectures import DECODERS, VOCABULARY
from tests.integrations.test_accelerate import LEFT_PADDED, PROMPT, assert_same_choices, generate, record_on_cpu

TRAINED = 18
"""Positions that the models were trained for: passed by the sixth step."""
HALF = 32
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {
        "short_factor": [1.0] * HALF,
        "long_factor": [4.0 + i for i in range(HALF)],
        "original_max_position_embeddings": TRAINED,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
READ_ON_THE_HOST = ("dynamic", "longrope")
"""Kinds whose frequencies some release chooses by the host's numbers: such a step is not recorded."""


def test_every_kind_that_transformers_has_is_here():
    assert set(ROPE_INIT_FUNCTIONS) <= set(KINDS)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in ROPE_INIT_FUNCTIONS])
def test_rotations_of_every_kind_go_on_beyond_the_trained_length(kind, padded):
    parameters = {"rope_type": kind, "rope_theta": 1e4, **KINDS[kind]}
    changes: dict[str, Any] = {"rope_parameters": parameters, "max_position_embeddings": TRAINED}
    mask = LEFT_PADDED if padded else torch.ones_like(PROMPT)
    found = []
    for accelerated in (False, True):
        model = DECODERS["llama"].build(torch.bfloat16, **changes)
        model.set_attn_implementation("eager")
        replace_norms(model)
        if accelerated:
            ck.accelerate(model, kv_format="bf16")
            replay = record_on_cpu(model)
        found.append(generate(model, mask))
    assert_same_choices(found[1], found[0])
    if kind in READ_ON_THE_HOST:
        assert replay.replays == 0 or replay.reason is None
    else:
        assert replay.reason is None and replay.replays == replay.ahead + 1 > 1


def _llava() -> Any:
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        projection_dim=64,
    )  # fmt: skip
    text = transformers.LlamaConfig(**DECODERS["llama"].options)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCABULARY - 1)
    return transformers.LlavaForConditionalGeneration(config), {"pixel_values": torch.randn(2, 3, 16, 16)}, 4


def _qwen2_vl() -> Any:
    text = {
        **DECODERS["qwen2"].options,
        "hidden_size": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    text["rope_parameters"]["mrope_section"] = [8, 12, 12]
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 256, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=VOCABULARY - 1, video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3, vision_end_token_id=VOCABULARY - 4,
    )  # fmt: skip
    patches = torch.randn(2 * 16, 3 * 2 * 8 * 8)
    inputs = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    return transformers.Qwen2VLForConditionalGeneration(config), inputs, 4


@pytest.mark.parametrize("make", [_llava, _qwen2_vl], ids=["llava", "qwen2-vl, mrope"])
def test_a_vision_language_model_chooses_the_tokens_of_eager_attention(make):
    found = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        model, inputs, image_tokens = make()
        model = model.to(torch.bfloat16).eval()
        ids = PROMPT.clamp(max=VOCABULARY - 5)
        ids = torch.cat((ids[:, :3], torch.full((2, image_tokens), VOCABULARY - 1), ids[:, 3:]), dim=1)
        if "image_grid_thw" in inputs:
            ids[:, 2] = VOCABULARY - 3
            inputs["mm_token_type_ids"] = (ids == VOCABULARY - 1).int()
        model.set_attn_implementation("eager")
        replace_norms(model)
        if accelerated:
            ck.accelerate(model, kv_format="bf16")
            replay = record_on_cpu(model)
        options: Any = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "output_logits": True}
        inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in inputs.items()}
        with torch.no_grad():
            found.append(model.generate(ids, **inputs, **options, return_dict_in_generate=True))
    want, got = found
    for step, (ours, theirs) in enumerate(zip(got.logits, want.logits, strict=True)):
        assert (ours - theirs).norm() <= 3e-2 * theirs.norm(), f"step {step}"
        if not torch.equal(got.sequences[:, ids.shape[1] + step], want.sequences[:, ids.shape[1] + step]):
            break
    assert isinstance(got.past_key_values, ck.DecodeCache)
    # Qwen2-VL: older releases give a step no positions, and it runs as usual.
    static = make is _llava or Version(transformers.__version__) >= Version("5.23")
    assert (replay.reason, replay.replays, replay.ahead) == (None, *((10, 9) if static else (0, 0)))
