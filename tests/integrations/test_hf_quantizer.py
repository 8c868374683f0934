"""Quantised models through `save_pretrained` and `from_pretrained`: the same bytes come back, or an error does."""

from __future__ import annotations

import copy
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from cute_kernels import QuantizedLinear, QuantizedMoE, quantize_model, quantize_weight
from cute_kernels.formats.weights import MXFP4, shifted
from cute_kernels.formats.weights.fp4 import MXFP4_ANY
from cute_kernels.integrations import hf_quantizer
from cute_kernels.integrations.checkpoints import load_model
from tests.moe import blocks

BF16 = torch.bfloat16
IDS = torch.arange(1, 25).view(2, 12)


@pytest.fixture(autouse=True)
def registered():
    hf_quantizer.register()
    hf_quantizer.register()  # twice is once


def load(path: Any, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **options)


def llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attention_bias=True, tie_word_embeddings=tied,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model.eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=2))
    return model.eval()


def bert() -> Any:
    """Its output layer is called otherwise, and shares weight and bias with other modules."""
    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model: Any = BertLMHeadModel(BertConfig(num_attention_heads=2, is_decoder=True, **sizes))
    nn.init.normal_(model.cls.predictions.bias)
    return model.eval()


def dense(make: Any, path: Path) -> Any:
    """The model in bf16 as from_pretrained makes it, whose rotary frequencies stay in fp32."""
    make().save_pretrained(path / "dense")
    return load(path / "dense", dtype=BF16)


MAKERS = (llama, lambda: llama(tied=True), gpt2, bert, *blocks.MODELS, blocks.minimax_model)


