"""Models of many architectures compute with attn_implementation="cute_kernels" what they compute with eager attention:
whatever their masks, caches and options are, or an error says what is not supported."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cute_kernels.integrations import transformers as integration
from cute_kernels.integrations.transformers import ATTENTION_NAME, DecodeCache
from cute_kernels.integrations.transformers.attend import EAGER_OPTIONS, REFUSED_OPTIONS
from tests.integrations.architectures import DECODERS, ENCODERS, VOCABULARY, Architecture, inputs_of

OWN_ATTENTION = ("falcon", "falcon, ALiBi", "bloom", "mpt")
"""Models whose code offers no choice of attention."""
LATENTS = ("deepseek-v3",)
"""Models that cache something else than keys and values, in newer releases of transformers."""
CHUNKS = (12, 4, 1, 1, 3)

IDS = torch.randint(3, VOCABULARY, (2, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[0, :6] = 0


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()
    transformers.logging.set_verbosity_error()


def architectures(known: dict[str, Architecture]) -> Any:
    missing = pytest.mark.skip(reason="not in this release of transformers")
    return pytest.mark.parametrize(
        ("name", "architecture"),
        [pytest.param(name, a, marks=() if a.available else missing, id=name) for name, a in known.items()],
    )


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@torch.no_grad()
def in_chunks(model: Any, cache: Any, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits of all tokens that are no padding, fed as a first turn, a second turn and single tokens."""
    logits, end = [], 0
    for size in CHUNKS:
        start, end = end, end + size
        given = {} if mask is None else {"attention_mask": mask[:, :end]}
        logits.append(model(IDS[:, start:end], past_key_values=cache, **given).logits)
    return torch.cat(logits, dim=1)[torch.ones_like(IDS).bool() if mask is None else mask.bool()]


@torch.no_grad()
def in_one(model: Any, mask: torch.Tensor | None) -> torch.Tensor:
    logits = model(IDS, attention_mask=mask, use_cache=False).logits
    return logits[torch.ones_like(IDS).bool() if mask is None else mask.bool()]


CACHES = {
    "dynamic": lambda model: transformers.DynamicCache(config=model.config),
    "static": lambda model: transformers.StaticCache(config=model.config, max_cache_len=sum(CHUNKS) + 9),
}


@architectures(DECODERS)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("kind", ["without a cache", *CACHES])
def test_decoders_compute_what_eager_attention_does(name, architecture, kind, padded):
    model = architecture.build()
    mask = LEFT_PADDED if padded else None
    found = []
    for implementation in ("eager", ATTENTION_NAME):
        model.set_attn_implementation(implementation)
        try:
            found.append(in_chunks(model, CACHES[kind](model), mask) if kind in CACHES else in_one(model, mask))
        except RuntimeError as error:
            if implementation == "eager":
                pytest.skip(f"eager attention itself: {error}")
            raise
    assert relative_error(found[1], found[0]) < 1e-5


@architectures(ENCODERS)
def test_encoders_compute_what_eager_attention_does(name, architecture):
    model = architecture.build()
    inputs = inputs_of(model)
    for padded in (True, False):
        if not padded and inputs.pop("attention_mask", None) is None:
            continue
        found = []
        for implementation in ("eager", ATTENTION_NAME):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                output = model(**inputs)
            found.append(output["logits"] if "logits" in output else output.last_hidden_state)
            if padded and not model.config.is_encoder_decoder and "attention_mask" in inputs:
                found[-1] = found[-1][inputs["attention_mask"].bool()]
        assert relative_error(found[1], found[0]) < 1e-5


@architectures(DECODERS)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_decoders_run_through_a_decode_cache_or_say_what_they_do(name, architecture, padded):
    model = architecture.build(torch.bfloat16)
    mask = LEFT_PADDED if padded else None
    model.set_attn_implementation("eager")
    want = in_one(model, mask)
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        got = in_chunks(model, DecodeCache("bf16", sum(CHUNKS)), mask)
    except AttributeError as error:
        if name in OWN_ATTENTION:
            assert "offers no choice: it computes attention itself" in str(error)
        else:
            assert name in LATENTS
            assert "DeepseekV3Attention.expand_kv computes with what it caches" in str(error)
        return
    assert name not in OWN_ATTENTION
    assert relative_error(got, want) < 2e-2


