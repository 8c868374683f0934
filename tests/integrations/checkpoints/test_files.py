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
from cute_kernels.integrations.checkpoints import layer_formats, load_quantized_linears, load_safetensors
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
for gptq in ("gptq", "gptq_v2"):  # nothing but the configuration tells v2 from v1
    CONFIGURED.remove((gptq, False))


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


@pytest.mark.parametrize("version", ["GEMM", None])
def test_awq_as_its_first_versions_configured_it(tmp_path, version):
    layers = golden_layers()
    config = {"quant_method": "awq", "zero_point": True, "q_group_size": 64, "w_bit": 4, "version": version}
    path = write(tmp_path, prefixed({key: goldens.awq(layer) for key, layer in layers.items()}))
    for key, layer in load_safetensors(path, config=config):
        assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)


def test_gptq_v2_that_says_so_as_its_format(tmp_path):
    """GPTQModel writes "format" beside "checkpoint_format", and reads either."""
    layers = golden_layers()
    config = {"quant_method": "gptq", "bits": 4, "format": "gptq_v2"}
    path = write(tmp_path, prefixed({key: goldens.gptq(layer, 2) for key, layer in layers.items()}), config)
    for key, layer in load_safetensors(path):
        assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)


def test_gptq_layers_with_bits_of_their_own(tmp_path):
    layers = golden_layers()
    layers[NAMES[1]] = goldens.layer(72, 128, 32, 8, lowest_zero=1, act_order=True)
    dynamic = {"-:.*attn.*": {}, r"+:model\..*up_proj": {"bits": 8, "group_size": 32, "desc_act": True}}
    config = WRITERS["gptq"][1] | {"desc_act": False, "dynamic": dynamic}
    path = write(tmp_path, prefixed({key: goldens.gptq(layer) for key, layer in layers.items()}), config)
    for key, layer in load_safetensors(path):
        assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)


def test_compressed_tensors_have_the_bits_and_groups_that_their_configuration_says(tmp_path):
    layers = {NAMES[0]: goldens.layer(72, 192, 128, 8, dtype=torch.bfloat16)}
    tensors = {name: goldens.compressed_tensors(layer) for name, layer in layers.items()}
    del tensors[NAMES[0]]["weight_shape"]
    path = write(tmp_path, prefixed(tensors), groups({"num_bits": 8, "group_size": 128}))
    ((name, layer),) = load_safetensors(path)
    assert torch.equal(layer.weight.dequantize(FP64), layers[name].dense)


def groups(*weights: dict[str, Any]) -> dict[str, Any]:
    """A configuration of compressed-tensors with a group of layers for each of these."""
    found = {f"group_{i}": {"targets": ["Linear"], "weights": each} for i, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": found}


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
    assert isinstance(layer, QuantizedLinear)
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
    index.write_text(json.dumps({"weight_map": weight_map | {"norm.weight": "."}}))
    with pytest.raises(FileNotFoundError, match="^norm.weight: got no file ., want it beside model"):
        load_safetensors(tmp_path)
    for outside in ("../model-0.safetensors", str(tmp_path / "model-0.safetensors"), "a/../../model-0.safetensors"):
        index.write_text(json.dumps({"weight_map": weight_map | {"norm.weight": outside}}))
        with pytest.raises(ValueError, match="norm.weight: got .*, want a file of the checkpoint's directory"):
            load_safetensors(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {"norm.weight": "model-7.safetensors"}}))
    with pytest.raises(FileNotFoundError, match="^norm.weight: got no file model-7.safetensors, want it beside model"):
        load_safetensors(tmp_path)


def test_shards_without_an_index_have_to_be_complete(tmp_path):
    files = [tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, (name, layer) in zip(files, golden_layers().items(), strict=True):
        save_file(prefixed({name: goldens.awq(layer)}), file)
    assert [name for name, _ in load_safetensors(tmp_path)] == sorted(NAMES)
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match="^path: got 1 of 2 files of model, want all of them"):
        load_safetensors(tmp_path)
    assert [name for name, _ in load_safetensors(files[0])] == [NAMES[0]]  # a part, by its name


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


