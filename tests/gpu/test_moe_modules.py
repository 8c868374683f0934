"""`QuantizedMoE` on a GPU: moved, loaded, compiled, captured in CUDA graphs, made of a model's blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from cute_kernels import QuantizedLinear, QuantizedMoE, quantize_model
from cute_kernels.gemm.experts import fused_moe
from cute_kernels.gemm.experts.module import QuantizedInputScaledMoE
from cute_kernels.gemm.packed_experts import quantize_experts
from cute_kernels.runtime import KernelSpec, arch_of, load_many
from tests.gpu.compiled import assert_one_graph_serves, assert_replays, captured, compiled
from tests.gpu.moe_forms import (
    BF16,
    EVERY_TOKENS,
    EXPERTS,
    FORMS,
    HIDDEN,
    INNER,
    LAYER_TOLERANCE,
    MORE_TOKENS,
    TOKENS,
    TOPK,
    Form,
    call,
    every_form,
    exact_layer,
    layer,
    numbers,
)
from tests.gpu.specs import products_needed_by
from tests.gpu.test_moe import CUDA, assert_near
from tests.linear.cases import known

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("product_kernels")]

LOADED = Form(8, BF16, None, zero=True)  # whose layer takes on another format
LOADED_TOKENS = 33
BLOCK_HIDDEN, BLOCK_INNER, MMA_N = 128, 64, 8


def specs() -> list[KernelSpec]:
    """The kernels of this module."""

    def work() -> None:
        for tokens in EVERY_TOKENS:
            for made in (module(device="cpu"), module_with_shared_expert("cpu"), module_of_scaled_inputs("cpu")):
                made(call(FORMS["w4"], tokens, device="cpu")[0])
        module(LOADED, device="cpu")(call(LOADED, LOADED_TOKENS, device="cpu")[0])
        model_of_blocks()(numbers(1, MMA_N, BLOCK_HIDDEN, device="cpu"))

    return products_needed_by(work)


@pytest.fixture(scope="module")
def product_kernels() -> None:
    """Every kernel of these tests, in memory: from a bundle or the cache, or compiled in parallel now."""
    load_many(specs(), arch_of())


class Router(nn.Module):
    """Mixtral's: (logits, shares of the experts of each token, their ids)."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(count, hidden, dtype=torch.float32, device="cpu"), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = functional.linear(x.float(), self.weight)
        shares, ids = logits.softmax(-1).topk(TOPK, dim=-1)
        return logits, shares / shares.sum(-1, keepdim=True), ids


def module(form: Form = FORMS["w4"], seed: int = 0, device: str = CUDA) -> QuantizedMoE:
    """Made on the CPU and moved."""
    return QuantizedMoE(Router(HIDDEN, EXPERTS), *layer(form, seed, "cpu")).to(device)


def module_with_shared_expert(device: str = CUDA) -> QuantizedMoE:
    weight = known(HIDDEN, HIDDEN, group_size=128).pack()
    shared = {"shared_expert": QuantizedLinear(weight), "shared_expert_gate": nn.Linear(HIDDEN, 1, dtype=BF16)}
    made = QuantizedMoE(Router(HIDDEN, EXPERTS), *layer(FORMS["w4"], device="cpu"), shared).to(device)
    return made.requires_grad_(False)


class ScoringRouter(Router):
    """Llama 4's: (sigmoid of the chosen logits [tokens, experts], all logits)."""

    top_k = TOPK

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = functional.linear(x.float(), self.weight)
        values, ids = logits.topk(TOPK, dim=-1)
        return torch.zeros_like(logits).scatter(1, ids, values.sigmoid()).to(x.dtype), logits


def module_of_scaled_inputs(device: str = CUDA) -> QuantizedInputScaledMoE:
    return QuantizedInputScaledMoE(ScoringRouter(HIDDEN, EXPERTS), *layer(FORMS["w4"], device="cpu")).to(device)


@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_take_what_their_router_has_scaled(tokens):
    made: Any = module_of_scaled_inputs()
    x = call(FORMS["w4"], tokens)[0]
    found, logits = made(x)
    shares, ids = made.router(x)[0].topk(TOPK, dim=-1)
    rows, ones = (x[:, None] * shares[..., None]).flatten(0, 1), torch.ones(tokens * TOPK, 1, device=CUDA)
    want = exact_layer(FORMS["w4"], rows, ids.view(-1, 1), ones).view(tokens, TOPK, HIDDEN).sum(1)
    assert torch.equal(logits, made.router(x)[1])
    assert_near(found, want, LAYER_TOLERANCE)
    inputs = [call(FORMS["w4"], tokens, seed)[:1] for seed in range(3)]
    assert_replays(lambda x: made(x)[0], inputs[0], inputs[1:])


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_module_moved_to_the_gpu_is_its_experts_as_its_router_says(tokens):
    made, x = module(), call(FORMS["w4"], tokens)[0]
    _, shares, ids = made.gate(x)
    found = made(x)
    assert torch.equal(found, fused_moe(x, *layer(FORMS["w4"]), shares, ids))
    assert_near(found, exact_layer(FORMS["w4"], x, ids, shares), LAYER_TOLERANCE)


