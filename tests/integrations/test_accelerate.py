"""`accelerate` changes how a model decodes and nothing else: the same `generate`, tokens, masks and caches."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.models.deepseek_v3 import modeling_deepseek_v3

import cute_kernels.integrations.transformers as ck
from cute_kernels import QuantizedLinear
from cute_kernels.attention import ops as attention_ops
from cute_kernels.integrations.transformers.graphs import StepReplay
from cute_kernels.integrations.transformers.norms import replace_norms, restore_norms
from cute_kernels.kv_cache import step_ops
from tests.integrations.architectures import DECODERS, VOCABULARY
from tests.integrations.test_transformers_models import LATENTS, OWN_ATTENTION

ACCELERATED = [name for name, a in DECODERS.items() if a.available and name not in (*OWN_ATTENTION, *LATENTS)]
PROMPT = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(3))
LEFT_PADDED = torch.ones_like(PROMPT)
LEFT_PADDED[0, :5] = 0
NEW = 9  # tokens, which pass the end of a window of 8


CACHES_LATENTS = hasattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv")


class Operators(TorchDispatchMode):
    """Notes the operators that run in its block, and runs them again.

    `make_fx` does so, too, but takes far longer: it also notes how each result looks and where it was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []  # operator, what it was given, what it gave
        self.made: set[int] = set()  # identities of what they gave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and id(args[0]) in self.made:
            raise RuntimeError("the host takes a value out of a tracing tensor")  # which a graph's capture refuses, too
        given = (args, kwargs or {})
        result = func(*args, **given[1])
        self.calls.append((func, given, result))
        self.made.update(map(id, tree_leaves(result)))
        return result

    def replay(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """What stands now in place of ``outputs`` of the block."""
        there: dict[int, torch.Tensor] = {}

        def now(value: Any) -> Any:
            return there.get(id(value), value)

        for func, given, result in self.calls:
            args, kwargs = tree_map(now, given)
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor):
                    there[id(old)] = new
        return [now(each) for each in outputs]


class Traced:
    """Stands for a CUDA graph on a CPU: the operators of one run, replayed. Like a graph's, numbers that the host took
    during that run stay what they were, so a step that is not static gives wrong tokens here, too."""

    count = 0

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        with (
            mock.patch.object(step_ops, "path_of", lambda step: step_ops.dispatch),  # as one operator
            mock.patch.object(attention_ops, "path_of", lambda *_: attention_ops.dispatch),
            Operators() as self.operators,
        ):
            self.outputs: Any = function()
        Traced.count += 1

    def replay(self) -> None:
        with torch.inference_mode():
            kept = tensors_of(self.outputs)
            for old, new in zip(kept, self.operators.replay(kept), strict=True):
                old.copy_(new)


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """The tensors of a model's outputs, in order."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    nested = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, (tuple, list)) else ()
    return [tensor for value in nested for tensor in tensors_of(value)]


def record_on_cpu(model: Any) -> StepReplay:
    """The model's decode steps are recorded as `Traced` does it."""
    assert isinstance(model.forward, StepReplay)
    model.forward.record = Traced
    return model.forward


@torch.no_grad()
def generate(model: Any, mask: torch.Tensor, **options: Any) -> Any:
    options = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    } | options
    return model.generate(input_ids=PROMPT, attention_mask=mask, pad_token_id=0, **options)


