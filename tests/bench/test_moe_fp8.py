"""Layers of experts with products in FP8: what is measured is checked first, and its kernels are known."""

from __future__ import annotations

import pytest
import torch

from bench import moe_fp8
from bench.moe import Inputs, check
from bench.moe_fp8 import Fp8Layer
from bench.record import Recorder
from bench.suites import Bench, WrongOutput
from bench.timing import Protocol, ticking
from bench.workloads import MoeModel, MoeShape
from cute_kernels import fused_moe
from simulator import stand_in
from tests.bench.clocks import every_call_takes

SMALL = MoeModel("small", 5, 2, 192, 128)  # 192: half a k block at the end


@pytest.mark.parametrize("form", ["mxfp4", "fp8_block"])
def test_a_layer_is_held_to_its_rounded_operands(form: str):
    weights = moe_fp8.make_experts(Fp8Layer(SMALL, form, (3,)), "cpu")
    inputs, tokens = Inputs.of(MoeShape(SMALL, 3), "cpu"), torch.tensor([0, 2])
    want = moe_fp8.reference(*weights, inputs, tokens)
    y = fused_moe(inputs.x, *weights, inputs.weights, inputs.ids, activations="fp8")
    assert 0 < check(y, tokens, want, moe_fp8.TOLERANCE) < moe_fp8.TOLERANCE
    with pytest.raises(WrongOutput, match="relative error"):
        check(fused_moe(inputs.x, *weights, inputs.weights, inputs.ids), tokens, want, moe_fp8.TOLERANCE)


def test_kernels_of_both_kinds_of_products_are_made_ready():
    symbols = [spec.symbol for spec in moe_fp8.specs(moe_fp8.LAYERS[:1])]
    assert any("_e4m3tailr" in symbol for symbol in symbols) and "linear_fp8_rows_bf16_rows_half" in symbols
    assert {"linear_fp8_rows_bf16_rows_rounded", "linear_fp8_rows_bf16_groups_plain"} <= {*symbols}
    assert any(symbol.startswith("grouped_linear_e2m1") for symbol in symbols) and "moe_routing_i32_pdl" in symbols


def test_a_run_checks_times_and_tells_every_row():
    floors = stand_in(lambda flush, protocol, quick: None)
    bench = Bench(Recorder(None), Protocol(samples=1), device="cpu", flush=lambda: None, make_floor=floors)
    with ticking(every_call_takes(50.0)):
        moe_fp8.run(bench, [Fp8Layer(SMALL, "mxfp4", (1, 3))])
    assert not bench.recorder.data["failures"] and len(bench.recorder.data["moe_fp8"]) == 2
    failures = [{"what": "that", "error": "because"}]
    text = moe_fp8.text({**bench.recorder.data, "environment": {"gpu": "a GPU"}, "failures": failures})
    assert "small, 3 tokens" in text and "16-bit us" in text and "failed: that: because" in text
