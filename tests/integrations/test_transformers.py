"""transformers models decode through packed caches, and what is not supported is refused rather than wrong."""

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DynamicCache

from cute_kernels.formats.kv import FORMATS
from cute_kernels.integrations import transformers as integration
from cute_kernels.integrations.transformers import ATTENTION_NAME, DecodeCache, attend
from tests.integrations.llamas import small_llama

VOCABULARY = 64


@pytest.fixture
def model() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64, "max_position_embeddings": 128}
    model: Any = small_llama(**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    for layer in model.model.layers:  # peaked attention, so that a wrong cache shows in the logits
        layer.self_attn.q_proj.weight.data.mul_(80)
    integration.register()
    return model


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (3, 30), generator=torch.Generator().manual_seed(1))


def relative_error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@torch.no_grad()
def in_steps(model, tokens, cache, chunks):
    """Logits of all tokens, fed in chunks of the given sizes."""
    model.set_attn_implementation(ATTENTION_NAME)
    pieces = tokens.split(chunks, dim=1)
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


@torch.no_grad()
def in_one(model, tokens):
    model.set_attn_implementation("sdpa")
    return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("chunks", [[20] + [1] * 10, [1] * 30, [8, 12] + [1] * 10], ids=["usual", "steps", "chunked"])
def test_a_bf16_cache_gives_the_logits_of_the_model_without_one(model, tokens, chunks):
    assert relative_error(in_steps(model, tokens, DecodeCache("bf16", 30), chunks), in_one(model, tokens)) < 2e-2


QUANTISED = [name for name, form in FORMATS.items() if not (form.given_scale or form.cache_dtype.is_floating_point)]


@pytest.mark.parametrize(
    "kv_format", [name for name in QUANTISED if name != "int8_g8"]
)  # a group is 8 columns at least
def test_a_quantised_cache_gives_the_logits_of_quantised_keys_and_values(model, tokens, kv_format, monkeypatch):
    """The yardstick quantises K and V and runs them through a BF16 cache: same values, other bytes.

    In one layer: a second one's numbers would differ in last bits, which move codes by a step on some processors.
    """
    del model.model.layers[1:]
    got = in_steps(model, tokens, DecodeCache(kv_format, 30), [1] * 30)
    form = FORMATS[kv_format]
    update = integration.DecodeCacheLayer.update

    def update_with_rounded(layer, *states, **_):
        return update(layer, *(form.dequantize(form.quantize(x), 64, torch.bfloat16) for x in states[:2]))

    monkeypatch.setattr(integration.DecodeCacheLayer, "update", update_with_rounded)
    want = in_steps(model, tokens, DecodeCache("bf16", 30), [1] * 30)
    assert relative_error(got, want) < 2**-7  # the yardstick's K and V are rounded to 8 bits, and both results
    if kv_format.startswith("int4"):
        assert relative_error(got, in_one(model, tokens)) > 3e-2  # and the quantisation is visible at all


@pytest.mark.parametrize(
    "kv_format", [("int8_token_head", "int4_g4"), ("int8_token_head", "bf16"), ("bf16", "int4_g4")], ids=str
)
def test_a_later_turn_of_many_tokens_attends_to_rows_as_they_lie(model, tokens, kv_format):
    """Also where K or V alone is of 16 bits; the same as token by token."""
    want = in_steps(model, tokens, DecodeCache(kv_format, 30), [8] + [1] * 22)
    with mock.patch.object(attend, "extend_attention", wraps=attend.extend_attention) as asked:
        got = in_steps(model, tokens, DecodeCache(kv_format, 30), [8, 22])
    assert [call.kwargs["kv_format"] for call in asked.call_args_list] == [kv_format] * 2  # layers
    assert relative_error(got, want) < 3e-2


@pytest.mark.parametrize("kv_format", [name for name, form in FORMATS.items() if form.given_scale])
def test_formats_whose_scales_lie_beside_the_cache_are_refused_by_name(kv_format):
    with pytest.raises(
        ValueError, match=f"^kv_format: got '{kv_format}', which wants scales beside the cache, want scales"
    ):
        DecodeCache(kv_format, 30)


@pytest.mark.parametrize(
    "kv_format", [("int4_channel32", "int4_g4"), {0: "bf16", -1: ("int4_channel32", "bf16")}], ids=str
)
def test_keys_in_blocks_are_refused_by_name(kv_format):
    with pytest.raises(ValueError, match="^kv_format: got 'int4_channel32', whose newest keys lie beside the cache"):
        DecodeCache(kv_format, 30)