def assert_same_choices(got: Any, want: Any) -> None:
    """The same greedy tokens, until two were as good but for rounding; the same logits up to there."""
    first = want.sequences.shape[1] - len(want.logits)
    for request in range(got.sequences.shape[0]):
        for step, (ours, theirs) in enumerate(zip(got.logits, want.logits, strict=True)):
            ours, theirs = ours[request].double(), theirs[request].double()
            assert (ours - theirs).norm() <= 3e-2 * theirs.norm(), f"request {request}, step {step}"
            if got.sequences[request, first + step] != want.sequences[request, first + step]:
                top = theirs.topk(2).values
                assert top[0] - top[1] < 0.1 * theirs.std()
                break


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", ACCELERATED)
def test_generate_chooses_the_tokens_of_eager_attention(name, padded):
    model = DECODERS[name].build(torch.bfloat16)
    mask = LEFT_PADDED if padded else torch.ones_like(PROMPT)
    model.set_attn_implementation("eager")
    replace_norms(model)  # they round once where transformers rounds twice
    want = generate(model, mask)
    ck.accelerate(model, kv_format="bf16")
    replay = record_on_cpu(model)
    got = generate(model, mask)
    assert isinstance(got.past_key_values, ck.DecodeCache)
    assert_same_choices(got, want)
    if name == "opt":  # in some releases it counts its positions on the host
        assert not replay.replays and (replay.reason is None or "value out of a tracing tensor" in replay.reason)
    else:
        static = not (padded and name == "llama 4")  # chunks are a mask of columns, and padding is not cached
        assert (replay.reason, replay.replays) == (None, NEW - 2 if static else 0)


@pytest.mark.parametrize(("name", "static"), [("llama", True), ("mistral, window", False)])
def test_padding_between_tokens_is_honoured_by_recorded_steps(name, static):
    """A window counts columns there, the cache's rows are tokens: such a batch's steps run as usual."""
    model = DECODERS[name].build(torch.bfloat16)
    mask = LEFT_PADDED.clone()
    mask[1, 7:9] = 0
    model.set_attn_implementation("eager")
    want = generate(model, mask)
    ck.accelerate(model, kv_format="bf16")
    replay = record_on_cpu(model)
    assert_same_choices(generate(model, mask), want)
    assert (replay.reason, replay.replays) == (None, NEW - 2 if static else 0)


@pytest.mark.parametrize("kv_format", ["int4_g4", ("int8_token_head", "int4_g4"), {0: "bf16", -1: "int4_g4"}])
def test_quantised_caches_give_what_their_steps_give_unrecorded(kv_format):
    found = []
    for recorded in (False, True):
        model = DECODERS["qwen3"].build(torch.bfloat16)
        summary = ck.accelerate(model, kv_format=kv_format)
        if recorded:
            record_on_cpu(model)
        found.append(generate(model, LEFT_PADDED))
    assert torch.equal(found[0].sequences, found[1].sequences)
    for one, other in zip(found[0].logits, found[1].logits, strict=True):
        assert torch.equal(one, other)
    assert "int4_g4" in str(summary)
    formats = [layer.formats for layer in found[0].past_key_values.layers]
    want = {"int4_g4": [("int4_g4",) * 2] * 2, ("int8_token_head", "int4_g4"): [("int8_token_head", "int4_g4")] * 2}
    assert formats == (want[kv_format] if not isinstance(kv_format, dict) else [("bf16",) * 2, ("int4_g4",) * 2])


def test_the_next_call_finds_the_memory_and_the_recorded_step():
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="int4_g4")
    replay = record_on_cpu(model)
    ones = torch.ones_like(PROMPT)
    Traced.count = 0
    first = generate(model, ones)
    rows = first.past_key_values.layers[0].k_rows
    sequences = first.sequences
    other = generate(model, ones)  # the first cache is still held
    assert other.past_key_values.layers[0].k_rows is not rows
    assert (Traced.count, replay.replays) == (2, 2 * (NEW - 2))
    del first
    gc.collect()
    again = generate(model, ones)
    assert again.past_key_values.layers[0].k_rows is rows
    assert (Traced.count, replay.replays) == (2, 3 * (NEW - 2) + 1)
    assert torch.equal(again.sequences, sequences) and torch.equal(other.sequences, sequences)


