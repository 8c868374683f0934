"""Layers of FP8, MXFP4 and NVFP4 as ModelOpt and DeepSeek name them, whole models of them, and files that are bad."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cute_kernels import QuantizedLinear
from cute_kernels.integrations.checkpoints import load_model, load_quantized_linears, load_safetensors
from cute_kernels.integrations.checkpoints.torchao import from_tensor
from tests.integrations.checkpoints.test_model import MAKERS, SKIPPED, error, reference
from tests.integrations.test_own_attention import HAS_DEEPSEEK_V4
from tests.integrations.test_own_attention import deepseek_v4 as deepseek_v4_model

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
Tensors = dict[str, torch.Tensor]
NAME = "model.layers.0.mlp.up_proj"


def numbers(generator: torch.Generator, low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32).to(torch.uint8)


def fp4(generator: torch.Generator, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes [N, K / 2], their numbers [N, K])."""
    stored = numbers(generator, 0, 256, n, k // 2)
    codes = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1).long()
    return stored, LEVELS[codes & 7] * (1 - 2.0 * (codes >> 3))


def fp8(generator: torch.Generator, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = (torch.randn(n, k, generator=generator) * 100).clamp(-448, 448).to(E4M3)
    return codes, codes.float()


def spread(scales: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def modelopt_nvfp4(generator: torch.Generator, n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    weight, wide = fp4(generator, n, k)
    scale = (torch.rand(n, -(-k // 16), generator=generator) * 400).to(E4M3)
    second = torch.exp2(-torch.randint(12, 15, (), generator=generator).float())  # of each layer its own
    tensors = {"weight": weight, "weight_scale": scale, "weight_scale_2": second, "input_scale": torch.tensor(0.5)}
    return tensors, wide * (spread(scale.float(), (n, k), (1, 16)) * second)


def compressed_nvfp4(generator: torch.Generator, n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    """As `modelopt_nvfp4`, with other names, and divided by the second level."""
    tensors, wide = modelopt_nvfp4(generator, n, k)
    second = 1 / tensors["weight_scale_2"].reshape(1)
    return {
        "weight_packed": tensors["weight"],
        "weight_scale": tensors["weight_scale"],
        "weight_global_scale": second,
        "input_global_scale": torch.ones(1),
    }, wide


def deepseek_v3(generator: torch.Generator, n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    weight, wide = fp8(generator, n, k)
    scale = (torch.rand(-(-n // 128), -(-k // 128), generator=generator) + 0.5) / 2**11
    return {"weight": weight, "weight_scale_inv": scale}, wide * spread(scale, (n, k), (128, 128))


def deepseek_v4(
    block: int, dtype: torch.dtype = E8M0
) -> Callable[[torch.Generator, int, int], tuple[Tensors, torch.Tensor]]:
    def make(generator: torch.Generator, n: int, k: int) -> tuple[Tensors, torch.Tensor]:
        weight, wide = fp8(generator, n, k)
        scale = numbers(generator, 113, 117, -(-n // block), -(-k // block))
        factor = torch.exp2(scale.float() - 127)
        return {"weight": weight, "scale": scale.view(dtype)}, wide * spread(factor, (n, k), (block, block))

    return make


def deepseek_v4_experts(generator: torch.Generator, n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    weight, wide = fp4(generator, n, k)
    scale = numbers(generator, 118, 124, n, -(-k // 32))
    factor = torch.exp2(scale.float() - 127)
    return {"weight": weight.view(torch.int8), "scale": scale.view(E8M0)}, wide * spread(factor, (n, k), (1, 32))


def modelopt_fp8(generator: torch.Generator, n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    weight, wide = fp8(generator, n, k)
    scale = torch.tensor(0.00037)
    return {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(0.02)}, wide * scale


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
COMPRESSED_NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16},
            "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local", "group_size": 16},
        }
    },
}
FORMATS: dict[str, tuple[Callable[..., tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "modelopt nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "modelopt fp8": (modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "compressed-tensors nvfp4": (compressed_nvfp4, COMPRESSED_NVFP4),
    "deepseek v3": (deepseek_v3, BLOCKS),
    "deepseek v4": (deepseek_v4(128), BLOCKS | {"scale_fmt": "ue8m0"}),
    "deepseek v4.1, bytes": (deepseek_v4(32, torch.uint8), BLOCKS | {"weight_block_size": [32, 32]}),
    "deepseek v4 experts": (deepseek_v4_experts, BLOCKS),
}


def write_layer(path: Path, tensors: Tensors, config: dict[str, Any] | None, **more: torch.Tensor) -> Path:
    save_file({f"{NAME}.{own}": tensor for own, tensor in (tensors | more).items()}, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("form", list(FORMATS))
def test_a_layer_is_what_its_formula_says_bit_by_bit(tmp_path, form, configured):
    make, config = FORMATS[form]
    tensors, want = make(torch.Generator().manual_seed(0), 200, 416)  # tails of tiles, blocks and groups
    bias = torch.randn(200)
    path = write_layer(tmp_path, tensors, config if configured else None, bias=bias)
    ((name, layer),) = load_safetensors(path if configured else path / "model.safetensors")
    assert name == NAME and isinstance(layer, QuantizedLinear) and layer.bias is not None
    assert torch.equal(layer.weight.dequantize(torch.float32), want)
    assert torch.equal(layer.weight.dequantize(), want.bfloat16())


def write_model(path: Path, model: Any, form: str) -> Tensors:
    """Writes a model whose matrices but the embedding, output and router are in a format; returns the dense tensors
    that they stand for."""
    (make, config), generator = FORMATS[form], torch.Generator().manual_seed(1)
    model.save_pretrained(path, max_shard_size="50GB")
    dense, tensors = load_file(path / "model.safetensors"), Tensors()
    for key, tensor in sorted(dense.items()):
        name, _, own = key.rpartition(".")
        if own != "weight" or tensor.dim() != 2 or "embed" in name or name.rpartition(".")[2] in SKIPPED:
            tensors[key] = tensor
            continue
        stored, want = make(generator, *tensor.shape)
        dense[key] = want.bfloat16()
        tensors |= {f"{name}.{each}": value for each, value in stored.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16", "quantization_config": config}
    (path / "config.json").write_text(json.dumps(settings))
    return dense


@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek"])
@pytest.mark.parametrize("form", list(FORMATS))
def test_a_directory_becomes_the_model_that_its_formula_describes(tmp_path, form, kind):
    """The scales of the second level of an expert's gate and up differ."""
    dense = write_model(tmp_path / "packed", MAKERS[kind](), form)
    model = load_model(tmp_path / "packed", activations="16bit")
    assert error(model, reference(tmp_path / "dense", dense)) < 0.02
    report = model.quantization_report
    assert report.quantized and all(layer.nbytes and layer.packed_nbytes for layer in report.quantized)
    assert all("16-bit products as asked; declared: " in layer.note for layer in report.quantized)
    left = {layer.name.rpartition(".")[2]: layer.reason for layer in report.left}
    assert left["embed_tokens"] == "an embedding" and left["lm_head"] == "of 16 bits in the checkpoint"
    assert ("gate" in left) == (kind != "llama") and all(layer.nbytes for layer in report.left)
    assert not {layer.name for layer in report.left} & {layer.name for layer in report.quantized}


@HAS_DEEPSEEK_V4
@pytest.mark.parametrize("block", [128, 32])
def test_a_directory_of_deepseek_v4_has_its_own_names(tmp_path, block):
    """`layers.0.ffn.experts.0.w1` and the like: MXFP4 experts beside FP8 in blocks of 128, or of 32 as V4.1 has them.
    Products of groups of heads (`wo_a`) are unpacked."""
    path, generator = tmp_path / "packed", torch.Generator().manual_seed(1)
    deepseek_v4_model().bfloat16().save_pretrained(path)
    dense, tensors = load_file(path / "model.safetensors"), Tensors()
    for key, tensor in sorted(dense.items()):
        name, _, own = key.rpartition(".")
        if own != "weight" or tensor.dim() != 2 or not re.search(r"\.w(q_a|q_b|kv|o_a|o_b|[123])$", name):
            tensors[key] = tensor
            continue
        make = deepseek_v4_experts if ".experts." in name else deepseek_v4(block)
        stored, want = make(generator, *tensor.shape)
        dense[key] = want.bfloat16()
        tensors |= {f"{name}.{each}": value for each, value in stored.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = BLOCKS | {"scale_fmt": "ue8m0", "weight_block_size": [block, block]}
    settings = json.loads((path / "config.json").read_text())
    settings |= {"dtype": "bfloat16", "quantization_config": config, "expert_dtype": "fp4"}
    (path / "config.json").write_text(json.dumps(settings))
    model = load_model(path, activations="16bit")
    assert error(model, reference(tmp_path / "dense", dense)) < 0.02
    experts = [layer for layer in model.quantization_report.quantized if layer.name.endswith(".experts")]
    assert len(experts) == 2 and all(layer.note.startswith("MXFP4, 16-bit products") for layer in experts)
    assert any(layer.name.endswith("o_a_proj") for layer in model.quantization_report.left)


def test_modelopt_s_own_file_is_a_configuration(tmp_path):
    tensors, want = modelopt_nvfp4(torch.Generator().manual_seed(0), 64, 64)
    path = write_layer(tmp_path, tensors, None)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    ((_, layer),) = load_safetensors(path)
    assert torch.equal(layer.weight.dequantize(torch.float32), want)
    (path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(TypeError, match=r"^hf_quant_config.json: got NoneType, want the quantisation configuration"):
        load_safetensors(path)


def test_modelopts_mixed_precision_names_stacked_experts_as_one_layer(tmp_path):
    """The groups beside it have them as one target; a model of one file has layers of both formats."""
    generator = torch.Generator().manual_seed(0)
    expert, dense = "model.layers.0.mlp.experts.3.up_proj", "model.layers.0.self_attn.q_proj"
    made = {expert: modelopt_nvfp4(generator, 64, 128), dense: modelopt_fp8(generator, 64, 128)}
    tensors = {f"{name}.{own}": tensor for name, (parts, _) in made.items() for own, tensor in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    layers = {expert.rpartition(".experts")[0] + ".experts": {"quant_algo": "NVFP4"}, dense: {"quant_algo": "FP8"}}
    groups = {f"group_{i}": {"input_activations": {"dynamic": False}, "targets": [key]} for i, key in enumerate(layers)}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**config, "config_groups": groups}}))
    found = dict(load_safetensors(tmp_path))
    for name, (_, want) in made.items():
        assert torch.equal(found[name].weight.dequantize(torch.float32), want)
    assert found[expert].activations is None and found[dense].activation_scale is not None


@pytest.mark.parametrize("dtype", [torch.uint8, E4M3])
@pytest.mark.parametrize("beside", [True, False])
def test_stacked_experts_of_a_format_that_is_not_read_are_not_passed_over(tmp_path, dtype, beside):
    """As ModelOpt writes those of gpt-oss: beside layers that are read, or alone."""
    tensors = modelopt_fp8(torch.Generator().manual_seed(0), 64, 64)[0] if beside else {}
    path = write_layer(tmp_path, tensors, None)
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    more = {stacked: torch.zeros(2, 64, 64).to(dtype), f"{stacked}_weight_scale": torch.ones(())}
    save_file(load_file(path / "model.safetensors") | more, path / "model.safetensors")
    said = f"^{stacked} of .*: got a layer that is quantised in a format that is not read"
    with pytest.raises(ValueError, match=said):
        load_safetensors(path)


def with_byte(codes: torch.Tensor, byte: int) -> torch.Tensor:
    found = codes.clone()
    found.view(torch.uint8)[3, 5] = byte
    return found


NVFP4, V3 = (make(torch.Generator().manual_seed(0), 64, 256)[0] for make in (modelopt_nvfp4, deepseek_v3))
V4 = deepseek_v4_experts(torch.Generator().manual_seed(0), 64, 256)[0]
BAD: dict[str, tuple[Tensors, dict[str, torch.Tensor | None], str]] = {
    "groups of another size": (NVFP4, {"weight_scale": NVFP4["weight_scale"][:, ::2]}, "weight_scale: got shape .*16"),
    "scales of other rows": (NVFP4, {"weight_scale": NVFP4["weight_scale"][:32]}, r"weight_scale: got shape \[32, 16"),
    "scales that are NaN": (
        NVFP4,
        {"weight_scale": torch.full((64, 16), 0x7F, dtype=torch.uint8).view(E4M3)},
        "weight_scale: got",
    ),
    "a negative scale": (NVFP4, {"weight_scale": (-NVFP4["weight_scale"].float()).to(E4M3)}, "weight_scale: got"),
    "scales of 0": (
        NVFP4,
        {"weight_scale": torch.zeros(64, 16).to(E4M3)},
        "weight_scale: got 0 everywhere, a layer without values",
    ),
    "no second level": (NVFP4, {"weight_scale_2": None}, "weight_scale_2: got no scale of the second level"),
    "a second level of 0": (NVFP4, {"weight_scale_2": torch.zeros(())}, "weight_scale_2: got 0, want positive finite"),
    "a second level without end": (NVFP4, {"weight_scale_2": torch.tensor(torch.inf)}, "weight_scale_2: got inf, want"),
    "a divisor without end, by which all would be 0": (
        {"weight_packed": NVFP4["weight"], "weight_scale": NVFP4["weight_scale"]},
        {"weight_global_scale": torch.tensor([torch.inf])},
        "weight_global_scale: got inf, want positive finite numbers",
    ),
    "a tensor that needs a kernel": (NVFP4, {"pre_quant_scale": torch.ones(256)}, "pre_quant_scale: got a tensor that"),
    "scales of FP4 beside codes of bytes": (V3, {"weight_scale_inv": NVFP4["weight_scale"]}, "weight_scale_inv: got"),
    "blocks of another size": (V3, {"weight_scale_inv": torch.ones(1, 3)}, "weight_scale_inv: got shape .1, 3."),
    "scales that are infinite": (
        V3,
        {"weight_scale_inv": torch.full((1, 2), torch.inf)},
        "weight_scale_inv: got values that are not finite",
    ),
    "an exponent of 255": (
        V4,
        {"scale": torch.full((64, 8), 255, dtype=torch.uint8)},
        "scale: got 255, which is NaN",
    ),
    "an exponent of 255 of a block of FP8": (
        V3,
        {"weight_scale_inv": None, "scale": torch.tensor([[120, 255]], dtype=torch.uint8).view(E8M0)},
        "scale: got 255, which is NaN, want exponents up to 254",
    ),
    "an exponent of 255 of a group of FP8": (
        V3,
        {"weight_scale_inv": None, "weight_scale": torch.tensor(255, dtype=torch.uint8).expand(64, 8)},
        "weight_scale: got 255, which is NaN, want exponents up to 254",
    ),
    "no rows": (
        V3,
        {"weight": V3["weight"][:0], "weight_scale_inv": None, "weight_scale": torch.tensor(0.5)},
        r"weight: got shape \[0, 256\], want",
    ),
    "a code that is NaN": (V3, {"weight": with_byte(V3["weight"], 0x7F)}, "weight: got codes that are NaN"),
    "a code that is NaN, in one scale": (
        V3,
        {"weight": with_byte(V3["weight"], 0xFF), "weight_scale_inv": None, "weight_scale": torch.tensor(0.5)},
        "weight: got codes that are NaN, want numbers",
    ),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("said", ["fp8", "int4", None, "fp4"])
def test_what_deepseek_says_of_its_experts_is_what_they_have(tmp_path, said, inside):
    """V4 says it in config.json, V4.1 in the quantisation configuration."""
    write_layer(tmp_path, V4, None)
    config = BLOCKS | ({"expert_dtype": said} if said and inside else {})
    settings = {"quantization_config": config} | ({"expert_dtype": said} if said and not inside else {})
    (tmp_path / "config.json").write_text(json.dumps(settings))
    if said in (None, "fp4"):
        ((_, layer),) = load_safetensors(tmp_path)
        assert isinstance(layer, QuantizedLinear) and layer.weight_format.title == "MXFP4"
        return
    wanted = "beside weight of torch.int8, want 'fp4'" if said == "fp8" else "want 'fp4' or 'fp8'"
    with pytest.raises(ValueError, match=f"^{NAME}.expert_dtype: got '{said}'.* ?{wanted}"):
        list(load_safetensors(tmp_path))


V3_CODES = torch.zeros(320, 256).to(E4M3)


@pytest.mark.parametrize("shape", [(), (1, 1), (320,), (320, 1), (2, 2), (5, 4), (320, 2)])
def test_scales_of_other_blocks_than_the_configuration_declares_are_refused(tmp_path, shape):
    """One scale would be that of the whole weight, and 320 those of its rows."""
    tensors = {"weight": V3_CODES, "weight_scale_inv": torch.ones(shape)}
    said = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}}
    compressed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], **said}}}
    for config, own in ((BLOCKS, "weight_scale_inv"), (compressed, "weight_scale")):
        renamed = {"weight": V3_CODES, own: tensors["weight_scale_inv"]}
        got = re.escape(str(list(shape)))
        wanted = rf"{own}: got shape {got}, want \[3, 2\]: the configuration says blocks of .*128"
        with pytest.raises(ValueError, match=rf"^{NAME}.{wanted}.*\(in model.safetensors\)$"):
            list(load_safetensors(write_layer(tmp_path, renamed, config)))
    attributes = {"block_size": [128, 128]}
    with pytest.raises(ValueError, match=r"scale: got shape .* want \[3, 2\]"):
        from_tensor("Float8Tensor", {"qdata": V3_CODES, "scale": torch.ones(shape)}, attributes)


@pytest.mark.parametrize(("block", "shape"), [([128, 128], (3, 2)), ([512, 512], ()), ([1, 256], (320,)), (None, ())])
def test_scales_of_the_blocks_that_the_configuration_declares_are_read(tmp_path, block, shape):
    tensors = {"weight": V3_CODES, "weight_scale_inv": torch.ones(shape)}
    assert list(load_safetensors(write_layer(tmp_path, tensors, BLOCKS | {"weight_block_size": block})))


@pytest.mark.parametrize("which", list(BAD))
def test_a_bad_tensor_is_named_with_its_layer_and_file(tmp_path, which):
    tensors, changes, message = BAD[which]
    changed = {name: tensor.contiguous() for name, tensor in (tensors | changes).items() if tensor is not None}
    with pytest.raises((TypeError, ValueError), match=rf"^{NAME}.{message}.*\(in model.safetensors\)$"):
        list(load_safetensors(write_layer(tmp_path, changed, None)))


def test_a_model_is_as_it_was_where_a_later_layer_is_bad(tmp_path):
    """The message names the file of the tensor that is bad, not of the layer's first one."""
    model: Any = nn.ModuleDict({name: nn.Linear(256, 64, bias=False) for name in ("a", "b")})
    before = dict(model.named_modules())
    files = {"a.weight": "1", "a.weight_scale_inv": "1", "b.weight": "1", "b.weight_scale_inv": "2"}
    bad = V3 | {"weight_scale_inv": torch.full((1, 2), torch.inf)}
    tensors = {key: (bad if key[0] == "b" else V3)[key[2:]].clone() for key in files}
    for number in "12":
        part = {key: tensors[key] for key, file in files.items() if file == number}
        save_file(part, tmp_path / f"model-{number}-of-2.safetensors")
    index = {"weight_map": {key: f"model-{file}-of-2.safetensors" for key, file in files.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"^b.weight_scale_inv: got .* want finite ones \(in model-2-of-2.safetensors\)$"
    ):
        load_quantized_linears(model, tmp_path)
    assert dict(model.named_modules()) == before and type(model["a"]) is nn.Linear


def test_fp16_is_refused_where_scales_are_bytes_and_taken_where_they_are_numbers(tmp_path):
    with pytest.raises(TypeError, match=f"^{NAME}.dtype: got torch.float16, want bf16"):
        list(load_safetensors(write_layer(tmp_path, NVFP4, None), dtype=torch.float16))
    ((_, layer),) = load_safetensors(write_layer(tmp_path, V3, None), dtype=torch.float16)
    assert layer.weight.dtype == torch.float16


def test_e5m2_is_refused_by_name(tmp_path):
    tensors = {"weight": torch.zeros(64, 64).to(torch.float8_e5m2), "weight_scale": torch.ones(())}
    with pytest.raises(ValueError, match="a layer that is quantised in a format that is not read"):
        load_safetensors(write_layer(tmp_path, tensors, None))
