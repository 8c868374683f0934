"""Checkpoints of many kinds of models become the models of their dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

from cute_kernels import QuantizedLinear
from cute_kernels.gemm.activations import Relu2
from cute_kernels.gemm.experts.module import QuantizedInputScaledMoE, QuantizedRoutedExperts
from cute_kernels.gemm.experts.stored import stored_as
from cute_kernels.integrations.checkpoints import load_model
from tests.integrations.checkpoints import goldens
from tests.integrations.checkpoints.test_model import BF16, FORMATS, llama, write
from tests.moe import blocks

IDS = torch.arange(3, 15)[None]
PIXELS = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32).to(BF16)
WAVE = torch.linspace(-1, 1, 400).sin()[None].to(BF16)
SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
RECURRENT: dict[str, Any] = SMALL | {"num_hidden_layers": 3, "intermediate_size": 128}
T5: dict[str, Any] = {
    "decoder_start_token_id": 0,
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 32,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 2,
}
MAMBA: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "state_size": 16, "num_hidden_layers": 1}
SPEECH: dict[str, Any] = {
    "conv_dim": (32, 32),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
}


def text(model: Any) -> torch.Tensor:
    return model(IDS).logits


MODELS: dict[str, tuple[Callable[[], Any], str, Callable[[Any], torch.Tensor]]] = {
    "t5": (
        lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
        "Attention DenseReluDense",
        lambda model: model(input_ids=IDS, decoder_input_ids=IDS).logits,
    ),
    "mamba": (
        lambda: tf.MambaForCausalLM(tf.MambaConfig(**MAMBA, time_step_rank=32)),
        "in_proj out_proj dt_proj",
        text,
    ),
    "mamba 2": (
        lambda: tf.Mamba2ForCausalLM(tf.Mamba2Config(**MAMBA, num_heads=4, head_dim=32, n_groups=1)),
        "out_proj",
        text,
    ),
    "siglip": (
        lambda: tf.SiglipVisionModel(tf.SiglipVisionConfig(**SMALL, image_size=32, patch_size=16)),
        "proj fc",
        lambda model: model(PIXELS).pooler_output,
    ),
    "wav2vec2": (
        lambda: tf.Wav2Vec2Model(tf.Wav2Vec2Config(**SMALL, **SPEECH, num_conv_pos_embedding_groups=4)),
        "projection attention dense",
        lambda model: model(WAVE).last_hidden_state,
    ),
    "recurrent gemma": (
        lambda: tf.RecurrentGemmaForCausalLM(tf.RecurrentGemmaConfig(**RECURRENT, vocab_size=96, lru_width=64)),
        "proj linear",
        text,
    ),
    "nanochat": (
        lambda: tf.NanoChatForCausalLM(tf.NanoChatConfig(**SMALL, num_key_value_heads=2, vocab_size=96)),
        "proj fc",
        text,
    ),
    "falcon": (
        lambda: tf.FalconForCausalLM(
            tf.FalconConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
        ),
        "query_key_value dense",
        text,
    ),
}


def packed(path: Path, model: Any, picks: str) -> Path:
    """A GPTQ checkpoint of the linear layers whose names have one of the words, and beside it the dense one."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.05)
    model.to(BF16).save_pretrained(path / "dense")
    layers = {name for name, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    turned = {name for name in layers if type(model.get_submodule(name)).__name__ == "Conv1D"}
    dense, tensors = load_file(path / "dense" / "model.safetensors"), {}
    for seed, key in enumerate(sorted(dense)):
        name = key.removesuffix(".weight")
        if name not in layers or key == name or not any(pick in name for pick in picks.split()):
            tensors[key] = dense[key]
            continue
        n, k = reversed(dense[key].shape) if name in turned else dense[key].shape
        layer = goldens.layer(n, k, 32, lowest_zero=1, dtype=BF16, seed=seed)
        dense[key] = (layer.dense.T if name in turned else layer.dense).to(BF16).contiguous()
        tensors |= {f"{name}.{own}": value for own, value in goldens.gptq(layer).items()}
    save_file(dense, path / "dense" / "model.safetensors", metadata={"format": "pt"})
    (path / "packed").mkdir()
    save_file(tensors, path / "packed" / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "dense" / "config.json").read_text())
    (path / "packed" / "config.json").write_text(json.dumps(settings | {"quantization_config": FORMATS["gptq"][1]}))
    return path


@torch.no_grad()
def agree(got: Any, want: Any, run: Callable[[Any], torch.Tensor]) -> bool:
    found, wanted = run(got).double(), run(want).double()
    return bool((found - wanted).norm() <= 0.02 * wanted.norm())


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_whose_code_asks_for_weights_while_it_is_loaded(tmp_path, name):
    """Initialisation, which runs while a model is loaded, reads and writes `weight` and `bias` of many layers."""
    make, picks, run = MODELS[name]
    model = make()
    path = packed(tmp_path, model, picks)
    found = load_model(path / "packed")
    assert any(isinstance(module, QuantizedLinear) for module in found.modules())
    assert agree(found, type(model).from_pretrained(path / "dense", dtype=BF16), run)


