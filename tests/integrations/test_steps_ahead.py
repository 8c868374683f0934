"""Steps that are begun before they are asked for: the same tokens, logits and caches as without, whatever the caller
does between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

import cute_kernels.integrations.transformers as ck
from cute_kernels.integrations.transformers import accelerated as module
from cute_kernels.integrations.transformers import graphs
from cute_kernels.integrations.transformers.graphs import StepReplay
from cute_kernels.integrations.transformers.inputs import StepInputs
from tests.integrations.architectures import DECODERS
from tests.integrations.test_accelerate import LEFT_PADDED, NEW, PROMPT, Traced, generate, record_on_cpu

FIRST = 2
"""Steps of a call that are not replayed: one runs as usual, one is recorded and replayed, but was not begun."""


def accelerated(kv_format: Any = "int4_g4", name: str = "llama", **options: Any) -> tuple[Any, StepReplay]:
    model = DECODERS[name].build(torch.bfloat16)
    ck.accelerate(model, kv_format=kv_format, **options)
    return model, record_on_cpu(model)


def one_by_one() -> Any:
    """Within it no call of `generate` is taken for a greedy one."""
    return mock.patch.object(module, "is_greedy", lambda *_: False)


def in_order(**options: Any) -> Any:
    """What `generate` returns where no step is begun before it is asked for."""
    model, replay = accelerated()
    with one_by_one():
        found = generate(model, LEFT_PADDED, **options)
    assert not replay.ahead
    return found


def assert_same(got: Any, want: Any) -> None:
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        assert torch.equal(ours, theirs)
    assert_same_caches(got.past_key_values, want.past_key_values)


def assert_same_caches(got: Any, want: Any) -> None:
    assert (got.columns.count, got.columns.begun) == (want.columns.count, None)
    assert torch.equal(got.columns.seq_lens, want.columns.seq_lens)
    for ours, theirs in zip(got.layers, want.layers, strict=True):
        for a, b in zip(ours.rows, theirs.rows, strict=True):
            for request, tokens in enumerate(got.columns.seq_lens.tolist()):
                assert torch.equal(a[request, ..., :tokens, :], b[request, ..., :tokens, :])


def test_greedy_steps_are_begun_before_they_are_asked_for():
    model, replay = accelerated()
    got = generate(model, LEFT_PADDED)
    assert (replay.replays, replay.ahead) == (NEW - FIRST, NEW - FIRST - 1)
    assert_same(got, in_order())


def test_a_step_is_one_replay_and_none_is_begun_behind_the_last_one():
    model, replay = accelerated()
    began = []

    class Counted(Traced):
        def replay(self) -> None:
            began.append(1)
            super().replay()

    replay.record = lambda function, device: Counted(function, device)
    generate(model, LEFT_PADDED)
    assert len(began) == replay.replays == NEW - FIRST


class Other(LogitsProcessor):
    """Forbids the likeliest token at some steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] - PROMPT.shape[1] not in self.steps:
            return scores
        return scores.scatter(1, scores.argmax(-1, keepdim=True), float("-inf"))


@pytest.mark.parametrize("steps", [{4}, {4, 5}, set(range(NEW))], ids=["once", "twice", "always"])
def test_a_choice_that_was_not_foreseen_is_honoured(steps):
    options = {"logits_processor": LogitsProcessorList([Other(steps)])}
    model, replay = accelerated()
    got = generate(model, LEFT_PADDED, **options)
    assert 0 < replay.replays - replay.ahead
    assert_same(got, in_order(**options))
    if len(steps) == NEW:
        assert replay.ahead == 0  # and after two of them none is begun any more


def test_a_step_that_reads_the_caches_length_reads_its_own():
    """Llama 4's chunks: a mask of columns before the step, which is another number after one that was called back."""
    found = []
    for ahead in (True, False):
        model, replay = accelerated("bf16", "llama 4")
        with nullcontext() if ahead else one_by_one():
            options = {"logits_processor": LogitsProcessorList([Other({4})])}
            outputs = [generate(model, torch.ones_like(PROMPT), **options) for _ in range(2)]  # in the same memory
        assert bool(replay.ahead) == ahead and replay.replays > NEW
        found.append(outputs)
    for got, want in zip(*found, strict=True):
        assert torch.equal(got.sequences, want.sequences)
        for ours, theirs in zip(got.logits, want.logits, strict=True):
            assert torch.equal(ours, theirs)


