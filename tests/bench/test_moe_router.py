"""The benchmark of routers: both ways choose alike, and what is measured is told once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import moe_router
from bench.moe import MODELS
from bench.workloads import MoeShape
from cute_kernels.gemm.experts.router.reference import select_reference


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_torchs_router_and_ours_agree(model):
    router = moe_router.Router.of(MoeShape(model, 40), "cpu")
    (ids, weights), (torch_ids, torch_weights) = router.ours(), router.by_torch()
    same = (ids.long().sort(-1).values == torch_ids.sort(-1).values).all(-1)
    assert float(same.float().mean()) > 0.8  # others have logits that round to one number in bf16
    got, want = (each.float().sort(-1).values for each in (weights, torch_weights))
    assert float((got - want).norm() / want.norm()) <= moe_router.TOLERANCE
    logits = router.x.double() @ router.weight.double().T
    assert torch.equal(ids, select_reference(logits, router.routing, router.correction)[0])


def test_a_router_is_measured_once_and_told():
    shape = MoeShape(MODELS[1], 8)
    times = {f"{way}_us": 1.5 for way in ("route", "torch", "route_layer", "torch_layer")}
    rows: list[dict[str, Any]] = [{"name": shape.name, **times}]
    assert moe_router.is_wanted(shape, []) and not moe_router.is_wanted(shape, rows)
    assert moe_router.lines(rows) == [
        "router of Qwen3-30B-A3B, 8 tokens: 1.5 us, torch 1.5; with the layer 1.5, torch 1.5"
    ]


def test_every_kernel_of_a_models_router_can_be_compiled():
    for model in MODELS:
        for spec in moe_router.specs(model):
            spec.check()