def test_the_cache_counts_the_bytes_that_hold_tokens(model, tokens):
    sizes = {}
    for kv_format in ("bf16", "int4_g1", "int4_g4"):
        cache = DecodeCache(kv_format, 100)
        assert cache.num_bytes == 0
        in_steps(model, tokens, cache, [30])
        sizes[kv_format] = cache.num_bytes
        assert cache.get_seq_length() == 30 and cache.layers[0].get_max_length() == 100
    per_token = 2 * 2 * 3 * 30 * 2  # K and V, layers, requests, tokens, KV heads
    assert sizes == {"bf16": per_token * 128, "int4_g1": per_token * 36, "int4_g4": per_token * 48}


def test_reset_and_crop_forget_tokens(model, tokens):
    cache = DecodeCache("int4_g4", 30)
    whole = in_steps(model, tokens, cache, [20] + [1] * 10)
    cache.crop(-3)
    assert cache.get_seq_length() == 27
    assert torch.equal(in_steps(model, tokens[:, 27:], cache, [1] * 3), whole[:, 27:])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(in_steps(model, tokens, cache, [20] + [1] * 10), whole)


@pytest.mark.parametrize("count", [-21, -20, -4, 0, 5, 20, 30])
def test_crop_means_what_it_means_in_the_installed_release(model, tokens, count):
    lengths = []
    for implementation, cache in (("sdpa", DynamicCache()), (ATTENTION_NAME, DecodeCache("int4_g4", 30))):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            model(tokens[:, :20], past_key_values=cache)
        try:
            cache.crop(count)
        except ValueError as error:
            assert implementation == "sdpa" or "tokens_to_remove: got" in str(error)
            lengths.append("refused")
        else:
            lengths.append(cache.get_seq_length())
    if count == -21:  # more than there are: transformers wraps around or forgets all
        assert lengths[1] == "refused"
    else:
        assert lengths[0] == lengths[1]


@torch.no_grad()
def generate(model, tokens, **options):
    mask = torch.ones_like(tokens)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(tokens, attention_mask=mask, past_key_values=DecodeCache("bf16", 40), **options)


def assert_greedy(model, prompt_len, got):
    """Each new token is the best by the uncached model's logits, or loses to the best by rounding alone."""
    logits = in_one(model, got[:, :-1])[:, prompt_len - 1 :].double()
    lost = logits.amax(-1) - logits.gather(-1, got[:, prompt_len:, None]).squeeze(-1)
    assert (lost < 0.05 * logits.std()).all()


def test_generate_works(model, tokens):
    model.set_attn_implementation(ATTENTION_NAME)
    got = generate(model, tokens[:, :10])
    assert got.shape == (3, 16)
    assert_greedy(model, 10, got)


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
def test_assisted_generation_gives_greedy_tokens(model, tokens, how):
    model.set_attn_implementation(ATTENTION_NAME)
    prompt = tokens[:1, :6].repeat(1, 3)
    helper = (
        {"prompt_lookup_num_tokens": 3}
        if how == "prompt lookup"
        else {"assistant_model": small_llama(7, hidden_size=64, intermediate_size=64)}
    )
    got = generate(model, prompt, max_new_tokens=12, eos_token_id=VOCABULARY, **helper)  # one that is never made
    assert got.shape == (1, 30)
    assert_greedy(model, 18, got)


def test_beams_are_those_of_another_cache(model, tokens):
    sequences = []
    for implementation in ("sdpa", ATTENTION_NAME):
        model.set_attn_implementation(implementation)
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": 3}
        options |= {"attention_mask": torch.ones(3, 10, dtype=torch.long), "return_dict_in_generate": True}
        cache = {} if implementation == "sdpa" else {"past_key_values": DecodeCache("bf16", 18)}
        found = model.generate(tokens[:, :10], output_scores=True, **options, **cache)
        sequences.append(found)
    scores = [found.sequences_scores for found in sequences]
    assert torch.allclose(*scores, atol=2e-2)


def requests(cache: Any) -> tuple[list[list[float]], list[int]]:
    """Each request's tokens of the first layer, as one number for each token."""
    layer: Any = cache.layers[0]
    return layer.rows[0][:, :, : layer.count].double().sum((1, 3)).tolist(), cache.columns.seq_lens.tolist()


