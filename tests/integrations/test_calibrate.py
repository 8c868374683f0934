"""Constants of a model's cache, from what its layers attend to."""

from typing import Any

import pytest
import torch

import cute_kernels.integrations.transformers as ck
from cute_kernels.formats.kv.transforms import key_of
from cute_kernels.integrations.transformers.calibrate import gather_moments, watch
from cute_kernels.kv_cache import CacheTransform, Calibrator, KVCache
from tests.integrations.architectures import DECODERS, HYBRIDS, VOCABULARY
from tests.integrations.llamas import small_llama

NAMES = ["llama", "qwen3", "mistral, window", "gemma 2", "gemma 3", "gpt-oss", "glm-4"]


def make_batches(count=2, columns=24):
    return [{"input_ids": torch.randint(2, VOCABULARY, (2, columns))} for _ in range(count)]


def seen_by(model, batches):
    """Each layer's q, k and v of all batches, as `watch` shows them."""
    shown: dict[int, list] = {}
    watch(model, batches, lambda seen: shown.setdefault(seen.layer, []).append(seen[1:4]))
    return [tuple(torch.cat(parts) for parts in zip(*shown[layer], strict=True)) for layer in sorted(shown)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_watched_model_computes_what_it_did_and_is_as_it_was(name, implementation):
    model = DECODERS[name].build(torch.float32)
    if implementation == "sdpa" and (not model._supports_sdpa or name == "gemma 2"):
        pytest.skip("the model offers no SDPA, or one without its soft cap (transformers 5.0.0)")
    model.set_attn_implementation(implementation)
    batch = make_batches(1)[0]
    with torch.no_grad():
        want = model(**batch).logits
    logits = []
    handle = model.register_forward_hook(lambda module, args, out: logits.append(out.logits))
    layers = seen_by(model, [batch])
    handle.remove()
    assert model.config._attn_implementation == implementation and len(layers) == 2
    torch.testing.assert_close(logits[0], want, rtol=1e-4, atol=1e-4)
    heads = (model.config.num_attention_heads, model.config.num_key_value_heads, model.config.num_key_value_heads)
    assert [x.shape[:2] for x in layers[0]] == [(48, count) for count in heads]


def test_padding_is_not_seen():
    model, batch = DECODERS["llama"].build(torch.float32), make_batches(1)[0]
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    layers = seen_by(model, [batch | {"attention_mask": mask}])
    assert all(x.shape[0] == 41 for x in layers[0])
    alone = {"input_ids": batch["input_ids"][1:, 7:], "position_ids": torch.arange(17)[None]}
    for got, want in zip(layers[1], seen_by(model, [alone])[1], strict=True):
        torch.testing.assert_close(got[24:].norm(), want.norm(), rtol=1e-3, atol=1e-3)


def test_transforms_are_those_of_what_is_cached():
    model, batches = DECODERS["llama"].build(torch.float32), make_batches()
    constants: Any = ck.calibrate_cache(model, batches, ("int4_g4", "int4_g1"), about={"text": "random"})
    assert constants.num_layers == 2 and constants.scales == ()
    assert constants.about["tokens"] == "96" and constants.about["text"] == "random"
    for transform, (_, k, _) in zip(constants.transforms, seen_by(model, batches), strict=True):
        torch.testing.assert_close(transform.k_center, k.mean(0), rtol=1e-4, atol=1e-5)
        assert (transform.k_rotation, transform.v_rotation, transform.v_factor) == (16, 1, None)
    assert constants.transforms[0].key != constants.transforms[1].key


@pytest.mark.parametrize(("name", "own"), [("qwen3-next", [3]), ("lfm2", [1]), ("falcon-h1", [0, 1])])
def test_a_hybrids_layers_of_keys_and_values_are_calibrated_by_their_numbers(name, own):
    """Engines ask for a layer's constants by its number, and want as many as the model has layers."""
    model, batches = HYBRIDS[name].build(torch.bfloat16), make_batches()
    found: Any = ck.calibrate_cache(model, batches, ("int8_head", "int4_g1"))
    assert [i for i, transform in enumerate(found.transforms) if transform is not None] == own
    assert [i for i, (k_scale, _) in enumerate(found.scales) if k_scale is not None] == own
    assert len(found.transforms) == len(found.scales) == model.config.num_hidden_layers
    with pytest.raises(ValueError, match="ForCausalLM with layers of .*, want keys and values in all"):
        ck.choose_formats(model, batches, 0.5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrids_attention_runs_over_the_models_own_cache(name):
    model, tokens = HYBRIDS[name].build(torch.bfloat16), make_batches(1)[0]["input_ids"]
    want = model.generate(tokens, max_new_tokens=6, do_sample=False)
    with pytest.raises(ValueError, match="ForCausalLM with layers of .*, want kv_format=None for it"):
        ck.accelerate(model)
    ck.accelerate(model, kv_format=None)
    assert model.config._attn_implementation == ck.ATTENTION_NAME
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), want)


