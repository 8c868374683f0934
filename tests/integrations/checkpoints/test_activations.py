"""Activations that checkpoints declare are honoured where products represent them, and a caller may ask otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from cute_kernels import QuantizedLinear, quantize_model, quantized_linear
from cute_kernels.gemm.experts.module import OfExperts
from cute_kernels.integrations.checkpoints import load_model, load_quantized_linears, load_safetensors
from cute_kernels.names import ModelActivations
from tests.integrations.checkpoints.make_files import MADE, NAME, K, N
from tests.integrations.checkpoints.test_float_codes import FORMATS, modelopt_fp8, write_layer, write_model
from tests.integrations.checkpoints.test_model import IDS, llama
from tests.moe import blocks

BY_BLOCK, BY_ROW = ("FP8 ones have a scale for " + each for each in ("128 inputs", "a row"))
DECLARED = {  # by format: what is declared, and why products of 256 inputs are in 16 bits all the same
    "modelopt nvfp4": ("FP4", "there are none in FP4"),
    "modelopt fp8": ("FP8 (static)", ""),
    "compressed-tensors nvfp4": ("FP4 (dynamic, in groups of 16)", "there are none in FP4"),
    "deepseek v3": ("FP8 (dynamic, in groups of 128)", ""),
    "deepseek v4": ("FP8 (dynamic, in groups of 128)", ""),
    "deepseek v4.1, bytes": ("FP8 (dynamic, in groups of 32)", BY_BLOCK),
    "deepseek v4 experts": ("FP8 (dynamic, in groups of 128)", BY_ROW),
}


def only_note(model: Any) -> str:
    """The products of a model's one layer, as its report says them."""
    (layer,) = model.quantization_report.quantized
    return layer.note.partition(", ")[2]


def of_one_layer(n: int, k: int) -> Any:
    model: Any = nn.Linear(k, n, bias=False)
    for part in reversed(NAME.split(".")):
        model = nn.ModuleDict({part: model})
    return model


def test_every_format_has_its_declaration():
    assert DECLARED.keys() == FORMATS.keys()


@pytest.mark.parametrize("asked", [None, "fp8", "16bit"])
@pytest.mark.parametrize("form", list(FORMATS))
def test_a_layer_rounds_its_inputs_as_declared_unless_the_caller_asks_otherwise(tmp_path, form, asked):
    (make, config), (declared, kept) = FORMATS[form], DECLARED[form]
    tensors, _ = make(torch.Generator().manual_seed(0), 128, 256)
    path, x = write_layer(tmp_path, tensors, config), torch.randn(3, 256).bfloat16()
    ((_, layer),) = load_safetensors(path, activations=asked)
    assert isinstance(layer, QuantizedLinear)
    rounds = {None: not kept, "fp8": "nvfp4" not in form, "16bit": False}[asked]
    scale = tensors["input_scale"] if rounds and "static" in declared else None
    want = quantized_linear(x, layer.weight)
    if rounds:
        rounded = quantized_linear(x, layer.weight, activations="fp8", activation_scale=scale)
        assert not torch.equal(rounded, want)
        want = rounded
    assert torch.equal(layer(x), want)
    model = load_quantized_linears(of_one_layer(128, 256), path, activations=asked)
    said = only_note(model)
    why = f" because {kept}" if kept else f" as declared: {declared}"
    if asked is not None:
        why = " as asked" if rounds or asked == "16bit" else " because FP8 ones want "
    assert said.startswith(f"{'FP8' if rounds else '16-bit'} products{why}")
    assert said.endswith(f"declared: {declared}")