def test_a_layer_that_stands_in_several_places_is_swapped_in_all_of_them(tmp_path):
    layers = golden_layers()
    path = write(tmp_path, prefixed({name: goldens.awq(layer) for name, layer in layers.items()}))
    target = model()
    target.add_module("again", target.get_submodule(NAMES[0]))
    load_quantized_linears(target, path)
    again = target.get_submodule("again")
    assert isinstance(again, QuantizedLinear) and again is target.get_submodule(NAMES[0])


def with_forward(linear: nn.Linear) -> None:
    own = linear.forward
    vars(linear)["forward"] = lambda x: own(x) + 1


def with_backward_hook(layer: nn.Module) -> None:
    layer.register_full_backward_hook(lambda *_: None)


def test_forward_hooks_of_swapped_layers_go_on_and_can_be_removed(tmp_path):
    layers = golden_layers()
    target = model().to_empty(device="cpu").bfloat16()
    hooked = target.get_submodule(NAMES[0])
    handle = hooked.register_forward_hook(lambda module, args, kwargs, out: out + 1, with_kwargs=True)
    load_quantized_linears(target, write(tmp_path, prefixed({n: goldens.awq(one) for n, one in layers.items()})))
    x = torch.randn(3, 128).bfloat16()
    layer: Any = target.get_submodule(NAMES[0])
    with_hook = layer(x)
    handle.remove()
    assert isinstance(layer, QuantizedLinear) and torch.equal(with_hook, layer(x) + 1)


@pytest.mark.parametrize("change", [with_forward, with_backward_hook])
def test_a_layer_that_a_quantised_one_cannot_replace_is_unpacked_and_named(tmp_path, change):
    layers = golden_layers()
    target = model().to_empty(device="cpu").bfloat16()
    kept: Any = target.get_submodule(NAMES[0])
    change(kept)
    load_quantized_linears(target, write(tmp_path, prefixed({n: goldens.awq(one) for n, one in layers.items()})))
    assert target.get_submodule(NAMES[0]) is kept and torch.equal(kept.weight, layers[NAMES[0]].dense.bfloat16())
    report: Any = target.quantization_report
    (reason,) = [each.reason for each in report.left if each.name == NAMES[0]]
    assert reason.startswith("unpacked to 16 bits: it")


def test_a_transposed_layer_that_stays_gets_its_weight_transposed(tmp_path):
    layers, bias = golden_layers(), torch.randn(72).bfloat16()
    target = model().to_empty(device="cpu").bfloat16()
    parent, _, own = NAMES[0].rpartition(".")
    kept = pytest.importorskip("transformers.pytorch_utils").Conv1D(72, 128).bfloat16()
    with_backward_hook(kept)
    setattr(target.get_submodule(parent), own, kept)
    tensors = prefixed({n: goldens.awq(one) for n, one in layers.items()}) | {f"{NAMES[0]}.bias": bias}
    load_quantized_linears(target, write(tmp_path, tensors))
    assert torch.equal(kept.weight.T, layers[NAMES[0]].dense.bfloat16()) and torch.equal(kept.bias, bias)


def test_a_bias_that_a_layer_of_16_bits_lacks_is_refused(tmp_path):
    target = model().to_empty(device="cpu")
    with_backward_hook(target.get_submodule(NAMES[1]))
    before = dict(target.named_modules())
    tensors = prefixed({n: goldens.awq(one) for n, one in golden_layers().items()})
    path = write(tmp_path, tensors | {f"{NAMES[1]}.bias": torch.zeros(72)})
    with pytest.raises(ValueError, match=f"^{NAMES[1]}.bias: got a bias of a layer that stays in 16 bits, want none"):
        load_quantized_linears(target, path)
    assert dict(target.named_modules()) == before


def test_a_bias_that_the_checkpoint_lacks_is_named(tmp_path):
    target = model()
    target.get_submodule(NAMES[1]).register_parameter("bias", nn.Parameter(torch.empty(72, device="meta")))
    before = dict(target.named_modules())
    with pytest.raises(ValueError, match=f"^{NAMES[1]}.bias: got no such tensor, want it: the model's layer has a"):
        load_quantized_linears(target, broken(tmp_path))
    assert dict(target.named_modules()) == before