def test_latents_are_refused_by_name():
    with pytest.raises(ValueError, match="model: got DeepseekV3ForCausalLM, which caches latents"):
        ck.calibrate_cache(DECODERS["deepseek-v3"].build(torch.bfloat16), make_batches(1), "int4_g4")


def test_formats_that_gain_nothing_are_left_alone():
    model, batches = DECODERS["llama"].build(torch.float32), make_batches(1)
    constants: Any = ck.calibrate_cache(model, batches, {0: "bf16", -1: ("int8_token_head", "bf16")})
    first, second = constants.transforms
    assert first is None
    assert (second.k_rotation, second.v_rotation) == (64, 1) and not second.changes_values
    values: Any = ck.calibrate_cache(model, batches, ("int4_g4", "int4_g1"), values=True).transforms[1]
    assert values.v_rotation == 64 and values.v_factor is not None
    plain = ck.calibrate_cache(model, batches, "int4_g4", center=False, factors=False, rotation=False)
    assert plain.transforms == (None, None) and plain.about["method"] == "scales alone"


def test_one_pass_serves_several_formats():
    model, batches = DECODERS["llama"].build(torch.float32), make_batches()
    moments = gather_moments(model, batches)
    assert moments.tokens == 96 and len(moments.layers) == 2
    for formats, values in (("int4_g4", False), (("int8_token_head", "int4_g2"), "factors"), ("int4_g1", True)):
        options: Any = {"values": values}
        own = ck.calibrate_cache(model, batches, formats, **options)
        shared = ck.calibrate_cache(model, batches, formats, moments=moments, **options)
        assert [key_of(one) for one in own.transforms] == [key_of(one) for one in shared.transforms]
        assert own.about == shared.about


def test_scales_are_of_what_is_written():
    model, batches = DECODERS["llama"].build(torch.float32), make_batches()
    constants: Any = ck.calibrate_cache(model, batches, ("int8_head", "int4_g4"))
    for transform, (k_scale, v_scale), (_, k, _) in zip(
        constants.transforms, constants.scales, seen_by(model, batches), strict=True
    ):
        want = Calibrator("int8_head").update(transform.keys(k)).scale()
        torch.testing.assert_close(k_scale, want)
        assert v_scale is None


def test_what_cannot_be_calibrated_is_named():
    model = DECODERS["llama"].build(torch.float32)
    with pytest.raises(ValueError, match="batches: got none, want at least one"):
        ck.calibrate_cache(model, [], "int4_g4")
    values: Any = "all"
    with pytest.raises(ValueError, match="values: got 'all', want False, True or 'factors'"):
        ck.calibrate_cache(model, make_batches(1), "int4_g4", values=values)
    generator: Any = (batch for batch in make_batches())
    with pytest.raises(TypeError, match="batches: got generator, want a list: they are gone through twice"):
        ck.calibrate_cache(model, generator, "int4_g4")
    with pytest.raises(ValueError, match="kv_format"):
        ck.calibrate_cache(model, make_batches(1), "int3")


@pytest.mark.parametrize("weights", [None, "w8g64"])
def test_an_accelerated_model_is_calibrated_as_the_model_itself(weights):
    model, batches = DECODERS["llama"].build(torch.bfloat16), make_batches(1)
    want: Any = ck.calibrate_cache(model, batches, "int4_g4").transforms
    ck.accelerate(model, kv_format="int4_g4", weights=weights, cuda_graphs=False)
    constants: Any = ck.calibrate_cache(model, batches, "int4_g4")
    if weights is None:
        assert constants.transforms[0].key == want[0].key
    assert len(constants.transforms) == 2


# -- a cache that is written with them --------------------------------------------------------------------------------


def test_keys_in_blocks_are_calibrated_for_a_cache_that_serves_them(tmp_path):
    pytest.importorskip("safetensors")
    model, batches = DECODERS["llama"].build(torch.float32), make_batches(1)
    formats: Any = ("int4_channel32", "int4_g2")
    path = tmp_path / "constants.safetensors"
    ck.calibrate_cache(model, batches, formats, values="factors").save(path)
    cache = KVCache(2, 2, 64, 2, 64, kv_format=formats, max_seqs=1)
    cache.set_constants(path)
    cache.allocate("a", 40)
    batch = cache.make_batch(1).update(["a"], 40)
    k, v = torch.randn(2, 40, 2, 64).bfloat16()
    cache.append(1, batch, k, v)
    got = cache.read(1, "a", torch.float32)
    transform = cache.transforms[1]
    assert transform is not None and transform.k_rotation == 32 and transform.v_factor is not None
    for found, exact, most in zip(got, (k, v), (0.15, 0.15), strict=True):
        assert 0 < (found - exact.float()).norm() < most * exact.float().norm()