def test_a_file_that_declares_nothing_and_a_state_dict_keep_16_bits(tmp_path):
    tensors, _ = modelopt_fp8(torch.Generator().manual_seed(0), 128, 256)
    path, x = write_layer(tmp_path, tensors, FORMATS["modelopt fp8"][1]), torch.randn(3, 256).bfloat16()
    ((_, layer),) = load_safetensors(path)
    want = layer(x)
    for name, found in (("bare", tensors), ("state", layer.state_dict())):
        (other := tmp_path / name).mkdir()
        ((_, plain),) = load_safetensors(write_layer(other, found, None))
        assert isinstance(plain, QuantizedLinear) and plain.activations is None and plain.activation_scale is None
    ((_, layer),) = load_safetensors(tmp_path / "state", activations="fp8")
    assert torch.equal(layer(x), want)  # by the static scale in the state dict


@pytest.mark.parametrize("asked", [None, "fp8"])
@pytest.mark.parametrize("scale", [None, torch.tensor(0.0), torch.tensor(torch.nan), torch.ones(2)])
def test_a_static_scale_that_is_missing_or_no_positive_number_is_named(tmp_path, scale, asked):
    tensors, _ = modelopt_fp8(torch.Generator().manual_seed(0), 128, 256)
    del tensors["input_scale"]
    path = write_layer(
        tmp_path, tensors | ({} if scale is None else {"input_scale": scale}), FORMATS["modelopt fp8"][1]
    )
    assert len(list(load_safetensors(path, activations="16bit"))) == 1
    with pytest.raises(ValueError, match=rf"{NAME}.input_scale: got .* activations='16bit' does without"):
        list(load_safetensors(path, activations=asked))


def test_a_static_scale_in_a_state_dict_is_named_as_it_is_there(tmp_path):
    layer = QuantizedLinear.from_linear(nn.Linear(128, 64, dtype=torch.bfloat16), format="fp8")
    tensors = layer.state_dict() | {"activation_scale": torch.tensor(0.0)}
    path = write_layer(tmp_path, tensors, None)
    assert len(list(load_safetensors(path))) == 1
    with pytest.raises(ValueError, match=rf"{NAME}.activation_scale: got 0, want a positive .* activations='16bit'"):
        list(load_safetensors(path, activations="fp8"))


def test_another_name_for_activations_is_refused_with_those_that_there_are(tmp_path):
    tensors, _ = modelopt_fp8(torch.Generator().manual_seed(0), 128, 256)
    path, wrong = write_layer(tmp_path, tensors, None), "int8"
    said = r"activations: got 'int8', want None \(as the checkpoint declares\), 'fp8' or '16bit'"
    with pytest.raises(ValueError, match=said):
        load_safetensors(path, activations=wrong)  # pyright: ignore[reportArgumentType]


# -- whole models ------------------------------------------------------------------------------------------------------