@pytest.mark.parametrize("change", ["a weight", "a layer", "a hook"])
def test_a_changed_model_is_recorded_anew(change):
    """A recording reads the weights that there were: others are never read from there."""
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="bf16")
    replay = record_on_cpu(model)
    ones = torch.ones_like(PROMPT)
    first = generate(model, ones).sequences
    gc.collect()
    layer = model.model.layers[1].self_attn
    weight = layer.o_proj.weight.detach() * -3
    if change == "a weight":
        layer.o_proj.weight = torch.nn.Parameter(weight)
    elif change == "a layer":
        layer.o_proj = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        layer.o_proj.weight.data.copy_(weight)
    else:
        layer.o_proj.register_forward_hook(lambda module, args, output: -3 * output)
    got = generate(model, ones)
    ck.restore(model)
    want = generate(model, ones, past_key_values=ck.DecodeCache("bf16"))
    assert replay.replays == 2 * (NEW - 2)
    assert not torch.equal(got.sequences, first)
    assert_same_choices(got, want)


def test_a_model_with_changed_settings_is_recorded_anew():
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="bf16", weights="w4g32")
    record_on_cpu(model)
    layer: Any = model.model.layers[1].self_attn.o_proj
    Traced.count = 0
    for recorded, activations in enumerate((None, "fp8"), start=1):
        layer.activations = activations
        for _ in range(2):
            generate(model, torch.ones_like(PROMPT))
            gc.collect()
        assert Traced.count == recorded


def test_a_second_turn_goes_on_with_the_cache():
    model = DECODERS["mistral, window"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="bf16")
    record_on_cpu(model)
    first = generate(model, LEFT_PADDED)
    turn = torch.cat((first.sequences, PROMPT[:, :6]), dim=1)
    mask = torch.cat((LEFT_PADDED, torch.ones(2, turn.shape[1] - LEFT_PADDED.shape[1], dtype=torch.long)), dim=1)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options |= {"attention_mask": mask, "return_dict_in_generate": True}
    with torch.no_grad():
        got = model.generate(turn, past_key_values=first.past_key_values, **options)
        ck.restore(model)
        model.set_attn_implementation("eager")
        want = model.generate(turn, **options)
    assert got.past_key_values is first.past_key_values
    for ours, theirs in zip(got.logits[:1], want.logits[:1], strict=True):
        assert (ours - theirs).norm() <= 3e-2 * theirs.norm()


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"num_return_sequences": 2, "num_beams": 2}]
)
def test_other_ways_to_generate_run(options):
    found = []
    for accelerated in (False, True):
        model = DECODERS["llama"].build(torch.bfloat16)
        model.generation_config.eos_token_id = VOCABULARY  # one that is never made
        if accelerated:
            ck.accelerate(model, kv_format="bf16")
            record_on_cpu(model)
        ids = PROMPT[:1].repeat(1, 2) if "prompt_lookup_num_tokens" in options else PROMPT
        with torch.no_grad():
            found.append(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, **options))
    assert found[0].shape == found[1].shape
    assert (found[0] == found[1]).float().mean() > 0.8  # ties between tokens apart


def test_caches_that_are_asked_for_are_used():
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="int4_g4")
    ones = torch.ones_like(PROMPT)
    mine = transformers.DynamicCache()
    assert generate(model, ones, past_key_values=mine).past_key_values is mine
    assert isinstance(generate(model, ones, cache_implementation="static").past_key_values, transformers.StaticCache)
    assert generate(model, ones, use_cache=False).past_key_values is None
    ck.restore(model)
    assert isinstance(generate(model, ones).past_key_values, transformers.DynamicCache)


def test_a_mask_that_changes_behind_is_refused():
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="bf16")
    replay = record_on_cpu(model)
    cache = ck.DecodeCache("bf16")
    mask = LEFT_PADDED.clone()

    def step(ids: torch.Tensor) -> Any:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits

    step(PROMPT)
    for _ in range(4):
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), dim=1)
        step(PROMPT[:, :1])
    assert replay.replays == 3
    mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), dim=1)
    mask[0, 0] = 1
    with pytest.raises(ValueError, match="attention_mask: got another mask of the first 17 columns"):
        step(PROMPT[:, :1])
    mask[0, 0] = 0
    lens = cache.columns.seq_lens.tolist()  # type: ignore[union-attr]
    step(PROMPT[:, :1])
    assert cache.columns.seq_lens.tolist() == [n + 1 for n in lens]  # type: ignore[union-attr]