def test_a_request_that_has_ended_costs_one_step():
    want = in_order()
    ends = int(want.sequences[0, PROMPT.shape[1] + 4])
    options = {"eos_token_id": ends, "max_new_tokens": NEW}
    want = in_order(**options)
    model, replay = accelerated()
    got = generate(model, LEFT_PADDED, **options)
    assert_same(got, want)
    misses = replay.replays - replay.ahead - 1
    assert misses <= 2 and got.sequences.shape == want.sequences.shape


@pytest.mark.parametrize("change", ["crop", "reorder", "another pass"])
def test_what_happens_to_the_cache_between_two_steps_is_honoured(change):
    """A step that was begun is called back before anything else reads or changes the cache."""
    found = []
    for ahead in (True, False):
        model, _ = accelerated(cuda_graphs=True)
        cache = ck.DecodeCache("int4_g4", capacity=256)

        def between(ids: torch.Tensor, scores: Any, cache: Any = cache, model: Any = model, **_: Any) -> torch.Tensor:
            if ids.shape[1] == PROMPT.shape[1] + 6:
                if change == "crop":
                    cache.crop(-1)
                    model.model(ids[:, -2:-1], past_key_values=cache)
                elif change == "reorder":
                    cache.reorder_cache(torch.tensor([1, 1]))
                else:
                    model.model(ids[:, -1:], past_key_values=cache)
                    cache.crop(-1)
            return torch.zeros(len(ids), dtype=torch.bool)

        criteria = StoppingCriteriaList([between])
        options = {"past_key_values": cache, "stopping_criteria": criteria}
        with nullcontext() if ahead else one_by_one():
            found.append(generate(model, torch.ones_like(PROMPT), **options))
    assert_same(*found)


def test_an_error_between_two_steps_leaves_the_cache_as_it_is():
    model, replay = accelerated()
    cache = ck.DecodeCache("int4_g4", capacity=256)

    def fails(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.shape[1] == PROMPT.shape[1] + 6:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        generate(model, LEFT_PADDED, past_key_values=cache, stopping_criteria=StoppingCriteriaList([fails]))
    columns = cache.columns
    assert columns is not None and columns.begun is None and replay.ahead
    padding = (LEFT_PADDED == 0).sum(1)
    assert torch.equal(columns.seq_lens, (columns.count - padding).int())


def test_outputs_are_the_callers_to_keep():
    model, replay = accelerated()
    kept = generate(model, LEFT_PADDED, output_scores=True, output_hidden_states=True)
    again = generate(model, LEFT_PADDED, output_scores=True, output_hidden_states=True)
    for one, other in zip(kept.logits, again.logits, strict=True):
        assert torch.equal(one, other)
    assert replay.ahead


def test_a_call_in_inference_mode_and_one_without_share_the_memory():
    model, replay = accelerated()
    with torch.inference_mode():
        first = generate(model, LEFT_PADDED).sequences.clone()
    second = generate(model, LEFT_PADDED).sequences
    with torch.inference_mode():
        third = generate(model, LEFT_PADDED).sequences
    assert torch.equal(first, second) and torch.equal(first, third)
    assert replay.reason is None


def test_two_threads_may_generate_with_one_model():
    """Neither call sees the other's state, and none is left behind."""
    model, replay = accelerated()
    entered, left = threading.Event(), threading.Event()
    mine, theirs = ck.DecodeCache("int4_g4", capacity=256), ck.DecodeCache("int4_g4", capacity=256)

    def other() -> None:
        with replay.within_generate(theirs, 99):
            entered.set()
            left.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    assert replay._call is None
    with replay.within_generate(mine, 99):
        left.set()
        thread.join()
        assert replay._call is not None
    assert replay._call is None
    assert_same(generate(model, LEFT_PADDED), in_order())


@pytest.mark.parametrize("options", [{"do_sample": True, "top_k": 5}, {"num_beams": 2}], ids=["sampled", "beams"])
def test_steps_of_other_calls_are_not_begun_ahead(options):
    model, replay = accelerated()
    generate(model, LEFT_PADDED, **options)
    assert replay.ahead == 0


def test_greedy_and_sampled_calls_take_turns_over_one_memory():
    """Their steps are recorded apart: only greedy ones make the next step's inputs."""
    model, replay = accelerated()
    want = in_order()
    for _ in range(2):
        assert_same(generate(model, LEFT_PADDED), want)
        before = replay.ahead
        sampled = generate(model, LEFT_PADDED, do_sample=True, top_k=1)
        assert replay.ahead == before and torch.equal(sampled.sequences, want.sequences)
    assert replay.ahead and replay.reason is None


def step_arguments(cache: Any, tokens: int) -> dict[str, Any]:
    """What `generate` calls a step with, after ``tokens`` columns."""
    positions = torch.full((2, 1), tokens)
    mask = torch.ones(2, tokens + 1, dtype=torch.int64)
    return {"input_ids": torch.full((2, 1), 5), "position_ids": positions, "attention_mask": mask, "use_cache": True,
            "past_key_values": cache}  # fmt: skip


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another batch": lambda given: given | {"input_ids": torch.full((3, 1), 5)},
    "two tokens": lambda given: given | {"input_ids": torch.full((2, 2), 5)},
    "positions of another dtype": lambda given: given | {"position_ids": given["position_ids"].int()},
    "no positions": lambda given: given | {"position_ids": None},
    "an older mask": lambda given: given | {"attention_mask": given["attention_mask"][:, 1:]},
    "no mask": lambda given: given | {"attention_mask": None},
    "another option": lambda given: given | {"use_cache": False},
    "an option more": lambda given: given | {"logits_to_keep": 1},
    "another cache": lambda given: given | {"past_key_values": ck.DecodeCache("int4_g4")},
}


