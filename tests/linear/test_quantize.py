"""quantize_weight: errors within half a step, and groups that trip naive quantisers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import blocks
from cute_kernels.formats.weights.integers import SCALE_LIMIT
from cute_kernels.gemm import PackedWeight, quantize_weight
from cute_kernels.gemm.quantize import pack_codes
from cute_kernels.gemm.weight import rows_of
from tests.linear.cases import GROUPS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def random_weight(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return 0.02 * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.sampled_from(GROUPS),
    st.booleans(),
    st.sampled_from([BF16, FP16]),
    st.integers(1, 140),
    st.integers(1, 300),
    st.integers(0, 2**31),
)
def test_each_weight_is_within_half_a_step_of_its_group(bits, group_size, zero_point, dtype, n, k, seed):
    w = random_weight(n, k, seed)
    packed = quantize_weight(w, bits, group_size, zero_point, dtype)
    error = (packed.dequantize(FP32) - w).abs()
    length, top = group_size or k, (1 << bits) - 1
    for group, start in enumerate(range(0, k, length)):
        part = w[:, start : start + length]
        low, high = part.amin(dim=1).clamp(max=0), part.amax(dim=1).clamp(min=0)
        exact = (high - low) / top if zero_point else torch.maximum(high * 2 / (top - 1), low * 2 / -(top + 1))
        scale = rows_of(packed.scales)[:n, group].float()
        rounding = torch.finfo(dtype).eps * exact + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert ((exact <= scale * (1 + 1e-6)) & (scale <= exact * (1 + 1e-6) + rounding)).all()
        assert (error[:, start : start + length].amax(dim=1) <= scale * (0.5 + 1e-4)).all()


def test_the_whole_range_is_used():
    w = torch.tensor([[7.0, -1.0], [-8.0, 1.0], [0.0, 15.0], [-15.0, 0.0]])
    assert torch.equal(quantize_weight(w[:2], 4, None).dequantize(FP32), w[:2])
    assert torch.equal(quantize_weight(w[2:], 4, None, zero_point=True).dequantize(FP32), w[2:])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("constant", [0.5, -0.5, 0.0, 1e8, -1e8])
def test_constant_groups_come_back(bits, zero_point, constant):
    w = torch.full((3, 64), constant)
    back = quantize_weight(w, bits, 32, zero_point, BF16).dequantize(FP32)
    assert torch.allclose(back, w, rtol=2**-7)


@pytest.mark.parametrize("zero_point", [False, True])
def test_the_widest_range_is_kept_and_what_is_beyond_refused(zero_point):
    """Kernels have room for scales below 2**27."""
    largest = 6 * 2.0**27
    w = torch.tensor([[largest, -largest] * 16])
    back = quantize_weight(w, 4, 32, zero_point, BF16).dequantize(FP32)
    assert back.isfinite().all() and ((back - w).abs() <= largest / 7).all()
    steps = 7.5 if zero_point else 7  # a scale is of this and that half of the range
    wanted = f"w: got a group that wants scale {2.0**27:g}, want one below 2..27 in bf16".replace("+", r"\+")
    with pytest.raises(ValueError, match=f"^{wanted}"):
        quantize_weight(torch.tensor([[steps * 2.0**27, -steps * 2.0**27] * 16]), 4, 32, zero_point, BF16)
    immense = torch.finfo(FP32).max * 0.7  # immense - -immense is beyond fp32
    with pytest.raises(ValueError, match=r"^w: got a group that wants scale \d[\d.]*e\+37, want one below"):
        quantize_weight(torch.tensor([[immense, -immense] * 16]), 4, 32, zero_point, BF16)


@pytest.mark.parametrize(("scale", "refused"), [(2.0**26.9, False), (-(2.0**27), True), (float("inf"), True)])
def test_scales_that_kernels_have_no_room_for_are_refused(scale, refused):
    """By all that packs codes, importers included, and by what loads packed weights."""
    codes = torch.randint(0, 16, (64, 64), dtype=torch.uint8)
    scales = torch.ones(64, 2)
    scales[3, 1] = scale
    for dtype, fits in ((BF16, not refused), (FP16, True)):
        arguments = {"bits": 4, "group_size": 32, "shape": (64, 64)}
        call = partial(pack_codes, lambda start, stop: codes[start:stop], scales.to(dtype), None, **arguments)
        if fits:
            packed = call()
            assert torch.equal(packed.scales, PackedWeight.from_state_dict(packed.state_dict()).scales)
        else:
            with pytest.raises(ValueError, match=r"^scales: got a scale of .*, want bf16 scales below 2\*\*27"):
                call()


def test_the_limit_is_what_the_decoder_has_room_for():
    decode = pytest.importorskip("cute_kernels.formats.weights.integer_decode")
    factor = 2.0 ** (decode.UNIT_EXPONENT - decode.SUBNORMAL_EXPONENT)
    below = torch.tensor(SCALE_LIMIT, dtype=BF16).view(torch.int16) - 1
    assert (below.view(BF16).double() * factor).to(BF16).isfinite()
    assert (torch.tensor(SCALE_LIMIT, dtype=torch.float64) * factor).to(BF16).isinf()


@pytest.mark.parametrize("magnitude", [1e-9, 1e-6, 1e-4])
def test_groups_near_the_end_of_fp16_are_kept_to_its_smallest_step(magnitude):
    w = magnitude * torch.linspace(-1, 1, 64).view(2, 32)
    back = quantize_weight(w, 8, 32, dtype=FP16).dequantize(FP32)
    assert ((back - w).abs() <= max(2**-25, magnitude / 200)).all()


def test_the_result_does_not_depend_on_the_blocks():
    w = random_weight(200, 130)
    whole = quantize_weight(w, 4, 64, zero_point=True).state_dict()
    with blocks.at_most(1):
        parts = quantize_weight(w, 4, 64, zero_point=True).state_dict()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_scales_take_the_weights_dtype_or_bf16():
    w = random_weight(2, 32)
    assert quantize_weight(w).dtype == BF16
    assert quantize_weight(w.half()).dtype == FP16
    assert quantize_weight(w, dtype=FP16).dtype == FP16


def test_parameters_views_and_other_places_are_taken():
    w = torch.nn.Parameter(random_weight(64, 256))
    assert not quantize_weight(w).scales.requires_grad
    assert torch.equal(quantize_weight(w[:, ::2]).codes, quantize_weight(w[:, ::2].contiguous()).codes)
    assert torch.equal(quantize_weight(w, device="cpu").codes, quantize_weight(w).codes)


BAD = {
    "a list": ({"w": [1.0]}, "w: got list, want a torch.Tensor"),
    "integers": ({"w": torch.zeros(4, 4).int()}, "w: got dtype torch.int32, want a floating one"),
    "three dimensions": ({"w": torch.zeros(2, 4, 4)}, r"w: got shape \[2, 4, 4\], want \[N, K\]"),
    "no rows": ({"w": torch.zeros(0, 4)}, r"w: got shape \[0, 4\], want"),
    "bits": ({"bits": 2}, "bits: got 2, want 4 or 8"),
    "group_size": ({"group_size": 0}, "group_size: got 0, want one of 16, 32, 64, 128, 256, or None"),
    "zero_point": ({"zero_point": 8}, "zero_point: got 8, want True or False"),
    "dtype": ({"dtype": FP32}, "dtype: got torch.float32, want None, torch.bfloat16 or torch.float16"),
    "NaN": ({"w": torch.tensor([[1.0, float("nan")]])}, "w: got NaN or infinite values"),
    "infinite": ({"w": torch.tensor([[1.0, float("-inf")]])}, "w: got NaN or infinite values"),
    "beyond fp16": ({"w": torch.full((1, 32), 1e6), "dtype": FP16}, "w: got a group that wants scale 142857, beyond"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=list(BAD))
def test_what_does_not_quantise_is_refused_by_name(changes, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        quantize_weight(**({"w": random_weight(4, 32)} | changes))
