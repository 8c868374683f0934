"""interleave_weights: gate and up of a checkpoint, row by row in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from cute_kernels import interleave_weights, quantized_linear
from tests.linear.cases import GROUPS, known


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("zero_points", [(False, False), (True, True), (True, False)])
def test_even_rows_are_gate_and_odd_rows_are_up(bits, group_size, zero_points):
    gate, up = (known(70, 300, bits, group_size, zero, seed=seed) for seed, zero in enumerate(zero_points))
    both = interleave_weights(gate.pack(), up.pack())
    dense = both.dequantize(torch.float64)
    assert both.shape == (140, 300) and (both.zeros is not None) == any(zero_points)
    assert torch.equal(dense[0::2], gate.dense) and torch.equal(dense[1::2], up.dense)


def test_swiglu_takes_it():
    gate, up = (known(64, 64, seed=seed).pack() for seed in range(2))
    x = torch.randn(3, 64).bfloat16()
    got = quantized_linear(x, interleave_weights(gate, up), activation="swiglu", out_dtype=torch.float32)
    parts = [quantized_linear(x, part, out_dtype=torch.float32) for part in (gate, up)]
    torch.testing.assert_close(got, functional.silu(parts[0]) * parts[1])


def test_a_shared_order_and_scale_of_inputs_stay():
    perm, scale = torch.randperm(96), torch.rand(96).bfloat16()
    gate, up = (known(64, 96, seed=seed).pack(perm=perm, input_scale=scale) for seed in range(2))
    both = interleave_weights(gate, up)
    assert both.perm is not None and torch.equal(both.perm, perm.int())
    assert both.input_scale is not None and torch.equal(both.input_scale, scale)
    assert torch.equal(both.dequantize()[1::2], up.dequantize())


@pytest.mark.parametrize(
    ("up", "message"),
    [
        (known(64, 128).pack(), r"up: got shape \(64, 128\), want \(64, 64\), that of gate"),
        (known(64, 64, 8).pack(), "up: got bits 8, want 4"),
        (known(64, 64, 4, 64).pack(), "up: got group_size 64, want 32"),
        (known(64, 64, dtype=torch.float16).pack(), "up: got dtype torch.float16, want torch.bfloat16"),
        (known(64, 64).pack(perm=torch.arange(63, -1, -1)), "up: got another perm than gate has"),
        (replace(known(64, 64).pack(), input_scale=torch.ones(64).bfloat16()), "up: got another input_scale"),
    ],
)
def test_weights_that_do_not_belong_together_are_refused(up, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        interleave_weights(known(64, 64).pack(), up)
