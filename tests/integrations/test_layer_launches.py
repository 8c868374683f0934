"""A layer's products from one attention to the next are one launch where a kernel serves them, and nobody can tell but
by the time.

Without a GPU no kernel does. A stand-in takes every layer here that `quantized_layer` takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_kernels.integrations.transformers as ck
from cute_kernels import NormedRows
from cute_kernels.gemm.layer import call as layer_call
from cute_kernels.gemm.normed import left_to_next
from cute_kernels.integrations.transformers import blocks, deferral
from cute_kernels.integrations.transformers.deferral import shaped, tensor_of
from cute_kernels.integrations.transformers.norms import Projected, deferred_norm_of, terms_of, with_product
from tests.integrations.test_deferred_norms import (
    CHANGES,
    CHANGES_IN_MODES,
    FUSED,
    Steps,
    assert_hidden_states,
    left,
)
from tests.integrations.test_fused_blocks import IDS, accelerated, ordered_llama, relative_error
from tests.observed import calls_of

# Layers of a step of two that are one launch. The last one has no product behind it.
WHOLE = {name: 2 for name, norms in FUSED.items() if norms != (0, 0)}
WHOLE |= {
    "llama, biases": 0,
    "qwen2": 1,  # q, k and v have biases
}


def in_one(call: layer_call.LayerCall) -> layer_call.LayerRows:
    """`quantized_layer` as its kernel has it, whatever the weights."""
    return layer_call.layer_apart(call)


def is_right(call: layer_call.LayerCall) -> bool:
    layer_call.check_layer(call)  # what no caller can answer for is asked in vain
    return all(weight.perm is weight.input_scale is None for weight in call.weights)


# What stands for the kernels that a machine without a GPU lacks.
STAND_INS: dict[str, Callable[..., Any]] = {
    "serves_rows": lambda rows: True,
    "is_one_launch": is_right,
    "layer": in_one,
    "leaves_norm": lambda *_: True,
    "quantized_linear_norm": left,
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer that may be is one launch, of any number of rows; what is not leaves norms to products."""
    for name, stand_in in STAND_INS.items():
        monkeypatch.setattr(deferral, name, stand_in)


def counted(model: Any) -> tuple[torch.Tensor, int]:
    """(logits of a step, layers that were one launch)."""
    with calls_of(in_one) as calls:
        logits = Steps(model)().logits.double()
    return logits, len(calls)