def test_a_weight_that_code_reads_and_a_layer_of_another_forward_are_unpacked(tmp_path):
    make, picks, _ = MODELS["mamba"]
    mixer = load_model(packed(tmp_path / "mamba", make(), picks) / "packed").backbone.layers[0].mixer
    assert isinstance(mixer.in_proj, QuantizedLinear) and type(mixer.dt_proj) is nn.Linear
    assert mixer.dt_proj.weight.dtype == BF16 and not mixer.dt_proj.weight.is_meta
    make, picks, _ = MODELS["siglip"]
    head = load_model(packed(tmp_path / "siglip", make(), picks) / "packed").head
    assert isinstance(head.mlp.fc1, QuantizedLinear) and isinstance(head.attention.out_proj, nn.Linear)


def test_the_transposed_layers_of_gpt2(tmp_path):
    model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2))
    path = packed(tmp_path, model, "c_attn c_proj c_fc")
    found = load_model(path / "packed")
    assert sum(isinstance(module, QuantizedLinear) for module in found.modules()) == 4
    assert agree(found, tf.GPT2LMHeadModel.from_pretrained(path / "dense", dtype=BF16), text)


@pytest.mark.parametrize("make", [blocks.mixtral_model, blocks.qwen3_model], ids=["mixtral", "qwen3"])
def test_a_packed_router_is_unpacked(tmp_path, make):
    tensors, _ = write(tmp_path / "packed", make(), "gptq")
    router = next(key for key in tensors if key.endswith("gate.weight"))
    n, k = tensors[router].shape
    layer = goldens.layer(n, k, 32, lowest_zero=1, dtype=BF16, seed=9)
    save_file(tensors | {router: layer.dense.to(BF16)}, tmp_path / "packed" / "model.safetensors")
    want = load_model(tmp_path / "packed")
    del tensors[router]
    tensors |= {router.removesuffix("weight") + own: value for own, value in goldens.gptq(layer).items()}
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    assert agree(load_model(tmp_path / "packed"), want, text)


def test_a_quantised_output_layer_is_tied_to_nothing(tmp_path):
    model = llama(tied=True)
    path = packed(tmp_path, model, "up_proj")
    tensors, layer = (
        load_file(path / "packed" / "model.safetensors"),
        goldens.layer(128, 64, 32, lowest_zero=1, dtype=BF16, seed=1),
    )
    tensors |= {f"lm_head.{own}": value for own, value in goldens.gptq(layer).items()}
    save_file(tensors, path / "packed" / "model.safetensors")
    found = load_model(path / "packed")
    assert isinstance(found.lm_head, QuantizedLinear) and not found.config.tie_word_embeddings
    assert torch.equal(found.lm_head.weight.dequantize(), layer.dense.to(BF16))


# -- experts one by one ------------------------------------------------------------------------------------------------

VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
MOE: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "head_dim": 32}