def test_more_tokens_than_allowed_are_refused_with_the_cache_intact():
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="int4_g4", max_seq_len=PROMPT.shape[1] + 3)
    cache = ck.DecodeCache("int4_g4", PROMPT.shape[1] + 3)
    with torch.no_grad():
        want = model(PROMPT, past_key_values=cache).logits
        with pytest.raises(ValueError, match="got token 17, want at most the cache's max_seq_len 16"):
            model(PROMPT[:, :4], past_key_values=cache)
        assert cache.get_seq_length() == 13
        model(PROMPT[:, :3], past_key_values=cache)
    assert cache.get_seq_length() == 16 and want.isfinite().all()
    with pytest.raises(ValueError, match="want at most the cache's max_seq_len 16"):
        generate(model, torch.ones_like(PROMPT))


def test_a_cache_grows_and_keeps_its_tokens():
    model = DECODERS["llama"].build(torch.bfloat16)
    model.set_attn_implementation(ck.ATTENTION_NAME)
    found = []
    for cache in (ck.DecodeCache("int4_g4", capacity=14), ck.DecodeCache("int4_g4", 40)):
        with torch.no_grad():
            model(PROMPT, past_key_values=cache)
            found.append(torch.cat([model(PROMPT[:, i : i + 1], past_key_values=cache).logits for i in range(9)], 1))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("llama", 5),
        ("qwen3", 9),
        ("gemma 2", 9),
        ("gemma 3", 13),
        ("gpt-oss", 5),
        ("olmo 2", 9),
        ("cohere 2", 0),
        ("gpt-2", 0),
    ],
)
def test_rms_norms_are_replaced_where_their_code_is_known(name, norms):
    if not DECODERS[name].available:
        pytest.skip("not in this release of transformers")
    model = DECODERS[name].build(torch.bfloat16)
    modules = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    torch.manual_seed(0)
    for module in modules:
        torch.nn.init.normal_(module.weight)
    inputs = [torch.randn(3, 2, module.weight.shape[0]).bfloat16() * 30 for module in modules]
    want = [module(x) for module, x in zip(modules, inputs, strict=True)]
    assert replace_norms(model) == norms
    for module, x, y in zip(modules, inputs, want, strict=True):
        with torch.no_grad():
            got = module(x).double()
        assert (got - y.double()).norm() <= 4e-3 * y.double().norm() and got.dtype == torch.float64
    restore_norms(model)
    assert not any("forward" in vars(module) for module in modules)


def test_a_norm_that_a_gradient_flows_through_is_the_model_s_own():
    """The kernel has none: what lies before the norm would learn nothing."""
    model = DECODERS["llama"].build(torch.bfloat16)
    norm, x = model.model.norm, torch.randn(2, 3, model.config.hidden_size).bfloat16().requires_grad_()
    want = torch.autograd.grad(norm(x).float().square().sum(), x)
    assert replace_norms(model) > 0
    with Operators() as called:
        assert torch.equal(torch.autograd.grad(norm(x).float().square().sum(), x)[0], want[0])
        assert not any(call[0] is torch.ops.cute_kernels.norm.default for call in called.calls)
        with torch.no_grad():
            norm(x)
    assert called.calls[-1][0] is torch.ops.cute_kernels.norm.default


@pytest.mark.parametrize("new", [1, 20])
def test_attention_over_a_cache_refuses_to_pass_on_a_gradient(new):
    """It has none, and what lies before it would learn nothing by it."""
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="bf16")
    cache = ck.DecodeCache("bf16")
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        want = model(PROMPT[:, :1].expand(2, new), past_key_values=copy.deepcopy(cache)).logits
    got = model(PROMPT[:, :1].expand(2, new), past_key_values=cache).logits  # nobody has to turn gradients off for it
    assert (got - want).norm() <= 1e-2 * want.norm()
    with pytest.raises(NotImplementedError, match="query: got one that wants a gradient"):
        got.sum().backward()


