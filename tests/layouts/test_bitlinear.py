"""Bit-linear maps: matrix operations are operations on functions, and match CuTe layouts and the DSL."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import algebra, dsl
from layouts.algebra import ComposedLayout, Layout, Swizzle
from layouts.bitlinear import BitMap, bits_of, domain_bits
from tests.layouts.dsl_oracle import dsl_offsets, traced


@st.composite
def maps(draw, in_bits=None, out_bits=None):
    n = draw(st.integers(0, 7)) if in_bits is None else in_bits
    m = draw(st.integers(0, 8)) if out_bits is None else out_bits
    return BitMap(tuple(draw(st.integers(0, 2**m - 1)) for _ in range(n)), m)


@st.composite
def bijections(draw, bits=None):
    n = draw(st.integers(0, 7)) if bits is None else bits
    found = BitMap.permutation(draw(st.permutations(range(n))))
    for _ in range(draw(st.integers(0, 6)) if n > 1 else 0):
        low, high = draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
        columns = [1 << i for i in range(n)]
        columns[high] ^= 1 << low
        found = BitMap(tuple(columns), n) @ found
    return found


@given(maps(), st.data())
def test_the_map_is_linear(bit_map, data):
    index = st.integers(0, 2**bit_map.in_bits - 1)
    a, b = data.draw(index), data.draw(index)
    assert bit_map(a ^ b) == bit_map(a) ^ bit_map(b)


@given(maps())
def test_table_apply_matrix_and_call_agree(bit_map):
    indices = np.arange(2**bit_map.in_bits)
    expected = [bit_map(int(i)) for i in indices]
    assert bit_map.table().tolist() == expected
    assert bit_map.apply(indices).tolist() == expected
    bits = indices[None, :] >> np.arange(bit_map.in_bits)[:, None] & 1
    image = bit_map.matrix() @ bits % 2
    assert (image * (1 << np.arange(bit_map.out_bits))[:, None]).sum(axis=0).tolist() == expected


@given(st.data())
def test_composition_is_composition_and_associates(data):
    n, m, k, j = (data.draw(st.integers(0, 5)) for _ in range(4))
    a, b, c = data.draw(maps(n, m)), data.draw(maps(k, n)), data.draw(maps(j, k))
    assert (a @ b).table().tolist() == [a(b(i)) for i in range(2**k)]
    assert (a @ b) @ c == a @ (b @ c)
    assert a @ BitMap.identity(n) == a == BitMap.identity(m) @ a


@given(bijections())
def test_inverse(bit_map):
    assert bit_map.is_bijective
    assert bit_map @ bit_map.inverse() == BitMap.identity(bit_map.in_bits) == bit_map.inverse() @ bit_map
    assert np.array_equal(bit_map.inverse().table()[bit_map.table()], np.arange(2**bit_map.in_bits))


@given(maps())
def test_rank_and_kernel_count_collisions(bit_map):
    table = bit_map.table()
    assert len(set(table.tolist())) == 2**bit_map.rank
    assert bit_map.is_injective == (len(set(table.tolist())) == len(table))
    assert len(bit_map.kernel()) == bit_map.in_bits - bit_map.rank
    assert all(bit_map(index) == 0 and index for index in bit_map.kernel())


@given(st.integers(0, 2**32))
def test_power_of_two_layouts_convert_both_ways(seed):
    rng = random.Random(seed)
    bits = rng.randint(1, 8)
    layout = Layout((2,) * bits, tuple(1 << b for b in rng.sample(range(10), bits)))
    bit_map = BitMap.from_layout(layout)
    assert np.array_equal(bit_map.table(), algebra.offsets(layout))
    assert algebra.equal(bit_map.to_layout(), layout)
    assert domain_bits(layout) == bits


def test_layouts_of_the_dsl_are_matrices():
    samples = [
        Layout((8, 64), (64, 1)),
        Layout(((2, 4), (8, 2)), ((1, 32), (4, 2))),
        algebra.swizzled(3, 4, 3, Layout((8, 64), (64, 1))),
        algebra.swizzled(2, 3, 3, Layout((16, 32), (32, 1))),
    ]

    def body():
        return [dsl_offsets(dsl.to_dsl(layout), algebra.size(layout)) for layout in samples]

    for layout, expected in zip(samples, traced(body), strict=True):
        assert BitMap.from_layout(layout).table().tolist() == expected


def test_a_product_of_strides_is_linear_where_bits_do_not_meet():
    assert BitMap.from_layout(Layout((2, 2), (3, 4))).columns == (3, 4)
    with pytest.raises(ValueError, match="carry"):
        BitMap.from_layout(Layout((2, 2), (3, 1)))


def test_a_swizzle_is_an_involution():
    for bits in ((1, 4, 3), (2, 4, 3), (3, 4, 3), (3, 3, 3), (2, 0, -2)):
        bit_map = BitMap.from_swizzle(Swizzle(*bits), 12)
        assert bit_map @ bit_map == BitMap.identity(12)
        assert BitMap.from_function(Swizzle(*bits), 12, 12) == bit_map


def test_stacked_acts_on_low_and_high_bits():
    low, high = BitMap((2, 1), 2), BitMap((1, 3), 2)
    both = low.stacked(high)
    assert all(both(i | j << 2) == low(i) | high(j) << 2 for i in range(4) for j in range(4))


def test_describe_shows_the_xors():
    text = BitMap.from_swizzle(Swizzle(1, 0, 2), 3).describe()
    assert text.splitlines() == ["3 -> 3 bits, rank 3", "  o0 = i0 ^ i2", "  o1 = i1", "  o2 = i2"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: BitMap((4,), 2), "column 0 is 4"),
        (lambda: BitMap((), -1), "out_bits is -1"),
        (lambda: BitMap((1,), 1)(2), "index is 2"),
        (lambda: BitMap((1,), 1).apply(np.array([2])), r"\[2, 2\]"),
        (lambda: BitMap((1,), 1) @ BitMap((1,), 2), "2 output bits; want 1"),
        (lambda: BitMap((1, 1), 2).inverse(), "rank 1"),
        (lambda: BitMap.permutation([0, 0]), "permutation"),
        (lambda: BitMap.from_layout(Layout(6, 1)), "extent 6"),
        (lambda: BitMap.from_layout(ComposedLayout(Swizzle(1, 0, 1), Layout(4, 1), offset=1)), "offset 0"),
        (lambda: BitMap.from_swizzle(Swizzle(3, 4, 3), 8), "touches bit 9"),
        (lambda: BitMap.from_function(lambda i: min(i + 1, 3), 2, 2), "not linear"),
        (lambda: BitMap((3,), 2).to_layout(), "XORs"),
        (lambda: bits_of(12), "extent is 12"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
