"""The benchmark of layers of experts: its bytes, the kernels it needs, its references, its bars and table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from bench import moe
from bench.__main__ import main
from bench.bars import judge
from bench.moe import Inputs, Layer, MoeModel, MoeShape
from bench.moe_peers import PEERS, MoePeer, Routed
from bench.suites import WrongOutput
from cute_kernels.moe import fused_moe

SMALL = MoeModel("small", 4, 2, 128, 256)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_timing_without_a_gpu_is_refused_in_words(capsys):
    assert main(["moe"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_bytes_are_those_of_the_packed_experts():
    layer, shape = Layer.of(SMALL, "cpu"), MoeShape(SMALL, 3)
    for product, weight in enumerate((layer.gate_up, layer.down)):
        assert shape.weight_bytes(product, len(weight)) == weight.nbytes
        assert weight.shape == SMALL.products[product]


def test_the_layer_agrees_with_the_reference_and_the_check_notices_what_does_not():
    layer, inputs = Layer.of(SMALL, "cpu"), Inputs.of(MoeShape(SMALL, 5), "cpu")
    chosen = torch.tensor([0, 2, 4])
    want = moe.reference(layer, inputs, chosen)
    out = fused_moe(inputs.x, layer.gate_up, layer.down, inputs.ids, inputs.weights)
    assert moe.check(out, chosen, want) < moe.TOLERANCE
    with pytest.raises(WrongOutput):
        moe.check(out * 1.02, chosen, want)
    out[1, 3] = torch.nan  # of no chosen token
    with pytest.raises(WrongOutput):
        moe.check(out, chosen, want)


def test_dense_experts_are_views_of_one_tensor():
    dense = Layer.of(SMALL, "cpu").dense
    assert torch.equal(dense.gate_up[:, ::2], dense.gate) and torch.equal(dense.gate_up[:, 1::2], dense.up)
    assert dense.gate_up.is_contiguous()


@pytest.mark.skipif(PEERS[0].missing() is not None, reason="torch has no grouped products")
def test_the_peers_layer_agrees():
    layer, inputs = Layer.of(SMALL, "cpu"), Inputs.of(MoeShape(SMALL, 5), "cpu")
    routed = Routed.of(inputs.x, inputs.ids, inputs.weights, SMALL.experts)
    try:
        out = PEERS[0].layer(layer.dense, routed)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no grouped products on a CPU: {error}")
    assert moe.relative_error(out, moe.reference(layer, inputs, torch.arange(5))) < moe.TOLERANCE


def test_a_peer_that_disagrees_is_not_timed():
    layer, inputs = Layer.of(SMALL, "cpu"), Inputs.of(MoeShape(SMALL, 2), "cpu")
    routed, chosen = Routed.of(inputs.x, inputs.ids, inputs.weights, SMALL.experts), torch.arange(2)
    want = moe.reference(layer, inputs, chosen)
    wrong = MoePeer("wrong", lambda: None, lambda *_: want, lambda *_: want, lambda *_: want + 1)
    assert "disagrees" in str(moe._disagreement(wrong, layer.dense, routed, chosen, want))
    right = MoePeer("right", lambda: None, *(3 * [lambda *_: want]))
    assert moe._disagreement(right, layer.dense, routed, chosen, want) is None


def test_every_kernel_can_be_compiled():
    found = moe.specs()
    assert len(found) == len(set(found)) and len(found) > 10
    for spec in found:
        spec.check()
        assert spec.config.can_implement() is None  # type: ignore[attr-defined]


def row(model: str, tokens: int, us: float, rival: float) -> dict[str, Any]:
    product = {"us": us, "floor_us": 100.0, "floor_ratio": us / 100, "tflops": 600.0}
    return {
        "name": f"{model}, {tokens} tokens",
        "shape": {"model": {**asdict(SMALL), "name": model}, "tokens": tokens},
        "active": 8,
        "most_rows": 9,
        "first": product,
        "in_order": {**product, "us": us - 15},
        "second": product,
        "layer": product,
        "eager_us": us,
        "peers": {"torch grouped bf16": {"first_us": rival, "in_order_us": rival, "layer_us": rival}},
    }


def test_bars_and_table():
    rows = [row("Mixtral-8x7B", 1, 115.0, 50.0), row("Mixtral-8x7B", 8192, 120.0, 110.0)]
    record: dict[str, Any] = {"moe": rows, "moe_host_us": {"Mixtral-8x7B": 30.0}, "failures": []}
    verdicts = judge(record)
    assert [(verdict.limit, verdict.met) for verdict in verdicts] == [
        (1.2, True),
        (1.0, False),
        (1.0, True),
        (620, False),
        (25.0, False),
    ]
    record |= {"bars": [verdict.as_dict() for verdict in verdicts], "environment": {"gpu": "H200"}}
    text = moe.text(record)
    assert "2 of 5 bars met" in text and "NOT MET moe: Mixtral-8x7B, 8192 tokens, first product: rate" in text