def test_a_norm_of_other_code_stays():
    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
            self.variance_epsilon = 1e-6

        def forward(self, hidden_states):
            input_dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            variance = hidden_states.pow(4).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            return self.weight * hidden_states.to(input_dtype)

    assert replace_norms(Other()) == 0


@pytest.mark.parametrize("kv_format", ["int8_head", ("int8_channel", "int4_g4"), {0: "bf16", -1: "e4m3_tensor"}])
def test_scales_come_from_samples(kv_format):
    model = DECODERS["qwen2"].build(torch.bfloat16)
    replace_norms(model)
    exact = generate(model, LEFT_PADDED)
    scales = ck.calibrate(
        model, [{"input_ids": PROMPT, "attention_mask": LEFT_PADDED}, {"input_ids": PROMPT}], kv_format
    )
    assert len(scales) == 2
    ck.accelerate(model, kv_format=kv_format, scales=scales)
    record_on_cpu(model)
    got = generate(model, LEFT_PADDED)
    for step, most in ((0, 1e-2), (1, 0.15), (2, 0.15)):  # the first turn is exact
        ours, theirs = got.logits[step].double(), exact.logits[step].double()
        assert (ours - theirs).norm() < most * theirs.norm()
    with pytest.raises(ValueError, match="which wants scales beside the cache"):
        ck.DecodeCache(kv_format)
    with pytest.raises(ValueError, match="batches: got none"):
        ck.calibrate(model, [], kv_format)


def test_a_copy_of_an_accelerated_model_is_a_model_of_its_own():
    model = DECODERS["qwen3"].build(torch.bfloat16)
    ck.accelerate(model, kv_format="int4_g4", weights="w4g64")
    record_on_cpu(model)
    want = generate(model, LEFT_PADDED)
    copied = copy.deepcopy(model)
    replay = record_on_cpu(copied)
    got = generate(copied, LEFT_PADDED)
    assert replay.replays == NEW - 2 and torch.equal(got.sequences, want.sequences)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert not generate(copied, LEFT_PADDED).sequences[:, PROMPT.shape[1] :].any()
    assert torch.equal(generate(model, LEFT_PADDED).sequences, want.sequences)
    ck.restore(copied)
    assert "generate" not in vars(copied) and "generate" in vars(model)
    with pytest.raises(TypeError, match="accelerated model to pickle"):
        pickle.dumps(model)


def test_weights_are_quantised_and_it_says_so():
    model = DECODERS["llama"].build(torch.bfloat16)
    summary = ck.accelerate(model, kv_format="int4_g4", weights="w8g64")
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 14 and {(layer.weight.bits, layer.weight.group_size) for layer in layers} == {(8, 64)}
    text = str(summary)
    assert "LlamaForCausalLM" in text and "14 of them w8g64" in text and "left: Linear lm_head" in text
    assert generate(model, torch.ones_like(PROMPT)).sequences.shape == (2, PROMPT.shape[1] + NEW)


