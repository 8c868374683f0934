"""Directories of gpt-oss, by Hugging Face's names and by the original ones, against transformers' dequantising."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from cute_kernels import quantize_model
from cute_kernels.gemm.experts import ClampedSwiglu, QuantizedRoutedExperts
from cute_kernels.gemm.experts.blocks import experts_refusal
from cute_kernels.integrations import hf_quantizer
from cute_kernels.integrations.checkpoints import load_model, load_safetensors
from tests.integrations.checkpoints.test_model import error

BF16 = torch.bfloat16
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 160,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
}
EXPERTS, TOPK = 8, 3
Tensors = dict[str, torch.Tensor]


def model() -> Any:
    torch.manual_seed(0)
    made: Any = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=TOPK))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made.to(BF16).eval()


def hugging_face(path: Path) -> tuple[Tensors, Tensors]:
    """(the tensors of a quantised directory, the dense ones that transformers makes of them)."""
    model().save_pretrained(path)
    dense, tensors = load_file(path / "model.safetensors"), Tensors()
    generator = torch.Generator().manual_seed(1)
    for key, tensor in dense.items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = tensor
            continue
        experts, k, n = tensor.shape
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        # Large enough that gates and ups reach the limit.
        scales = torch.randint(122, 126, (experts, n, k // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        dense[key] = convert_moe_packed_tensors(blocks, scales)
    settings = json.loads((path / "config.json").read_text())
    settings |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tensors, dense


NAMES = {
    "input_layernorm.weight": "attn.norm.scale",
    "self_attn.sinks": "attn.sinks",
    "self_attn.o_proj.weight": "attn.out.weight",
    "self_attn.o_proj.bias": "attn.out.bias",
    "post_attention_layernorm.weight": "mlp.norm.scale",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.bias",
    "mlp.experts.gate_up_proj_blocks": "mlp.mlp1_weight.blocks",
    "mlp.experts.gate_up_proj_scales": "mlp.mlp1_weight.scales",
    "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
    "mlp.experts.down_proj_blocks": "mlp.mlp2_weight.blocks",
    "mlp.experts.down_proj_scales": "mlp.mlp2_weight.scales",
    "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
}


def original(path: Path, tensors: Tensors) -> None:
    """The same tensors as the original files have them."""
    path.mkdir()
    found = {
        "embedding.weight": tensors["model.embed_tokens.weight"],
        "norm.scale": tensors["model.norm.weight"],
        "unembedding.weight": tensors["lm_head.weight"],
    }
    for layer in range(SIZES["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}", f"block.{layer}"
        found |= {f"{theirs}.{name}": tensors[f"{ours}.{own}"] for own, name in NAMES.items()}
        for own in ("weight", "bias"):
            parts = [tensors[f"{ours}.self_attn.{which}_proj.{own}"] for which in "qkv"]
            found[f"{theirs}.attn.qkv.{own}"] = torch.cat(parts)
    save_file(found, path / "model--00001-of-00001.safetensors")
    settings = {
        **SIZES, "num_experts": EXPERTS, "experts_per_token": TOPK, "swiglu_limit": 7.0, "initial_context_length": 4096,
        "rope_theta": 150000, "rope_scaling_factor": 32.0, "rope_ntk_alpha": 1, "rope_ntk_beta": 32,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(settings))


def reference(path: Path, config: Path, dense: Tensors) -> Any:
    path.mkdir()
    save_file(dense, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((config / "config.json").read_text())
    del settings["quantization_config"]
    (path / "config.json").write_text(json.dumps(settings))
    return AutoModelForCausalLM.from_pretrained(path, dtype=BF16)


def test_both_kinds_of_files_become_the_model_that_transformers_dequantises(tmp_path):
    tensors, dense = hugging_face(tmp_path / "hf")
    original(tmp_path / "original", tensors)
    told: list[tuple[str, int, int]] = []
    found = load_model(tmp_path / "hf", progress=lambda *step: told.append(step))
    want = reference(tmp_path / "dense", tmp_path / "hf", dense)
    assert error(found, want) < 0.01
    assert [name for name, *_ in told] == [
        f"model.layers.{i}.mlp.experts.{own}_proj" for i in range(2) for own in ("down", "gate_up")
    ]
    experts = found.model.layers[1].mlp.experts
    assert isinstance(experts, QuantizedRoutedExperts) and experts.activation == ClampedSwiglu(1.702, 7.0)
    for part, own in ((experts.gate_up, "gate_up_proj"), (experts.down, "down_proj")):
        assert torch.equal(part.weight.dequantize(), dense[f"model.layers.1.mlp.experts.{own}"].mT)
        assert part.bias is not None and torch.equal(part.bias, dense[f"model.layers.1.mlp.experts.{own}_bias"])
    notes = {layer.note for layer in found.quantization_report.quantized}
    assert len(found.quantization_report.quantized) == 2 and notes == {"MXFP4, 16-bit products"}
    other = load_model(tmp_path / "original")
    assert type(other) is GptOssForCausalLM
    for (name, ours), theirs in zip(found.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert error(other, found) < 1e-6


def test_a_saved_copy_has_the_same_bits(tmp_path):
    hugging_face(tmp_path / "hf")
    found = load_model(tmp_path / "hf")
    found.save_pretrained(tmp_path / "saved")
    hf_quantizer.register()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, tensor in found.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert error(again, found) == 0


def test_a_dense_model_is_quantised():
    dense, want = model(), model()
    quantize_model(dense, bits=8, group_size=32)
    assert isinstance(dense.model.layers[0].mlp.experts, QuantizedRoutedExperts)
    assert error(dense, want) < 0.03


def test_layers_one_by_one_are_all_experts_of_a_projection(tmp_path):
    tensors, dense = hugging_face(tmp_path / "hf")
    original(tmp_path / "original", tensors)
    for path in ("hf", "original"):
        layers = dict(load_safetensors(tmp_path / path))
        assert len(layers) == 4
        for name, layer in layers.items():
            assert torch.equal(layer.weight.dequantize(), dense[name].mT) and layer.bias is not None


def change(path: Path, key: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[key] = tensors[key] if tensor is None else tensor
    if tensor is None:
        del tensors[key]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


FIRST = "model.layers.0.mlp.experts.gate_up_proj"
BAD: dict[str, tuple[str, torch.Tensor | None, str]] = {
    "no scales": ("_scales", None, "scales: got no such tensor, want it beside blocks"),
    "no bias": ("_bias", None, "bias: got no such tensor, want it: the model's experts have one"),
    "a bias of another size": ("_bias", torch.zeros(8, 4).bfloat16(), r"bias: got torch.bfloat16 \[8, 4\], want"),
    "an exponent of 255": ("_scales", torch.full((8, 320, 3), 255).byte(), "scales: got 255, which is NaN"),
    "scales of other groups": ("_scales", torch.full((8, 320, 2), 120).byte(), r"scales: got shape \[8, 320, 2\]"),
    "blocks of 8 bytes": ("_blocks", torch.zeros(8, 320, 6, 8).byte(), r"blocks: got shape \[8, 320, 6, 8\], want"),
    "experts of another number": ("_blocks", torch.zeros(4, 320, 3, 16).byte(), "scales: got shape"),
}


@pytest.mark.parametrize("which", list(BAD))
def test_a_bad_tensor_is_named_with_its_layer(tmp_path, which):
    own, tensor, message = BAD[which]
    hugging_face(tmp_path)
    change(tmp_path, FIRST + own, tensor)
    with pytest.raises((TypeError, ValueError), match=rf"^{FIRST}.{message}"):
        load_model(tmp_path)


def test_original_files_with_a_tensor_more_are_refused(tmp_path):
    tensors, _ = hugging_face(tmp_path / "hf")
    original(tmp_path / "original", tensors)
    file = tmp_path / "original" / "model--00001-of-00001.safetensors"
    whole = load_file(file)
    for more in ("block.0.attn.rope", "head.scale"):
        save_file(whole | {more: torch.zeros(3)}, file)
        with pytest.raises(ValueError, match=rf"^{more}: got a tensor of that name, want those of gpt-oss's original"):
            load_model(tmp_path / "original")


Experts: Any = GptOssExperts  # which a decorator makes, of no type


class WithoutAShift(Experts):
    """Experts whose activation is another one."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * up


def test_experts_that_mean_something_else_are_refused():
    config = GptOssConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=TOPK)
    assert experts_refusal(GptOssExperts(config)) is None
    assert experts_refusal(WithoutAShift(config)) == "the code of its experts, WithoutAShift, is not known"
