"""Transforms of a cache: attention over k' and v' with q' is, to rounding, attention over k and v with q."""

import copy
import math
import pickle

import pytest
import torch

from cute_kernels.formats.kv import format_of
from cute_kernels.formats.kv.transforms import CacheTransform, check_transforms, key_of, rotated

GROUP = 3
SHAPES = [(2, 64, 64), (1, 80, 128), (3, 128, 96), (2, 192, 128), (1, 256, 256)]


def sylvester(width):
    """The Hadamard matrix by its definition: the sign of entry (i, j) is the parity of i & j."""
    signs = [[(-1) ** bin(i & j).count("1") for j in range(width)] for i in range(width)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(width)


def widest(dim):
    return dim & -dim


def make_inputs(heads, dim, v_dim, tokens=37, queries=5, seed=None):
    """q, k, v in fp64 and a transform of all kinds, with channels of K 80 to 120 times the rest, and their means."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31 if seed is None else seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    k = randn(tokens, heads, dim) + randn(heads, dim)
    loud = torch.randint(dim, (4,), generator=generator)
    k[..., loud] *= torch.tensor([80.0, 120.0, -95.0, 101.0], dtype=torch.float64)
    v, q = randn(tokens, heads, v_dim), randn(queries, heads * GROUP, dim)
    q[..., loud] /= 60

    def factor(columns):
        signs = torch.randint(2, (heads, columns), generator=generator) * 2 - 1
        return (signs * torch.exp(randn(heads, columns))).float()

    transform = CacheTransform(
        k_center=k.mean(0).float(),
        k_factor=factor(dim),
        k_rotation=widest(dim),
        v_factor=factor(v_dim),
        v_rotation=widest(v_dim),
    )
    return q, k, v, transform


def shift_of(transform, q):
    shift = transform.shift(q)
    assert shift is not None
    return shift


def attention(q, k, v, scale, softcap=None, sinks=None, shift=None):
    """Attention in fp64 with its log-sum-exp, by definition; shift is added to every score of its query."""
    k, v = (x.repeat_interleave(GROUP, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q, k)
    scores = (scores if shift is None else scores + shift[..., None]) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(len(q), -1)[..., None]), -1)
        v = torch.cat((v, torch.zeros_like(v[:1])))
    lse = scores.logsumexp(-1)
    return torch.einsum("qhk,khd->qhd", torch.exp(scores - lse[..., None]), v), lse


@pytest.mark.parametrize("width", [1, 2, 8, 32, 128])
def test_a_rotation_is_the_hadamard_matrix_in_natural_order_block_by_block(width):
    x = torch.randn(3, 2, 256, dtype=torch.float64)
    want = torch.cat([block @ sylvester(width) for block in x.split(width, -1)], -1)
    torch.testing.assert_close(rotated(x, width), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotated(rotated(x, width), width), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads", "dim", "v_dim"), SHAPES)
def test_scores_are_unchanged_but_for_the_shift(heads, dim, v_dim):
    q, k, _, transform = make_inputs(heads, dim, v_dim)
    new = torch.einsum("qhd,khd->qhk", transform.queries(q), transform.keys(k).repeat_interleave(GROUP, dim=1))
    old = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(GROUP, dim=1))
    torch.testing.assert_close(new + shift_of(transform, q)[..., None], old, rtol=1e-11, atol=1e-10)
    assert (new - old).abs().max() > 1e-3  # the shift is there to be missed


@pytest.mark.parametrize(("heads", "dim", "v_dim"), SHAPES)
def test_a_plain_softmax_does_not_need_the_shift(heads, dim, v_dim):
    q, k, v, transform = make_inputs(heads, dim, v_dim)
    scale = dim**-0.5
    want, want_lse = attention(q, k, v, scale)
    out, lse = attention(transform.queries(q), transform.keys(k), transform.values(v), scale)
    torch.testing.assert_close(transform.restore(out), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse + scale * transform.shift(q), want_lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("softcap", "with_sinks"), [(30.0, False), (None, True), (30.0, True)])
def test_caps_and_sinks_are_right_with_the_shift_and_wrong_without(softcap, with_sinks):
    q, k, v, transform = make_inputs(2, 64, 64)
    q *= 4
    scale, sinks = 64**-0.5, torch.randn(2 * GROUP, dtype=torch.float64) + 4 if with_sinks else None
    want, want_lse = attention(q, k, v, scale, softcap, sinks)
    new = (transform.queries(q), transform.keys(k), transform.values(v), scale, softcap, sinks)
    out, lse = attention(*new, shift=transform.shift(q))
    torch.testing.assert_close(transform.restore(out), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)
    wrong, _ = attention(*new)
    assert (transform.restore(wrong) - want).norm() > 1e-4 * want.norm()


def test_a_sink_may_be_lowered_by_the_shift_instead():
    q, k, v, transform = make_inputs(2, 64, 64)
    scale, sinks, shift = 64**-0.5, torch.randn(2 * GROUP, dtype=torch.float64), transform.shift(q)
    want, want_lse = attention(q, k, v, scale, sinks=sinks)
    lowered = sinks - scale * shift
    out, lse = attention(transform.queries(q), transform.keys(k), transform.values(v), scale, sinks=lowered)
    torch.testing.assert_close(transform.restore(out), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse + scale * shift, want_lse, rtol=1e-10, atol=1e-10)


def test_parts_with_different_centers_merge_by_shifted_log_sum_exps():
    q, k, v, transform = make_inputs(2, 64, 64)
    scale = 64**-0.5
    other = CacheTransform(k_center=torch.randn(2, 64) * 3)
    want, _ = attention(q, k, v, scale)
    parts = []
    for part, rows in ((transform, slice(0, 20)), (other, slice(20, None))):
        out, lse = attention(part.queries(q), part.keys(k[rows]), part.values(v[rows]), scale)
        parts.append((part.restore(out), lse, lse + scale * part.shift(q)))

    def merged(number):
        weights = torch.softmax(torch.stack([part[number] for part in parts], -1), -1)
        return sum(part[0] * weights[..., i, None] for i, part in enumerate(parts))

    torch.testing.assert_close(merged(2), want, rtol=1e-10, atol=1e-10)
    assert (merged(1) - want).norm() > 1e-3 * want.norm()


@pytest.mark.parametrize(("heads", "dim", "v_dim"), SHAPES)
def test_keys_and_values_come_back(heads, dim, v_dim):
    _, k, v, transform = make_inputs(heads, dim, v_dim)
    torch.testing.assert_close(transform.original_keys(transform.keys(k)), k, rtol=1e-11, atol=1e-10)
    torch.testing.assert_close(transform.restore(transform.values(v)), v, rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize(("heads", "dim", "v_dim"), SHAPES)
def test_errors_of_rows_come_back_over_the_factors_and_no_larger(heads, dim, v_dim):
    """Rotations keep a block's norm: a bound of the error of rows is, over the factors, one of what is read."""
    q, k, v, transform = make_inputs(heads, dim, v_dim)
    sides = (
        (k, transform.keys, transform.original_keys, transform.k_factor, transform.k_rotation),
        (v, transform.values, transform.restore, transform.v_factor, transform.v_rotation),
    )
    for x, write, read, factor, width in sides:
        rows = write(x)
        error = torch.randn_like(rows) * 0.1 * rows.abs().amax()
        assert factor is not None
        off = (read(rows + error) - x) * factor
        blocks = [y.unflatten(-1, (-1, width)).norm(dim=-1) for y in (off, error)]
        torch.testing.assert_close(*blocks, rtol=1e-9, atol=1e-9)
    rows, turned = transform.keys(k), transform.queries(q).unflatten(1, (heads, GROUP))
    error = torch.randn_like(rows)
    wrong = torch.einsum("qhgd,khd->qhgk", q.unflatten(1, (heads, GROUP)), transform.original_keys(rows + error) - k)
    torch.testing.assert_close(wrong, torch.einsum("qhgd,khd->qhgk", turned, error), rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes_are_computed_in_fp32_and_rounded_once(dtype):
    q, k, v, transform = make_inputs(2, 64, 64)
    for apply, x in ((transform.queries, q), (transform.keys, k), (transform.values, v), (transform.restore, v)):
        narrow = apply(x.to(dtype))
        assert narrow.dtype == dtype
        wide = apply(x.to(dtype).double())
        # Six sums and two products in fp32, each off by 2**-24 of what is a row's length at most; then rounded once.
        lost = 16 * 2.0**-24 * float(wide.norm(dim=-1).max())
        torch.testing.assert_close(narrow, wide.to(dtype), rtol=torch.finfo(dtype).eps, atol=lost)
    assert shift_of(transform, q.to(dtype)).dtype == torch.float32


@pytest.mark.parametrize("kv_format", ["int4_g1", "int4_g4"])
def test_adversarial_channels_survive_four_bits_once_centred_and_rotated(kv_format):
    q, k, _, _ = make_inputs(2, 128, 128, tokens=256, queries=64, seed=7)
    k += 40 * torch.randn(2, 128, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    form = format_of(kv_format)

    def error(transform):
        stored = form.dequantize(form.quantize(transform.keys(k).float()), 128, torch.float32).double()
        new, old = (
            torch.einsum("qhd,khd->qhk", x, y.repeat_interleave(GROUP, dim=1))
            for x, y in ((transform.queries(q), stored), (q, k))
        )
        shift = transform.shift(q)
        wrong = (new if shift is None else new + shift[..., None]) - old
        return float(wrong.std() / (old - old.mean(-1, keepdim=True)).std())

    plain = error(CacheTransform())
    factor = (k.var(0) ** -0.25).float()
    remedied = error(CacheTransform(k_center=k.mean(0).float(), k_factor=factor, k_rotation=128))
    assert plain > 0.5 and remedied < plain / 3


def test_the_identity_changes_nothing_and_says_so():
    _, k, _, transform = make_inputs(2, 64, 64)
    nothing = CacheTransform()
    assert nothing.identity and nothing.key == key_of(None) == "none" and not nothing.changes_values
    assert nothing.keys(k) is k and nothing.shift(k) is None
    assert not transform.identity and transform.changes_values and transform.key != "none"
    assert not CacheTransform(k_rotation=2).changes_values


def test_a_key_tells_transforms_apart_and_nothing_else():
    center, factor = torch.randn(2, 64), torch.rand(2, 64) + 0.5
    made = CacheTransform(k_center=center, k_factor=factor, k_rotation=32)
    assert made.key == CacheTransform(k_center=center.clone(), k_factor=factor.clone(), k_rotation=32).key
    moved = center.clone()
    moved[1, 63] = moved[1, 63].nextafter(torch.tensor(9e9))
    others = [
        CacheTransform(k_center=moved, k_factor=factor, k_rotation=32),
        CacheTransform(k_center=center, k_factor=factor, k_rotation=16),
        CacheTransform(k_center=center, k_factor=factor, k_rotation=32, v_rotation=32),
        CacheTransform(k_center=center, v_factor=factor, k_rotation=32),
        CacheTransform(k_center=center, k_rotation=32),
    ]
    assert len({made.key, *(other.key for other in others)}) == 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k_center": [[1.0]]}, TypeError, "k_center: got list, want a torch.Tensor"),
        ({"k_center": torch.zeros(2, 64).double()}, TypeError, "k_center: got dtype torch.float64, want torch.float32"),
        ({"k_center": torch.zeros(64)}, ValueError, r"k_center: got shape \[64\], want \[num_kv_heads, head_dim\]"),
        ({"k_center": torch.full((2, 64), math.nan)}, ValueError, "k_center: got NaN or infinity"),
        ({"k_center": torch.zeros(64, 2).t()}, ValueError, "k_center: got strides"),
        ({"k_factor": torch.zeros(2, 64)}, ValueError, "k_factor: got 0 for column 0 of head 0, want magnitudes"),
        ({"v_factor": torch.full((2, 64), 1e9)}, ValueError, "v_factor: got 1e"),
        ({"k_factor": torch.full((2, 64), math.inf)}, ValueError, "k_factor: got NaN or infinity"),
        ({"k_rotation": 48}, ValueError, "k_rotation: got 48, want 1 or a power of two"),
        ({"k_rotation": 0}, ValueError, "k_rotation: got 0"),
        ({"v_rotation": 2.0}, TypeError, "v_rotation: got 2.0, want an int"),
        ({"k_center": torch.zeros(2, 80), "k_rotation": 32}, ValueError, "k_rotation: got 32, want .* divides .* 80"),
        (
            {"k_center": torch.zeros(2, 64), "k_factor": torch.ones(3, 64)},
            ValueError,
            r"k_factor: got shape \[3, 64\], want \[2, 64\]",
        ),
        (
            {"k_center": torch.zeros(2, 64), "v_factor": torch.ones(1, 128)},
            ValueError,
            r"v_factor: got shape \[1, 128\], want \[2, 128\]",
        ),
    ],
)
def test_what_is_no_transform_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        CacheTransform(**arguments)


def test_a_transform_of_other_sizes_is_named():
    made = CacheTransform(k_center=torch.zeros(2, 64), v_rotation=64)
    made.validate(2, 64)
    made.validate(2, 64, 128)
    with pytest.raises(ValueError, match=r"k_center: got shape \[2, 64\], want \[4, 64\]"):
        made.validate(4, 64)
    with pytest.raises(ValueError, match=r"k_center: got shape \[2, 64\], want \[2, 128\]"):
        made.validate(2, 128, 64)
    with pytest.raises(ValueError, match="v_rotation: got 64, want a power of two that divides head_dim 80"):
        made.validate(2, 64, 80)
    with pytest.raises(ValueError, match=r"q: got shape \[5, 3, 64\], want \[..., a multiple of 2, 64\]"):
        made.shift(torch.zeros(5, 3, 64))


def test_layers_have_one_transform_each():
    made = CacheTransform(k_rotation=64)
    assert check_transforms("transform", None, 2) == (None, None)
    assert check_transforms("transform", made, 2) == (made, made)
    assert check_transforms("transform", [None, made], 2) == (None, made)
    with pytest.raises(ValueError, match="transform: got 3 transforms, want 2, one for each layer"):
        check_transforms("transform", [made] * 3, 2)
    with pytest.raises(TypeError, match=r"transform\[1\]: got str, want a CacheTransform or None"):
        check_transforms("transform", [made, "rotate"], 2)
    with pytest.raises(TypeError, match="transform: got str, want a CacheTransform, one for each layer, or None"):
        check_transforms("transform", "rotate", 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "file"])
def test_a_copy_has_addresses_of_its_own(copied):
    transform = make_inputs(1, 64, 64, seed=0)[-1]
    assert all(transform.addresses) and transform.kind  # kept from now on
    found = copied(transform)
    arrays = found.k_center, found.k_factor, found.q_factor, found.v_factor
    assert found.addresses == tuple(array.data_ptr() for array in arrays)
    assert found.key == transform.key and not {*found.addresses} & {*transform.addresses}