def test_a_model_that_is_the_layer_itself_is_refused(tmp_path):
    path = write(tmp_path, goldens.awq(golden_layers()[NAMES[0]]))
    with pytest.raises(TypeError, match="^model: got the layer itself, Linear, want a module around it"):
        load_quantized_linears(nn.Linear(128, 72, bias=False), path)


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


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "gptq_v2"])
def test_no_layer_that_has_lost_a_tensor_is_passed_over(tmp_path, name):
    store, _ = WRITERS[name]
    tensors = prefixed({key: store(layer) for key, layer in golden_layers().items()})
    form = next(form for form in layer_formats.LAYER_FORMATS if form.name == name)
    for lost in form.required:
        write(tmp_path, {key: tensor for key, tensor in tensors.items() if key != f"{NAMES[1]}.{lost}"})
        with pytest.raises(ValueError, match=f"^{NAMES[1]}.{lost}: got no such tensor, want it beside"):
            load_safetensors(tmp_path)


FOREIGN = {
    "fp8": {"weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)},
    "int8 alone": {"weight": torch.zeros(4, 4).char()},
    "fp8 in blocks": {"weight": torch.zeros(4, 4).bfloat16(), "weight_scale_inv": torch.ones(1, 1)},
    "marlin": {"qweight": torch.zeros(4, 4).int(), "g_idx": torch.zeros(4).int()},
    "bitsandbytes": {"weight": torch.zeros(8, 1).byte(), "weight.absmax": torch.ones(1)},
    "torchao of another class": {"_weight_scale": torch.ones(4, 1)},
    "torchao's first names": {"weight:qdata": torch.zeros(4, 4).char(), "weight:scale": torch.ones(4, 1)},
    "LLM.int8": {"weight": torch.zeros(4, 4).char(), "SCB": torch.ones(4)},
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=list(FOREIGN))
def test_a_layer_of_a_format_that_is_not_read_is_refused_not_passed_over(tmp_path, foreign):
    tensors = prefixed({NAMES[0]: goldens.awq(golden_layers()[NAMES[0]]), "model.other": foreign})
    write(tmp_path, tensors, WRITERS["awq"][1])
    with pytest.raises(
        ValueError, match=r"^model\.other\.[a-z_A-Z.]+.*: got .*(format that is not read|no such tensor)"
    ):
        load_safetensors(tmp_path)


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.int8, "compressed-tensors"), (torch.float8_e4m3fn, "fp8")])
def test_layers_of_bytes_of_another_method_are_refused_by_name(tmp_path, dtype, wanted):
    foreign = {"weight": torch.zeros(4, 4).to(dtype), "weight_scale": torch.ones(4, 1)}
    tensors = prefixed({NAMES[0]: goldens.awq(golden_layers()[NAMES[0]]), "model.other": foreign})
    with pytest.raises(ValueError, match=f"^quant_method: got 'awq', want one of {wanted} .* such as model.other"):
        load_safetensors(write(tmp_path, tensors, WRITERS["awq"][1]))


@pytest.mark.parametrize("name", ["awq", "gptq", "compressed-tensors"])
@pytest.mark.parametrize("extra", ["weight_global_scale", "act_scales", "lora_a"])
def test_a_tensor_beside_a_layer_that_nobody_reads_is_refused(tmp_path, name, extra):
    store, config = WRITERS[name]
    tensors = prefixed({key: store(layer) for key, layer in golden_layers().items()})
    path = write(tmp_path, tensors | {f"{NAMES[1]}.{extra}": torch.ones(1)}, config)
    with pytest.raises(ValueError, match=f"^{NAMES[1]}.{extra}: got a tensor that {name} does not have"):
        load_safetensors(path)


# -- where the configuration stands ------------------------------------------------------------------------------------


def write_config(path: Path, settings: dict[str, Any], file: str = "config.json") -> None:
    (path / file).write_text(json.dumps(settings))


V2: dict[str, Any] = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4}
PLACES: dict[str, dict[str, Any]] = {
    "text_config": {"text_config": {"quantization_config": V2}},
    "deeper": {"thinker_config": {"text_config": {"quantization_config": V2}}},
    "compression_config": {"compression_config": V2},
    "both alike": {"quantization_config": V2, "text_config": {"quantization_config": V2}},
    "wrapped": {"quantization_config": {"quant_method": "gptq", "sparsity_config": {}, "quantization_config": V2}},
}


