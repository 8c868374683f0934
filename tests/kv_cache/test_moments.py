"""Transforms from samples: the center is the mean, factors do attention's output the least harm."""

import pytest
import torch

from cute_kernels import blocks
from cute_kernels.formats.kv import format_of
from cute_kernels.kv_cache.moments import Moments, group_of

HEADS, GROUP, DIM = 2, 3, 64


def arrays_of(moments, **options):
    """The arrays of the transform that samples ask for."""
    return moments.transform(**options).arrays


def make_samples(tokens=120):
    size = torch.exp(torch.randn(HEADS, DIM, dtype=torch.float64))
    mean = 5 * torch.randn(HEADS, DIM, dtype=torch.float64)
    k = torch.randn(tokens, HEADS, DIM, dtype=torch.float64) * size + mean
    loud = 0.3 * torch.exp(torch.randn(DIM, dtype=torch.float64))
    q = torch.randn(tokens, HEADS * GROUP, DIM, dtype=torch.float64) * loud
    return q, k, torch.randn(tokens, HEADS, DIM, dtype=torch.float64)


def importance_by_definition(q, k, v, center, scale):
    """M_de = sum over queries i of a head's group and keys t <= i of p_it^2 |v_t - o_i|^2 (k_t - c)_d^2 q_ie^2."""
    found = torch.zeros(HEADS, DIM, DIM, dtype=torch.float64)
    for head in range(HEADS * GROUP):
        keys, values = k[:, head // GROUP], v[:, head // GROUP]
        for i in range(len(q)):
            p = torch.softmax(keys[: i + 1] @ q[i, head] * scale, 0)
            out = p @ values[: i + 1]
            w = p.square() * (values[: i + 1] - out).square().sum(-1)
            squares = (keys[: i + 1] - center[head // GROUP]).square()
            found[head // GROUP] += (w[:, None] * squares).sum(0)[:, None] * q[i, head].square()
    return found


def harm(importance, factor, block):
    """The sum that factors are to make least, for each head and block of columns."""
    terms = importance * factor[:, :, None].square() / factor[:, None, :].square()
    blocks = [terms[:, i : i + block, i : i + block].sum((1, 2)) for i in range(0, DIM, block)]
    return torch.stack(blocks, -1)


def test_sequences_add_up():
    sequences = [make_samples(tokens) for tokens in (1, 40, 70)]
    together = Moments()
    for sequence in sequences:
        together.update(*sequence)
    assert together.tokens == 111
    keys = torch.cat([k for _, k, _ in sequences])
    torch.testing.assert_close(arrays_of(together)["k_center"], keys.mean(0).float(), rtol=1e-4, atol=1e-4)
    apart = sum(Moments().update(*sequence)._importance(keys.mean(0)) for sequence in sequences)
    torch.testing.assert_close(together._importance(keys.mean(0)), apart, rtol=1e-3, atol=1e-6)


def test_the_importance_of_channels_is_that_of_its_definition():
    q, k, v = make_samples(30)
    center, scale = k.mean(0), 0.03
    got = Moments().update(q, k, v, scale)._importance(center)
    want = importance_by_definition(q, k, v, center, scale)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5 * float(want.max()))


def test_long_sequences_are_looked_at_in_parts():
    q, k, v = make_samples(50)
    want = arrays_of(Moments().update(q, k, v), v_factors=True)
    with blocks.at_most(7 * HEADS * GROUP * 50):
        found = arrays_of(Moments().update(q, k, v), v_factors=True)
    for name, array in found.items():
        torch.testing.assert_close(array, want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("options", "block"), [({}, DIM), ({"k_group": 32}, 32), ({"k_rotation": 16}, 16)])
def test_factors_do_the_least_harm(options, block):
    q, k, v = make_samples(200)
    moments = Moments().update(q, k, v)
    factor = arrays_of(moments, **options)["k_factor"].double().abs()
    importance = moments._importance(k.mean(0))
    least = harm(importance, factor, block)
    assert (least < 0.9 * harm(importance, torch.ones_like(factor), block)).all()
    for _ in range(20):
        other = factor * torch.exp(0.05 * torch.randn(HEADS, DIM, dtype=torch.float64))
        assert (harm(importance, other, block) > least * (1 - 1e-4)).all()


def test_factors_are_balanced_over_what_shares_a_scale():
    moments = Moments().update(*make_samples(100))
    wide = arrays_of(moments, k_rotation=16, k_group=64)["k_factor"].abs()
    torch.testing.assert_close(wide, arrays_of(moments, k_group=64)["k_factor"])
    assert not torch.allclose(wide, arrays_of(moments, k_rotation=16)["k_factor"].abs(), rtol=1e-2)


def test_without_a_center_keys_count_from_zero():
    q, k, v = make_samples(100)
    moments = Moments().update(q, k, v)
    arrays = arrays_of(moments, center=False)
    assert set(arrays) == {"k_factor"}
    least = harm(moments._importance(torch.zeros_like(k[0])), arrays["k_factor"].double(), DIM)
    assert (
        least < harm(moments._importance(torch.zeros_like(k[0])), arrays_of(moments)["k_factor"].double(), DIM)
    ).all()


def test_values_are_levelled_by_what_attention_sees_of_them():
    q, k, v = make_samples(60)
    v[..., 7] *= 50
    factor = arrays_of(Moments().update(q, k, v), v_factors=True)["v_factor"]
    others = torch.arange(DIM) != 7
    ratio = factor[:, others].mean(1) / factor[:, 7]
    assert ((ratio > 4) & (ratio < 12)).all()  # 50 ** 1/2


def test_rotations_come_with_random_signs_of_their_seed():
    moments = Moments().update(*make_samples())
    plain, one = arrays_of(moments, k_group=16), arrays_of(moments, k_rotation=16, v_rotation=64)
    made = moments.transform(k_rotation=16, v_rotation=64)
    assert (made.k_rotation, made.v_rotation) == (16, 64)
    assert made.key == moments.transform(k_rotation=16, v_rotation=64).key
    assert made.key != moments.transform(k_rotation=16, v_rotation=64, seed=1).key
    torch.testing.assert_close(one["k_factor"].abs(), plain["k_factor"])
    assert set(one["v_factor"].flatten().tolist()) == {1.0, -1.0}
    signs_only = arrays_of(moments, k_rotation=16, center=False, factors=False)
    assert set(signs_only) == {"k_factor"} and set(signs_only["k_factor"].flatten().tolist()) == {1.0, -1.0}


def test_channels_that_are_always_zero_get_finite_factors():
    q, k, v = make_samples(80)
    k[..., 5], q[..., 9] = 0.0, 0.0
    k[:, 1], q[..., 17] = 0.0, 0.0
    transform = Moments().update(q, k, v).transform(k_rotation=64, v_factors=True)
    torch.testing.assert_close(transform.original_keys(transform.keys(k)), k, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "head_dim", "width"),
    [
        ("int4_g1", 128, 128),
        ("int4_g4", 128, 32),
        ("int4_g4", 64, 16),
        ("int4_g4", 96, 24),
        ("int8_token_head", 128, 128),
        ("int8_head", 128, 128),
        ("int8_g4", 256, 64),
        ("int8_channel", 128, 1),
        ("e4m3_head", 128, 1),
        ("e5m2", 64, 1),
        ("bf16", 64, 1),
    ],
)
def test_groups_are_what_shares_a_scale(name, head_dim, width):
    assert group_of(format_of(name), head_dim) == width


def test_samples_that_do_not_fit_are_named():
    q, k, v = make_samples(4)
    with pytest.raises(ValueError, match="q, k, v: got no samples"):
        Moments().transform()
    with pytest.raises(ValueError, match=r"q: got shape \[4, 5, 64\], want \[4, a multiple of 2, 64\]"):
        Moments().update(q[:, :5], k, v)
    with pytest.raises(ValueError, match=r"k: got shape \[4, 128\], want \[tokens, heads, head_dim\]"):
        Moments().update(q, k.flatten(1), v)
    with pytest.raises(ValueError, match="k, v: got shapes"):
        Moments().update(q, k, v[:, :1])
    with pytest.raises(ValueError, match="k, v: got shapes"):
        Moments().update(q, k, v).update(q[..., :32], k[..., :32], v)
    with pytest.raises(ValueError, match="q, k, v: got NaN or infinity among the samples"):
        Moments().update(q, k, v / 0)
    with pytest.raises(TypeError, match="k: got dtype torch.int64"):
        Moments().update(q, k.long(), v)


def test_refused_samples_leave_no_trace():
    q, k, v = make_samples(4)
    moments = Moments()
    with pytest.raises(ValueError, match="q, k, v: got NaN"):
        moments.update(q[..., :32], k[..., :32] * torch.nan, v)
    with pytest.raises(ValueError, match="q, k, v: got no samples"):
        moments.transform()
    assert moments.update(q, k, v).sizes == (HEADS, DIM, v.shape[2])
