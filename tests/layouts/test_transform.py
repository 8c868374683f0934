"""Transforms: what they do to bytes is what their layout says, and their algebra is that of functions."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layouts import algebra
from layouts.algebra import Layout
from layouts.transform import Transform, pack, unpack
from layouts.wordshuffle import make_plan

seeds = st.integers(0, 2**32)


def random_transform(rng: random.Random, bits: int, extents=(1, 2, 2, 4, 8, 16, 3, 5)) -> Transform:
    """A shuffle of digits whose first and last are even, so that 4-bit elements stay in whole bytes."""
    shape = [2, *(rng.choice(extents) for _ in range(rng.randint(0, 4))), 2]
    order = list(range(len(shape)))
    rng.shuffle(order)
    if bits == 4:
        order.sort(key=lambda axis: axis not in (0, len(shape) - 1))
    stride, cursor = [0] * len(shape), 1
    for axis in order:
        stride[axis] = cursor
        cursor *= shape[axis]
    layout = Layout(tuple(shape), tuple(stride))
    flip = rng.choice([0, 1 << bits - 1, 5])
    return Transform.from_layout("shuffle", layout, bits, (cursor,), (cursor // 2, 2), flip)


def gathered(transform: Transform, x: torch.Tensor) -> torch.Tensor:
    """The definition: one element at a time."""
    batch = x.shape[: x.ndim - len(transform.in_shape)]
    flat = unpack(x.reshape(*batch, -1), transform.bits)
    out, source = torch.empty_like(flat), algebra.offsets(transform.source).tolist()
    for i in range(transform.size):
        out[..., i] = flat[..., source[i]] ^ transform.flip
    return pack(out, transform.bits).view(*batch, *transform.storage_shape(transform.out_shape))


def random_bytes(rng, *shape):
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(rng.randint(0, 9999))
    )


@given(seeds, st.sampled_from([4, 8]))
def test_bytes_move_as_the_layout_says(seed, bits):
    rng = random.Random(seed)
    transform = random_transform(rng, bits)
    x = random_bytes(rng, rng.choice([1, 3]), *transform.storage_shape(transform.in_shape))
    before = x.clone()
    assert torch.equal(transform(x), gathered(transform, before))
    assert torch.equal(x, before), "the input is not changed"


@given(seeds, st.sampled_from([4, 8]))
def test_inverse_undoes(seed, bits):
    rng = random.Random(seed)
    transform = random_transform(rng, bits)
    x = random_bytes(rng, *transform.storage_shape(transform.in_shape))
    assert torch.equal(transform.inverse()(transform(x)), x)
    assert transform.then(transform.inverse()) == Transform.identity(bits, transform.in_shape)
    assert transform.inverse().inverse() == transform


@given(seeds, st.sampled_from([4, 8]))
def test_composition_is_composition_and_associates(seed, bits):
    rng = random.Random(seed)
    size = 64
    parts = []
    for _ in range(3):
        while True:
            part = random_transform(rng, bits, extents=(2, 4, 8))
            if part.size == size:
                break
        parts.append(part.reshaped(out_shape=(size,)))
    a, b, c = parts
    x = random_bytes(rng, size * bits // 8)
    assert torch.equal(a.then(b)(x), b(a(x)))
    assert a.then(b).then(c) == a.then(b.then(c))
    assert a.then(b).bit_map() == a.bit_map() @ b.bit_map()


@given(seeds)
def test_a_transform_verifies_itself(seed):
    proofs = random_transform(random.Random(seed), 8).verify()
    assert {"symbolic", "exhaustive"} <= {proof.method for proof in proofs}


@given(seeds)
def test_equality_is_equality_of_what_is_done(seed):
    rng = random.Random(seed)
    a, b = (random_transform(rng, 8, extents=(2, 3)) for _ in range(2))
    same = a.in_shape == b.in_shape and a.out_shape == b.out_shape and a.flip == b.flip
    same = same and algebra.offsets(a.source).tolist() == algebra.offsets(b.source).tolist()
    assert (a == b) == same
    assert a == a.renamed("other") and hash(a) == hash(a.renamed("other"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_numpy_and_torch_agree_and_keep_their_kind(dtype):
    transform = Transform.from_layout("transpose", Layout((6, 4), (4, 1)), 8, (6, 4), (4, 6))
    x = torch.arange(48).to(dtype).view(2, 6, 4)
    out = transform(x)
    assert torch.equal(out, x.transpose(1, 2)) and out.dtype == dtype
    assert np.array_equal(transform(x.numpy()), out.numpy()) and transform(x.numpy()).dtype == x.numpy().dtype


def test_strided_read_only_and_misaligned_inputs():
    transform = Transform.from_layout("transpose", Layout((8, 8), (8, 1)), 8, (8, 8))
    x = torch.arange(65, dtype=torch.uint8)
    assert torch.equal(transform(x[1:].view(8, 8)), x[1:].view(8, 8).t())
    assert torch.equal(transform(x[:64].view(8, 8).t()), x[:64].view(8, 8))
    frozen = x[:64].view(8, 8).numpy().copy()
    frozen.flags.writeable = False
    assert np.array_equal(transform(frozen), frozen.T)
    assert np.array_equal(transform(frozen[::-1]), frozen[::-1].T)


def test_the_input_is_not_changed():
    transform = Transform.from_layout("flip", Layout(64, 1), 4, (64,), flip=8)
    x = torch.zeros(32, dtype=torch.uint8)
    assert (transform(x) == 0x88).all() and not x.any()


def test_empty_batches_pass():
    transform = Transform.from_layout("transpose", Layout((8, 8), (8, 1)), 4, (8, 8))
    assert transform(torch.empty(0, 8, 4, dtype=torch.int8)).shape == (0, 8, 4)


def test_large_arrays_are_cut_without_changing_the_result():
    """Beyond the cache chunk: transposition of 4-bit elements, both orders of extents."""
    for rows, cols in ((64, 65536), (65536, 64), (2048, 2048), (3 * 512, 5 * 512)):
        transform = Transform.from_layout("transpose", Layout((rows, cols), (cols, 1)), 4, (rows, cols), (cols, rows))
        x = random_bytes(random.Random(1), rows, cols // 2)
        expected = pack(unpack(x, 4).t(), 4)
        assert torch.equal(transform(x), expected)
        assert torch.equal(transform.inverse()(expected), x)


def test_plans_use_the_widest_word_that_fits():
    def words(rows, cols, bits=4):
        return make_plan(algebra.as_modes(Layout((rows, cols), (cols, 1))), bits).word_bits

    assert [words(8, 8), words(4, 12), words(6, 10), words(8, 8, 8), words(2, 6, 8), words(3, 5, 8)] == [
        32,
        16,
        8,
        32,
        16,
        8,
    ]


def test_transposing_packed_nibbles_takes_three_exchanges_and_no_swap():
    plan = make_plan(algebra.as_modes(Layout((64, 64), (64, 1))), 4)
    assert (len(plan.exchanges), len(plan.swaps)) == (3, 0)


def test_pack_and_unpack():
    assert pack(torch.tensor([1, -1, 15, 2], dtype=torch.int8), 4).tolist() == [0xF1, 0x2F]
    assert unpack(torch.tensor([0xF1], dtype=torch.uint8), 4).tolist() == [1, 15]


TRANSPOSE = Transform.from_layout("transpose", Layout((8, 4), (4, 1)), 4, (8, 4), (4, 8))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Transform.from_layout("x", Layout(4, 2), 8, (4,)), ValueError, "no canonical bijection"),
        (lambda: Transform.from_layout("x", Layout(4, 1), 8, (5,)), ValueError, "bijection of 5"),
        (lambda: Transform.from_layout("x", Layout(4, 1), 8, (4,), (2, 3)), ValueError, "different sizes"),
        (lambda: Transform.from_layout("x", Layout(4, 1), 3, (4,)), ValueError, "bits is 3"),
        (lambda: Transform.from_layout("x", Layout(9, 1), 4, (3, 3)), ValueError, "even last extent"),
        (lambda: Transform.from_layout("x", Layout(4, 1), 4, (4,), flip=16), ValueError, "flip is 16"),
        (lambda: TRANSPOSE(torch.zeros(8, 4, dtype=torch.uint8)), ValueError, r"\(8, 4\).*8, 2.*two 4-bit"),
        (lambda: TRANSPOSE(torch.zeros(8, 2)), TypeError, "float32"),
        (lambda: TRANSPOSE(np.zeros((8, 2), dtype=np.int32)), TypeError, "int32"),
        (lambda: TRANSPOSE([0]), TypeError, "list"),  # pyright: ignore[reportArgumentType]
        (lambda: TRANSPOSE.then(TRANSPOSE), ValueError, r"takes 4-bit \(8, 4\)"),
        (lambda: make_plan(((3, 3), (3, 1)), 4), ValueError, "split a byte"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