def experts_model() -> Any:
    """Layers of 256 inputs, experts of 192 between their products."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**blocks.COMMON, "hidden_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    config = Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=192)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # frequencies of positions in fp32
    return model.eval()


MODELS = {"llama": llama, "experts": experts_model}  # llama's layers have 64 and 96 inputs
PRODUCTS = {
    ("modelopt fp8", "llama"): {
        "q_proj": "16-bit products because FP8 ones want at least 128 inputs; declared: FP8 (static)",
        "down_proj": "FP8 products as declared: FP8 (static)",
    },
    ("deepseek v3", "experts"): {
        "q_proj": "FP8 products as declared: FP8 (dynamic, in groups of 128)",
        "experts": "FP8 products as declared: FP8 (dynamic, in groups of 128)",
    },
    ("modelopt fp8", "experts"): {
        "q_proj": "FP8 products as declared: FP8 (static)",
        "experts": "16-bit products because experts have no static scales; declared: FP8 (static)",
    },
    ("deepseek v4 experts", "experts"): {
        "experts": f"16-bit products because {BY_ROW}; declared: FP8 (dynamic, in groups of 128)"
    },
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(("form", "kind"), list(PRODUCTS))
def test_a_models_report_says_the_products_of_each_layer_and_who_chose_them(tmp_path, form, kind):
    write_model(tmp_path / "packed", MODELS[kind](), form)
    model = load_model(tmp_path / "packed")
    notes = {one.name.rpartition(".")[2]: one.note.partition(", ")[2] for one in model.quantization_report.quantized}
    for own, note in PRODUCTS[form, kind].items():
        assert notes[own] == note
    for name, layer in model.named_modules():
        if isinstance(layer, (QuantizedLinear, OfExperts)):
            own = name.rpartition(".")[2]
            assert (layer.activations == "fp8") == notes.get(own, notes.get("experts", "")).startswith("FP8")


def test_experts_without_static_scales_are_read_and_round_by_row_where_asked(tmp_path):
    """A calibration passes over experts that no token chose: their scales may be missing."""
    path = tmp_path / "packed"
    write_model(path, experts_model(), "modelopt fp8")
    tensors = load_file(path / "model.safetensors")
    left = {key: value for key, value in tensors.items() if not (".experts." in key and key.endswith("input_scale"))}
    save_file(left, path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(path, activations="fp8")
    (note,) = (one.note for one in model.quantization_report.quantized if one.name.endswith("experts"))
    assert note.endswith("FP8 products as asked; declared: FP8 (static)")
    assert not torch.equal(logits(model), logits(load_model(path)))


@pytest.mark.parametrize(("form", "kind"), [("modelopt fp8", "llama"), ("deepseek v3", "experts")])
def test_a_saved_model_computes_as_it_did_until_the_caller_asks_otherwise(tmp_path, form, kind):
    write_model(tmp_path / "packed", MODELS[kind](), form)
    model = load_model(tmp_path / "packed")
    want, plain = logits(model), logits(load_model(tmp_path / "packed", activations="16bit"))
    assert not torch.equal(want, plain)
    model.save_pretrained(tmp_path / "saved")
    again, other = (load_model(tmp_path / "saved", activations=asked) for asked in (None, "16bit"))
    assert torch.equal(logits(again), want) and torch.equal(logits(other), plain)
    before, after, asked = (each.quantization_report.quantized for each in (model, again, other))
    saved = {one.name: one for one in after}
    for one in before:
        name = one.name if one.name in saved else one.name.rpartition(".")[0]  # of experts, the block's
        assert ("FP8 products as declared: FP8" in saved[name].note) == ("FP8 products" in one.note)
        assert (saved[name].nbytes, saved[name].packed_nbytes) == (one.nbytes, one.packed_nbytes)
    assert all("16-bit products as asked" in one.note for one in asked)
    into = MODELS[kind]()
    into.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(logits(load_quantized_linears(into, tmp_path / "saved")), want)
    other.save_pretrained(tmp_path / "plain")  # which says what it computes with now
    assert torch.equal(logits(load_model(tmp_path / "plain")), plain)


def test_experts_that_declare_different_activations_keep_16_bits(tmp_path):
    path = tmp_path / "packed"
    write_model(path, experts_model(), "deepseek v3")
    settings = json.loads((path / "config.json").read_text())
    other = {"model.layers.0.mlp.experts.0.up_proj": {"activation_scheme": "static"}}
    settings["quantization_config"]["quantized_layers"] = other
    (path / "config.json").write_text(json.dumps(settings))
    (note,) = (one.note for one in load_model(path).quantization_report.quantized if one.name.endswith("experts"))
    both = "FP8 (dynamic, in groups of 128) and FP8 (static, in groups of 128)"
    assert note.endswith(f"16-bit products because there are none in {both}; declared: {both}")


def test_quantize_model_takes_the_same_words():
    words: tuple[ModelActivations | None, ...] = (None, "16bit", "fp8")
    for asked in words:
        model: Any = nn.Sequential(nn.Linear(128, 64, dtype=torch.bfloat16))
        quantize_model(model, format="fp8", activations=asked)
        assert model[0].activations == ("fp8" if asked == "fp8" else None)
        assert only_note(model) == ("FP8 products as asked" if asked == "fp8" else "16-bit products")


# -- files that the projects wrote -------------------------------------------------------------------------------------

OWN_FILES = {  # what they declare, and whether it is honoured
    "ct_fp8_block": ("FP8 (dynamic, in groups of 128)", True),
    "ct_fp8_channel": ("FP8 (dynamic)", True),
    "ct_fp8_tensor": ("FP8 (dynamic)", True),
    "ct_mxfp8": ("FP8 (dynamic, in groups of 32)", False),
    "ct_mxfp4": ("FP4 (dynamic, in groups of 32)", False),
    "ct_nvfp4": ("FP4 (dynamic, in groups of 16)", False),
    "ct_w4": (None, False),
    "modelopt_fp8": ("FP8 (static)", True),
    "modelopt_fp8_row": ("FP8 (dynamic)", True),
    "modelopt_fp8_block": (None, False),
    "modelopt_mxfp4": ("FP8 (dynamic)", True),
    "modelopt_mxfp8": ("FP8 (dynamic, in groups of 32)", False),
    "modelopt_nvfp4": ("FP4", False),
}
ROUNDING = {  # as torchao writes what it does with activations, less what is alike
    "torchao_fp8_row": ("Float8", {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}}, "FP8 (dynamic)"),
    "torchao_fp8_tensor": ("Float8", {"float8_dtype": {"_data": "float8_e5m2"}}, "E5M2 (dynamic)"),
    "torchao_mxfp8": (
        "MX",
        {"elem_dtype": {"_data": "float8_e4m3fn"}, "block_size": 32},
        "FP8 (dynamic, in groups of 32)",
    ),
    "torchao_mxfp4": ("MX", {"elem_dtype": {"_data": "float4_e2m1fn_x2"}}, "FP4 (dynamic)"),
    "torchao_nvfp4": ("NVFP4", {"use_dynamic_per_tensor_scale": True}, "FP4 (dynamic)"),
    "torchao_int8": ("Int8", {"mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"}}, "INT8 (dynamic)"),
}


def loaded_note(path: Any) -> tuple[QuantizedLinear, str]:
    model = load_quantized_linears(of_one_layer(N, K), path)
    layer = model.get_submodule(NAME)
    assert isinstance(layer, QuantizedLinear)
    return layer, only_note(model)


@pytest.mark.parametrize("name", list(OWN_FILES))
def test_what_a_projects_own_file_declares_is_honoured_or_named(name):
    """ModelOpt's groups call all activations static; its algorithm says which are."""
    declared, honoured = OWN_FILES[name]
    if name == "modelopt_fp8_block":  # of twice the inputs
        ((_, layer),) = load_safetensors(MADE / name)
        assert isinstance(layer, QuantizedLinear) and layer.activations is None
        return
    layer, said = loaded_note(MADE / name)
    assert (layer.activations == "fp8") == honoured and said.startswith("FP8" if honoured else "16-bit")
    assert said.endswith("16-bit products" if declared is None else f"declared: {declared}")
    assert (layer.activation_scale is not None) == (name == "modelopt_fp8")
    if layer.activation_scale is not None:
        assert torch.equal(layer.activation_scale, load_file(MADE / name / "model.safetensors")[f"{NAME}.input_scale"])