@pytest.mark.parametrize("settings", PLACES.values(), ids=list(PLACES))
def test_a_configuration_is_found_wherever_it_stands(tmp_path, settings):
    layers = golden_layers()
    path = write(tmp_path, prefixed({key: goldens.gptq(layer, 2) for key, layer in layers.items()}))
    write_config(path, settings)
    for key, layer in load_safetensors(path):
        assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "quantization_config.json"])
def test_a_configuration_beside_config_json_is_found(tmp_path, file):
    layers = golden_layers()
    path = write(tmp_path, prefixed({key: goldens.gptq(layer, 2) for key, layer in layers.items()}))
    write_config(path, {"model_type": "llama", "quantization_config": None})
    write_config(path, V2, file)
    for key, layer in load_safetensors(path):
        assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)


def test_configurations_that_differ_are_refused(tmp_path):
    path = write(tmp_path, prefixed({key: goldens.gptq(layer, 2) for key, layer in golden_layers().items()}))
    v1 = V2 | {"checkpoint_format": "gptq"}
    write_config(path, {"quantization_config": V2, "text_config": {"compression_config": v1}})
    with pytest.raises(ValueError, match="differ in quantization_config, text_config.compression_config"):
        load_safetensors(path)


def test_zero_points_of_gptq_without_a_configuration_are_refused_since_v1_and_v2_differ(tmp_path):
    for version in (1, 2):
        path = write(tmp_path, prefixed({key: goldens.gptq(layer, version) for key, layer in golden_layers().items()}))
        with pytest.raises(
            ValueError, match=f"^{NAMES[0]}.qzeros: got (zero points that may be of format 'gptq' or|a zero)"
        ):
            list(load_safetensors(path))
    layers = golden_layers(symmetric=True)
    tensors = {key: goldens.gptq(layer) | {"g_idx": torch.arange(128).int() // 64} for key, layer in layers.items()}
    for key, layer in load_safetensors(write(tmp_path, prefixed(tensors))):
        assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)


@pytest.mark.parametrize("quantizer", ["gptqmodel:2.2.0", ["gptqmodel:1.4.0"], ["other:1.0"], None])
def test_zero_points_of_zero_are_read_as_the_writer_that_the_configuration_names_writes_them(tmp_path, quantizer):
    layers = golden_layers(lowest_zero=0)
    tensors = {key: goldens.gptq(layer, 2) for key, layer in layers.items()}
    for own in tensors.values():
        own["qzeros"] = own["qzeros"] - 0x11111111
    config = V2 | {"checkpoint_format": "gptq", "meta": {"quantizer": quantizer}}
    path = write(tmp_path, prefixed(tensors), config)
    if "gptqmodel" not in str(quantizer):
        with pytest.raises(ValueError, match=f"^{NAMES[0]}.qzeros: got a zero point 0 in format 'gptq'"):
            list(load_safetensors(path))
        return
    for key, layer in load_safetensors(path):
        assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)


def test_groups_of_inputs_that_nobody_tells_the_order_of_are_refused(tmp_path):
    tensors = {key: goldens.gptq(layer) for key, layer in golden_layers(act_order=True).items()}
    for own in tensors.values():
        del own["g_idx"]
    path = write(tmp_path, prefixed(tensors), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"})
    with pytest.raises(ValueError, match=rf"^{NAMES[0]}.g_idx: got no such tensor, .* nothing of the order of inputs"):
        list(load_safetensors(path))


def test_packed_weights_without_zero_points_want_a_configuration(tmp_path):
    layers = golden_layers(symmetric=True)
    tensors = {key: goldens.compressed_tensors(layer) for key, layer in layers.items()}
    for own in tensors.values():
        own.pop("weight_zero_point", None)
    with pytest.raises(ValueError, match=f"^{NAMES[0]}.weight_zero_point: got no such tensor, .* nothing of zero"):
        list(load_safetensors(write(tmp_path, prefixed(tensors))))
    for key, layer in load_safetensors(write(tmp_path, prefixed(tensors), groups(SYMMETRIC))):
        assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)


