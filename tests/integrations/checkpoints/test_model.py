"""A directory becomes a running model: every format, dense and mixtures of experts, against dequantised models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cute_kernels import QuantizedLinear, quantize_model
from cute_kernels.gemm.experts.module import QuantizedRoutedExperts
from cute_kernels.integrations.checkpoints import load_model, load_quantized_linears, load_safetensors, read_kv_scales
from tests.integrations.checkpoints import goldens
from tests.moe import blocks

BF16 = torch.bfloat16
IDS = torch.arange(1, 25).view(2, 12)
SKIPPED = ("lm_head", "gate")
Store = Callable[[goldens.Layer], dict[str, torch.Tensor]]
FORMATS: dict[str, tuple[Store, dict[str, Any]]] = {
    "awq": (goldens.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq": (goldens.gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
    "compressed-tensors": (
        goldens.compressed_tensors,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
        },
    ),
}


def llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model.to(BF16).eval()


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "mixtral": blocks.mixtral_model,
    "qwen3": blocks.qwen3_model,
    "deepseek": blocks.deepseek_model,
    "minimax": blocks.minimax_model,
}


def write(path: Path, model: Any, form: str, **extra: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint of the model with every matrix but the embedding, output and router in a format.

    Returns:
        The tensors of the file, and the dense ones that they stand for, under the checkpoint's names.
    """
    store, config = FORMATS[form]
    model.save_pretrained(path, max_shard_size="50GB")
    dense = load_file(path / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for seed, (key, tensor) in enumerate(sorted(dense.items())):
        name, _, own = key.rpartition(".")
        plain = own != "weight" or tensor.dim() != 2 or "embed" in name or name.rpartition(".")[2] in SKIPPED
        if plain:
            tensors[key] = tensor
            continue
        n, k = tensor.shape
        layer = goldens.layer(n, k, 32, lowest_zero=1, dtype=BF16, seed=seed)
        dense[key] = layer.dense.to(BF16)
        tensors |= {f"{name}.{each}": value for each, value in store(layer).items()}
    save_file(tensors | extra.pop("tensors", {}), path / "model.safetensors", metadata={"format": "pt"})
    settings = (
        json.loads((path / "config.json").read_text()) | {"quantization_config": config, "dtype": "bfloat16"} | extra
    )
    (path / "config.json").write_text(json.dumps(settings))
    return tensors, dense


def reference(path: Path, dense: dict[str, torch.Tensor]) -> Any:
    """The model of the dense tensors, as transformers loads it."""
    path.mkdir()
    save_file(dense, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path.parent / "packed" / "config.json").read_text())
    del settings["quantization_config"]
    (path / "config.json").write_text(json.dumps(settings))
    return AutoModelForCausalLM.from_pretrained(path, dtype=BF16)


def error(got: Any, want: Any) -> float:
    with torch.no_grad():
        a, b = got(IDS).logits.double(), want(IDS).logits.double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("form", list(FORMATS))
@pytest.mark.parametrize("kind", list(MAKERS))
def test_a_directory_becomes_the_model_that_its_formula_describes(tmp_path, kind, form):
    _, dense = write(tmp_path / "packed", MAKERS[kind](), form)
    told: list[tuple[str, int, int]] = []
    model = load_model(tmp_path / "packed", progress=lambda *step: told.append(step))
    want = reference(tmp_path / "dense", dense)
    assert error(model, want) < 0.02
    kinds = {type(module) for module in model.modules()}
    assert (QuantizedRoutedExperts in kinds) == (kind != "llama") and QuantizedLinear in kinds
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert linears == ["lm_head"] and not model.training
    assert [done for _, done, _ in told] == list(range(1, len(told) + 1)) and told[-1][2] == len(told)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek", "minimax"])
def test_what_was_loaded_is_saved_and_loaded_as_ours(tmp_path, kind):
    write(tmp_path / "packed", MAKERS[kind](), "gptq")
    model = load_model(tmp_path / "packed")
    model.save_pretrained(tmp_path / "ours", max_shard_size="60KB")
    again = load_model(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]["quant_method"] == (
        "cute_kernels"
    )


