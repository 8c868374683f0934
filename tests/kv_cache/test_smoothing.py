"""Smoothing of K: the same scores from keys that are easier to quantise."""

from dataclasses import dataclass

import pytest
import torch

from cute_kernels.formats.kv import format_of
from cute_kernels.kv_cache import check_pairs, compute_kv_scale, fold, smooth_keys

KV_HEADS, GROUP, DIM, HIDDEN = 2, 3, 64, 96


@dataclass(frozen=True)
class Rotation:
    rotary_dim: int
    interleaved: bool = False


ROTATIONS = [Rotation(64), Rotation(64, True), Rotation(32), Rotation(32, True)]


def rotate(x, rope, theta=10000.0):
    """RoPE of x [tokens, heads, DIM] at positions 0, 1, ..., in complex numbers."""
    half = rope.rotary_dim // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(()).double(), torch.arange(len(x))[:, None] * frequencies)[:, None]
    rotated, rest = x[..., : rope.rotary_dim].double(), x[..., rope.rotary_dim :].double()
    shape = (half, 2) if rope.interleaved else (2, half)
    pairs = rotated.unflatten(-1, shape).movedim(-1 if rope.interleaved else -2, 0)
    complex_pairs = torch.complex(pairs[0], pairs[1]) * turn
    parts = torch.stack((complex_pairs.real, complex_pairs.imag), -1 if rope.interleaved else -2)
    return torch.cat((parts.flatten(-2), rest), -1)


def scores(q, k):
    """[tokens, heads, DIM] each, to [q heads, tokens, tokens]."""
    return torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(GROUP, dim=1))


def outlier_samples(tokens=40):
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(tokens, KV_HEADS, DIM, generator=generator, dtype=torch.float64)
    k[:, 0, 5] *= 60
    k[:, 1, 40] *= 90
    q = torch.randn(tokens, KV_HEADS * GROUP, DIM, generator=generator, dtype=torch.float64)
    return q, k


def factors_per_query_head(factors):
    return factors.double().repeat_interleave(GROUP, dim=0)


def test_factors_after_rope_leave_scores_and_level_the_channels():
    q, k = outlier_samples()
    factors = smooth_keys(k, alpha=1.0)
    assert factors.shape == (KV_HEADS, DIM) and factors.dtype == torch.float32
    smooth_q, smooth_k = q * factors_per_query_head(factors), k / factors.double()
    torch.testing.assert_close(scores(smooth_q, smooth_k), scores(q, k), rtol=1e-12, atol=1e-10)
    tops = smooth_k.abs().amax(0)
    torch.testing.assert_close(tops, tops[:, :1].expand_as(tops), rtol=1e-5, atol=0)


def test_alpha_shares_the_burden_between_k_and_q():
    q, k = outlier_samples()
    factors = smooth_keys(k, q, alpha=0.5)
    k_tops = (k / factors.double()).abs().amax(0)
    q_tops = (q * factors_per_query_head(factors)).abs().amax(0).reshape(KV_HEADS, GROUP, DIM).amax(1)
    ratio = k_tops / q_tops  # SmoothQuant's point: equal ranges, here up to the head's mean
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-5, atol=0)
    torch.testing.assert_close(smooth_keys(k, q, alpha=0.0).log().mean(-1), torch.zeros(KV_HEADS), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g4", "int8_token_head", "int8_head"])
def test_scores_of_smoothed_keys_survive_quantisation_better(kv_format):
    q, k = outlier_samples()
    form = format_of(kv_format)

    q[:, :GROUP, 5] /= 60  # queries as trained models have them: small where keys are large
    q[:, GROUP:, 40] /= 90

    def error(q, k):
        scale = compute_kv_scale(k, kv_format=kv_format) if form.given_scale else None
        stored = form.dequantize(form.quantize(k.float(), scale), DIM, torch.float64, scale)
        return (scores(q, stored) - scores(q, k)).norm()

    factors = smooth_keys(k, q)
    smoothed = error(q * factors_per_query_head(factors), k / factors.double())
    assert smoothed < error(q, k) / 3


@pytest.mark.parametrize("rope", ROTATIONS, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_folded_into_projections_scores_are_unchanged(rope, biased):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(12, HIDDEN, generator=generator, dtype=torch.float64)
    q_weight, k_weight = (
        torch.randn(heads * DIM, HIDDEN, generator=generator, dtype=torch.float64)
        for heads in (KV_HEADS * GROUP, KV_HEADS)
    )
    biases = [
        torch.randn(len(w), generator=generator, dtype=torch.float64) if biased else None for w in (q_weight, k_weight)
    ]

    def project(q_weight, k_weight, q_bias, k_bias):
        q, k = (torch.nn.functional.linear(hidden, w, b) for w, b in ((q_weight, q_bias), (k_weight, k_bias)))
        q, k = q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM))
        return k, scores(rotate(q, rope), rotate(k, rope))

    k, want = project(q_weight, k_weight, *biases)
    factors = smooth_keys(rotate(k, rope), rope=rope)
    assert factors.max() / factors.min() > 1.1
    folded = fold(factors, q_weight, k_weight, *biases, rope=rope)
    assert (folded.q_bias is not None) == biased == (folded.k_bias is not None)
    smooth_k, found = project(*folded)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-9)
    assert not torch.allclose(smooth_k, k)