@pytest.mark.parametrize(("name", "weights"), [("llama", "w4g64"), ("gemma 2", None)])
def test_the_output_layer_has_a_format_of_its_own(name, weights):
    """Gemma's is its embedding, which stays in 16 bits."""
    model = DECODERS[name].build(torch.bfloat16)
    model.set_attn_implementation("eager")  # SDPA of some releases drops Gemma's soft cap
    want = generate(model, LEFT_PADDED).logits[0].double()
    embedding = model.get_input_embeddings().weight.clone()
    summary = ck.accelerate(model, kv_format="bf16", weights=weights, output_layer="w8g64")
    head = model.lm_head
    assert isinstance(head, QuantizedLinear) and (head.weight.bits, head.weight.group_size) == (8, 64)
    assert "output layer" in str(summary) and torch.equal(model.get_input_embeddings().weight, embedding)
    others = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear) and layer is not head]
    assert {layer.weight.bits for layer in others} == (set() if weights is None else {4})
    if weights is None:
        got = generate(model, LEFT_PADDED).logits[0].double()
        assert (got - want).norm() <= 3e-2 * want.norm()
    again = ck.accelerate(model, kv_format="int4_g4", output_layer="w4g64")  # it is quantised already
    assert model.lm_head is head and "output layer" in str(again)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("llama", {"output_layer": "w8"}, ValueError, "output_layer: got 'w8', want one such as"),
        ("bloom", {}, ValueError, "BloomForCausalLM, which offers no choice of attention"),
        ("deepseek-v3", {}, ValueError, "DeepseekV3ForCausalLM, whose DeepseekV3Attention has latents and"),
        ("llama", {"kv_format": "int5"}, ValueError, "kv_format: got 'int5'"),
        ("llama", {"kv_format": {0: "bf16"}}, ValueError, "kv_format: got none for layer 1"),
        ("llama", {"kv_format": "int8_head"}, ValueError, "which wants scales beside the cache"),
        ("llama", {"kv_format": ("int4_channel32", "int4_g4")}, ValueError, "kv_format: got 'int4_channel32', whose"),
        ("llama", {"kv_format": "fp16"}, TypeError, "kv_format: got 'fp16', want the format of the model's torch.bf"),
        ("llama", {"max_seq_len": 0}, ValueError, "max_seq_len: got 0, want at least 1"),
        ("llama", {"weights": "int4"}, ValueError, "weights: got 'int4', want one such as 'w4g128'"),
        ("llama", {"weights": "mxpf4"}, ValueError, "weights: got 'mxpf4', .*did you mean mxfp4"),
        ("llama", {"weights": 4}, TypeError, "weights: got int, want a str such as 'w4g128' or 'mxfp4'"),
        ("llama", {"weights": "w4g64", "skip": ("lm_haed",)}, ValueError, "skip: got 'lm_haed', which names no layer"),
        ("llama", {"weights": "w4g64", "skip": "lm_head"}, TypeError, "skip: got 'lm_head', want a sequence of names"),
    ],
)
def test_what_cannot_be_accelerated_is_refused_and_left_alone(name, options, error, message):
    if name in LATENTS and not CACHES_LATENTS:
        pytest.skip("caches keys and values in this release of transformers")
    model = DECODERS[name].build(torch.bfloat16)
    before = model.config._attn_implementation
    with pytest.raises(error, match=message):
        ck.accelerate(model, **options)
    assert model.config._attn_implementation == before
    assert "generate" not in vars(model) and "forward" not in vars(model)


@pytest.mark.parametrize("kv_format", ["int4_g4", ("int8_token_head", "int4_g4"), {0: "bf16", -1: "int8_g4"}])
def test_formats_that_do_not_exist_for_the_models_heads_are_refused(kv_format):
    model = DECODERS["llama"].build(torch.bfloat16)
    model.config.head_dim = 80
    with pytest.raises(ValueError, match=r"want a format for the model's heads: groups of 20 columns"):
        ck.accelerate(model, kv_format=kv_format)
    assert "generate" not in vars(model) and "forward" not in vars(model)


def test_models_of_other_kinds_are_refused():
    spread = DECODERS["llama"].build(torch.bfloat16)
    spread.lm_head.to("meta")
    with pytest.raises(ValueError, match="got LlamaForCausalLM on cpu, meta, want it on one device"):
        ck.accelerate(spread)
    with pytest.raises(TypeError, match="model: got Linear, want a transformers model"):
        ck.accelerate(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model: got LlamaForCausalLM in torch\.float32"):
        ck.accelerate(DECODERS["llama"].build())