def qwen3_vl_moe() -> Any:
    said = {**SMALL, **MOE, "vocab_size": 96, "num_key_value_heads": 2}
    said["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    return tf.Qwen3VLMoeForConditionalGeneration(tf.Qwen3VLMoeConfig(text_config=said, vision_config=VISION))


def llama4() -> Any:
    own: dict[str, Any] = {"intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1}
    return tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(**SMALL, **own, vocab_size=96, num_key_value_heads=2, head_dim=32, pad_token_id=0)
    )


def with_experts_apart(path: Path, model: Any) -> Any:
    """A GPTQ checkpoint of a model's experts one by one, and the model of their dequantised weights."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    model.to(BF16).eval().save_pretrained(path, max_shard_size="50GB")
    tensors = {key: x for key, x in load_file(path / "model.safetensors").items() if ".experts." not in key}
    for name, module in model.named_modules():
        kind = stored_as(module)
        if kind is None:
            continue
        first, down, _ = kind.weights(module)
        rows = {"gate_proj": first[:, :64], "up_proj": first[:, -64:]} if kind.gated else {"up_proj": first}
        for expert in range(len(down)):
            for seed, (own, weight) in enumerate((rows | {"down_proj": down}).items()):
                n, k = weight[expert].shape
                layer = goldens.layer(n, k, 32, lowest_zero=1, dtype=BF16, seed=3 * expert + seed)
                weight[expert].copy_(layer.dense)
                key = f"{name}.{expert}.{own}".replace("model.", SAVED_AS.get(type(model), "model."), 1)
                tensors |= {f"{key}.{own}": value for own, value in goldens.gptq(layer).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": FORMATS["gptq"][1]}))
    return model


SAVED_AS = {tf.NemotronHForCausalLM: "backbone."}  # what checkpoints call the model


def test_experts_that_transformers_knows_stacked_alone(tmp_path):
    want = with_experts_apart(tmp_path, qwen3_vl_moe())
    found = load_model(tmp_path)
    assert type(found.model.language_model.layers[0].mlp.experts) is QuantizedRoutedExperts
    assert agree(found, want, text)


def test_experts_whose_router_scales_what_they_take(tmp_path):
    want = with_experts_apart(tmp_path / "packed", llama4())
    found = load_model(tmp_path / "packed")
    block = found.model.layers[0].feed_forward
    assert type(block) is QuantizedInputScaledMoE and not any(isinstance(m, QuantizedLinear) for m in found.modules())
    assert [layer.name for layer in found.quantization_report.quantized] == ["model.layers.0.feed_forward"]
    assert agree(found, want, text)
    found.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "ours")(IDS).logits, found(IDS).logits)


@torch.no_grad()
def test_experts_without_a_gate(tmp_path):
    want = with_experts_apart(tmp_path / "packed", blocks.nemotron_model())
    found = load_model(tmp_path / "packed")
    (experts,) = (module for module in found.modules() if isinstance(module, QuantizedRoutedExperts))
    assert experts.activation == Relu2() and agree(found, want, text)
    found.save_pretrained(tmp_path / "ours")
    assert torch.equal(load_model(tmp_path / "ours")(IDS).logits, found(IDS).logits)
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    lost = {key: x for key, x in tensors.items() if ".experts.2.up_proj." not in key}
    save_file(lost, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts: got no up of expert 2, want it"):
        load_model(tmp_path / "packed")


# -- which class, which attention, which settings ----------------------------------------------------------------------


def test_an_auto_class_finds_the_model(tmp_path):
    path = packed(tmp_path, llama(), "up_proj")
    assert type(load_model(path / "packed", model_class=tf.AutoModelForCausalLM)) is tf.LlamaForCausalLM
    with pytest.raises(ValueError, match="^model_class: got AutoModelForSeq2SeqLM, which has no model for LlamaConfig"):
        load_model(path / "packed", model_class=tf.AutoModelForSeq2SeqLM)
    with pytest.raises(ValueError, match="^model_class: got .*AutoTokenizer.*, want a model's class of transformers"):
        load_model(path / "packed", model_class=tf.AutoTokenizer)


def test_a_tensor_of_another_shape_is_named(tmp_path):
    path = packed(tmp_path, llama(), "up_proj") / "packed" / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(9)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^model.norm.weight: got shape \[9\], want \[\d+\], that of the model$"):
        load_model(path.parent)


@pytest.mark.parametrize("picks", ["up_proj", "up_proj lm_head"])
def test_a_model_without_a_head_passes_over_the_heads_tensors(tmp_path, picks):
    path = packed(tmp_path, llama(), picks)
    found = load_model(path / "packed", model_class=tf.AutoModel)
    assert type(found) is tf.LlamaModel
    want = tf.AutoModel.from_pretrained(path / "dense", dtype=BF16)
    assert agree(found, want, lambda model: model(IDS).last_hidden_state)
    with pytest.raises(ValueError, match="^model.other: got a tensor that is left over"):
        tensors = load_file(path / "packed" / "model.safetensors")
        save_file(tensors | {"model.other": torch.ones(1)}, path / "packed" / "model.safetensors")
        load_model(path / "packed", model_class=tf.AutoModel)


def test_our_attention_is_registered_where_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tf.AttentionInterface, "_global_mapping", dict(tf.AttentionInterface._global_mapping))
    tf.AttentionInterface._global_mapping.pop("cute_kernels", None)
    path = packed(tmp_path, llama(), "up_proj")
    found = load_model(path / "packed", attn_implementation="cute_kernels")
    assert found.config._attn_implementation == "cute_kernels"
    assert agree(found, tf.LlamaForCausalLM.from_pretrained(path / "dense", dtype=BF16), text)


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_directory_says_how_its_model_generates(tmp_path, form):
    said = {"eos_token_id": [5, 7], "pad_token_id": 3, "temperature": 0.6, "top_p": 0.8, "do_sample": True}
    write(tmp_path / "packed", llama(), form)
    (tmp_path / "packed" / "generation_config.json").write_text(json.dumps(said))
    found = load_model(tmp_path / "packed").generation_config
    assert {key: getattr(found, key) for key in said} == said


def test_an_older_directory_says_it_in_config_json(tmp_path):
    write(tmp_path / "packed", llama(), "gptq", num_beams=4, eos_token_id=9)
    (tmp_path / "packed" / "generation_config.json").unlink(missing_ok=True)
    found = load_model(tmp_path / "packed").generation_config
    assert (found.num_beams, found.eos_token_id) == (4, 9)