def test_a_module_takes_inputs_of_any_dimensions():
    made, x = module(), call(FORMS["w4"], 8)[0]
    assert torch.equal(made(x.view(2, 4, HIDDEN)).view(8, HIDDEN), made(x))
    assert torch.equal(made(x[:1].view(HIDDEN)), made(x[:1])[0])


def test_a_shared_expert_is_added():
    made, x = module_with_shared_expert(), call(FORMS["w4"], 33)[0]
    shared = torch.sigmoid(made.shared_expert_gate(x)) * made.shared_expert(x)  # type: ignore[operator]
    assert torch.equal(made(x), module()(x) + shared)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("place", [CUDA, "meta"])
def test_state_comes_back_through_a_safetensors_file(tmp_path, place, assign):
    files = pytest.importorskip("safetensors.torch")
    made, x = module(seed=1), call(FORMS["w4"], LOADED_TOKENS)[0]
    files.save_file(made.state_dict(), tmp_path / "layer.safetensors")
    state = files.load_file(tmp_path / "layer.safetensors", device=CUDA)
    for form in (FORMS["w4"], LOADED):
        other = module(form, seed=2)
        assert not torch.equal(other(x), made(x))
        other = other.to(place)
        if place == "meta":
            other.gate.to_empty(device=CUDA)
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(x), made(x))
        assert (other.down.codes.data_ptr() == state["down.codes"].data_ptr()) == assign


@pytest.mark.parametrize("make", [module, module_with_shared_expert])
def test_a_compiled_module_is_the_eager_one(make):
    made = make()
    step = compiled(made)
    for tokens in TOKENS:
        x = call(FORMS["w4"], tokens, tokens)[0]
        assert torch.equal(step(x), made(x))
    assert_one_graph_serves(made, [call(FORMS["w4"], tokens, tokens)[:1] for tokens in MORE_TOKENS], marks=False)


@pytest.mark.parametrize("make", [module, module_with_shared_expert])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_captured_module_takes_new_inputs(make, tokens):
    made = make()
    for function in (made, compiled(made)):
        inputs = [call(FORMS["w4"], tokens, seed)[:1] for seed in range(3)]
        assert_replays(function, inputs[0], inputs[1:])


def test_a_captured_module_takes_weights_that_are_loaded_later():
    made, other, x = module(), module(seed=1), call(FORMS["w4"], 33)[0]
    graph, out = captured(made, [x])
    made.load_state_dict(other.state_dict())
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, other(x))


# -- blocks of transformers --------------------------------------------------------------------------------------------


def block() -> nn.Module:
    """A block of transformers, on the CPU."""
    sizes: dict[str, Any] = {"hidden_size": BLOCK_HIDDEN, "intermediate_size": BLOCK_INNER}
    made = MixtralSparseMoeBlock(MixtralConfig(**sizes, num_local_experts=EXPERTS, num_experts_per_tok=TOPK))
    for seed, weight in enumerate(made.parameters()):
        weight.data = numbers(*weight.shape, device="cpu", seed=seed) / weight.shape[-1] ** 0.5
    return made.requires_grad_(False).eval()


def model_of_blocks() -> nn.Module:
    """Quantised on the CPU."""
    return quantize_model(nn.Sequential(block(), block()))


def test_blocks_quantised_on_the_gpu_are_those_quantised_on_the_cpu():
    told: list[tuple[str, int, int]] = []
    moved = model_of_blocks().to(CUDA)
    made = quantize_model(nn.Sequential(block(), block()).to(CUDA), progress=lambda *step: told.append(step))
    assert told == [("0", 1, 2), ("1", 2, 2)]
    ours, theirs = made.state_dict(), moved.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    x = numbers(1, MMA_N, BLOCK_HIDDEN)
    assert torch.equal(made(x), moved(x)) and torch.equal(compiled(made)(x), made(x))
    dense = block().to(CUDA)
    error = (QuantizedMoE.from_block(dense)(x) - dense(x)).float().norm()
    assert error <= 0.25 * dense(x).float().norm()


@every_form
def test_experts_quantised_on_the_gpu_are_those_quantised_on_the_cpu(form):
    dense = numbers(EXPERTS, 2 * INNER, HIDDEN, device="cpu")
    for halves in (False, True):
        options: dict[str, Any] = {"dtype": form.dtype, "halves_in_turn": halves}
        on_cpu = quantize_experts(dense, form.bits, form.group, form.zero, **options).state_dict()
        on_gpu = quantize_experts(dense.to(CUDA), form.bits, form.group, form.zero, **options).state_dict()
        assert all(torch.equal(on_gpu[name].cpu(), on_cpu[name]) for name in on_cpu)