@torch.no_grad()
def test_a_step_that_is_called_otherwise_is_looked_at_anew():
    """What was replayed last is replayed again only by a call that differs in its tensors' values alone."""
    model, replay = accelerated()
    cache = ck.DecodeCache("int4_g4", capacity=32)
    with replay.within_generate(cache):
        model(PROMPT[:2, :4], attention_mask=torch.ones(2, 4), past_key_values=cache, use_cache=True)
        for tokens in range(4, 7):
            model(**step_arguments(cache, tokens))
        assert replay.replays == 2 and replay._call is not None and replay._call.last is not None
        last, given, columns = replay._call.last, step_arguments(cache, 7), cache.columns
        assert last.is_called(given, replay._epoch) and columns is not None
        for what, change in CHANGES.items():
            assert not last.is_called(change(given), replay._epoch), what
        assert not last.is_called(given, object())  # another state of the model
        for name, value in (("capacity", 7), ("is_certain", False), ("static", True), ("graphs", {})):
            with mock.patch.object(columns, name, value):
                assert not last.is_called(given, replay._epoch), name
        before = replay.replays
        with torch.enable_grad():
            model(**given)
        assert replay.replays == before


def test_inputs_of_a_step_lie_side_by_side_and_are_compared_to_the_last_element():
    given = {
        "input_ids": torch.tensor([[5], [6], [7]]),
        "position_ids": torch.arange(9).view(3, 3, 1),
        "scale": torch.tensor(0.5),
        "types": torch.tensor([[1], [0], [1]], dtype=torch.int32),
    }
    inputs = StepInputs(given)
    other = {name: value + 1 for name, value in given.items()}
    for values in (given, other):
        inputs.place(values)
        assert not inputs.are(values)  # it is what was noted that is compared
        inputs.note()
        assert inputs.are(values)
        for name, tensor in inputs.tensors.items():
            assert torch.equal(tensor, values[name]) and tensor.shape == values[name].shape
            assert tensor.data_ptr() % 64 == inputs.tensors["input_ids"].data_ptr() % 64
    for name, value in other.items():
        changed = value.clone()
        changed.view(-1)[-1] += 1
        assert not inputs.are(other | {name: changed})


def test_a_replays_outputs_are_made_as_the_models_own_are():
    """The same class, fields, items and order, with another cache and copies of tensors, nested ones too."""
    hidden = (torch.randn(2, 3), torch.randn(2, 3))
    stand_in: Any = graphs._CACHE
    recorded = CausalLMOutputWithPast(logits=torch.randn(2, 5), past_key_values=stand_in, hidden_states=hidden)
    cache: Any = ck.DecodeCache("bf16")
    made = graphs._own(cache, recorded, torch.clone)
    want = CausalLMOutputWithPast(logits=recorded.logits, past_key_values=cache, hidden_states=hidden)
    assert type(made) is type(want) and list(made) == list(want) and vars(made).keys() == vars(want).keys()
    assert made.past_key_values is cache and made["past_key_values"] is cache and made.loss is None
    assert made.logits is not None and recorded.logits is not None and made.hidden_states is not None
    assert torch.equal(made.logits, recorded.logits) and made.logits is made["logits"] is made[0]
    assert made.logits.data_ptr() != recorded.logits.data_ptr()
    for ours, theirs in zip(made.hidden_states, hidden, strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    assert recorded.past_key_values is graphs._CACHE