def test_a_layer_whose_scales_are_all_0_is_refused_and_one_0_among_others_is_not(tmp_path):
    golden = golden_layers()[NAMES[0]]
    tensors = goldens.awq(golden)
    path = write(tmp_path, prefixed({NAMES[0]: tensors | {"scales": torch.zeros(2, 72).half()}}), WRITERS["awq"][1])
    with pytest.raises(ValueError, match=f"^{NAMES[0]}.scales: got 0 everywhere"):
        list(load_safetensors(path))
    tensors["scales"][1, 3] = 0
    ((_, layer),) = load_safetensors(write(tmp_path, prefixed({NAMES[0]: tensors}), WRITERS["awq"][1]))
    want = golden.dense.clone()
    want[3, 64:] = 0
    assert torch.equal(layer.weight.dequantize(FP64), want)


# -- several groups of compressed-tensors ------------------------------------------------------------------------------


def test_each_layer_has_the_group_that_its_name_is_in(tmp_path):
    layers = {NAMES[0]: golden_layers()[NAMES[0]], NAMES[1]: goldens.layer(72, 192, 128, 8, dtype=torch.bfloat16)}
    tensors = {key: goldens.compressed_tensors(layer) for key, layer in layers.items()}
    config = groups({"num_bits": 4, "group_size": 64}, {"num_bits": 8, "group_size": 128})
    config["config_groups"]["group_1"]["targets"] = ["re:.*up_proj"]
    for key, layer in load_safetensors(write(tmp_path, prefixed(tensors), config)):
        assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)
    config["config_groups"]["group_0"]["targets"] = [NAMES[1]]
    with pytest.raises(ValueError, match=f"^{NAMES[0]}.config_groups: got none whose targets are"):
        list(load_safetensors(write(tmp_path, prefixed(tensors), config)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format: got 'nvfp4-pack-quantized', want 'pack-quantized'"),
        ({"weights": {"type": "float", "num_bits": 4}}, "type: got weights of type 'float', want 'int'"),
        ({"targets": "Linear"}, "config_groups: got targets 'Linear', want a list of names"),
    ],
)
def test_a_group_that_is_not_understood_is_refused_by_its_layer(tmp_path, change, message):
    tensors = {key: goldens.compressed_tensors(layer) for key, layer in golden_layers().items()}
    config = groups({"num_bits": 4})
    config["config_groups"]["group_0"] |= change
    with pytest.raises((TypeError, ValueError), match=f"^{NAMES[0]}.{message}"):
        list(load_safetensors(write(tmp_path, prefixed(tensors), config)))


def test_weights_whose_inputs_are_rotated_are_refused(tmp_path):
    tensors = {key: goldens.compressed_tensors(layer) for key, layer in golden_layers().items()}
    config = groups({"num_bits": 4}) | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}
    with pytest.raises(ValueError, match=f"^{NAMES[0]}.transform_config: got transforms of inputs"):
        list(load_safetensors(write(tmp_path, prefixed(tensors), config)))


SYMMETRIC, ASYMMETRIC = {"symmetric": True, "num_bits": 4}, {"symmetric": False, "num_bits": 4}
GPTQ = {"quant_method": "gptq", "bits": 4}
MISMATCHES = {
    "sym": ("gptq", GPTQ | {"sym": True}, (), "qzeros: got zero points other than 8, want 8 everywhere.* sym is true"),
    "no desc_act": ("gptq", GPTQ | {"desc_act": False}, (), "g_idx: got inputs of a group that are not neighbours"),
    "desc_act": ("gptq", GPTQ | {"desc_act": True}, ("g_idx",), "g_idx: got no such tensor, .* desc_act is true"),
    "a list for dynamic": ("gptq", GPTQ | {"dynamic": [3]}, (), r"dynamic: got \[3\], want values for each pattern"),
    "no pattern": ("gptq", GPTQ | {"dynamic": {"+:(": {}}}, (), r"dynamic: got '\+:\(' .*, want a regular expression"),
    "awq": (
        "awq",
        {"quant_method": "awq", "zero_point": False},
        (),
        "qzeros: got zero points other than 8, want 8 everywhere.* zero_point is false",
    ),
    "symmetric": (
        "compressed-tensors",
        groups(SYMMETRIC),
        (),
        "weight_zero_point: got zero points other than 8, .* symmetric is true",
    ),
    "asymmetric": (
        "compressed-tensors",
        groups(ASYMMETRIC, ASYMMETRIC | {"group_size": 32}),
        ("weight_zero_point",),
        "weight_zero_point: got no such tensor, .* symmetric is false",
    ),
    "actorder": (
        "compressed-tensors",
        groups(ASYMMETRIC | {"actorder": "group"}),
        ("weight_g_idx",),
        "weight_g_idx: got no such tensor, .* actorder is 'group'",
    ),
    "num_bits": (
        "compressed-tensors",
        groups({"num_bits": 8}),
        (),
        r"weight_packed: got shape \[72, 16\], want 4 codes a word",
    ),
    "no groups": (
        "compressed-tensors",
        {"config_groups": {"group_0": ["Linear"]}},
        (),
        r"config_groups: got {'group_0': \['Linear'\]}, want groups of layers by name",
    ),
    "group_size": (
        "compressed-tensors",
        groups({"group_size": 32}),
        (),
        "group_size: got 32, want one of .*, 2 groups of K = 128",
    ),
}


