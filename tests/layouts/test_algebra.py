"""The algebra agrees with CuTe DSL and with brute force; notation and conversion are exact."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import algebra, dsl
from layouts.algebra import Layout, Swizzle
from tests.layouts.dsl_oracle import dsl_offsets, traced


def compact_layout(rng: random.Random, modes: int = 3) -> Layout:
    """A bijection of power-of-two and odd extents with shuffled strides."""
    shape = [rng.choice([1, 2, 3, 4, 8]) for _ in range(rng.randint(1, modes))]
    order = list(range(len(shape)))
    rng.shuffle(order)
    stride, cursor = [0] * len(shape), 1
    for axis in order:
        stride[axis] = cursor
        cursor *= shape[axis]
    return Layout(tuple(shape), tuple(stride)) if len(shape) > 1 else Layout(shape[0], stride[0])


def power_layout(rng: random.Random) -> Layout:
    shape = tuple(2 ** rng.randint(0, 3) for _ in range(rng.randint(2, 3)))
    stride, cursor = [], 1
    for extent in shape:
        stride.append(cursor)
        cursor *= extent
    rng.shuffle(pairs := list(zip(shape, stride, strict=True)))
    return Layout(tuple(s for s, _ in pairs), tuple(d for _, d in pairs))


def operations():
    """(name, our function, DSL function, argument maker)."""
    from cutlass import cute

    def two_powers(rng):
        a = power_layout(rng)
        b = Layout(2 ** rng.randint(0, 3), 1) if rng.random() < 0.5 else power_layout(rng)
        return (a, b)

    def tile_of(rng):
        a = power_layout(rng)
        total = algebra.size(a)
        extent = 2 ** rng.randint(0, max(0, total.bit_length() - 1))
        stride = 2 ** rng.randint(0, max(0, (total // extent).bit_length() - 1))
        return (a, Layout(extent, stride))

    return [
        ("composition", algebra.compose, cute.composition, tile_of),
        ("coalesce", algebra.coalesce, cute.coalesce, lambda rng: (compact_layout(rng),)),
        ("right_inverse", algebra.right_inverse, cute.right_inverse, lambda rng: (compact_layout(rng),)),
        ("left_inverse", algebra.left_inverse, cute.left_inverse, lambda rng: (compact_layout(rng),)),
        ("complement", algebra.complement, cute.complement, lambda rng: (Layout(4, 2 ** rng.randint(0, 3)), 64)),
        ("logical_divide", algebra.logical_divide, cute.logical_divide, tile_of),
        ("logical_product", algebra.logical_product, cute.logical_product, lambda rng: two_powers(rng)),
        ("blocked_product", algebra.blocked_product, cute.blocked_product, same_rank),
        ("raked_product", algebra.raked_product, cute.raked_product, same_rank),
    ]


def same_rank(rng):
    return Layout((2, 4), (4, 1)), Layout((2 ** rng.randint(0, 2), 4), (1, 2 ** rng.randint(2, 4)))


TRIALS = 40


def test_every_operation_agrees_with_the_dsl():
    rng = random.Random(7)
    cases = [(op, op[3](rng)) for op in operations() for _ in range(TRIALS)]

    def body():
        found = []
        for (_, _, dsl_fn, _), args in cases:
            result = dsl_fn(*[dsl.to_dsl(arg) if isinstance(arg, Layout) else arg for arg in args])
            found.append((str(result), dsl_offsets(result, int(_dsl_size(result)))))
        return found

    for ((name, ours, _, _), args), (text, expected) in zip(cases, traced(body), strict=True):
        result = ours(*args)
        said = f"{name}{tuple(algebra.notation(a) if isinstance(a, Layout) else a for a in args)}: DSL {text}"
        assert algebra.size(result) == len(expected), said
        assert algebra.offsets(result).tolist() == expected, said
        assert algebra.equal(result, algebra.parse(text)), said


def _dsl_size(layout):
    from cutlass import cute

    return cute.size(layout)


SWIZZLES = [(1, 2, 3), (1, 3, 3), (2, 3, 3), (3, 3, 3), (2, 4, 3), (3, 4, 3)]


def test_swizzled_layouts_agree_with_the_dsl():
    layouts = [algebra.swizzled(*bits, Layout((8, 64), (64, 1))) for bits in SWIZZLES]

    def body():
        return [dsl_offsets(dsl.to_dsl(layout), 512) for layout in layouts]

    for layout, expected in zip(layouts, traced(body), strict=True):
        assert algebra.offsets(layout).tolist() == expected


def test_conversion_from_and_to_the_dsl_is_exact():
    samples = [
        Layout(((2, 4), 8), ((1, 16), 2)),
        Layout(5, 3),
        Layout((4, (2, 3)), (0, (1, 4))),
        algebra.swizzled(3, 4, 3, Layout((8, 64), (64, 1))),
    ]

    def body():
        return [algebra.notation(dsl.from_dsl(dsl.to_dsl(layout))) for layout in samples]

    assert traced(body) == [algebra.notation(layout) for layout in samples]


def test_a_dynamic_layout_is_refused():
    class Dynamic:
        def __str__(self):
            return "(?,4):(4,1)"

    with pytest.raises(ValueError, match="static"):
        dsl.from_dsl(Dynamic())
    with pytest.raises(TypeError, match="str"):
        dsl.to_dsl("(4,8):(8,1)")


def values_of(layout: Any) -> list[int]:
    return [layout(i) for i in range(algebra.size(layout))]


@given(st.integers(0, 2**32))
def test_canonical_equality_is_equality_of_functions(seed):
    rng = random.Random(seed)
    a, b = compact_layout(rng), compact_layout(rng)
    assert algebra.equal(a, b) == (values_of(a) == values_of(b))
    assert algebra.equal(a, algebra.from_modes(algebra.as_modes(a)))


@given(st.integers(0, 2**32))
def test_offsets_and_permutation_test_agree_with_brute_force(seed):
    rng = random.Random(seed)
    layout = compact_layout(rng)
    if rng.random() < 0.3:
        layout = algebra.from_modes(tuple((s, 2 * d) for s, d in algebra.as_modes(layout)))
    values = values_of(layout)
    assert algebra.offsets(layout).tolist() == values
    assert algebra.is_permutation(layout) == (sorted(values) == list(range(len(values))))


@pytest.mark.parametrize("bits", SWIZZLES)
def test_a_swizzle_is_its_own_inverse(bits):
    swizzle = Swizzle(*bits)
    values = np.arange(4096)
    once = algebra.apply_swizzle(swizzle, values)
    assert np.array_equal(once, [swizzle(int(v)) for v in values])
    assert np.array_equal(algebra.apply_swizzle(swizzle, once), values)


@pytest.mark.parametrize("text", ["(4,8):(8,1)", "5:3", "((2,4),8):((1,16),2)", "S<3,4,3> o 0 o (8,64):(64,1)"])
def test_notation_round_trips(text):
    assert algebra.notation(algebra.parse(text)) == text


@pytest.mark.parametrize("text", ["(4,8)", "(4,8:(8,1)", "(4,?):(1,4)", "4,8:8,1", "x:1", "4):(1"])
def test_malformed_notation_is_refused(text):
    with pytest.raises(ValueError, match="layout is"):
        algebra.parse(text)