def apart(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """What something gives if every product is a launch, and every norm."""
    with monkeypatch.context() as patch:
        patch.setattr(deferral, "serves_rows", lambda rows: False)
        patch.setattr(deferral, "leaves_norm", lambda *_: False)
        return run()


@pytest.mark.parametrize("name", FUSED)
def test_a_layer_is_one_launch_and_computes_the_same(name, kernels, monkeypatch):
    model = accelerated(name)
    got, count = counted(model)
    assert count == WHOLE.get(name, 0)
    want, none = apart(monkeypatch, lambda: counted(model))
    assert none == 0 and relative_error(got, want) <= 1e-2


def test_the_next_attention_projects_nothing_again(kernels):
    model = accelerated()
    own = [layer.self_attn.forward._first for layer in model.model.layers]
    with calls_of(deferral.Product.__call__, blocks.AttentionBlock._projected) as calls:
        Steps(model)()
    last = [call for call in calls if call.function is blocks.AttentionBlock._projected][-1]
    assert isinstance(last.arguments["x"], Projected)
    assert not any(call.arguments["self"] is own[1] for call in calls)


WHOLE_CHANGED = dict.fromkeys(CHANGES, 1) | {
    "its norm is looked at": 1,  # of the second layer, behind which nothing comes
    "the MLP's norm is looked at": 1,
    "the layer is looked at": 1,
    "the next layer is looked at": 0,
    "q of the next layer is looked at": 0,
    "o is batch-invariant": 0,
    "parts of one layer in two": 2,
    "one norm in two places": 2,
    "another norm": 2,
    "another weight": 2,
}


@pytest.mark.parametrize(("change", "mode"), CHANGES_IN_MODES)
def test_what_somebody_sees_or_changes_is_as_without(change, mode, kernels, monkeypatch):
    model = accelerated()
    with mode():
        before, _ = counted(model)
        CHANGES[change][0](model)
        got, count = counted(model)
        assert count == WHOLE_CHANGED[change]
        want, _ = apart(monkeypatch, lambda: counted(model))
    assert relative_error(got, want) <= 1e-2
    harmless = ("o is batch-invariant", "an MLP in training")
    assert change in harmless or relative_error(got, before) > 0.05


def test_hidden_states_are_those_of_the_layers(kernels, monkeypatch):
    assert_hidden_states(accelerated("qwen3"), lambda run: apart(monkeypatch, run))


def test_prompts_and_gradients_go_their_own_way(kernels):
    model = accelerated()
    embeddings = model.model.embed_tokens(IDS[:, :4]).detach().requires_grad_()
    with calls_of(in_one) as calls:
        with torch.no_grad():
            model(IDS, past_key_values=ck.DecodeCache("bf16"))
        model(inputs_embeds=embeddings, past_key_values=ck.DecodeCache("bf16"))
    assert not calls


def test_a_product_is_of_the_weight_that_stands_there_when_it_is_asked_for():
    model = accelerated()
    norm, attention = model.model.layers[1].input_layernorm, model.model.layers[1].self_attn.forward
    rows = torch.randn(2, 1, 128).bfloat16()
    result = torch.randn(2, 1, attention.merged.weight.shape[0]).bfloat16()
    with torch.no_grad():
        noted = with_product(left_to_next(rows, *terms_of(norm), None), norm, attention._first.weight, result)
        found = deferred_norm_of(noted, norm)
        assert noted is rows and isinstance(found, Projected) and shaped(found) is rows
        assert torch.equal(torch.cat([one.flatten(2) for one in attention._projected(found)], 2), result)
        want = attention._projected(norm(rows))
        attention.merged.scales = -attention.merged.scales
        changed = attention._projected(norm(rows))
        assert not torch.equal(changed[0], want[0])
        assert all(torch.equal(one, other) for one, other in zip(attention._projected(found), changed, strict=True))
        assert torch.equal(tensor_of(found), norm(rows))
        assert deferred_norm_of(noted, model.model.norm) is None
        written = result.clone()
        result.mul_(-1)
        left_over = deferred_norm_of(noted, norm)
        assert isinstance(left_over, NormedRows) and torch.equal(left_over.normed(), norm(rows))
        with_product(left_to_next(rows, *terms_of(norm), None), norm, attention._first.weight, written)
        assert isinstance(deferred_norm_of(noted, norm), Projected)
        rows.mul_(-1)
        assert deferred_norm_of(noted, norm) is None


def test_a_layer_that_is_called_twice_with_the_same_rows_gives_the_same(kernels, monkeypatch):
    """Nobody writes to queries, keys and values that were made before."""
    own = blocks.LayerBlock.__call__

    def twice(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        cache = copy.deepcopy(options["past_key_values"])
        first = own(self, hidden_states, **{**options, "past_key_values": cache})
        second = own(self, hidden_states, **options)
        assert torch.equal(first, second)
        return second

    for name in ("llama", "qwen3"):
        model = accelerated(name)
        want, _ = counted(model)
        with monkeypatch.context() as patch:
            patch.setattr(blocks.LayerBlock, "__call__", twice)
            got, count = counted(model)
        assert torch.equal(got, want) and count == 4


def test_rows_that_one_launch_does_not_take_go_the_way_of_norms_in_products(kernels, monkeypatch):
    model = accelerated()
    with monkeypatch.context() as patch, calls_of(left, in_one) as calls:
        patch.setattr(deferral, "serves_rows", layer_call.serves_rows)  # a step here has two
        Steps(model)()
    assert [call.function for call in calls] == [left] * 3


def test_weights_in_act_order_go_the_way_of_norms_in_products(kernels, monkeypatch):
    model = ordered_llama()
    ck.accelerate(model, kv_format="bf16")
    got, count = counted(model)
    want, _ = apart(monkeypatch, lambda: counted(model))
    assert relative_error(got, want) <= 1e-2 and count == 0


def test_a_copy_of_a_model_and_one_that_was_moved_are_the_same(kernels):
    model = accelerated()
    want, count = counted(model)
    moved = copy.deepcopy(model)
    for layer in moved.model.layers:
        layer.mlp._apply(torch.clone)
        layer.self_attn.o_proj._apply(torch.clone)
    got, found = counted(moved)
    assert torch.equal(got, want) and found == count == 2
