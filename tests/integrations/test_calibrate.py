"""Constants of a model's cache, from what its layers attend to."""

import pytest
import torch

import cute_kernels.integrations.transformers as ck
from cute_kernels.integrations.transformers.calibrate import watch
from cute_kernels.kv_cache import Calibrator
from tests.integrations.architectures import DECODERS, VOCABULARY

NAMES = ["llama", "qwen3", "mistral, window", "gemma 2", "gemma 3", "gpt-oss", "glm-4"]


def make_batches(count=2, columns=24):
    return [{"input_ids": torch.randint(2, VOCABULARY, (2, columns))} for _ in range(count)]


def seen_by(model, batches):
    """Each layer's q, k and v of all batches, as `watch` shows them."""
    shown: dict[int, list] = {}
    watch(model, batches, lambda seen: shown.setdefault(seen.layer, []).append(seen[1:]))
    return [tuple(torch.cat(parts) for parts in zip(*shown[layer], strict=True)) for layer in sorted(shown)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_watched_model_computes_what_it_did_and_is_as_it_was(name, implementation):
    model = DECODERS[name].build(torch.float32)
    if implementation == "sdpa" and not model._supports_sdpa:
        pytest.skip("the model offers no SDPA")
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
    constants = ck.calibrate_cache(model, batches, ("int4_g4", "int4_g1"), about={"text": "random"})
    assert constants.num_layers == 2 and constants.scales == ()
    assert constants.about["tokens"] == "96" and constants.about["text"] == "random"
    for transform, (_, k, _) in zip(constants.transforms, seen_by(model, batches), strict=True):
        torch.testing.assert_close(transform.k_center, k.mean(0), rtol=1e-4, atol=1e-5)
        assert (transform.k_rotation, transform.v_rotation) == (16, 64)
    assert constants.transforms[0].key != constants.transforms[1].key


def test_formats_that_gain_nothing_are_left_alone():
    model, batches = DECODERS["llama"].build(torch.float32), make_batches(1)
    constants = ck.calibrate_cache(model, batches, {0: "bf16", -1: ("int8_token_head", "bf16")})
    first, second = constants.transforms
    assert first is None
    assert (second.k_rotation, second.v_rotation) == (64, 1) and not second.changes_values
    plain = ck.calibrate_cache(model, batches, "int4_g4", center=False, factors=False, rotation=False)
    assert plain.transforms == (None, None) and plain.about["method"] == "scales alone"


def test_scales_are_of_what_is_written():
    model, batches = DECODERS["llama"].build(torch.float32), make_batches()
    constants = ck.calibrate_cache(model, batches, ("int8_head", "int4_g4"))
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
    with pytest.raises(TypeError, match="batches: got generator, want a list: they are gone through twice"):
        ck.calibrate_cache(model, (batch for batch in make_batches()), "int4_g4")
    with pytest.raises(ValueError, match="kv_format"):
        ck.calibrate_cache(model, make_batches(1), "int3")
