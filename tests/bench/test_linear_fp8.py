"""Products in FP8: what is measured is checked first, beside the peers that are here."""

from __future__ import annotations

import pytest
import torch

from bench import linear_fp8
from bench.suites import WrongOutput
from cute_kernels import quantize_weight, quantized_linear


@pytest.mark.parametrize("form", linear_fp8.FORMATS)
def test_a_product_is_held_to_its_rounded_operands(form: str):
    x, weight = torch.randn(3, 256).bfloat16(), quantize_weight(torch.randn(96, 256), format=form, dtype=torch.bfloat16)
    y = quantized_linear(x, weight, activations="fp8")
    assert 0 < linear_fp8.check(y, x, weight) < linear_fp8.TOLERANCE
    with pytest.raises(WrongOutput, match="relative error"):
        linear_fp8.check(quantized_linear(x, weight), x, weight)


def test_peers_compute_the_same_product():
    x, weight = (
        torch.randn(3, 256).bfloat16(),
        quantize_weight(torch.randn(96, 256), format="fp8", dtype=torch.bfloat16),
    )
    calls, why_not = linear_fp8.peers_of(x, weight)
    assert not why_not and {"torch._scaled_mm", "rounding of x alone"} <= calls.keys()
    assert linear_fp8.check(calls["torch._scaled_mm"](), x, weight) < linear_fp8.TOLERANCE
    blocks = quantize_weight(torch.randn(96, 256), format="fp8_block", dtype=torch.bfloat16)
    calls, why_not = linear_fp8.peers_of(x, blocks)
    assert "DeepGEMM" in calls or "DeepGEMM" in why_not


def test_kernels_of_both_kinds_of_products_are_made_ready():
    symbols = [spec.symbol for spec in linear_fp8.specs([(96, 320)], (1, 100), ["mxfp4", "fp8"])]
    assert sum("_e4m3tailr" in symbol for symbol in symbols) >= 2 and "linear_fp8_rows_bf16_rows_half" in symbols
    assert any(symbol.startswith("linear_e2m1") for symbol in symbols)


def test_a_run_is_a_table():
    peers = {"16-bit products": {"us": 3.0}, "DeepGEMM": {"us": None, "why_not": "not here"}}
    row = {
        "name": "8 x 8, M = 1",
        "format": "fp8",
        "error": 1e-3,
        "us": {"median_us": 2.0},
        "tflops": 1.0,
        "peers": peers,
    }
    failures = [{"what": "that", "error": "because"}]
    text = linear_fp8.text({"linear_fp8": [row], "environment": {"gpu": "a GPU"}, "failures": failures})
    assert "16-bit products" in text and "8 x 8, M = 1" in text and "failed: that: because" in text