@pytest.mark.parametrize(
    "make", MAKERS, ids=["llama", "tied", "gpt2", "bert", "mixtral", "qwen3", "deepseek", "minimax"]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_saved_model_comes_back_bit_for_bit(tmp_path, make, sharded):
    path = tmp_path / "packed"
    model: Any = quantize_model(dense(make, tmp_path), bits=4, group_size=32, zero_point=True)
    model.save_pretrained(path, max_shard_size="40KB" if sharded else "50GB")
    assert len(list(path.glob("*.safetensors"))) > 1 or not sharded
    loaded, info = load(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    for name, module in model.named_modules():
        assert type(loaded.get_submodule(name)) is type(module), name
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    with torch.no_grad():
        assert torch.equal(load(again)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("make", [llama, gpt2, blocks.MODELS[0]], ids=["llama", "gpt2", "mixtral"])
def test_a_model_without_a_head_takes_the_layers_of_one_with_a_head_and_the_reverse(tmp_path, make):
    model: Any = quantize_model(dense(make, tmp_path), group_size=32, skip=())
    model.save_pretrained(tmp_path / "packed")
    base = load_model(tmp_path / "packed", model_class=transformers.AutoModel)
    with torch.no_grad():
        want = model.base_model(IDS)[0]
        assert type(base) is type(model.base_model) and torch.equal(base(IDS)[0], want)
        base.save_pretrained(tmp_path / "base")
        assert torch.equal(load(tmp_path / "base").base_model(IDS)[0], want)


@pytest.mark.parametrize("loaded", [False, True])
def test_what_was_changed_after_quantisation_is_saved(tmp_path, loaded):
    """Settings, a format that a state dict brought, and layers that were swapped by hand."""
    model: Any = quantize_model(dense(llama, tmp_path), group_size=32, skip=("lm_head", "o_proj"))
    if loaded:
        model.save_pretrained(tmp_path / "packed")
        model = load(tmp_path / "packed")
    first, second = (layer.self_attn for layer in model.model.layers)
    first.q_proj.activations, first.k_proj.batch_invariant = "fp8", True
    other = QuantizedLinear(quantize_weight(first.v_proj.dequantize(), bits=8), first.v_proj.bias)
    first.v_proj.load_state_dict(other.state_dict())
    first.o_proj = QuantizedLinear.from_linear(first.o_proj)
    second.q_proj = dense(llama, tmp_path).model.layers[1].self_attn.q_proj
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    again.save_pretrained(tmp_path / "changed")
    found, alive = load(tmp_path / "changed"), weakref.ref(again)
    del again
    assert alive() is None
    for name, module in model.named_modules():
        assert type(found.get_submodule(name)) is type(module) and repr(found.get_submodule(name)) == repr(module), name
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, model(IDS).logits)


class Doubling(LlamaForCausalLM):
    """A model whose code has a hook on one of its layers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        layer = self.get_submodule("model.layers.0.mlp.down_proj")
        layer.register_forward_hook(lambda module, args, kwargs, out: out * 2, with_kwargs=True)


def test_hooks_of_a_models_own_code_come_back_with_it(tmp_path):
    model: Any = Doubling(llama().config).bfloat16()
    quantize_model(model, group_size=64)
    model.save_pretrained(tmp_path)
    x, loaded = torch.randn(3, 192).to(BF16), Doubling.from_pretrained(tmp_path)
    layers: list[Any] = [each.get_submodule("model.layers.0.mlp.down_proj") for each in (model, loaded)]
    assert all(isinstance(layer, QuantizedLinear) for layer in layers) and torch.equal(layers[0](x), layers[1](x))


def test_layers_of_several_forms_come_back(tmp_path):
    model = dense(llama, tmp_path)
    quantize_model(model, bits=8, group_size=64, skip=("lm_head", "*.mlp.*"), batch_invariant=True)
    quantize_model(model, bits=4, group_size=None)
    layer = model.model.layers[0].mlp.up_proj
    weight = quantize_weight(torch.randn(192, 128).to(BF16), 4, 32)
    perm, scale = torch.randperm(128).int(), torch.rand(128).to(BF16)
    fields = {"codes": weight.codes, "scales": weight.scales, "zeros": None, "perm": perm, "input_scale": scale}
    changed = QuantizedLinear(type(weight)(**fields, format=weight.format, shape=(192, 128)))  # pyright: ignore
    model.model.layers[0].mlp.up_proj = changed
    assert layer.shape == changed.shape
    other = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = QuantizedLinear(other.weight, None, torch.randn(128, 1))
    with pytest.warns(UserWarning, match="nothing is quantised"):
        quantize_model(model)  # has nothing left to do
    from cute_kernels.model_config import record_layers

    record_layers(model)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.model.layers[0].mlp.up_proj.perm is not None
    assert loaded.model.layers[1].mlp.down_proj.weight_format is shifted(4, 256)
    assert (
        loaded.model.layers[0].self_attn.q_proj.batch_invariant
        and not loaded.model.layers[0].mlp.down_proj.batch_invariant
    )
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_a_quantised_output_layer_is_tied_no_more(tmp_path):
    model: Any = quantize_model(dense(lambda: llama(tied=True), tmp_path), group_size=32, skip=())
    model.save_pretrained(tmp_path / "packed")
    loaded = load(tmp_path / "packed")
    assert isinstance(loaded.lm_head, QuantizedLinear) and not loaded.config.tie_word_embeddings
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


BART_SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}


def t5() -> Any:
    """Two embeddings and the output layer are one weight."""
    sizes: Any = {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=97, **sizes))


def bart() -> Any:
    """As T5, with other names."""
    sizes: Any = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in BART_SIZES.items()}
    return BartForConditionalGeneration(BartConfig(vocab_size=97, d_model=64, max_position_embeddings=64, **sizes))


@pytest.mark.parametrize("skip", [("lm_head",), ()], ids=["output layer in 16 bits", "output layer quantised"])
@pytest.mark.parametrize("make", [t5, bart])
def test_what_is_tied_besides_a_quantised_layer_stays_tied(tmp_path, make, skip):
    """The configuration's flag is about all ties: cleared for the output layer's, it would leave random embeddings."""
    torch.manual_seed(0)
    model: Any = quantize_model(make().bfloat16().eval(), bits=8, group_size=32, skip=skip)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=BF16).eval()
    with torch.no_grad():
        assert torch.equal(loaded(IDS, decoder_input_ids=IDS).logits, model(IDS, decoder_input_ids=IDS).logits)
    assert isinstance(loaded.lm_head, QuantizedLinear) == (not skip)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
def test_layers_that_a_model_keeps_in_fp32_come_back_as_they_were(tmp_path, monkeypatch, attribute, dtype):
    """transformers searches tensors' names for patterns: HYV4's "scale" is in every quantised layer's "scales"."""
    torch.manual_seed(0)
    patterns = ["wo", "scale", "layer_norm"]
    monkeypatch.setattr(T5ForConditionalGeneration, attribute, patterns)
    model: Any = quantize_model(t5().to(dtype).eval(), bits=8, group_size=32)
    model.save_pretrained(tmp_path)
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype).eval()
    want = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    is_kept = dtype == torch.float16 or attribute.endswith("strict") or Version(transformers.__version__).minor == 0
    if is_kept:  # what is not quantised: as the model wants it
        want |= {name: torch.float32 for name in want if "layer_norm" in name}
    assert {name: tensor.dtype for name, tensor in loaded.state_dict().items()} == want
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].to(tensor.dtype), tensor), name
    assert set(patterns) <= set(getattr(loaded, attribute))


def test_a_vision_language_model_comes_back(tmp_path):
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    options: Any = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**options, image_size=32, patch_size=8, projection_dim=64)
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**options, vocab_size=128), image_token_index=100
    )
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "dense")
    model: Any = LlavaForConditionalGeneration.from_pretrained(tmp_path / "dense", dtype=BF16)
    quantize_model(model, group_size=32)
    model.save_pretrained(tmp_path / "packed")
    loaded: Any = LlavaForConditionalGeneration.from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        assert torch.equal(loaded(IDS[:1]).logits, model(IDS[:1]).logits)


