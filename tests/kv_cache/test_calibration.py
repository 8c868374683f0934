"""Calibration of scales that lie beside the cache."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import blocks
from cute_kernels.formats.kv import FORMATS, format_of
from cute_kernels.kv_cache import Calibrator, compute_kv_scale

GIVEN = [name for name, form in FORMATS.items() if form.given_scale]
HEADS, DIM = 2, 64


def samples(seed=0, count=200):
    return torch.randn(count, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def by_scale(x, granularity):
    """Magnitudes [scales, elements that share one]."""
    columns = x.abs().reshape(-1, *x.shape[-2:]).flatten(1).T  # [heads * dim, samples]
    return columns.reshape({"tensor": 1, "head": x.shape[-2], "channel": x.shape[-2] * x.shape[-1]}[granularity], -1)


def code_max(name):
    return 127.0 if name.startswith("int8") else 448.0


@pytest.mark.parametrize("name", GIVEN)
def test_absmax_is_the_formats_own_scale_over_any_batching(name):
    x = samples()
    form = format_of(name)
    want = form.row(DIM).compute_scale(x)  # type: ignore[union-attr]
    whole = compute_kv_scale(x, kv_format=name)
    parts = compute_kv_scale(iter(x.reshape(4, 50, HEADS, DIM)), kv_format=name)
    assert torch.equal(whole, want) and torch.equal(parts, want) and whole.shape == want.shape
    assert form.dequantize(form.quantize(x, whole), DIM, torch.float32, whole).sub(x).abs().max() < 0.2


@pytest.mark.parametrize("name", GIVEN)
@settings(max_examples=25, deadline=None)
@given(
    percentile=st.sampled_from((0.5, 50.0, 90.0, 99.0, 99.9, 100.0)),
    seed=st.integers(0, 99),
    magnitude=st.sampled_from((2.0**-20, 1e-3, 1.0, 300.0, 2.0**18)),
)
def test_a_percentile_errs_upwards_by_less_than_a_bin(name, percentile, seed, magnitude):
    x = samples(seed).sign() * samples(seed + 1).abs().clamp(min=2**-3, max=2**4) * magnitude
    scale = compute_kv_scale(x.split(64), kv_format=name, method="percentile", percentile=percentile)
    groups = by_scale(x, format_of(name).given_scale)
    rank = math.ceil(groups.shape[1] * percentile / 100)
    exact = groups.kthvalue(rank, dim=1).values
    found = scale.flatten() * code_max(name)
    assert (found >= exact * (1 - 2e-7)).all()  # the division and multiplication by the code round
    assert (found < exact * (1 + 2**-6) * (1 + 2e-7)).all()
    assert (found <= groups.amax(1) * (1 + 2e-7)).all()


def test_a_percentile_lets_outliers_saturate():
    x = samples(count=2000)
    x[0, 0, 0] = 1000.0
    widest = compute_kv_scale(x, kv_format="int8_tensor")
    scale = compute_kv_scale(x, kv_format="int8_tensor", method="percentile", percentile=99.9)
    assert scale < widest / 200
    form = format_of("int8_tensor")
    coarse, fine = (form.dequantize(form.quantize(x, s), DIM, torch.float32, s)[1:] - x[1:] for s in (widest, scale))
    assert fine.norm() < coarse.norm() / 50


@pytest.mark.parametrize("magnitude", [0.0, 1e-30, 1e30])
def test_magnitudes_beyond_the_histogram_give_no_less_than_the_percentile(magnitude):
    x = torch.full((10, HEADS, DIM), magnitude)
    scale = compute_kv_scale(x, kv_format="e4m3_tensor", method="percentile", percentile=50)
    assert scale == (torch.tensor(magnitude) / 448 or 1)  # any is right for zeros, and none may be 0


def test_the_histogram_does_not_grow():
    calibrator = Calibrator("int8_head", "percentile")
    for seed in range(3):
        calibrator.update(samples(seed))
        assert calibrator._counts is not None and calibrator._counts.shape == (HEADS, 3074)
        assert int(calibrator._counts.sum()) == (seed + 1) * 200 * HEADS * DIM


def test_large_samples_are_taken_in_chunks():
    options = {"kv_format": "int8_channel", "method": "percentile", "percentile": 90}
    whole = compute_kv_scale(samples(), **options)
    with blocks.at_most(1000):
        assert torch.equal(compute_kv_scale(samples(), **options), whole)


def test_bf16_samples_and_other_leading_dimensions():
    x = samples().bfloat16()
    assert torch.equal(
        compute_kv_scale(x.reshape(2, 100, HEADS, DIM), kv_format="int8_head"),
        compute_kv_scale(x.float(), kv_format="int8_head"),
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Calibrator("int4_g4"), ValueError, "kv_format: got 'int4_g4', want a format whose scale lies beside"),
        (lambda: Calibrator("e5m2"), ValueError, "kv_format: got 'e5m2'"),
        (lambda: Calibrator("int7"), ValueError, "kv_format: got 'int7'"),
        (lambda: Calibrator("int8_head", "mean"), ValueError, "method: got 'mean'"),  # type: ignore[arg-type]
        (lambda: Calibrator("int8_head", "percentile", 0), ValueError, "percentile: got 0, want a positive"),
        (lambda: Calibrator("int8_head", "percentile", 101), ValueError, "percentile: got 101"),
        (lambda: Calibrator("int8_head").scale(), ValueError, "x: got no samples"),
        (lambda: Calibrator("int8_head").update(torch.ones(3)), ValueError, "x: got shape \\[3\\]"),
        (
            lambda: Calibrator("int8_head").update(torch.ones(3, 2, dtype=torch.int8)),
            TypeError,
            "x: got dtype torch.int8",
        ),
        (
            lambda: Calibrator("int8_head").update(torch.tensor([[1.0, torch.nan]])),
            ValueError,
            "x: got NaN or infinity",
        ),
        (
            lambda: Calibrator("int8_head").update(torch.tensor([[1.0, torch.inf]])),
            ValueError,
            "x: got NaN or infinity",
        ),
        (
            lambda: Calibrator("int8_head").update(samples()).update(samples()[:, :1]),
            ValueError,
            "x: got shape \\[200, 1, 64\\], want \\[..., 2, 64\\]",
        ),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_refused_samples_are_not_counted():
    calibrator = Calibrator("int8_tensor").update(samples())
    before = calibrator.scale()
    with pytest.raises(ValueError, match="NaN"):
        calibrator.update(samples() * torch.nan)
    assert torch.equal(calibrator.scale(), before)


@pytest.mark.parametrize("method", ["absmax", "percentile"])
def test_refused_and_empty_samples_leave_no_trace(method):
    calibrator = Calibrator("int8_head", method).update(samples()[:0])
    for bad in (samples()[..., :32] * torch.nan, torch.cat((samples() * 9, samples() * torch.nan))):
        with blocks.at_most(samples()[0].numel()), pytest.raises(ValueError, match="NaN"):
            calibrator.update(bad)
        with pytest.raises(ValueError, match="x: got no samples"):
            calibrator.scale()
    want = compute_kv_scale(samples(), kv_format="int8_head", method=method)
    assert torch.equal(calibrator.update(samples()).scale(), want)