def test_requests_are_repeated_selected_and_reordered(model, tokens):
    cache: Any = DecodeCache("bf16", 30)
    in_steps(model, tokens[:, :9], cache, [9])
    (a, b, c), _ = requests(cache)
    assert len({tuple(a), tuple(b), tuple(c)}) == 3
    cache.batch_repeat_interleave(2)
    assert requests(cache) == ([a, a, b, b, c, c], [9] * 6)
    cache.batch_select_indices(torch.tensor([5, 0, 2]))
    assert requests(cache) == ([c, a, b], [9] * 3)
    held = cache.layers[0].k_rows
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert requests(cache) == ([b, b, c], [9] * 3)
    assert cache.layers[0].k_rows is held
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert requests(cache) == ([b, c], [9] * 2)
    reference = DecodeCache("bf16", 30)
    in_steps(model, tokens[1:, :9], reference, [9])
    assert torch.equal(
        in_steps(model, tokens[1:, 9:], cache, [1] * 21), in_steps(model, tokens[1:, 9:], reference, [1] * 21)
    )


def test_offloading_is_refused_by_name(model, tokens):
    cache = DecodeCache("bf16", 30)
    in_steps(model, tokens[:, :9], cache, [9])
    for move in (cache.layers[0].offload, cache.layers[0].prefetch):
        with pytest.raises(NotImplementedError, match="a DecodeCache stays on its device"):
            move()


@pytest.mark.parametrize("method", ["update_conv_state", "update_recurrent_state", "update_indexer"])
def test_other_states_than_keys_and_values_are_refused_by_name(method):
    """Hybrids' layers of convolution or recurrence, and sparse attention's indexers."""
    with pytest.raises(NotImplementedError, match="layer 3 caches another state than keys and values"):
        getattr(DecodeCache("bf16"), method)(torch.zeros(1, 4), 3)
    with pytest.raises(NotImplementedError, match="layer 0 caches another state than keys and values"):
        DecodeCache("bf16").get_recurrent_state(0)


def test_cross_attention_is_refused_by_name(model, tokens):
    """Its keys are those of other tokens, which models read again past `update`."""
    cache = DecodeCache("bf16")
    cache.update(torch.zeros(2, 2, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 4, 64, dtype=torch.bfloat16), 0)
    with pytest.raises(ValueError, match="got 7 tokens for layer 1 in a pass over 4, want as many: .*cross-attention"):
        cache.update(torch.zeros(2, 2, 7, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 7, 64, dtype=torch.bfloat16), 1)
    for name in ("keys", "values"):
        with pytest.raises(AttributeError, match="hands out packed rows, not K and V"):
            getattr(cache.layers[0], name)


def test_without_a_cache_it_is_causal_attention(model, tokens):
    want = in_one(model, tokens)
    model.set_attn_implementation(ATTENTION_NAME)
    with torch.no_grad():
        assert relative_error(model(tokens, use_cache=False).logits, want) < 1e-2


def test_another_attention_implementation_is_told_what_the_cache_needs(model, tokens):
    model.set_attn_implementation("sdpa")
    with pytest.raises(AttributeError, match="the model's is 'sdpa'; want model.set_attn_implementation"):
        model(tokens, past_key_values=DecodeCache("bf16", 30))


def test_more_tokens_than_the_cache_holds_are_refused(model, tokens):
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(ValueError, match="got token 30, want at most the cache's max_seq_len 29"):
        model(tokens, past_key_values=DecodeCache("int4_g1", 29))


def test_bad_arguments_are_named(model, tokens):
    with pytest.raises(ValueError, match="kv_format: got 'int5'"):
        DecodeCache("int5", 10)
    with pytest.raises(ValueError, match="max_seq_len: got 0"):
        DecodeCache("bf16", 0)
    with pytest.raises(TypeError, match="max_seq_len: got '8', want an int"):
        DecodeCache("bf16", "8")  # type: ignore[arg-type]
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(TypeError, match="kv_format: got 'fp16'"):
        model(tokens, past_key_values=DecodeCache("fp16", 30))
    query = torch.randn(1, 2, 1, 64)
    keys = torch.randn(1, 2, 17, 64)
    with pytest.raises(ValueError, match="sliding_window: got 16 without a mask over 17 keys"):
        integration.attention(torch.nn.Module(), query, keys, keys, None, sliding_window=16)
