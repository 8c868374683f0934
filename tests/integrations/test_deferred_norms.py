"""Norms between a model's products take no launch where kernels have the means, and nobody can tell but by the time.

Without a GPU no product leaves a norm to the next one. A stand-in does here, which leaves what kernels leave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cute_kernels.integrations.transformers as ck
from cute_kernels import NormedRows, quantized_linear, rms_norm
from cute_kernels.gemm import deferred
from cute_kernels.integrations.transformers import blocks, deferral
from cute_kernels.integrations.transformers.deferral import Product, Sum
from cute_kernels.integrations.transformers.norms import deferred_norm_of, with_deferred_norm
from tests.integrations.test_fused_blocks import (
    IDS,
    LEFT_PADDED,
    accelerated,
    built,
    in_act_order,
    logits_of,
    ordered_llama,
    relative_error,
)
from tests.observed import calls_of

# A step of two layers: (products that leave a norm, products that take one). The last norm takes a launch.
FUSED = {
    "llama": (3, 3),
    "llama, biases": (3, 3),
    "qwen2": (3, 3),
    "qwen3": (3, 3),
    "mistral, window": (3, 3),
    "phi-3": (3, 3),
    "gemma": (0, 0),  # its MLP has another activation than the kernels' gate
    "gemma 2": (0, 0),  # results are normed before they are added
    "gemma 3": (0, 0),
    "mixtral": (0, 0),  # experts and their router read rows
    "qwen3-moe": (0, 0),
    "granite": (0, 0),  # it scales what it adds
    "smollm 3": (0, 0),  # its attention is the model's own
    "olmo 2": (0, 0),
}


def left(x: torch.Tensor, weight: Any, bias: Any = None, *, residual: Any, norm: Any, **options: Any) -> NormedRows:
    """`quantized_linear_norm` as kernels have it."""
    rows = quantized_linear(x, weight, bias, residual=residual)
    flat = rows.flatten(0, -2)
    scaled = (flat.float() * (norm.float() + options["norm_offset"])).to(rows.dtype)
    parts = deferred.DeferredParts(scaled, flat.float().view(len(flat), -1, 64).square().sum(-1))
    return deferred.left_to_next(rows, norm, options["norm_eps"], options["norm_offset"], parts)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products leave norms and take them."""
    for name, stand_in in {"leaves_norm": lambda *_: True, "quantized_linear_norm": left}.items():
        monkeypatch.setattr(deferral, name, stand_in)


class Steps:
    """A step of a model, behind a first turn."""

    def __init__(self, model: Any, mask: torch.Tensor = LEFT_PADDED) -> None:
        self.model, self.mask = model, mask

    @torch.no_grad()
    def __call__(self, **options: Any) -> Any:
        """Its outputs."""
        cache = ck.DecodeCache("bf16")
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        for start, end in ((0, 20), (20, 21)):
            given = {"attention_mask": self.mask[:, :end], "position_ids": positions[:, start:end]}
            outputs = self.model(IDS[:, start:end], past_key_values=cache, **given, **(options if start else {}))
        return outputs

    def counted(self) -> tuple[torch.Tensor, tuple[int, int]]:
        """(its logits; how many products leave a norm, how many take one)."""
        with calls_of(left, deferred.take) as calls:
            logits = self().logits.double()
        gives = sum(call.function is left for call in calls)
        return logits, (gives, len(calls) - gives)


