"""What a router means: transformers' own routers say the same, and what cannot be routed is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.gemm.experts import Routing, route
from cute_kernels.gemm.experts.router.reference import select_reference
from tests.moe import routers


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.zeros(len(ids), experts).scatter_(1, ids.long(), weights.float())


@pytest.mark.parametrize("make", routers.ALL, ids=lambda make: make.__name__)
def test_it_chooses_and_weighs_as_transformers_does_in_fp32(make):
    case = make()
    hidden = noise(500, routers.HIDDEN)
    with torch.no_grad():
        _, weights, ids = case.module(hidden)
    got_ids, got = route(hidden, case.module.weight, case.routing, **case.options)
    assert got_ids.dtype == torch.int32 and got.dtype == torch.float32 and not got.requires_grad
    assert torch.equal(got_ids.long().sort(dim=1).values, ids.sort(dim=1).values)
    experts = len(case.module.weight)
    torch.testing.assert_close(dense(got_ids, got, experts), dense(ids, weights, experts), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_and_scores_are_in_fp32_whatever_comes(dtype):
    hidden, weight = noise(20, 64).to(dtype), noise(33, 64, seed=1).to(dtype)
    bias, correction = noise(33, seed=2).to(dtype), noise(33, seed=3).to(dtype)
    routing = Routing(5, "sigmoid", True, 2.0)
    ids, weights = route(hidden, weight, routing, bias=bias, correction=correction)
    logits = hidden.double() @ weight.double().T + bias.double()
    wanted_ids, wanted = select_reference(logits, routing, correction)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=0)


def test_equal_experts_rank_by_their_index():
    logits = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0, 2.0], [-torch.inf, 0, -torch.inf, 0, 0, -torch.inf]])
    assert select_reference(logits, Routing(5))[0].tolist() == [[1, 2, 5, 0, 3], [1, 3, 4, 0, 2]]


def test_nan_ranks_first_and_infinity_next():
    logits = torch.tensor([[0.0, torch.nan, torch.inf, 1.0, torch.nan]])
    assert select_reference(logits, Routing(4, "sigmoid"))[0].tolist() == [[1, 4, 2, 3]]


def test_scores_that_are_all_0_get_weights_of_0():
    weights = select_reference(torch.full((1, 8), -1e4), Routing(2, "sigmoid", renormalize=True))[1]
    assert weights.tolist() == [[0.0, 0.0]]


def test_tokens_choose_within_the_groups_whose_two_best_are_greatest():
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.5, 0.5, 0.4, 0.3, 0.3, 0.2]])
    logits = torch.logit(scores.clamp(1e-3, 1 - 1e-3))
    ids, _ = select_reference(logits, Routing(3, "sigmoid", groups=3, kept_groups=1))
    assert ids.tolist() == [[3, 4, 5]]
    ids, _ = select_reference(logits, Routing(3, "sigmoid", groups=3, kept_groups=2))
    assert ids.tolist() == [[0, 3, 4]]


def test_padding_has_no_experts():
    given, padding = (noise(5, 8), noise(4, 8), Routing(2)), torch.tensor([False, True, False, True, True])
    (ids, weights), whole = route(*given, padding=padding), route(*given)
    assert torch.equal(ids, whole[0].masked_fill(padding[:, None], -1)) and torch.equal(weights, whole[1])


def test_no_tokens():
    ids, weights = route(noise(0, 8), noise(4, 8), Routing(2))
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize(
    "argument, change",
    [
        ("hidden", {"hidden": noise(3, 7)}),
        ("hidden", {"hidden": noise(8)}),
        ("hidden", {"hidden": noise(3, 8).int()}),
        ("weight", {"weight": noise(4, 2, 4)}),
        ("weight", {"weight": noise(8, 4).T}),
        ("weight", {"weight": None}),
        ("bias", {"bias": noise(5)}),
        ("correction", {"correction": noise(4).double()}),
        ("padding", {"padding": noise(3)}),
        ("padding", {"padding": torch.zeros(2, dtype=torch.bool)}),
        ("padding", {"padding": torch.zeros(6, dtype=torch.bool)[::2]}),
        ("routing", {"routing": 2}),
        ("routing", {"routing": Routing(5)}),
        ("routing", {"routing": Routing(1, groups=3)}),
        ("routing", {"routing": Routing(1, groups=4)}),
        ("routing", {"routing": Routing(3, groups=2)}),
    ],
)
def test_what_cannot_be_routed_is_refused_by_name(argument, change):
    call: dict[str, Any] = {"hidden": noise(3, 8), "weight": noise(4, 8), "routing": Routing(2)} | change
    with pytest.raises((TypeError, ValueError), match=f"^{argument}: got"):
        route(**call)


@pytest.mark.parametrize(
    "name, value",
    [
        ("top_k", 0),
        ("top_k", 2.0),
        ("scoring", "softmin"),
        ("renormalize", 1),
        ("scale", float("nan")),
        ("groups", 0),
        ("kept_groups", 2),
    ],
)
def test_a_routing_that_means_nothing_is_refused_by_name(name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: got"):
        replace(Routing(2), **{name: value})


def test_compiled_calls_are_one_operator():
    weight, correction = noise(16, 8), noise(16, seed=2)
    routing = Routing(4, "sigmoid", True, 2.5, 4, 2)

    def call(hidden: torch.Tensor) -> Any:
        return route(hidden, weight, routing, correction=correction, padding=padding)

    hidden, padding = noise(6, 8, seed=3), torch.arange(6) > 3
    got = torch.compile(call, backend="eager", fullgraph=True)(hidden)
    assert all(torch.equal(one, other) for one, other in zip(got, call(hidden), strict=True))
    arguments = hidden, weight, None, correction, *routing.fields, padding
    torch.library.opcheck(torch.ops.cute_kernels.route.default, arguments)