@pytest.mark.parametrize(("name", "config", "lost", "message"), MISMATCHES.values(), ids=list(MISMATCHES))
def test_tensors_that_are_not_as_the_configuration_says_are_refused(tmp_path, name, config, lost, message):
    store, _ = WRITERS[name]
    layers = golden_layers(act_order=name != "awq")
    tensors = {key: store(layer) for key, layer in layers.items()}
    for own in tensors.values():
        for each in lost:
            del own[each]
    with pytest.raises((TypeError, ValueError), match=f"^{NAMES[0]}.{message}"):
        list(load_safetensors(write(tmp_path, prefixed(tensors), config)))


def test_configurations_that_fit_symmetric_layers_are_taken(tmp_path):
    layers = golden_layers(symmetric=True, act_order=True)
    configs = {"gptq": GPTQ | {"sym": True, "desc_act": True}, "compressed-tensors": groups(SYMMETRIC, ASYMMETRIC)}
    for name, config in configs.items():
        tensors = {key: WRITERS[name][0](layer) for key, layer in layers.items()}
        for key, layer in load_safetensors(write(tmp_path, prefixed(tensors), config)):
            assert torch.equal(layer.weight.dequantize(FP64), layers[key].dense)


@pytest.mark.parametrize("number", [torch.tensor([4, 4]), torch.tensor(4.5)])
def test_numbers_of_hqq_that_are_none_are_refused_by_name(tmp_path, number):
    tensors = prefixed({NAMES[0]: hqq_tensors(golden_layers()[NAMES[0]]) | {"nbits": number}})
    with pytest.raises(ValueError, match=f"^{NAMES[0]}.nbits: got torch.* want one integer"):
        list(load_safetensors(write(tmp_path, tensors)))


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
    with pytest.raises(
        ValueError,
        match="^path: got no quantised layer, by none of the names W_q, _weight_qdata, blocks, codes, q",
    ):
        load_safetensors(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"norm.weight": torch.zeros(4)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="^norm.weight: got it in one.safetensors and in other.safetensors"):
        load_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "fp8"}, "quant_method: got 'fp8', want one of awq, gptq, auto-round for layers with qweight"),
        ({"quant_method": "awq", "version": "gemv"}, f"{NAMES[0]}.version: got 'gemv', want 'gemm'"),
        ({"quant_method": "awq", "checkpoint_format": "gemv"}, f"{NAMES[0]}.version: got 'gemv', want 'gemm'"),
        (
            {"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_v2"},
            f"{NAMES[0]}.checkpoint_format: got 'gptq' and 'gptq_v2' as format",
        ),
        ({"quant_method": "awq", "bits": 8}, f"{NAMES[0]}.bits: got 8, want 4 for AWQ"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(tmp_path, config, message):
    path = write(tmp_path, prefixed({name: goldens.awq(layer) for name, layer in golden_layers().items()}), config)
    with pytest.raises(ValueError, match=f"^{message}"):
        list(load_safetensors(path))


def test_the_formats_that_share_a_mark_are_those_that_shapes_or_a_configuration_tell_apart():
    told = [(form.mark, form.dtypes, form.required) for form in layer_formats.LAYER_FORMATS]  # by the tensors alone
    assert {each[0] for each in told if told.count(each) > 1} == {"qweight"}
