"""Transforms from samples: the center is the mean, the factors are the best diagonal, rotations suit the format."""

import pytest
import torch

from cute_kernels.kv_cache.moments import Moments, rotation_of
from cute_kernels.kv_formats import format_of

HEADS, GROUP, DIM = 2, 3, 64


def arrays_of(moments, **options):
    """The arrays of the transform that samples ask for."""
    return moments.transform(**options).arrays


def make_samples(tokens=600):
    size = torch.exp(torch.randn(HEADS, DIM, dtype=torch.float64))
    mean = 5 * torch.randn(HEADS, DIM, dtype=torch.float64)
    k = torch.randn(tokens, HEADS, DIM, dtype=torch.float64) * size + mean
    q = torch.randn(tokens, HEADS * GROUP, DIM, dtype=torch.float64) * torch.exp(torch.randn(DIM, dtype=torch.float64))
    return q, k, torch.randn(tokens, HEADS, DIM, dtype=torch.float64)


def test_samples_in_parts_are_those_at_once():
    q, k, v = make_samples()
    parts = Moments()
    for rows in (slice(0, 1), slice(1, 77), slice(77, None)):
        parts.update(q[rows], k[rows], v[rows])
    at_once = Moments().update(q, k, v)
    assert parts.tokens == at_once.tokens == 600
    for name, array in at_once.transform(k_rotation=32, v_rotation=64).arrays.items():
        torch.testing.assert_close(parts.transform(k_rotation=32, v_rotation=64).arrays[name], array)


def test_the_center_is_the_mean_and_factors_are_the_best_diagonal():
    q, k, v = make_samples()
    arrays = arrays_of(Moments().update(q, k, v))
    assert set(arrays) == {"k_center", "k_factor"}
    torch.testing.assert_close(arrays["k_center"], k.mean(0).float())
    noise = k.var(0, unbiased=False)
    weight = q.reshape(-1, HEADS, GROUP, DIM).square().mean((0, 2))

    def loss(factor):
        return (factor.square() * noise).sum(-1) * (weight / factor.square()).sum(-1)

    best = loss(arrays["k_factor"].double())
    torch.testing.assert_close(best, (noise * weight).sqrt().sum(-1).square(), rtol=1e-5, atol=0)
    for _ in range(20):
        other = arrays["k_factor"].double() * torch.exp(0.1 * torch.randn(HEADS, DIM, dtype=torch.float64))
        assert (loss(other) > best).all()


def test_without_a_center_factors_go_by_mean_squares():
    q, k, v = make_samples()
    transform = Moments().update(q, k, v).transform(center=False)
    assert transform.k_center is None
    weight = q.reshape(-1, HEADS, GROUP, DIM).square().mean((0, 2))
    logs = 0.25 * (weight / k.square().mean(0)).log()
    torch.testing.assert_close(transform.k_factor, torch.exp(logs - logs.mean(-1, keepdim=True)).float())


def test_rotations_come_with_random_signs_of_their_seed():
    q, k, v = make_samples()
    moments = Moments().update(q, k, v)
    plain, one = arrays_of(moments), arrays_of(moments, k_rotation=16, v_rotation=64)
    made = moments.transform(k_rotation=16, v_rotation=64)
    assert (made.k_rotation, made.v_rotation) == (16, 64)
    assert made.key == moments.transform(k_rotation=16, v_rotation=64).key
    assert made.key != moments.transform(k_rotation=16, v_rotation=64, seed=1).key
    torch.testing.assert_close(one["k_factor"].abs(), plain["k_factor"])
    assert set(one["v_factor"].flatten().tolist()) == {1.0, -1.0}
    signs_only = arrays_of(moments, k_rotation=16, center=False, factors=False)
    assert set(signs_only) == {"k_factor"} and set(signs_only["k_factor"].flatten().tolist()) == {1.0, -1.0}


def test_channels_that_are_always_zero_get_finite_factors():
    q, k, v = make_samples()
    k[..., 5], q[..., 9] = 0.0, 0.0
    k[:, 1], q[..., 17] = 0.0, 0.0
    transform = Moments().update(q, k, v).transform(k_rotation=64)
    torch.testing.assert_close(transform.original_keys(transform.keys(k)), k, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "head_dim", "width"),
    [
        ("int4_g1", 128, 128),
        ("int4_g4", 128, 32),
        ("int4_g4", 64, 16),
        ("int4_g4", 96, 1),
        ("int8_token_head", 128, 128),
        ("int8_head", 128, 128),
        ("int8_g4", 256, 64),
        ("int8_channel", 128, 1),
        ("e4m3_head", 128, 1),
        ("e5m2", 64, 1),
        ("bf16", 64, 1),
    ],
)
def test_a_rotation_is_as_wide_as_what_shares_a_scale(name, head_dim, width):
    assert rotation_of(format_of(name), head_dim) == width


def test_samples_that_do_not_fit_are_named():
    q, k, v = make_samples(4)
    with pytest.raises(ValueError, match="q, k, v: got no samples"):
        Moments().transform()
    with pytest.raises(ValueError, match=r"q: got shape \[4, 5, 64\], want \[tokens, a multiple of 2, 64\]"):
        Moments().update(q[:, :5], k, v)
    with pytest.raises(ValueError, match=r"k: got shape \[4, 128\], want \[tokens, heads, head_dim\]"):
        Moments().update(q, k.flatten(1), v)
    with pytest.raises(ValueError, match="k, v: got shapes"):
        Moments().update(q, k, v[:, :1])
    with pytest.raises(ValueError, match="k, v: got shapes"):
        Moments().update(q, k, v).update(q[..., :32], k[..., :32], v)
    with pytest.raises(ValueError, match="v: got NaN or infinity among the samples"):
        Moments().update(q, k, v / 0)
    with pytest.raises(TypeError, match="k: got dtype torch.int64"):
        Moments().update(q, k.long(), v)
