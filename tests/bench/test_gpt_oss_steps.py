"""The bare decode loop of gpt-oss: that it computes the model's step, what it must read, which launches it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from bench import e2e_steps
from bench.gpt_oss_steps import CASES, MODELS, PACKED, GptOss, GptOssStep
from bench.steps import EPS, Shape
from cute_kernels import append_kv
from tests.launchers import recording

SMALL = GptOss("small", 3, 128, 96, 4, 2, experts=8, topk=2, vocabulary=40, window=16)


pytestmark = pytest.mark.usefixtures("small_steps")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_makes_logits_of_all_requests(case):
    step = SMALL.step(case, Shape(2, 40), "cpu")
    out = step()
    assert out.shape == (2, 40) and bool(out.isfinite().all())
    step.parts[1]["cache"]["v_cache"].view(torch.uint8).zero_()
    assert not torch.equal(step(), out)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


def plain_attention(step: GptOssStep, number: int, qkv: torch.Tensor) -> torch.Tensor:
    """A layer's attention in fp64, in the cache that the step has appended to."""
    model, cache = step.model, step.parts[number]["cache"]
    heads = qkv.bfloat16().view(len(qkv), -1, model.head_dim)
    q, k, v = heads.split((model.num_q_heads, model.num_kv_heads, model.num_kv_heads), dim=1)
    given = {name: value for name, value in cache.items() if name not in ("sinks", "window_size")}
    rotated = append_kv(k, v, q=q, **given)
    assert rotated is not None
    q = rotated.double()
    rows = []
    for request, table in enumerate(cache["block_table"]):
        keys, values = (
            cache[name][table.long()].transpose(1, 2).flatten(0, 1)[: step.shape.context].double()
            for name in ("k_cache", "v_cache")
        )
        seen = slice(-model.window, None) if number % 2 == 0 else slice(None)
        keys, values = (x[seen].repeat_interleave(model.num_q_heads // model.num_kv_heads, 1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", q[request], keys) * model.head_dim**-0.5
        shares = torch.cat((scores, cache["sinks"][:, None].double()), 1).softmax(-1)[:, :-1]
        rows.append(torch.einsum("ht,thd->hd", shares, values).flatten())
    return torch.stack(rows)


def plain_experts(step: GptOssStep, number: int, x: torch.Tensor) -> torch.Tensor:
    parts = step.parts[number]
    logits = x @ parts["router"].double().T + parts["router_bias"].double()
    best, ids = logits.topk(step.model.topk)
    # The closure of a layer's experts holds their weights and biases.
    names = parts["experts"].__code__.co_freevars
    held = dict(zip(names, (cell.cell_contents for cell in parts["experts"].__closure__), strict=True))
    rows = []
    for token, (shares, chosen) in enumerate(zip(best.softmax(-1), ids.tolist(), strict=True)):
        total = torch.zeros(step.model.hidden, dtype=torch.float64)
        for share, expert in zip(shares, chosen, strict=True):
            sums = held["gate_up"][expert].dequantize(torch.float32).double() @ x[token]
            sums = sums + held["given"]["gate_up_bias"][expert]
            gate, up = sums[::2].clamp(max=7.0), sums[1::2].clamp(-7.0, 7.0)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            down = held["down"][expert].dequantize(torch.float32).double()
            total += share * (down @ hidden + held["given"]["down_bias"][expert])
        rows.append(total)
    return torch.stack(rows)


def test_a_step_is_the_models_in_fp64():
    torch.manual_seed(1)
    step = SMALL.step(CASES[0], Shape(2, 40), "cpu", layers=2)
    assert isinstance(step, GptOssStep)
    found, x = step().double(), step.hidden.double()
    for number, parts in enumerate(step.parts):
        qkv, o = (parts[name].keywords for name in ("qkv", "o"))
        projected = functional.linear(normed(x), qkv["weight"].double(), qkv["bias"].double())
        attended = plain_attention(step, number, projected)
        x = x + functional.linear(attended, o["weight"].double(), o["bias"].double())
        x = x + plain_experts(step, number, normed(x))
    want = normed(x) @ step.head.double().T
    assert 0 < (found - want).norm() < 2e-2 * want.norm()


def test_projections_in_4_bits_take_fewer_bytes_and_every_second_layer_has_a_window():
    model, shape = MODELS["gpt-oss-20b"], Shape(1, 8192)
    step = object.__new__(GptOssStep)
    step.model, step.shape, step.layers = model, shape, model.layers
    sizes = []
    for case in (CASES[0], next(case for case in CASES if case.weights == PACKED)):
        step.case = case
        sizes.append(step.bytes)
    assert sizes[0] == pytest.approx(3.9e9, rel=0.01) and sizes[1] == pytest.approx(2.96e9, rel=0.01)
    whole = replace(model, window=8192)
    step.model = whole
    assert step.bytes - sizes[1] == 12 * model.cache_bytes("bf16", 8192 - 128)
    assert e2e_steps.largest_batch(model, CASES[0], 8192, 130e9) > 32


def test_of_one_token_a_layer_is_seven_launches_apart_from_its_projections():
    """A model of gpt-oss-20b's sizes, but for a few columns, experts and tokens."""
    model = replace(MODELS["gpt-oss-20b"], intermediate=192, experts=8, vocabulary=16)
    with recording() as cache:
        step = model.step(CASES[0], Shape(1, 192), "cpu", layers=2)
        cache.launches.clear()
        step()
    names = [launch.symbol for launch in cache.launches]
    kinds = ["norm_rms", "step_decode", "norm_rms", "moe_router", "grouped_linear", "grouped_linear", "moe_combine"]
    for name, kind in zip(names, [*kinds, *kinds, "norm_rms"], strict=True):
        assert name.startswith(kind)
    assert ["_window_" in name for name in names if name.startswith("step_decode")] == [True, False]
    assert all("sinks" in name for name in names if name.startswith("step_decode"))
