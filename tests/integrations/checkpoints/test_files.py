"""Checkpoints in safetensors files: every format is recognised, layers come one at a time, bad files change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from cute_kernels import QuantizedLinear, quantize_model
from cute_kernels.integrations.checkpoints import files, load_quantized_linears, load_safetensors
from tests.integrations.checkpoints import goldens

NAMES = ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj")
FP64 = torch.float64


def golden_layers(**options: Any) -> dict[str, goldens.Layer]:
    options = {"lowest_zero": 1, "dtype": torch.bfloat16} | options
    return {name: goldens.layer(72, 128, 64, seed=seed, **options) for seed, name in enumerate(NAMES)}


def prefixed(layers: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{name}.{own}": tensor for name, tensors in layers.items() for own, tensor in tensors.items()}


def hqq_tensors(golden: goldens.Layer) -> dict[str, torch.Tensor]:
    numbers = {"shape": golden.shape, "nbits": golden.bits, "axis": 1}
    return goldens.hqq(golden) | {name: torch.tensor(value) for name, value in numbers.items()}


WRITERS = {
    "awq": (goldens.awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}),
    "gptq": (goldens.gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}),
    "gptq_v2": (lambda layer: goldens.gptq(layer, 2), {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
    "compressed-tensors": (goldens.compressed_tensors, {"quant_method": "compressed-tensors"}),
    "hqq": (hqq_tensors, {"quant_method": "hqq"}),
}


def write(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    save_file(tensors, directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    return directory


CONFIGURED = [(name, configured) for name in WRITERS for configured in (True, False)]
CONFIGURED.remove(("gptq_v2", False))  # nothing but the configuration tells v2 from v1


@pytest.mark.parametrize(("name", "configured"), CONFIGURED)
def test_every_format_is_recognised_with_and_without_a_configuration(tmp_path, name, configured):
    store, config = WRITERS[name]
    layers = golden_layers(act_order=name.startswith("gptq"))
    tensors = prefixed({key: store(layer) for key, layer in layers.items()})
    tensors["model.embed_tokens.weight"] = torch.zeros(4, 4)
    path = write(tmp_path, tensors, config if configured else None)
    found = dict(load_safetensors(path if configured else path / "model.safetensors"))
    assert list(found) == sorted(NAMES)
    for key, layer in layers.items():
        assert torch.equal(found[key].weight.dequantize(FP64), layer.dense) and found[key].bias is None


def test_a_saved_quantised_model_is_a_checkpoint_too(tmp_path):
    torch.manual_seed(0)
    model = quantize_model(nn.Sequential(nn.Linear(128, 72), nn.ReLU(), nn.Linear(72, 64, bias=False)), group_size=64)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = nn.Sequential(nn.Linear(128, 72), nn.ReLU(), nn.Linear(72, 64, bias=False)).to("meta")
    load_quantized_linears(other, tmp_path)
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(other(x), model(x))


def test_biases_devices_and_dtypes(tmp_path):
    golden = golden_layers()[NAMES[0]]
    bias = torch.randn(72).half()
    path = write(tmp_path, goldens.awq(golden) | {"bias": bias})  # a layer by itself has no prefix
    ((name, layer),) = load_safetensors(path, dtype=torch.float16, device="cpu")
    assert name == "" and layer.scales.dtype == torch.float16
    assert layer.bias is not None and torch.equal(layer.bias, bias)


def test_shards_are_read_through_their_index(tmp_path):
    layers = golden_layers()
    weight_map: dict[str, str] = {}
    for i, (name, layer) in enumerate(layers.items()):
        tensors = prefixed({name: goldens.awq(layer)})
        save_file(tensors, tmp_path / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{i}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file({"other.qweight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")  # not in the index
    assert [name for name, _ in load_safetensors(tmp_path)] == sorted(NAMES)
    index.write_text(json.dumps({"weight_map": weight_map | {"norm.weight": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match="^norm.weight: got no such tensor, want it in model-1.safetensors, as model"):
        load_safetensors(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"norm.weight": "model-7.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="^norm.weight: got no file model-7.safetensors, want it beside model"):
        load_safetensors(tmp_path)


def test_a_layer_is_read_when_it_is_asked_for(tmp_path, monkeypatch):
    path = write(tmp_path, prefixed({name: goldens.awq(layer) for name, layer in golden_layers().items()}))
    read: list[str] = []
    original = safetensors.safe_open

    class Recorder:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = original(*arguments, **options)

        def __enter__(self) -> Recorder:
            self.file.__enter__()
            return self

        def __exit__(self, *arguments: Any) -> None:
            self.file.__exit__(*arguments)

        def get_tensor(self, key: str) -> torch.Tensor:
            read.append(key)
            return self.file.get_tensor(key)

    monkeypatch.setattr(safetensors, "safe_open", Recorder)
    layers = load_safetensors(path)
    assert read == []
    next(layers)
    assert {key.rpartition(".")[0] for key in read} == {NAMES[0]}


# -- into a model ------------------------------------------------------------------------------------------------------


def model(n: int = 72) -> nn.Module:
    projections = {name.rpartition(".")[2]: nn.Linear(128, n, bias=False, device="meta") for name in NAMES}
    layer = nn.ModuleDict({"mlp": nn.ModuleDict(projections)})
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList([layer])}), "lm_head": nn.Linear(4, 4)})


def test_linear_layers_of_a_model_are_swapped_and_progress_is_told(tmp_path):
    layers, told = golden_layers(), []
    path = write(tmp_path, prefixed({name: goldens.awq(layer) for name, layer in layers.items()}))
    loaded = load_quantized_linears(model(), path, progress=lambda *step: told.append(step))
    for name, layer in layers.items():
        swapped = loaded.get_submodule(name)
        assert isinstance(swapped, QuantizedLinear) and torch.equal(swapped.weight.dequantize(FP64), layer.dense)
    assert type(loaded.get_submodule("lm_head")) is nn.Linear
    assert told == [(NAMES[0], 1, 2), (NAMES[1], 2, 2)]


def broken(tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    """A checkpoint whose second layer is bad."""
    layers = golden_layers(act_order=True)
    tensors = {name: goldens.gptq(layer) for name, layer in layers.items()}
    tensors[NAMES[1]] = {name: t for name, t in (tensors[NAMES[1]] | changes).items() if t is not None}
    return write(tmp_path, prefixed(tensors), {"quant_method": "gptq", "bits": 4, "group_size": 64})


BAD = {
    "no scales": ({"scales": None}, f"{NAMES[1]}.scales: got no such tensor, want it beside qweight \\(gptq\\)"),
    "g_idx": ({"g_idx": torch.full((128,), 9).int()}, f"{NAMES[1]}.g_idx: got group 9 for input 0, want 0 to 1"),
    "nibbles": (
        {"qweight": torch.zeros(15, 72).int()},
        f"{NAMES[1]}.qweight: got shape \\[15, 72\\], want \\[16, 72\\]",
    ),
    "NaN": ({"scales": torch.full((2, 72), torch.nan)}, f"{NAMES[1]}.scales: got values that are not finite"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=list(BAD))
def test_a_bad_layer_is_named_and_leaves_the_model_as_it_was(tmp_path, changes, message):
    target = model()
    before = dict(target.named_modules())
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        load_quantized_linears(target, broken(tmp_path, **changes))
    assert dict(target.named_modules()) == before


def test_a_model_of_another_shape_or_without_the_layer_is_refused(tmp_path):
    path = broken(tmp_path)
    with pytest.raises(ValueError, match=rf"^{NAMES[0]}: got a weight \[72, 128\], want \[64, 128\]"):
        load_quantized_linears(model(64), path)
    with pytest.raises(ValueError, match=f"^{NAMES[0]}: got NoneType in the model, want an nn.Linear"):
        load_quantized_linears(nn.Linear(4, 4), path)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_that_was_cut_off_names_what_it_has_lost(tmp_path):
    path = broken(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    ends = {key: entry["data_offsets"][1] for key, entry in header.items()}
    last = max(ends, key=lambda key: ends[key])
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"^{last}: got model.safetensors cut off after {len(whole) - 1} bytes"):
        load_safetensors(path)
    path.write_bytes(whole[: len(whole) // 4])
    with pytest.raises(ValueError, match="^model.layers.* and [0-9]+ others: got model.safetensors cut off"):
        load_safetensors(path)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (5).to_bytes(8, "little") + b"hello"])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="^model.safetensors: got .* want a (whole )?safetensors file"):
        load_safetensors(path)


def a_file_with(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


ENTRY = {"dtype": "I32", "shape": [4, 4], "data_offsets": [0, 64]}
ENTRIES: dict[str, object] = {
    "no tensor": 3,
    "no place": {name: ENTRY[name] for name in ("dtype", "shape")},
    "a place in words": ENTRY | {"data_offsets": ["0", "64"]},
    "a place before the data": ENTRY | {"data_offsets": [-64, 0]},
    "a place that ends before it begins": ENTRY | {"data_offsets": [64, 0]},
    "more bytes than numbers": ENTRY | {"shape": [4, 3]},
    "a shape in words": ENTRY | {"shape": "4, 4"},
    "a negative size": ENTRY | {"shape": [-4, -4]},
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=list(ENTRIES))
def test_a_header_that_does_not_say_where_a_tensor_is_is_refused_by_the_tensors_name(tmp_path, entry):
    path = tmp_path / "model.safetensors"
    path.write_bytes(a_file_with({"layer.qweight": entry}))
    with pytest.raises(
        ValueError, match=r"^layer.qweight: got .* in the header of model.safetensors, want dtype, shape"
    ):
        load_safetensors(path)


def test_a_header_that_is_a_list_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(a_file_with([ENTRY]))
    with pytest.raises(ValueError, match="^model.safetensors: got a header that is a JSON list, want an object"):
        load_safetensors(tmp_path)


def test_what_the_safetensors_package_cannot_read_is_refused_by_the_tensors_name(tmp_path):
    entries = {f"layer.{name}": ENTRY | {"dtype": "I33"} for name in ("qweight", "qzeros", "scales")}
    (tmp_path / "model.safetensors").write_bytes(a_file_with(entries))
    with pytest.raises(ValueError, match="^layer.qweight: got model.safetensors, which is damaged .*I33"):
        list(load_safetensors(tmp_path))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "nonsense", "config.json: got what is no JSON"),
        ("config.json", "[]", "config.json: got a JSON list, want a JSON object"),
        ("quantize_config.json", "7", "quantize_config.json: got a JSON int, want a JSON object"),
        ("model.safetensors.index.json", "{}", "model.safetensors.index.json: got no 'weight_map'"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": 3}}',
            "model.safetensors.index.json: got no 'weight_map'",
        ),
    ],
)
def test_settings_that_cannot_be_read_are_refused_by_the_files_name(tmp_path, file, text, message):
    write(tmp_path, prefixed({name: goldens.awq(layer) for name, layer in golden_layers().items()}))
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=f"^{message}"):
        load_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "model: got NoneType, want an nn.Module"),
        ({"path": 3}, "path: got int, want the path of a file or directory"),
        ({"config": ["awq"]}, "config: got list, want the quantisation configuration, a mapping"),
    ],
)
def test_arguments_of_another_kind_are_refused(tmp_path, arguments, message):
    path = write(tmp_path, prefixed({name: goldens.awq(layer) for name, layer in golden_layers().items()}))
    with pytest.raises(TypeError, match=f"^{message}"):
        load_quantized_linears(**({"model": torch.nn.Linear(1, 1), "path": path} | arguments))


def test_directories_without_layers_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^path: got the directory .* without \*.safetensors"):
        load_safetensors(tmp_path)
    write(tmp_path, {"norm.weight": torch.zeros(4)})
    with pytest.raises(ValueError, match="^path: got no tensor named W_q, codes, qweight, weight_packed"):
        load_safetensors(tmp_path)
    save_file({"norm.weight": torch.zeros(4)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="^norm.weight: got it in model.safetensors and in other.safetensors"):
        load_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "fp8"}, "quant_method: got 'fp8', want one of awq, gptq for layers with qweight"),
        ({"quant_method": "awq", "version": "gemv"}, f"{NAMES[0]}.version: got 'gemv', want 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, f"{NAMES[0]}.bits: got 8, want 4 for AWQ"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(tmp_path, config, message):
    path = write(tmp_path, prefixed({name: goldens.awq(layer) for name, layer in golden_layers().items()}), config)
    with pytest.raises(ValueError, match=f"^{message}"):
        list(load_safetensors(path))


def test_the_formats_that_share_a_mark_are_the_two_that_shapes_tell_apart():
    marks = [form.mark for form in files.LAYER_FORMATS]
    assert {mark for mark in marks if marks.count(mark) > 1} == {"qweight"}