@pytest.mark.parametrize("rope", ROTATIONS, ids=str)
def test_factors_that_break_a_pair_are_refused(rope):
    _, k = outlier_samples()
    free = smooth_keys(k)
    weights = torch.ones(KV_HEADS * GROUP * DIM, 4), torch.ones(KV_HEADS * DIM, 4)
    with pytest.raises(ValueError, match=r"factors: got .* for columns .* of head 0, which RoPE rotates together"):
        fold(free, *weights, rope=rope)
    fold(free, *weights, rope=None)
    check_pairs(smooth_keys(k, rope=rope), rope)
    low, high = (0, 1) if rope.interleaved else (0, rope.rotary_dim // 2)
    factors = torch.ones(KV_HEADS, DIM)
    factors[1, high] = 2
    with pytest.raises(ValueError, match=f"got 1 and 2 for columns {low} and {high} of head 1"):
        check_pairs(factors, rope)
    if rope.rotary_dim < DIM:
        factors = torch.ones(KV_HEADS, DIM)
        factors[:, rope.rotary_dim :] = torch.rand(DIM - rope.rotary_dim) + 0.5
        check_pairs(factors, rope)


def test_dead_channels_and_heads_have_finite_factors():
    k = torch.randn(10, 2, 8)
    k[:, 0, 3] = 0
    k[:, 1] = 0
    factors = smooth_keys(k, torch.zeros(10, 2, 8))
    assert factors.isfinite().all() and (factors > 0).all()


def test_weights_keep_their_dtype():
    factors = smooth_keys(torch.randn(5, KV_HEADS, DIM))
    weights = torch.randn(KV_HEADS * DIM, 8).bfloat16(), torch.randn(KV_HEADS * DIM, 8).half()
    folded = fold(factors, *weights, rope=None)
    assert folded.q_weight.dtype == torch.bfloat16 and folded.k_weight.dtype == torch.float16


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda k, w: smooth_keys(k, alpha=1.5), ValueError, "alpha: got 1.5, want 0 to 1"),
        (lambda k, w: smooth_keys(k.long()), TypeError, "k_samples: got dtype torch.int64"),
        (lambda k, w: smooth_keys(k[:0]), ValueError, "k_samples: got shape \\[0, 2, 64\\]"),
        (lambda k, w: smooth_keys(k * torch.nan), ValueError, "k_samples: got NaN or infinity"),
        (lambda k, w: smooth_keys(k, k[:, :1]), ValueError, "q_samples: got shape \\[9, 1, 64\\]"),
        (lambda k, w: smooth_keys(k, rope=Rotation(66)), ValueError, "rope: got rotary_dim 66"),
        (lambda k, w: smooth_keys(k, rope=Rotation(31)), ValueError, "rope: got rotary_dim 31"),
        (lambda k, w: check_pairs(k, Rotation(64)), ValueError, "factors: got shape"),
        (lambda k, w: fold(0 * k[0], w, w, rope=None), ValueError, "factors: got 0.0, want positive finite numbers"),
        (lambda k, w: fold(k[0], w[1:], w, rope=None), ValueError, "q_weight: got shape \\[127, 4\\]"),
        (lambda k, w: fold(k[0], w, w[1:], rope=None), ValueError, "k_weight: got shape \\[127, 4\\]"),
        (lambda k, w: fold(k[0], w, w, w[0], rope=None), ValueError, "q_bias: got shape \\[4\\], want \\[128\\]"),
        (lambda k, w: fold(k[0], w, w, None, w[0], rope=None), ValueError, "k_bias: got shape \\[4\\], want \\[128\\]"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.rand(9, KV_HEADS, DIM) + 0.1, torch.ones(KV_HEADS * DIM, 4))
