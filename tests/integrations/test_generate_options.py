"""What a user asks of `generate`, or has done to a model before: it is honoured, or refused by name."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

import cute_kernels.integrations.transformers as ck
from cute_kernels import QuantizedLinear, arguments, quantize_model
from cute_kernels.integrations.checkpoints import load_model
from cute_kernels.integrations.transformers import cache as cache_module
from cute_kernels.integrations.transformers.graphs import StepReplay
from tests.integrations.llamas import small_llama

IDS = torch.arange(3, 15).view(2, 6)
SMALL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 64}
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}


def accelerated(kv_format: Any = "bf16", num_hidden_layers: int = 2, **options: Any) -> Any:
    model = small_llama(**SMALL, num_hidden_layers=num_hidden_layers)
    ck.accelerate(model, kv_format=kv_format, **options)
    return model


def cache_of(model: Any, **options: Any) -> Any:
    """The cache that `generate` has used."""
    return model.generate(IDS, **GREEDY, **options, return_dict_in_generate=True).past_key_values


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hybrid", "dynamic", None])
@pytest.mark.parametrize("place", ["model", "argument", "configuration"])
def test_names_of_the_default_cache_leave_the_choice_to_the_library(name, place):
    model, options = accelerated(), {}
    if place == "model":
        model.generation_config.cache_implementation = name
    elif place == "argument":
        options = {"cache_implementation": name}
    else:
        options = {"generation_config": GenerationConfig(cache_implementation=name)}
    assert type(cache_of(model, **options)) is ck.DecodeCache


def test_a_cache_that_is_asked_for_is_used_and_the_report_says_so():
    model: Any = small_llama(**SMALL)
    model.generation_config.cache_implementation = "static"
    said = str(ck.accelerate(model, kv_format="bf16"))
    assert "generate keeps to the model's generation_config" in said and "'static'" in said and "recorded" not in said
    assert type(cache_of(model)) is not ck.DecodeCache
    config = GenerationConfig(max_new_tokens=3)  # says nothing of caches: the model's own counts, as in transformers
    assert type(model.generate(IDS, generation_config=config, return_dict_in_generate=True).past_key_values) is not (
        ck.DecodeCache
    )
    assert type(cache_of(model, cache_implementation=None)) is ck.DecodeCache
    assert isinstance(cache_of(accelerated(), past_key_values=DynamicCache()), DynamicCache)


def step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def saved(cache: Any) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kept", [saved, copy.deepcopy], ids=["file", "copy"])
@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4", ("int8_token_head", "int4_g1")])
def test_a_cache_that_was_kept_goes_on_as_the_first_one(kept, kv_format):
    model, cache = accelerated(kv_format=kv_format), ck.DecodeCache(kv_format, capacity=512)
    step(model, cache, IDS[:, :4])
    again = kept(cache)
    assert again.num_bytes == cache.num_bytes and again.get_seq_length() == 4
    wanted = [step(model, cache, IDS[:, i : i + 1]) for i in (4, 5)]
    found = [step(model, again, IDS[:, i : i + 1]) for i in (4, 5)]  # the first was not touched, nor is this one
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert again.layers[0].k_rows.shape[2] == cache.layers[0].k_rows.shape[2]


def test_a_file_of_a_cache_holds_its_tokens_and_not_its_allocation():
    model, cache = accelerated(), ck.DecodeCache("bf16", 4096)
    step(model, cache, IDS)
    file = io.BytesIO()
    torch.save(cache, file)
    assert len(file.getvalue()) < 64 << 10
    empty = saved(ck.DecodeCache("bf16"))
    assert torch.equal(step(model, empty, IDS), step(model, ck.DecodeCache("bf16"), IDS))


def test_files_of_earlier_versions_name_classes_that_are_still_there():
    assert {"DecodeCache", "DecodeCacheLayer", "LatentCacheLayer", "_Book"} <= vars(cache_module).keys()


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kv_format", ["bf16", None])
def test_a_mask_of_integers_over_queries_and_keys_is_refused(dtype, cached, kv_format):
    model = accelerated(kv_format=kv_format)
    cache = ck.DecodeCache("bf16") if cached else None
    if cached:
        step(model, cache, IDS[:, :4])
    seen = torch.ones(2, 1, 2 if cached else 6, 6, dtype=dtype)
    with torch.no_grad(), pytest.raises(TypeError, match=rf"^attention_mask: got {dtype} \[2, 1, ., 6\], want bool"):
        model(IDS[:, 4:] if cached else IDS, attention_mask=seen, past_key_values=cache)


# -- torch.compile -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["module", "forward"])
def test_a_model_that_was_compiled_before_is_accelerated(how):
    want = accelerated(weights="w4g32", num_hidden_layers=1)
    torch.compiler.reset()
    model: Any = small_llama(**SMALL, num_hidden_layers=1)
    if how == "module":
        model = torch.compile(model, backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    own = vars(model).get("forward")
    ck.accelerate(model, kv_format="bf16", weights="w4g32")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, want(IDS).logits)
    two: dict[str, Any] = {**GREEDY, "max_new_tokens": 2}  # of a prompt, and of a step
    assert torch.equal(model.generate(IDS, **two), want.generate(IDS, **two))
    ck.restore(model)
    assert vars(model).get("forward") is own


def test_what_a_compiled_model_is_saved_as_is_its_own_module_s(tmp_path):
    inner = small_llama(**SMALL)
    model: Any = torch.compile(inner, backend="eager")
    assert quantize_model(model, bits=4, group_size=32) is model
    names = [name for form in inner.config.quantization_config["linear"] for name in form["names"]]
    assert names and not any("_orig_mod" in name for name in names)
    assert len(ck.calibrate(model, [IDS], "int8_head")) == 2


def test_continuous_batching_runs_over_transformers_attention_with_our_weights():
    model = accelerated(weights="w8g32")
    prompts = [list(range(3, 12)), list(range(5, 10))]
    want = [model.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in prompts]
    model.set_attn_implementation("sdpa")
    config = GenerationConfig(**GREEDY, pad_token_id=0, eos_token_id=63)
    few = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)  # else of all free memory
    batch = model.generate_batch(prompts, generation_config=config, continuous_batching_config=few)
    assert [each.generated_tokens for each in batch.values()] == want


# -- other settings ----------------------------------------------------------------------------------------------------


def test_steps_are_not_recorded_while_every_call_is_checked():
    model = small_llama(**SMALL)
    assert "recorded" in str(ck.accelerate(model, kv_format="bf16")) and isinstance(model.forward, StepReplay)
    with arguments.checking_values():
        assert "recorded" not in str(ck.accelerate(model, kv_format="bf16"))
        assert not isinstance(model.forward, StepReplay)
        assert type(cache_of(model)) is ck.DecodeCache


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [(72,), (60,), (None, 128)], ids=["more", "fewer", "multiple"])
def test_another_vocabulary_beside_a_quantised_output_layer(tmp_path, tied, count):
    model: Any = small_llama(**SMALL, tie_word_embeddings=tied)
    ck.accelerate(model, kv_format=None, weights="w8g32", output_layer="w8g32")
    with torch.no_grad():
        before = model(IDS).logits
    assert model.resize_token_embeddings() is model.resize_token_embeddings(64) is model.get_input_embeddings()
    assert isinstance(model.lm_head, QuantizedLinear)
    other = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="the output layer was quantised and is of 16 bits now"):
        model.resize_token_embeddings(*count)
    tokens = count[-1]
    assert (
        tokens == model.config.vocab_size == model.lm_head.out_features == model.get_input_embeddings().num_embeddings
    )
    with torch.no_grad():
        found = model(IDS).logits
        assert torch.equal(other(IDS).logits, before) and isinstance(other.lm_head, QuantizedLinear)
    shared = min(tokens, 64)
    assert (found[..., :shared] - before[..., :shared]).norm() <= 0.02 * before[..., :shared].norm()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert (load_model(tmp_path)(IDS).logits - found).norm() <= 0.02 * found.norm()