def test_our_state_dict_of_a_mixture_of_experts_is_a_checkpoint_too(tmp_path):
    model = quantize_model(blocks.mixtral_model(), bits=4, group_size=32)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = blocks.mixtral_model(seed=1)
    state = {key: tensor for key, tensor in model.state_dict().items() if key in other.state_dict()}
    other.load_state_dict(state, strict=False)
    load_quantized_linears(other, tmp_path)
    with torch.no_grad():
        assert torch.equal(other(IDS).logits, model(IDS).logits)
    names = [name for name, _ in load_safetensors(tmp_path)]
    assert sum(name.endswith("gate_up") for name in names) == 2


def test_experts_of_a_checkpoint_go_into_a_model_that_is_there(tmp_path):
    _, dense = write(tmp_path / "packed", blocks.mixtral_model(), "awq")
    want = reference(tmp_path / "dense", dense)
    model = reference(tmp_path / "again", dense)
    load_quantized_linears(model, tmp_path / "packed")
    assert error(model, want) < 0.02
    assert sum(isinstance(module, QuantizedRoutedExperts) for module in model.modules()) == 2


def test_experts_keep_forward_hooks_and_are_refused_with_hooks_that_would_be_lost(tmp_path):
    _, dense = write(tmp_path / "packed", blocks.mixtral_model(), "awq")
    for change, lost in ((with_backward_hook, True), (with_forward_hook, False)):
        model = reference(tmp_path / f"dense{lost}", dense)
        (name, *_) = [name for name, module in model.named_modules() if name.endswith(".experts")]
        change(model.get_submodule(name))
        if lost:
            with pytest.raises(ValueError, match="that is not served: it has backward_hooks"):
                load_quantized_linears(model, tmp_path / "packed")
            continue
        load_quantized_linears(model, tmp_path / "packed")
        experts = model.get_submodule(name)
        assert isinstance(experts, QuantizedRoutedExperts) and len(experts._forward_hooks) == 1


def with_backward_hook(module: nn.Module) -> None:
    module.register_full_backward_hook(lambda *_: None)


def with_forward_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, out: out)