@pytest.mark.parametrize("name", ["llama", "mistral, window", "gemma 2", "gpt-oss", "llama 4"])
def test_padding_between_tokens_is_never_seen(name):
    """In front of the first turn, at its end, and within the second one, of several tokens."""
    mask = torch.ones_like(IDS)
    mask[0, [0, 1, 13, 14]] = 0
    mask[1, [9, 10, 11]] = 0
    model = DECODERS[name].build(torch.bfloat16)
    model.set_attn_implementation("eager")
    want = in_one(model, mask)
    model.set_attn_implementation(ATTENTION_NAME)
    cache = DecodeCache("bf16", sum(CHUNKS))
    assert relative_error(in_chunks(model, cache, mask), want) < 2e-2
    assert cache.columns is not None and cache.get_seq_length() == sum(CHUNKS)
    assert cache.columns.seq_lens.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("argument", [True, False], ids=["argument", "attribute"])
def test_attention_that_is_not_causal_sees_all_keys(argument):
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 6, 64)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    if not argument:
        module.is_causal = False  # type: ignore[assignment]
    out, _ = integration.attention(module, q, k, v, None, is_causal=False if argument else None)
    assert relative_error(out, want) < 1e-6


@pytest.mark.parametrize("queries", [1, 3])
def test_any_mask_is_honoured_over_a_decode_cache(queries):
    """Each query sees other tokens, later ones among them."""
    model = DECODERS["llama"].build(torch.bfloat16)
    mask = torch.rand(2, 1, queries, 9 + queries, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[..., 0] = True
    found = []
    for implementation, cache in (
        ("eager", transformers.DynamicCache()),
        (ATTENTION_NAME, DecodeCache("bf16", 9 + queries)),
    ):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            model(IDS[:, :9], past_key_values=cache)
            seen = mask if implementation != "eager" else torch.where(mask, 0.0, -1e9).bfloat16()
            ids = IDS[:, 9 : 9 + queries]
            found.append(model(ids, attention_mask=seen, past_key_values=cache).logits)
    assert relative_error(found[1], found[0]) < 2e-2


def test_every_option_that_a_model_gives_to_attention_is_known():
    """A release with another option fails here, and is then looked at: SDPA drops what it does not know."""
    carried_by_the_mask = {"sliding_window", "indices", "block_indices"}
    of_flash_attention = {"max_length_q", "max_length_k", "deterministic", "position_ids"}
    of_sdpa = {"attention_mask", "scaling", "dropout", "is_causal", "position_bias", "query", "key", "value"}
    known = {*carried_by_the_mask, *of_flash_attention, *of_sdpa, *EAGER_OPTIONS, *REFUSED_OPTIONS, "output_attentions"}
    given = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        _, *calls = re.split(r"\battention_interface\(", path.read_text(encoding="utf-8"))
        for call in calls:  # of which only the arguments are parsed: all files take a quarter of a minute
            depths = itertools.accumulate((c == "(") - (c == ")") for c in call)
            end = next(place for place, depth in enumerate(depths) if depth < 0)
            parsed: Any = ast.parse(f"f({call[:end]})", mode="eval")
            given |= {keyword.arg for keyword in parsed.body.keywords if keyword.arg}
    assert {"scaling", "dropout", "softcap", "s_aux"} <= given  # and names are found at all
    assert given <= known


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_packed_sequences_are_refused(name):
    query = torch.randn(1, 2, 4, 64)
    with pytest.raises(ValueError, match=f"^{name}: got packed sequences, want None"):
        options: Any = {name: torch.tensor([0, 2, 4])}
        integration.attention(torch.nn.Module(), query, query, query, None, **options)


def test_weights_of_attention_are_refused():
    query = torch.randn(1, 2, 4, 64)
    with pytest.raises(ValueError, match="^output_attentions: got True, want attn_implementation='eager'"):
        integration.attention(torch.nn.Module(), query, query, query, None, output_attentions=True)