def test_a_dense_model_is_quantised_while_it_is_loaded(tmp_path):
    model = dense(llama, tmp_path)
    config = hf_quantizer.CuteKernelsConfig(bits=4, group_size=64)
    loaded = load(tmp_path / "dense", dtype=BF16, quantization_config=config)
    want: Any = quantize_model(model, bits=4, group_size=64)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, want(IDS).logits)
    loaded.save_pretrained(tmp_path / "packed")
    with torch.no_grad():
        again = load(tmp_path / "packed")
        assert torch.equal(again(IDS).logits, want(IDS).logits)
    assert loaded.quantization_report.quantized


# -- what is not as saved ----------------------------------------------------------------------------------------------


def saved(path: Path, make: Any = llama) -> Any:
    model: Any = quantize_model(make().to(BF16), bits=4, group_size=64)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("own", ["codes", "scales", "format", "bias"])
def test_a_tensor_that_is_missing_is_an_error_not_random_weights(tmp_path, own):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.1.self_attn.q_proj.{own}"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"^model\.layers\.1\.self_attn\.q_proj\.{own}: got no such tensor"):
        load(tmp_path)


def test_a_form_other_than_the_configurations_is_an_error(tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.format"][3] = 8
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.up_proj\.format: got \[1, 192, 128, 8, 64\], want"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 9}, "format_version: got 9, want 1"),
        ({"linear": None}, "linear: got None, want a list of forms"),
        ({"linear": [{"bits": 4}]}, "linear: got {'bits': 4}, want"),
    ],
)
def test_a_configuration_that_was_not_written_so_is_refused(tmp_path, change, message):
    saved(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises((TypeError, ValueError), match=message):
        load(tmp_path)


def test_layers_that_the_model_has_not_are_refused(tmp_path):
    saved(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["linear"][0]["names"].append("model.layers.7.mlp.up_proj")
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="^model.layers.7.mlp.up_proj: got no such layer in LlamaForCausalLM"):
        load(tmp_path)


def test_another_dtype_than_the_layers_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match="^dtype: got torch.float16, want torch.bfloat16"):
        load(tmp_path, dtype=torch.float16)


def test_options_are_checked():
    with pytest.raises(ValueError, match="^bits: got 3"):
        hf_quantizer.CuteKernelsConfig(bits=3)
    with pytest.raises(ValueError, match="^bit: got an option of that name"):
        hf_quantizer.CuteKernelsConfig(bit=4)
    with pytest.raises(ValueError, match="^format: got .* quantize_model takes other formats$"):
        hf_quantizer.CuteKernelsConfig(format="nvfp4")
    with pytest.raises(ValueError, match="^quant_method: got 'gptq'"):
        hf_quantizer.CuteKernelsConfig("gptq")


def test_experts_come_back_as_experts(tmp_path):
    saved(tmp_path, blocks.mixtral_model)
    loaded = load(tmp_path)
    assert isinstance(loaded.model.layers[1].mlp, QuantizedMoE)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("gate_up.scales"))
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"mlp\.gate_up\.scales: got no such tensor"):
        load(tmp_path)


def test_layers_are_saved_apart_where_the_first_checkpoints_had_them_as_one(tmp_path):
    """Nomic's BERT is written with q, k and v in one tensor; another model's are cut apart again as weights alone can
    be."""
    if not hasattr(transformers, "NomicBertForMaskedLM"):
        pytest.skip("not in this release of transformers")
    sizes: Any = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = transformers.NomicBertConfig(num_attention_heads=2, pad_token_id=0, **sizes)
    model: Any = transformers.NomicBertForMaskedLM(config).eval()
    model.save_pretrained(tmp_path / "dense")
    model = type(model).from_pretrained(tmp_path / "dense", dtype=BF16)
    quantize_model(model, bits=8, group_size=32)
    for path in (tmp_path / "packed", tmp_path / "again"):
        model.save_pretrained(path)
        own = [name for name in load_file(path / "model.safetensors") if name.endswith("q_proj.codes")]
        assert len(own) == 1 and isinstance(model.get_submodule(own[0].removesuffix(".codes")), QuantizedLinear)
        loaded = type(model).from_pretrained(path)
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        model = loaded


def test_mxfp4_scales_beyond_2_of_a_model_saved_as_mxfp4_choose_their_format(tmp_path):
    """There was one format for all scales. What is saved again says of each layer what it is."""
    for make in (blocks.mixtral_model, llama):
        path = tmp_path / make.__name__
        model: Any = quantize_model(dense(make, path), format="mxfp4")
        layers: Any = [module for module in model.modules() if getattr(module, "weight_format", None) is MXFP4]
        layers[0].scales.view(-1)[0] = layers[-1].scales.view(-1)[0] = 129
        model.save_pretrained(path / "old")
        for name in ("old", "new"):
            loaded = load(path / name)
            found = [module.weight_format for module in loaded.modules() if hasattr(module, "weight_format")]
            assert found == [MXFP4_ANY, *[MXFP4] * (len(layers) - 2), MXFP4_ANY]
            assert all(each.weight.format is each.weight_format for each in loaded.modules() if hasattr(each, "scales"))
            loaded.save_pretrained(path / "new")
            with torch.no_grad():
                assert torch.equal(loaded(IDS).logits, model(IDS).logits)
