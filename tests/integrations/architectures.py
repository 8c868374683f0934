"""Small transformers models of many architectures, with random weights: what the integration's tests run through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from packaging.version import Version

VOCABULARY = 97
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_VISION: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_FALCON = {name: _SMALL[name] for name in ("vocab_size", "num_hidden_layers", "num_attention_heads", "eos_token_id")}
_FALCON |= {"hidden_size": 256, "ffn_hidden_size": 96, "multi_query": False}


@dataclass(frozen=True)
class Architecture:
    """A model class and its configuration.

    peak: what the projections of q are multiplied by, so that attention is peaked and a wrong key shows in the output.
    soften: what norms of q are multiplied by, where they undo ``peak`` and nothing scales scores.
    since: the first release of transformers whose mask for it has as many columns as there are keys, whatever the
        attention implementation is called.
    """

    model: str
    config: str
    options: dict[str, Any]
    peak: float = 8.0
    soften: float = 1.0
    since: str = "5.0"

    @property
    def available(self) -> bool:
        """Whether the installed release of transformers has it."""
        known = hasattr(transformers, self.model) and hasattr(transformers, self.config)
        return known and Version(transformers.__version__) >= Version(self.since)

    def build(self, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        """The model, in evaluation, of the same weights every time; ``changes`` to its configuration."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.options, **changes})
        model = getattr(transformers, self.model)(config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if any(part in name for part in ("q_proj.weight", "query.weight", "query_key_value.weight")):
                    weight.mul_(self.peak)
                if name.endswith("q_norm.weight"):
                    weight.mul_(self.soften)
                if name.endswith("sinks"):
                    weight.normal_()
        frequencies = {name: x for name, x in model.named_buffers() if name.endswith("inv_freq")}
        model.to(dtype)
        for name, x in frequencies.items():  # in fp32, as `from_pretrained` leaves them
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, x)
        return model


def _text(name: str, config: Any = "", model: Any = "", **options: Any) -> Architecture:
    return Architecture(model or f"{name}ForCausalLM", config or f"{name}Config", {**_SMALL, **options})


_MOE = {"num_experts_per_tok": 4, "moe_intermediate_size": 64}  # all of them: random routers have ties
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA_4: dict[str, Any] = {  # sizes that differ between layers, and layers that read another one's keys
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "global_head_dim": 512,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
}

DECODERS: dict[str, Architecture] = {
    "llama": _text("Llama"),
    "llama, biases": _text("Llama", attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "llama 4": _text(
        "Llama4", "Llama4TextConfig", num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=8
    ),
    "qwen2": _text("Qwen2"),
    "qwen3": _text("Qwen3"),
    "mistral, window": _text("Mistral", sliding_window=8),
    "mistral": _text("Mistral", sliding_window=None),
    "ministral": _text("Ministral", sliding_window=8, **_WINDOWS),
    "phi-3": _text("Phi3", sliding_window=8),
    "gemma": _text("Gemma"),
    "gemma 2": _text("Gemma2", sliding_window=8, attn_logit_softcapping=5.0, query_pre_attn_scalar=16, **_WINDOWS),
    "gemma 3": _text("Gemma3", "Gemma3TextConfig", sliding_window=8, query_pre_attn_scalar=16, **_WINDOWS),
    "gemma 4": replace(_text("Gemma4", "Gemma4TextConfig", **_GEMMA_4), soften=0.0625),
    "gpt-oss": _text("GptOss", num_local_experts=4, sliding_window=8, **_WINDOWS, **_MOE),
    "cohere 2": _text("Cohere2", sliding_window=8, **_WINDOWS),
    "olmo 2": _text("Olmo2"),
    "glm-4": _text("Glm4"),
    "granite": _text("Granite"),
    "smollm 3": _text("SmolLM3"),
    "starcoder 2": _text("Starcoder2", sliding_window=8),
    "stablelm": replace(_text("StableLm", hidden_size=256), since="5.17"),
    "gpt-neox": _text("GPTNeoX", hidden_size=256),
    "gpt-2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 256, "eos_token_id": None},
    ),
    "opt": _text("OPT", hidden_size=256, ffn_dim=96, word_embed_proj_dim=256),
    "mixtral": _text("Mixtral", num_local_experts=4, num_experts_per_tok=4),
    "qwen3-moe": _text("Qwen3Moe", num_experts=4, decoder_sparse_step=1, **_MOE),
    "falcon": Architecture(
        "FalconForCausalLM", "FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon, ALiBi": Architecture("FalconForCausalLM", "FalconConfig", {**_FALCON, "alibi": True}),
    "bloom": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 128, "n_layer": 2, "n_head": 2, "eos_token_id": None},
    ),
    "mpt": Architecture(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 128, "n_layers": 2, "n_heads": 2, "eos_token_id": None},
    ),
    "deepseek-v3": _text(
        "DeepseekV3",
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        **_MOE,
    ),
}

_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
_LINEAR |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 32}
HYBRIDS: dict[str, Architecture] = {  # beside attention, convolution or recurrence
    "qwen3-next": _text("Qwen3Next", num_hidden_layers=4, num_experts=4, **_LINEAR, **_MOE),
    "lfm2": _text("Lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
    "falcon-h1": _text("FalconH1", mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16),
}

ENCODERS: dict[str, Architecture] = {
    "bert": Architecture("BertModel", "BertConfig", _BERT),
    "roberta": Architecture("RobertaModel", "RobertaConfig", _BERT),
    "modernbert": Architecture(
        "ModernBertModel", "ModernBertConfig", {**_BERT, "local_attention": 8, "global_attn_every_n_layers": 2}
    ),
    "clip, text": Architecture("CLIPTextModel", "CLIPTextConfig", {**_BERT, "eos_token_id": 2, "bos_token_id": 1}),
    "gemma 3, bidirectional": Architecture(
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {**_SMALL, "use_bidirectional_attention": True, "sliding_window": 8, **_WINDOWS},
    ),
    "llama, bidirectional": Architecture("LlamaModel", "LlamaConfig", {**_SMALL, "is_causal": False}),
    "siglip": Architecture("SiglipVisionModel", "SiglipVisionConfig", _VISION),
    "clip": Architecture("CLIPVisionModel", "CLIPVisionConfig", _VISION),
    "vit": Architecture("ViTModel", "ViTConfig", _VISION),
    "dinov2": Architecture("Dinov2Model", "Dinov2Config", _VISION),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_source_positions": 20,
            "num_mel_bins": 16,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "d_kv": 64,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "bigbird-pegasus, decoder": Architecture(  # causal, but its modules say that they are not
        "BigBirdPegasusForCausalLM",
        "BigBirdPegasusConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "decoder_layers": 2,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 64,
            "is_decoder": True,
            "is_encoder_decoder": False,
        },
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 64,
        },
    ),
}


def _inputs_of_text(model: Any) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _inputs_of_images(model: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


def _inputs_of_sound(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=generator)
    return {"input_features": torch.randn(2, 16, 40, generator=generator), "decoder_input_ids": ids}


def _inputs_of_pairs(model: Any) -> dict[str, Any]:
    return {**_inputs_of_text(model), "decoder_input_ids": _inputs_of_text(model)["input_ids"][:, :9]}


_INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "pixel_values": _inputs_of_images,
    "input_features": _inputs_of_sound,
    "input_ids": _inputs_of_text,
}


def inputs_of(model: Any) -> dict[str, Any]:
    """Two requests of what an encoder takes, the first of them padded where it can be."""
    if model.config.is_encoder_decoder and model.main_input_name == "input_ids":
        return _inputs_of_pairs(model)
    return _INPUTS[model.main_input_name](model)
