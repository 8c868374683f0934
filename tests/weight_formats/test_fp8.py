"""FP8 weights as consumer warps decode them, lane by lane: every code, every scale, the roundings of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import PackedWeight, quantize_weight, quantized_linear, stack_experts
from cute_kernels.formats.weights import FP8, FP8_BLOCK, MXFP8
from cute_kernels.gemm import slice_inputs, slice_outputs

pytest.importorskip("cutlass")

from cute_kernels.device.packed_math import HopperMath
from cute_kernels.formats.weights.decoder import CodeDecoder
from simulator import stand_in
from tests.attention.warp import LANES, Float32, Uint32, bf16_values, elements, halves
from tests.linear.warp import LinearWarp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
IN_REGISTERS = [[0, 2], [1, 3], [4, 6], [5, 7]]  # columns' codes, among the eight of two words


def decoded(decoder: CodeDecoder, dtype: str, codes: np.ndarray, rows: Any = None) -> np.ndarray:
    """[lane][register][column] of codes uint8 [32, 8]."""
    words = [Uint32(np.ascontiguousarray(codes[:, i : i + 4]).view(np.uint32)[:, 0]) for i in (0, 4)]
    found = stand_in(decoder.fragment)(words, 0, rows)
    return np.stack([elements(register, {"bf16": "bf16", "fp16": "f16"}[dtype]) for register in found], axis=1)


def numbers(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("form", [FP8, FP8_BLOCK], ids=str)
def test_weights_for_fp16_activations_are_cut_and_kept_as_others_are(form):
    w = torch.randn(128, 512, generator=torch.Generator().manual_seed(0)).half()
    weight = quantize_weight(w, format=form)
    whole = weight.dequantize(torch.float32)
    assert weight.dtype == torch.float16
    for part, wanted in (
        (weight.shard_n(1, 2), whole[64:]),
        (weight.shard_k(1, 2), whole[:, 256:]),
        (slice_outputs(weight, 3, 99), whole[3:99]),
        (slice_inputs(weight, 96, 400), whole[:, 96:400]),
        (PackedWeight.from_state_dict(weight.state_dict()), whole),
        (stack_experts([weight, weight])[1], whole),
    ):
        assert part.dtype == torch.float16 and torch.equal(part.dequantize(torch.float32), wanted)
    x = torch.eye(512)[:7].half()
    assert torch.equal(quantized_linear(x, weight), whole.half()[:, :7].T)


@pytest.fixture
def gpu(run_on):
    run_on(LinearWarp(np.zeros(16, np.uint8), np.zeros(0, np.uint8)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("gpu")
def test_every_code_is_exact(dtype):
    """Subnormal numbers and the sign of zero as well; what is NaN reads 480, and its scale says so."""
    codes = np.arange(256, dtype=np.uint8).reshape(32, 8)
    found = decoded(FP8.decoder(dtype, HopperMath(dtype)), dtype, codes)
    wanted = numbers(codes).nan_to_num(480.0).numpy()[:, IN_REGISTERS]
    wanted = np.where(codes[:, IN_REGISTERS] == 0xFF, -480.0, wanted)
    assert np.array_equal(found, wanted) and np.array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("gpu")
def test_weights_under_fp32_scales_are_rounded_as_torch_rounds_them(dtype):
    decoder = FP8_BLOCK.scaling_decoder(dtype, HopperMath(dtype))
    generator = np.random.default_rng(0)
    for exponent in range(-40, 27) if dtype == "bf16" else range(-20, 7):
        scales = ((generator.random((32, 2)) + 1) * 2.0**exponent).astype(np.float32)
        scales[0] = 0
        rows = stand_in(decoder.row_numbers)([Float32(row) for row in scales.T], None)
        codes = generator.integers(0, 256, (32, 8)).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 1
        found = decoded(decoder, dtype, codes, rows)
        of_rows = torch.from_numpy(scales)[:, [0, 1, 0, 1], None]
        wanted = (numbers(codes)[:, IN_REGISTERS] * of_rows).to(DTYPES[dtype]).double().numpy()
        assert np.array_equal(found * decoder.unit, wanted), exponent


@pytest.mark.usefixtures("gpu")
def test_a_scale_that_is_nan_makes_weights_nan():
    decoder = FP8_BLOCK.scaling_decoder("bf16", HopperMath("bf16"))
    rows = stand_in(decoder.row_numbers)([Float32(np.full(32, np.nan, np.float32))] * 2, None)
    assert np.isnan(decoded(decoder, "bf16", np.full((32, 8), 0x7F, np.uint8), rows)).all()


@pytest.mark.usefixtures("gpu")
def test_every_power_of_two_is_a_scale_and_255_is_nan():
    decoder = MXFP8.decoder("bf16", HopperMath("bf16"))
    for first in range(0, 256, 32):
        word: Any = decoder.scale_word(Uint32((first + LANES).astype(np.uint32)))
        wanted = MXFP8.numbers_of(torch.from_numpy(first + LANES).to(torch.uint8)).numpy()
        assert np.array_equal(bf16_values(halves(word))[:, 0].astype(np.float64), wanted, equal_nan=True), first
