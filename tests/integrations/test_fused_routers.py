"""`accelerate(fuse_routers=True)`: which routers run by `route`, what they give, and when a module's own code runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cute_kernels import quantize_model
from cute_kernels.integrations import transformers as ck
from cute_kernels.integrations.transformers.fuse import Fused, add_routers
from cute_kernels.integrations.transformers.patterns import recognise
from cute_kernels.integrations.transformers.routers import ROUTERS, RouterBlock, router_blocks
from tests.integrations.checkpoints.test_gpt_oss import model as gpt_oss_model
from tests.moe import blocks, routers

TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35]])


def accelerated(make: Any, **options: Any) -> Any:
    model = make()
    ck.accelerate(model, kv_format=None, weights="w8g32", **options)
    return model


def installed(model: Any) -> list[Any]:
    return [block for module in model.modules() if isinstance(block := vars(module).get("forward"), RouterBlock)]


@pytest.mark.parametrize("make", routers.ALL, ids=lambda make: make.__name__)
def test_the_table_says_what_a_router_computes(make):
    case = make()
    known = recognise(case.module, ROUTERS)
    assert known is not None and known.fits(case.module)
    assert known.routing(case.module) == case.routing
    assert set(dict(case.module.named_buffers())) == ({known.correction} - {None})


def test_a_router_with_another_scoring_than_its_codes_is_left():
    module = routers.deepseek_v4().module
    known = recognise(module, ROUTERS)
    module.score_fn = torch.nn.Sigmoid()
    assert known is not None and not known.fits(module)


@pytest.mark.parametrize("make", blocks.MODELS, ids=lambda make: make.__name__)
@torch.no_grad()
def test_a_model_computes_the_same_with_its_routers_fused(make):
    model = accelerated(make, fuse_routers=True)
    assert len(installed(model)) == 2
    got = model(TOKENS).logits.float()
    ck.restore(model)
    assert not installed(model)
    want = model(TOKENS).logits.float()
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize(
    ("make", "count"), [(gpt_oss_model, 2), (blocks.nemotron_model, 1)], ids=["gpt-oss", "Nemotron-H"]
)
@torch.no_grad()
def test_a_router_beside_experts_in_a_block_of_the_models_own_is_fused_too(make, count):
    model = quantize_model(make(), group_size=32)
    want, fused = model(TOKENS).logits.float(), Fused()
    add_routers(model, fused)
    assert fused.routers == len(installed(model)) == count
    got = model(TOKENS).logits.float()
    assert (got - want).norm() <= 0.02 * want.norm()


@torch.no_grad()
def test_one_compiled_program_serves_any_number_of_tokens():
    layer = accelerated(blocks.deepseek_model, fuse_routers=True).model.layers[0].mlp
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for tokens in (3, 5, 70):
        x = torch.randn(tokens, blocks.HIDDEN).bfloat16()
        assert torch.equal(compiled(x), layer(x))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


@torch.no_grad()
def test_it_is_told_and_off_unless_asked_for():
    assert not installed(accelerated(blocks.qwen3_model))
    model = blocks.qwen3_model()
    assert "2 router" in str(ck.accelerate(model, kv_format=None, weights="w8g32", fuse_routers=True))
    assert len(installed(model)) == 2
    ck.accelerate(model, kv_format=None)
    assert not installed(model)


@torch.no_grad()
def test_routers_of_experts_that_are_not_ours_stay():
    model = blocks.mixtral_model()
    ck.accelerate(model, kv_format=None, fuse_routers=True)
    assert not installed(model) and not list(router_blocks(model))
    assert not installed(accelerated(blocks.minimax_model, fuse_routers=True))


def test_the_modules_own_code_runs_where_somebody_looks_or_wants_a_gradient():
    gate = accelerated(blocks.mixtral_model, fuse_routers=True).model.layers[0].mlp.gate
    x = torch.randn(3, blocks.HIDDEN).bfloat16()
    assert gate(x)[0] is not None  # a gradient may be wanted
    with torch.no_grad():
        assert gate(x)[0] is None
        handle = gate.register_forward_hook(lambda *_: None)
        logits, weights, ids = gate(x)
        want = type(gate).forward(gate, x)
        assert all(torch.equal(one, other) for one, other in zip((logits, weights, ids), want, strict=True))
        handle.remove()
        assert gate(x)[0] is None
        gate.train()
        assert gate(x)[0] is not None