def test_layers_that_the_model_says_it_has_no_use_for_are_left(tmp_path):
    """DeepSeek-V3's checkpoints have a layer more, which predicts a token further on."""
    tensors, dense = write(tmp_path / "packed", blocks.deepseek_model(), "awq")
    if not any(
        "layers\\.61" in pattern for pattern in blocks.deepseek_model()._keys_to_ignore_on_load_unexpected or ()
    ):
        pytest.skip("this transformers does not say so")
    more = {key.replace("layers.1.", "layers.61."): t.clone() for key, t in tensors.items() if "layers.1." in key}
    save_file(tensors | more, tmp_path / "packed" / "model.safetensors")
    assert error(load_model(tmp_path / "packed"), reference(tmp_path / "dense", dense)) < 0.02
    more = {key.replace("layers.1.", "layers.7."): t.clone() for key, t in tensors.items() if "layers.1." in key}
    save_file(tensors | more, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(ValueError, match=r"^model\.layers\.7\..*: got (NoneType in the model|experts for)"):
        load_model(tmp_path / "packed")


def test_a_checkpoint_in_several_files_is_read_through_its_index(tmp_path):
    tensors, dense = write(tmp_path / "packed", blocks.mixtral_model(), "gptq")
    (tmp_path / "packed" / "model.safetensors").unlink()
    where = {key: f"model-{i % 3}.safetensors" for i, key in enumerate(sorted(tensors))}
    for file in {*where.values()}:
        save_file({key: t for key, t in tensors.items() if where[key] == file}, tmp_path / "packed" / file)
    (tmp_path / "packed" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert error(load_model(tmp_path / "packed"), reference(tmp_path / "dense", dense)) < 0.02


def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_gives(tmp_path):
    tensors, dense = write(tmp_path / "packed", llama(), "gptq")
    (tmp_path / "packed" / "model.safetensors").unlink()
    where = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(sorted(tensors))}
    for file in ("model-0.safetensors", "model-1.safetensors"):
        other = {key: torch.zeros_like(t) for key, t in tensors.items() if where[key] != file and "norm" in key}
        own = {key: t for key, t in tensors.items() if where[key] == file}
        save_file(own | other, tmp_path / "packed" / file, metadata={"format": "pt"})
    (tmp_path / "packed" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert error(load_model(tmp_path / "packed"), reference(tmp_path / "dense", dense)) < 0.02


@pytest.mark.parametrize("beside", ["adapter_model.safetensors", "consolidated.safetensors"])
def test_files_beside_model_safetensors_are_not_the_model(tmp_path, beside):
    _, dense = write(tmp_path / "packed", llama(), "gptq")
    save_file({"model.norm.weight": torch.zeros(64), "other": torch.zeros(1)}, tmp_path / "packed" / beside)
    assert error(load_model(tmp_path / "packed"), reference(tmp_path / "dense", dense)) < 0.02


def test_tied_embeddings_stay_tied(tmp_path):
    write(tmp_path / "packed", llama(tied=True), "awq")
    model = load_model(tmp_path / "packed")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_another_dtype_rounds_scales_and_is_the_models(tmp_path):
    write(tmp_path / "packed", llama(), "awq")
    model = load_model(tmp_path / "packed", dtype=torch.float16)
    assert model.dtype == torch.float16 == model.model.layers[0].mlp.up_proj.scales.dtype
    with torch.no_grad():
        assert bool(model(IDS).logits.isfinite().all())


def test_no_more_than_the_model_and_a_layer_is_read_at_a_time(tmp_path, monkeypatch):
    """Every dense tensor is read as a slice by transformers, every packed one when its layer's turn comes."""
    write(tmp_path / "packed", llama(), "awq")
    made: list[torch.Size] = []
    original = torch.nn.Linear.__init__

    def watched(self: Any, n: int, k: int, *args: Any, **options: Any) -> None:
        original(self, n, k, *args, **options)
        made.append(self.weight.device.type)

    monkeypatch.setattr(torch.nn.Linear, "__init__", watched)
    load_model(tmp_path / "packed")
    assert set(made) == {"meta"}


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_an_expert_that_is_missing_is_named(tmp_path):
    tensors, _ = write(tmp_path / "packed", blocks.mixtral_model(), "awq")
    lost = {key: t for key, t in tensors.items() if ".1.block_sparse_moe.experts.3.w3." not in key}
    assert len(lost) < len(tensors)
    save_file(lost, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.experts: got no up of expert 3, want it"):
        load_model(tmp_path / "packed")


def test_experts_with_an_order_of_inputs_are_refused(tmp_path):
    tensors, _ = write(tmp_path / "packed", blocks.mixtral_model(), "gptq")
    key = "model.layers.1.block_sparse_moe.experts.3.w1.g_idx"
    tensors[key] = tensors[key].flip(0)
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    settings = json.loads((tmp_path / "packed" / "config.json").read_text())
    settings["quantization_config"]["desc_act"] = True
    (tmp_path / "packed" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.block_sparse_moe\.experts\.3\.w[13]\.(perm|up)"):
        load_model(tmp_path / "packed")


@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"])
def test_a_dense_tensor_that_is_missing_is_an_error(tmp_path, key):
    tensors, _ = write(tmp_path / "packed", llama(), "awq")
    del tensors[key]
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(ValueError, match=f"^{key}: got no such tensor, want it"):
        load_model(tmp_path / "packed")


def test_a_layer_that_is_neither_packed_nor_there_is_an_error(tmp_path):
    tensors, _ = write(tmp_path / "packed", llama(), "awq")
    lost = {key: tensor for key, tensor in tensors.items() if "layers.1.mlp.up_proj" not in key}
    save_file(lost, tmp_path / "packed" / "model.safetensors")
    with pytest.raises(ValueError, match="^model.layers.1.mlp.up_proj.weight: got no such tensor, want it"):
        load_model(tmp_path / "packed")


def test_a_tensor_that_the_model_has_no_use_for_is_an_error(tmp_path):
    """AutoAWQ's scaled activations, for one: without them the model would be another."""
    write(tmp_path / "packed", llama(), "awq", tensors={"model.layers.0.mlp.act.scales": torch.ones(96)})
    with pytest.raises(ValueError, match=r"^model.layers.0.mlp.act.scales: got a"):
        load_model(tmp_path / "packed")


def test_code_in_the_directory_is_not_run(tmp_path):
    write(tmp_path / "packed", llama(), "awq", model_type="mine", auto_map={"AutoConfig": "code.Config"})
    (tmp_path / "packed" / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="^config.json: got model_type 'mine', want one that transformers has itself"):
        load_model(tmp_path / "packed")


def test_pickled_weights_and_gguf_are_refused_by_name(tmp_path):
    write(tmp_path / "packed", llama(), "awq")
    (tmp_path / "packed" / "model.safetensors").rename(tmp_path / "packed" / "model-Q4_K_M.gguf")
    with pytest.raises(FileNotFoundError, match=r"but with model-Q4_K_M.gguf, which is not read, want"):
        load_model(tmp_path / "packed")
    (tmp_path / "packed" / "model-Q4_K_M.gguf").rename(tmp_path / "packed" / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"but with pytorch_model.bin, which runs code when it is read"):
        load_model(tmp_path / "packed")
    with pytest.raises(FileNotFoundError, match="want a directory with config.json"):
        load_model(tmp_path)


def test_a_block_that_does_more_than_route_keeps_its_forward(tmp_path, monkeypatch):
    from transformers.models.mixtral import modeling_mixtral

    _, dense = write(tmp_path / "packed", blocks.mixtral_model(), "awq")
    original = modeling_mixtral.MixtralSparseMoeBlock.forward
    monkeypatch.setattr(
        modeling_mixtral.MixtralSparseMoeBlock, "forward", lambda self, hidden_states: 2 * original(self, hidden_states)
    )
    model = load_model(tmp_path / "packed")
    kinds = [type(layer.mlp).__name__ for layer in model.model.layers]
    assert kinds == ["MixtralSparseMoeBlock"] * 2
    assert all(isinstance(layer.mlp.experts, QuantizedRoutedExperts) for layer in model.model.layers)
    assert error(model, reference(tmp_path / "dense", dense)) < 0.02


# -- scales of the KV cache --------------------------------------------------------------------------------------------


def kv(names: tuple[str, str], value: Any = 0.5) -> dict[str, torch.Tensor]:
    prefix = "model.layers.{}." if "mixer" in names[0] else "model.layers.{}.self_attn."
    return {
        prefix.format(layer) + name: torch.tensor([value * (layer + 1) * (1 + i)])
        for layer in range(2)
        for i, name in enumerate(names)
    }


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),  # Phi-3
        ("mixer.k_proj.k_scale", "mixer.v_proj.v_scale"),  # Nemotron-H
    ],
)
def test_scales_of_the_cache_are_read_by_layer(tmp_path, names):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config = FORMATS["compressed-tensors"][1] | {"kv_cache_scheme": scheme}
    write(tmp_path / "packed", llama(), "compressed-tensors", tensors=kv(names), quantization_config=config)
    model = load_model(tmp_path / "packed")
    assert {layer: (s.k.item(), s.v.item()) for layer, s in model.kv_scales.items()} == {0: (0.5, 1.0), 1: (1.0, 2.0)}
    assert {s.stored_as for s in read_kv_scales(tmp_path / "packed").values()} == {"e4m3"}


@pytest.mark.parametrize("other", ["model.vision_tower.encoder", "model.visual", "mtp"])
@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale")])
def test_scales_of_other_layers_of_the_same_numbers_are_not_the_caches(tmp_path, other, names):
    of_cache = kv(names)
    more = {key.replace("model.", f"{other}.", 1): 8 * scale for key, scale in of_cache.items()}
    write(tmp_path, llama(), "compressed-tensors", tensors=of_cache | more)
    found = read_kv_scales(tmp_path)
    assert {layer: (s.k.item(), s.v.item()) for layer, s in found.items()} == {0: (0.5, 1.0), 1: (1.0, 2.0)}
    assert load_model(tmp_path).kv_scales == found  # they are left out of a model that has no such layers


def test_a_checkpoint_without_scales_has_none(tmp_path):
    write(tmp_path / "packed", llama(), "awq")
    assert read_kv_scales(tmp_path / "packed") == {} == load_model(tmp_path / "packed").kv_scales


@pytest.mark.parametrize(
    ("tensors", "scheme", "message"),
    [
        ({"model.layers.0.self_attn.k_scale": torch.ones(1)}, None, "got it without the other of k and v"),
        (kv(("k_scale", "v_scale"), -1.0), None, r"got \[-1.0\], want positive"),
        (kv(("k_scale", "v_scale")), {"num_bits": 4, "type": "int"}, "^kv_cache_scheme: got 4 bits of type 'int'"),
        (kv(("k_scale", "v_scale")), {"num_bits": 8, "type": "int", "symmetric": False}, "^kv_cache_scheme: got zero"),
    ],
)
def test_scales_of_the_cache_that_are_not_understood_are_refused(tmp_path, tensors, scheme, message):
    config = FORMATS["awq"][1] | {"kv_cache_scheme": scheme}
    write(tmp_path / "packed", llama(), "awq", tensors=tensors, quantization_config=config)
    with pytest.raises(ValueError, match=message):
        read_kv_scales(tmp_path / "packed")