def launched(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """What something gives if norms are launches."""
    with monkeypatch.context() as patch:
        patch.setattr(deferral, "leaves_norm", lambda *_: False)
        return run()


@pytest.mark.parametrize("name", FUSED)
def test_a_step_leaves_norms_to_products_and_computes_the_same(name, kernels, monkeypatch):
    model = accelerated(name)
    got, counts = Steps(model).counted()
    assert counts == FUSED[name]
    want, none = launched(monkeypatch, Steps(model).counted)
    assert none == (0, 0) and relative_error(got, want) <= 1e-2
    deferred = logits_of(model, LEFT_PADDED)
    assert relative_error(deferred, launched(monkeypatch, lambda: logits_of(model, LEFT_PADDED))) <= 1e-2


def test_prompts_are_served_as_before(kernels):
    """By attention's own code, of more tokens than a step has."""
    model = accelerated()
    with calls_of(left) as calls, torch.no_grad():
        model(IDS, past_key_values=ck.DecodeCache("bf16"))
    assert not calls


def test_a_down_projection_in_act_order_leaves_a_norm(kernels, monkeypatch):
    model = ordered_llama()
    ck.accelerate(model, kv_format="bf16")
    got, counts = Steps(model).counted()
    want, _ = launched(monkeypatch, Steps(model).counted)
    assert counts == (3, 3) and relative_error(got, want) <= 1e-2


def test_layers_in_act_order_are_given_rows_and_order_their_norm(monkeypatch):
    """On any device: one launch norms rows and puts them in order."""
    model = ordered_llama()
    ck.accelerate(model, kv_format="bf16")
    with calls_of(deferral.Product.__call__) as calls:
        got = Steps(model)().logits.double()
    assert [isinstance(call.arguments["x"], NormedRows) for call in calls].count(True) == 3
    monkeypatch.setattr(Sum, "takes", lambda *_: False)
    with calls_of(deferral.Product.__call__) as calls:
        want = Steps(model)().logits.double()
    assert not any(isinstance(call.arguments["x"], NormedRows) for call in calls)
    assert relative_error(got, want) <= 1e-2


def _look(names: str, number: int = 0) -> Callable[[Any], None]:
    """Somebody looks at what comes out of a module, and changes it."""

    def hook(model: Any) -> None:
        module = model.model.layers[number].get_submodule(names)
        module.register_forward_hook(lambda module, given, out: _scaled(out))

    return hook


def _scaled(out: Any) -> Any:
    return (_scaled(out[0]), *out[1:]) if isinstance(out, tuple) else -2 * out


def _adapted(names: str) -> Callable[[Any], None]:
    """Another module in a layer's place, as adapters (LoRA) are put in."""

    class Adapted(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -2 * self.layer(x)

    def change(model: Any) -> None:
        parent, _, name = names.rpartition(".")
        owner = model.model.layers[0].get_submodule(parent)
        setattr(owner, name, Adapted(getattr(owner, name)))

    return change


def _own_forward(model: Any) -> None:
    """A forward of its own, as accelerate's hooks put it in."""
    layer = model.model.layers[0].self_attn.o_proj
    own = layer.forward
    layer.forward = lambda x: -2 * own(x)


def _invariant(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.batch_invariant = True


def _in_training(model: Any) -> None:
    model.model.layers[0].mlp.train()


class Between(nn.Module):
    """A user's module before a layer, which changes its input in place."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.layer(hidden_states.mul_(-2), **kwargs)


def _between(model: Any) -> None:
    model.model.layers[1] = Between(model.model.layers[1])


def _shared(model: Any) -> None:
    """Parts of one layer in two."""
    first, second = model.model.layers
    second.mlp, second.post_attention_layernorm = first.mlp, first.post_attention_layernorm


def _shared_norm(model: Any) -> None:
    """The next layer's norm is the last one, too."""
    model.model.norm = model.model.layers[1].input_layernorm


def _other_norm(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(norm.weight.detach().roll(3))


def _other_weight(model: Any) -> None:
    layer = model.model.layers[0].self_attn.o_proj
    layer.codes = layer.codes.flip(0)


CHANGES: dict[str, tuple[Callable[[Any], None], tuple[int, int]]] = {
    "o is looked at": (_look("self_attn.o_proj"), (2, 2)),
    "attention is looked at": (_look("self_attn"), (2, 2)),
    "its norm is looked at": (_look("input_layernorm", 1), (2, 2)),
    "the MLP's norm is looked at": (_look("post_attention_layernorm"), (1, 1)),
    "the MLP is looked at": (_look("mlp"), (1, 1)),
    "down is looked at": (_look("mlp.down_proj"), (2, 2)),
    "q of the next layer is looked at": (_look("self_attn.q_proj", 1), (1, 1)),
    "the layer is looked at": (_look(""), (2, 2)),
    "the next layer is looked at": (_look("", 1), (2, 2)),
    "an adapter of o": (_adapted("self_attn.o_proj"), (2, 2)),
    "an adapter of down": (_adapted("mlp.down_proj"), (2, 2)),
    "an adapter of q": (_adapted("self_attn.q_proj"), (2, 2)),
    "an adapter of gate": (_adapted("mlp.gate_proj"), (1, 1)),
    "o has a forward of its own": (_own_forward, (2, 2)),
    "o is batch-invariant": (_invariant, (1, 1)),
    "an MLP in training": (_in_training, (1, 1)),
    "a module between": (_between, (2, 2)),
    "parts of one layer in two": (_shared, (3, 3)),
    "one norm in two places": (_shared_norm, (3, 3)),
    "another norm": (_other_norm, (3, 3)),
    "another weight": (_other_weight, (3, 3)),
}
# Tensors of inference mode have no version, by which a change in place is noticed; hooks and modules are seen as ever.
WITHOUT_VERSIONS = (
    "o is looked at",
    "a module between",
    "parts of one layer in two",
    "one norm in two places",
    "another norm",
    "another weight",
)
CHANGES_IN_MODES = [
    *((change, torch.no_grad) for change in CHANGES),
    *((change, torch.inference_mode) for change in WITHOUT_VERSIONS),
]


@pytest.mark.parametrize(("change", "mode"), CHANGES_IN_MODES)
def test_what_somebody_sees_or_changes_is_as_without(change, mode, kernels, monkeypatch):
    model = accelerated()
    with mode():
        before, _ = Steps(model).counted()
        make, counts = CHANGES[change]
        make(model)
        got, found = Steps(model).counted()
        assert found == counts
        want, _ = launched(monkeypatch, Steps(model).counted)
    assert relative_error(got, want) <= 1e-2
    harmless = ("o is batch-invariant", "an MLP in training")
    assert change in harmless or relative_error(got, before) > 0.05


def assert_hidden_states(model: Any, reference: Callable[[Callable[[], Any]], Any]) -> None:
    """Those of a step are those that the step gives within ``reference``, which runs it."""

    def run() -> Any:
        return Steps(model)(output_hidden_states=True).hidden_states

    want, got = reference(run), run()
    assert len(got) == len(want) == 3
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(ours.double(), theirs.double()) <= 1e-2


def test_hidden_states_are_those_of_the_layers(kernels, monkeypatch):
    model = accelerated("qwen3")
    assert_hidden_states(model, lambda run: launched(monkeypatch, run))


def test_gradients_go_the_models_own_way(kernels):
    model = accelerated()
    embeddings = model.model.embed_tokens(IDS[:, :4]).detach().requires_grad_()
    with calls_of(left, deferred.take) as calls:
        logits = model(inputs_embeds=embeddings, past_key_values=ck.DecodeCache("bf16")).logits
    assert not calls and logits.shape[:2] == (2, 4)


def test_a_copy_of_a_model_and_one_that_was_moved_leave_norms_too(kernels):
    model = accelerated()
    want, counts = Steps(model).counted()
    moved = copy.deepcopy(model)
    for layer in moved.model.layers:
        layer.mlp._apply(torch.clone)
        layer.self_attn.o_proj._apply(torch.clone)
    got, found = Steps(moved).counted()
    assert torch.equal(got, want) and found == counts == (3, 3)


def test_a_note_is_of_a_sum_as_it_was_left_and_of_one_norm(kernels):
    model = accelerated()
    layer: Any = model.model.layers[1]
    norm, x = layer.input_layernorm, torch.randn(2, 1, 96).bfloat16()
    into = Sum(torch.randn(2, 1, 128).bfloat16(), norm, Product(layer.self_attn.forward.merged))
    down = Product(model.model.layers[0].mlp.down_proj)
    with torch.no_grad():
        given = into.given(x, down)
        assert given is not None
        total = with_deferred_norm(given, norm)
        rows = deferred_norm_of(total, norm)
        assert rows is not None and rows.rows is total
        assert torch.equal(norm(total), rms_norm(total, norm.weight, eps=norm.variance_epsilon))
        assert deferred_norm_of(total, model.model.norm) is None and deferred_norm_of(total.clone(), norm) is None
        total.mul_(-1)
        assert deferred_norm_of(total, norm) is None


def test_sums_of_other_dtypes_and_shapes_are_launches(kernels):
    model = built("llama", weights=True)
    layer, x = model.model.layers[0], torch.randn(2, 1, 96).bfloat16()
    down, taker = Product(layer.mlp.down_proj), Product(layer.self_attn.q_proj)
    residual, norm = torch.randn(2, 1, 128).bfloat16(), layer.input_layernorm
    assert Sum(residual, norm, taker).takes(x, down)
    assert not Sum(residual.float(), norm, taker).takes(x, down)
    assert not Sum(residual[:1], norm, taker).takes(x, down)
    assert not Sum(residual, norm, taker).takes(x[:, :0], down)
    assert not Sum(residual, norm, Product(model.lm_head)).takes(x, down)
    in_act_order(layer.self_attn.k_proj)
    ordered = Sum(residual, norm, Product(layer.self_attn.k_proj))
    assert ordered.takes(x, down) and not ordered._replace(residual=residual.float()).takes(x, down)
    layer.self_attn.k_proj.scales = layer.self_attn.k_proj.scales.half()
    assert not ordered.takes(x, down)
    wide = copy.deepcopy(norm)
    wide.weight = nn.Parameter(wide.weight.detach().half())
    assert not Sum(residual, wide, taker).takes(x, down)
    assert blocks.direct(layer.mlp, blocks.MlpBlock) is None  # not accelerated
