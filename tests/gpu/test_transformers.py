"""transformers models on a GPU: `accelerate` replays CUDA graphs of their steps, and they choose the same tokens."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from transformers import LogitsProcessor, LogitsProcessorList

import cute_kernels.integrations.transformers as ck
from cute_kernels import quantize_model
from cute_kernels.formats.kv import LayerFormats
from cute_kernels.gemm import deferred
from cute_kernels.gemm.layer import call as layer_call
from cute_kernels.integrations.calibrate_command import with_step
from cute_kernels.integrations.transformers import accelerated as own_generate
from cute_kernels.integrations.transformers import deferral
from cute_kernels.integrations.transformers.blocks import AttentionBlock, MlpBlock
from cute_kernels.integrations.transformers.graphs import StepReplay
from cute_kernels.integrations.transformers.norms import replace_norms
from cute_kernels.kv_cache.constants import CacheConstants
from tests.gpu import same_tokens
from tests.integrations.architectures import DECODERS, VOCABULARY
from tests.integrations.test_accelerate import CACHES_LATENTS
from tests.observed import calls_of

pytestmark = [pytest.mark.gpu]

CUDA = "cuda"
PROMPT = torch.randint(3, VOCABULARY, (3, 50), generator=torch.Generator().manual_seed(3))
LEFT_PADDED = torch.ones_like(PROMPT)
LEFT_PADDED[0, :17] = 0
NEW = 40
NAMES = (
    "llama",
    "mistral, window",
    "gemma 2",
    "gemma 3",
    "gemma 4",
    "gpt-oss",
    "qwen3",
    "qwen3-moe",
    "llama 4",
    "phi-3",
)
MIXTURES = ("llama 4",)
"""One expert of several: random routers have ties, and a token that takes another expert is another token."""


def build(name: str) -> Any:
    return DECODERS[name].build(torch.bfloat16).to(CUDA)


@torch.no_grad()
def generate(model: Any, mask: torch.Tensor, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "pad_token_id": 0, **options}
    options["return_dict_in_generate"] = True
    ids = PROMPT[: len(mask)]
    return model.generate(input_ids=ids.to(CUDA), attention_mask=mask.to(CUDA), **options)


@torch.no_grad()
def rounding_of(model: Any, tokens: torch.Tensor) -> float:
    """How far the model's logits of these tokens are from those of its weights in fp32, at most; it stays in fp32."""
    rounded = model(tokens).logits.double()
    exact = model.float()(tokens).logits.double()
    return float(((rounded - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def assert_same_choices(got: Any, want: Any, tolerance: float = 4e-2) -> list[int]:
    """The same greedy tokens, until two were as good but for rounding; the same logits up to there. Returns how many
    steps that was, of each request."""
    ends = []
    for request in range(got.sequences.shape[0]):
        for step, (ours, theirs) in enumerate(zip(got.logits, want.logits, strict=True)):
            ours, theirs = ours[request].double(), theirs[request].double()
            assert (ours - theirs).norm() <= tolerance * theirs.norm(), f"request {request}, step {step}"
            place = PROMPT.shape[1] + step
            if got.sequences[request, place] != want.sequences[request, place]:
                top = theirs.topk(2).values
                assert top[0] - top[1] < 0.1 * theirs.std()
                ends.append(step)
                break
        else:
            ends.append(len(got.logits))
    return ends


def assert_same_experts_mostly(got: Any, want: Any) -> None:
    """Close logits in three of four of the steps in which both have chosen the same tokens before."""
    errors = []
    for request in range(got.sequences.shape[0]):
        for step, (ours, theirs) in enumerate(zip(got.logits, want.logits, strict=True)):
            place = PROMPT.shape[1] + step
            if not torch.equal(got.sequences[request, :place], want.sequences[request, :place]):
                break
            ours, theirs = ours[request].double(), theirs[request].double()
            errors.append(float((ours - theirs).norm() / theirs.norm()))
    assert len(errors) >= 3 and sorted(errors)[3 * len(errors) // 4] <= 4e-2


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", NAMES)
def test_generate_replays_graphs_and_chooses_the_tokens_of_eager_attention(name, padded):
    model = build(name)
    mask = LEFT_PADDED if padded else torch.ones_like(PROMPT)
    model.set_attn_implementation("eager")
    plain = copy.deepcopy(model)  # own norms take no fp32
    replace_norms(model)
    want = generate(model, mask)
    tolerance = max(4e-2, 1.5 * rounding_of(plain, want.sequences))  # Gemma 4's rounds by up to 11 %
    ck.accelerate(model, kv_format="bf16")
    got = generate(model, mask)
    if name in MIXTURES:
        assert_same_experts_mostly(got, want)
    else:
        assert_same_choices(got, want, tolerance)
    replay = model.forward
    assert isinstance(replay, StepReplay)
    static = not (padded and name == "llama 4")
    assert (replay.reason, replay.replays) == (None, NEW - 2 if static else 0)


@pytest.mark.parametrize("name", same_tokens.NAMES)
def test_256_greedy_steps_choose_the_tokens_of_sdpa(name):
    """As far as two tokens are not as good but for rounding; both rotate and norm by what `accelerate` puts in."""
    row = same_tokens.compare(name)
    print(same_tokens.text(row))
    if name in MIXTURES:
        assert row["median"] <= 4e-2
    else:
        assert row["worst"] <= 4e-2 and all(margin < same_tokens.TIE for margin in row["margins"])
        assert row["choices"]["widest"] < same_tokens.TIE


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi-3", "llama, biases"])
def test_fused_blocks_give_what_the_blocks_give(name):
    found = []
    for fused in (False, True):
        model = build(name)
        ck.accelerate(model, kv_format="int8_token_head", weights="w4g64", fuse_blocks=fused)
        kinds = [type(vars(module).get("forward")) for module in model.modules()]
        assert (kinds.count(AttentionBlock), kinds.count(MlpBlock)) == ((2, 2) if fused else (0, 0))
        found.append(generate(model, LEFT_PADDED))
    assert_same_choices(found[1], found[0])


def wide(name: str) -> Any:
    """A quantised model of three layers, whose rows are wide enough that products leave norms to the next ones."""
    model = DECODERS[name].build(torch.bfloat16, hidden_size=512, intermediate_size=1024, num_hidden_layers=3).to(CUDA)
    torch.manual_seed(1)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            torch.nn.init.normal_(module.weight, 1.0, 0.3)
    quantize_model(model)
    replace_norms(model)
    return model


def assert_repeats(model: Any, prompt: torch.Tensor, found: Any) -> None:
    """`generate` gives what it gave before, bit for bit."""
    again = generate(model, prompt)
    assert torch.equal(again.sequences, found.sequences)
    for ours, theirs in zip(again.logits, found.logits, strict=True):
        assert torch.equal(ours, theirs)


def assert_hidden_states(question: str, prompt: torch.Tensor) -> None:
    """Those of a step are those of a model whose blocks hear no to a ``question`` of `deferral`."""
    model, found = wide("llama"), []
    ck.accelerate(model, kv_format="bf16")
    for asks in (False, True):
        with nullcontext() if asks else mock.patch.object(deferral, question, lambda *_: False):
            found.append(generate(model, prompt, max_new_tokens=3, output_hidden_states=True).hidden_states[1])
    assert len(found[0]) == len(found[1]) == 4
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert (ours - theirs).float().norm() <= 2e-2 * theirs.float().norm()


@pytest.mark.parametrize("name", ["llama", "llama, biases", "qwen3", "phi-3"])
def test_norms_without_launches_choose_the_tokens_of_sdpa(name):
    model = wide(name)
    model.set_attn_implementation("sdpa")
    want = generate(model, LEFT_PADDED)
    ck.accelerate(model, kv_format="bf16")
    with mock.patch.object(deferral, "leaves_norm", lambda *_: False):
        launched = generate(model, LEFT_PADDED)
    with calls_of(deferred.left_to_next, deferred._taking_key) as calls:
        generate(model, LEFT_PADDED, max_new_tokens=2)
    # Of a step: o and down of each layer but the last down, which the model's own norm follows. The rows that a down
    # leaves go through the next layer's norm, which hands them on.
    after_o = [deferred.left_to_next, deferred._taking_key]
    after_down = [deferred.left_to_next, *after_o]
    assert [call.function for call in calls] == (after_o + after_down) * 2 + after_o
    got = generate(model, LEFT_PADDED)
    assert_same_choices(got, launched)
    assert_same_choices(got, want)
    assert isinstance(model.forward, StepReplay) and model.forward.reason is None
    assert_repeats(model, LEFT_PADDED, got)


def test_hidden_states_behind_norms_without_launches_are_those_of_the_layers():
    assert_hidden_states("leaves_norm", LEFT_PADDED)


WHOLE = {"llama": 3, "mistral, window": 3, "qwen2": 1, "qwen3": 3, "phi-3": 3, "llama, biases": 0}
"""Layers of three that are one launch. Qwen2's q, k and v have biases, and behind the last layer there are none."""


@pytest.mark.parametrize("name", WHOLE)
def test_layers_in_one_launch_choose_the_tokens_of_sdpa(name):
    model, one = wide(name), torch.ones_like(PROMPT[:1])
    model.set_attn_implementation("sdpa")
    want = generate(model, one)
    ck.accelerate(model, kv_format="bf16")
    with mock.patch.object(deferral, "serves_rows", lambda *_: False):
        apart = generate(model, one)
    with calls_of(layer_call.exchange_words, layer_call.layer_apart) as calls:
        generate(model, one, max_new_tokens=2)
        generate(model, LEFT_PADDED, max_new_tokens=2)  # three rows, as norms in products have it
    assert [call.function for call in calls] == [layer_call.exchange_words] * WHOLE[name]
    got = generate(model, one)
    assert_same_choices(got, apart)
    assert_same_choices(got, want)
    replay = model.forward
    assert isinstance(replay, StepReplay) and replay.reason is None
    replays = replay.replays
    assert_repeats(model, one, got)
    assert replay.replays >= replays + NEW - 2


def test_hidden_states_behind_layers_in_one_launch_are_those_of_the_layers():
    assert_hidden_states("serves_rows", torch.ones_like(PROMPT[:1]))


@pytest.mark.skipif(not CACHES_LATENTS, reason="caches keys and values in this release of transformers")
@pytest.mark.parametrize(("kv_format", "tolerance"), [("mla_bf16", 4e-2), ("mla_fp8", 0.15)])
def test_latents_are_decoded_by_recorded_steps(kv_format, tolerance):
    model = DECODERS["deepseek-v3"].build(torch.bfloat16, **same_tokens.LATENT_DIMS).to(CUDA)
    model.set_attn_implementation("eager")
    replace_norms(model)
    want = generate(model, LEFT_PADDED)
    ck.accelerate(model, kv_format=kv_format)
    assert_same_choices(generate(model, LEFT_PADDED), want, tolerance)
    assert isinstance(model.forward, StepReplay)
    assert (model.forward.reason, model.forward.replays) == (None, NEW - 2)


@pytest.mark.parametrize("kv_format", ["int4_g4", ("int8_token_head", "int4_g4"), {0: "bf16", -1: "int4_g4"}])
def test_quantised_caches_give_what_their_steps_give_unrecorded(kv_format):
    found = []
    for graphs in (False, True):
        model = build("qwen3")
        ck.accelerate(model, kv_format=kv_format, cuda_graphs=graphs)
        found.append(generate(model, LEFT_PADDED))
    assert_same_choices(found[1], found[0], tolerance=1e-2)


def test_a_report_of_formats_has_the_time_of_a_step():
    formats = LayerFormats((("int8_token_head", "int4_g2"), ("int4_g2", "int4_g2")), {"kl": 0.1})
    report: Any = with_step(formats, build("llama"), CacheConstants((None, None)), PROMPT.to(CUDA)).report
    assert 0 < report["step_ms"] < 20 and report["kl"] == 0.1


def test_the_next_call_replays_the_same_graph():
    model = build("llama")
    ck.accelerate(model, kv_format="int4_g4", weights="w4g64")
    first = generate(model, LEFT_PADDED).sequences
    replay = model.forward
    assert isinstance(replay, StepReplay) and replay.replays == NEW - 2
    again = generate(model, LEFT_PADDED).sequences
    assert replay.replays == 2 * NEW - 3 and torch.equal(first, again)


class NotTheLikeliest(LogitsProcessor):
    """Forbids the likeliest token at one step."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] != PROMPT.shape[1] + 11:
            return scores
        return scores.scatter(1, scores.argmax(-1, keepdim=True), float("-inf"))


def test_steps_that_cannot_be_recorded_leave_sampling_as_it_is():
    """A step of OPT's waits for the GPU. CUDA draws the same tokens as where no recording was tried."""
    found = []
    for records in (False, True):
        model = same_tokens.build("opt")
        ck.accelerate(model, kv_format="bf16", cuda_graphs=records)
        torch.manual_seed(0)
        found.append(generate(model, LEFT_PADDED, do_sample=True, max_new_tokens=12).sequences)
    assert "capturing" in str(model.forward.reason)
    assert torch.equal(*found)


def test_memory_does_not_grow_with_recordings():
    """Each call records steps of its own: what libraries keep for a stream is kept once."""
    model, marks = build("llama"), []
    ck.accelerate(model, kv_format="bf16")
    for _ in range(6):
        generate(model, torch.ones_like(PROMPT), past_key_values=ck.DecodeCache("bf16"))
        gc.collect()
        torch.cuda.synchronize()
        marks.append(torch.cuda.memory_allocated())
    assert model.forward.replays > 5 * NEW and max(marks[2:]) <= marks[1] + (1 << 20), marks


@pytest.mark.parametrize("change", ["none", "a token that was not foreseen", "requests that end"])
def test_steps_begun_ahead_have_the_bits_of_steps_in_order(change):
    """On a stream of their own, beside what `generate` does with the step before."""
    model = build("qwen3")
    ck.accelerate(model, kv_format="int4_g4", weights="w4g64")
    replay, options = model.forward, {}
    assert isinstance(replay, StepReplay)
    if change == "a token that was not foreseen":
        options["logits_processor"] = LogitsProcessorList([NotTheLikeliest()])
    elif change == "requests that end":
        options["eos_token_id"] = int(generate(model, LEFT_PADDED).sequences[0, PROMPT.shape[1] + 9])
    generate(model, LEFT_PADDED, **options)  # its memory and its recorded step serve the others
    found = []
    for one_by_one in (True, False):
        before = replay.ahead
        with mock.patch.object(own_generate, "is_greedy", lambda *_: False) if one_by_one else nullcontext():
            outputs = generate(model, LEFT_PADDED, **options)
        found.append((outputs.sequences, outputs.logits, outputs.past_key_values.columns.seq_lens.clone()))
        assert (replay.ahead > before) == (not one_by_one)
        del outputs
    (want, want_logits, want_lens), (got, got_logits, lens) = found
    assert torch.equal(got, want) and torch.equal(lens, want_lens)
    for ours, theirs in zip(got_logits, want_logits, strict=True):
        assert torch.equal(ours, theirs)


def test_beams_and_assisted_steps():
    model = build("llama")
    model.generation_config.eos_token_id = VOCABULARY  # one that is never made
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        ids = PROMPT[:1].to(CUDA)
        found = []
        for accelerated in (False, True):
            if accelerated:
                ck.accelerate(model, kv_format="bf16")
            found.append(model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0, **options))
            ck.restore(model)
            model.set_attn_implementation("sdpa")
        assert (found[0] == found[1]).float().mean() > 0.8  # ties between tokens apart