SIZES = {"llama": (2, 64), "qwen3": (2, 64), "gemma 2": (2, 64), "gpt-oss": (2, 64), "mistral, window": (2, 64)}


def make_transforms(count=2):
    """One a layer, of all kinds."""

    def signs():
        return (torch.randint(0, 2, (2, 64)) * 2 - 1).float()

    return [
        CacheTransform(torch.randn(2, 64), signs() * torch.exp(0.3 * torch.randn(2, 64)), 64, signs(), 32)
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", SIZES)
def test_generation_is_that_without_a_transform(name):
    """In a 16-bit cache, where a transform changes nothing but roundings: prompt, steps, and a second turn."""
    results = []
    for transform in (None, make_transforms()):
        torch.manual_seed(3)
        model = DECODERS[name].build(torch.bfloat16)
        ck.accelerate(model, kv_format="bf16", kv_transform=transform, cuda_graphs=False)
        cache = ck.DecodeCache("bf16", kv_transform=transform)
        prompt = torch.randint(2, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            logits = [model(prompt[:, :12], past_key_values=cache).logits[:, -1]]
            logits += [model(prompt[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(12, 16)]
            logits.append(model(prompt[:, 16:], past_key_values=cache).logits[:, -1])  # several queries at once
            more = torch.randint(2, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(6))
            logits.append(model(more, past_key_values=cache).logits[:, -1])  # too many for one launch
        results.append(torch.stack(logits).double())
    plain, transformed = results
    assert (transformed - plain).norm() < 0.05 * plain.norm()
    assert not torch.equal(transformed, plain)


def test_a_model_generates_with_what_was_calibrated(tmp_path):
    pytest.importorskip("safetensors")
    model = DECODERS["llama"].build(torch.bfloat16)
    prompt = {"input_ids": torch.randint(2, VOCABULARY, (2, 20))}
    formats = ("int8_head", "int4_g4")
    path = tmp_path / "constants.safetensors"
    ck.calibrate_cache(model, [prompt], formats).save(path)
    want = model.generate(**prompt, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    ck.accelerate(model, kv_format=formats, kv_transform=path, cuda_graphs=False)
    got = model.generate(**prompt, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert isinstance(got.past_key_values, ck.DecodeCache)
    layer = got.past_key_values.layers[1]
    assert layer.transform is not None and layer.transform.k_rotation == 64
    for step, most in ((0, 1e-2), (1, 0.2)):  # the first turn is exact
        ours, theirs = got.logits[step].double(), want.logits[step].double()
        assert (ours - theirs).norm() < most * theirs.norm()


def test_constants_that_do_not_fit_a_model_name_the_layer():
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="int4_g4", cuda_graphs=False)
    prompt = torch.randint(2, VOCABULARY, (1, 8))
    for transform, message in (
        ([None, CacheTransform(torch.zeros(3, 64))], r"kv_transform: layer 1: k_center: got shape \[3, 64\]"),
        (make_transforms(1), "kv_transform: got 1 layers', want layer 1's, too"),
    ):
        with pytest.raises(ValueError, match=message):
            model(prompt, past_key_values=ck.DecodeCache("int4_g4", kv_transform=transform))
    with pytest.raises(TypeError, match="kv_transform: got int, want a CacheTransform or None"):
        ck.DecodeCache("int4_g4", kv_transform=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kv_transform\[0\]: got str"):
        ck.accelerate(model, kv_transform=["hadamard", None])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="kv_transform: got one with kv_format None"):
        ck.accelerate(model, kv_format=None, kv_transform=make_transforms())
    with pytest.raises(FileNotFoundError, match="no such file"):
        ck.accelerate(model, kv_transform="missing.safetensors")


def test_input_ids_alone_are_batches_too_and_what_is_no_batch_is_refused():
    model: Any = small_llama(hidden_size=64, intermediate_size=64, head_dim=64)
    ids = torch.arange(3, 15).view(2, 6)
    scales: list[Any] = [ck.calibrate(model, [batch], "int8_head") for batch in (ids, {"input_ids": ids})]
    found, wanted = (torch.stack(sum(each, ())) for each in scales)
    assert len(found) == 4 and torch.equal(found, wanted)
    wrongs: list[Any] = [ids, {"input_ids": ids}, [ids[0]], [[1, 2]], [{"inputs": ids}]]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="^batches: got one that is .*, want input_ids"):
            ck.calibrate(model, wrong, "int8_head")