FP8 = {"num_bits": 8, "type": "float", "dynamic": True}
W4A8 = {  # what is declared beside INT4, whether that is symmetric, and what the report says
    "a token": (FP8 | {"strategy": "token"}, True, "FP8 products as declared: FP8 (dynamic)"),
    "a tensor": (FP8 | {"strategy": "tensor", "group_size": None}, True, "FP8 products as declared: FP8 (dynamic)"),
    "64 inputs": (FP8 | {"strategy": "group", "group_size": 64}, True, f"16-bit products because {BY_ROW}"),
    "zero points": (FP8, False, "16-bit products because FP8 ones want codes that are E4M3 numbers exactly"),
    "integers": (FP8 | {"type": "int"}, True, "16-bit products because there are none in INT8"),
    "a type that nothing says": (
        {"num_bits": 8, "dynamic": True},
        True,
        "16-bit products because there are none in INT8",
    ),
    "floats that are shifted": (
        FP8 | {"symmetric": False},
        True,
        "16-bit products because there are none in FP8 with zero points",
    ),
}


def write_w4(path: Path, declared: dict[str, Any], symmetric: bool = True, **more: torch.Tensor) -> None:
    """A layer in INT4 with these activations. more: tensors beside its own."""
    config = json.loads((MADE / "ct_w4" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"], group["weights"]["symmetric"] = declared, symmetric
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(MADE / "ct_w4" / "model.safetensors")
    left = {key: value for key, value in tensors.items() if not (symmetric and key.endswith("zero_point"))}
    save_file(left | {f"{NAME}.{own}": tensor for own, tensor in more.items()}, path / "model.safetensors")


@pytest.mark.parametrize("which", list(W4A8))
def test_int4_beside_fp8_activations_has_products_in_fp8(which, tmp_path):
    declared, symmetric, said = W4A8[which]
    write_w4(tmp_path, declared, symmetric)
    layer, note = loaded_note(tmp_path)
    assert note.startswith(said) and (layer.activations == "fp8") == said.startswith("FP8")
    x = torch.randn(3, K).bfloat16()
    assert torch.equal(layer(x), quantized_linear(x, layer.weight, activations=layer.activations))


@pytest.mark.parametrize("scales", [{"input_scale": torch.ones(1)}, {}], ids=["there", "missing"])
def test_static_scales_of_integers_are_not_those_of_fp8_products(scales, tmp_path):
    write_w4(tmp_path, FP8 | {"type": "int", "dynamic": False}, **scales)
    ((_, layer),) = load_safetensors(tmp_path, activations="fp8")
    assert isinstance(layer, QuantizedLinear) and layer.activations == "fp8" and layer.activation_scale is None


def test_a_scheme_that_is_null_is_dynamic(tmp_path):
    make, config = FORMATS["deepseek v3"]
    tensors, _ = make(torch.Generator().manual_seed(0), 128, 256)
    write_layer(tmp_path, tensors, config | {"activation_scheme": None})
    said = only_note(load_quantized_linears(of_one_layer(128, 256), tmp_path))
    assert said == "FP8 products as declared: FP8 (dynamic, in groups of 128)"


@pytest.mark.parametrize("name", list(ROUNDING))
def test_what_torchao_declares_of_activations_is_honoured_or_named(name, tmp_path):
    key, (kind, attributes, declared) = f"{NAME}.weight", ROUNDING[name]
    with safe_open(MADE / name / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    said = json.loads(metadata[key])
    assert said["_data"]["act_quant_kwargs"] is None
    tensors = load_file(MADE / name / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    assert loaded_note(tmp_path)[1] == "16-bit products"
    said["_data"]["act_quant_kwargs"] = {"_type": f"QuantizeTensorTo{kind}Kwargs", "_data": attributes}
    save_file(tensors, tmp_path / "model.safetensors", metadata={**metadata, key: json.dumps(said)})
    layer, note = loaded_note(tmp_path)
    assert (layer.activations == "fp8") == (name == "torchao_fp8_row") and note.endswith(f"declared: {declared}")


@pytest.mark.parametrize(
    ("name", "attribute", "value", "declared"),
    [
        ("torchao_intx4", "activation_quantization", {"_data": "INT8_ASYM_PER_TOKEN"}, "INT8 (dynamic)"),
        ("torchao_int4", "activation_dtype", {"_type": "torch.dtype", "_data": "float8_e4m3fn"}, "FP8 (dynamic)"),
    ],
)
def test_what_torchaos_integer_tensors_declare_of_activations_is_named(name, attribute, value, declared, tmp_path):
    key = f"{NAME}.weight"
    with safe_open(MADE / name / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert loaded_note(MADE / name)[1] == "16-bit products"
    said = json.loads(metadata[key])
    assert attribute in said["_data"]
    said["_data"][attribute] = value
    tensors = load_file(MADE / name / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", metadata={**metadata, key: json.dumps(said)})
    layer, note = loaded_note(tmp_path)
    assert layer.activations is None and note.endswith(f"declared: {declared}")
