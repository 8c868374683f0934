"""Fast conversions: order and values are proved, and what the proof rests on is tested on its own."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layouts import algebra
from layouts.decode import AND_OR, AND_XOR, CONVERSIONS, Conversion, biased_value, e4m3_value, e5m2_value
from layouts.isa import BF16, F16, Machine, exact_sum, join, lanes, splat
from layouts.proofs import ProofError
from layouts.weights import fastertransformer

STORED = {
    "u8_f16": (0, 2, 1, 3),
    "u8_bf16": (0, 2, 1, 3),
    "s8_f16": (0, 2, 1, 3),
    "s8_bf16": (0, 2, 1, 3),
    "u4_f16": (0, 2, 4, 6, 1, 3, 5, 7),
    "u4_bf16": (0, 2, 4, 6, 1, 3, 5, 7),
    "u4_f16_subnormal": (0, 2, 4, 6, 1, 3, 5, 7),
    "s4_f16": (0, 2, 4, 6, 1, 3, 5, 7),
    "s4_bf16": (0, 2, 4, 6, 1, 3, 5, 7),
    "u4_bf16_centred": (0, 2, 4, 6, 1, 3, 5, 7),
    "u8_bf16_centred": (0, 2, 1, 3),
    "e2m1_bf16": (0, 2, 4, 6, 1, 3, 5, 7),
    "e4m3_bf16": (0, 2, 1, 3),
    "e5m2_f16": (0, 1, 2, 3),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_derived_order_is_the_published_one(name):
    assert CONVERSIONS[name].stored_order() == STORED[name]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion_proves_itself(name):
    assert [proof.method for proof in CONVERSIONS[name].verify()] == ["exhaustive", "matrix", "exhaustive"]


@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=lambda c: c.name)
@given(st.data())
def test_elements_stored_in_that_order_come_out_in_order(conversion, data):
    """The end the proof serves, on whole registers."""
    top = (1 << conversion.bits) - 1
    elements = [data.draw(st.integers(0, top)) for _ in range(conversion.count)]
    register = 0
    for field, element in enumerate(conversion.stored_order()):
        register |= elements[element] << field * conversion.bits
    got = conversion.values(np.array([register]))[0]
    wanted = conversion.value(np.array(elements, dtype=np.uint32))
    assert all(g == w or np.isnan(w) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("bits", "name"), [(8, "u8_f16"), (4, "u4_f16"), (4, "u4_bf16")])
def test_weight_preprocessing_stores_what_the_conversion_reads(bits, name):
    """Step S4's order is derived from the instructions, not chosen."""
    conversion = CONVERSIONS[name]
    assert algebra.equal(fastertransformer.register_order(bits), conversion.register_layout())
    assert fastertransformer.bias_transform((conversion.count,), bits).flip == 1 << (bits - 1)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("u8_f16", {"prmt": 2, "sub.f16x2": 2}),
        ("u4_f16", {"lop3": 4, "shift": 1, "sub.f16x2": 2, "fma.f16x2": 2}),
        ("u4_bf16", {"lop3": 4, "shift": 3, "fma.bf16x2": 4}),
        ("u4_f16_subnormal", {"lop3": 4, "shift": 1}),
        ("e5m2_f16", {"prmt": 2}),
    ],
)
def test_instruction_counts(name, counts):
    assert CONVERSIONS[name].instructions() == counts


def test_a_wrong_sequence_is_caught():
    right = CONVERSIONS["u4_f16"]
    off_by_one = Conversion("x", 4, F16, 16, right.extract, right.finish, lambda c: biased_value(4)(c) + 1)
    with pytest.raises(ProofError, match="every code"):
        off_by_one.verify()
    mixing = Conversion(
        "y", 4, F16, 16, lambda m, x: [m.lop3(x, m.shr(x, 1), 0, 0xF0 & 0xCC)] * 4, right.finish, right.value
    )
    with pytest.raises(ProofError, match="affine"):
        mixing.verify()
    doubled = Conversion("z", 4, F16, 16, lambda m, x: [x, x, x, x], right.finish, right.value)
    with pytest.raises(ValueError, match="field 0 reaches lanes"):
        doubled.verify()


def test_fp8_values_agree_with_torch():
    codes = torch.arange(256, dtype=torch.uint8)
    for value, dtype in ((e4m3_value, torch.float8_e4m3fn), (e5m2_value, torch.float8_e5m2)):
        assert np.array_equal(value(codes.numpy()), codes.view(dtype).double().numpy(), equal_nan=True)


def test_e4m3_nan_is_not_kept():
    lane = CONVERSIONS["e4m3_bf16"].run(np.array([0x7F]))[0, 0]
    assert BF16.decode(lane) == 480


def test_subtracting_the_bias_first_is_exact_and_folding_it_into_the_scale_is_not():
    """(1024 + q) - 1032 then * scale rounds once; (1024 + q) * scale + fp16(-1032 * scale) is off by scale / 2."""
    codes = np.arange(16, dtype=np.uint32)
    biased = join(*[(0x6400 | codes).astype(np.uint16)] * 2)
    scales = F16.decode(np.random.default_rng(3).integers(0x1C00, 0x3C00, 200).astype(np.uint16))
    worst_exact = worst_folded = 0.0
    for scale in scales:
        exact = (codes.astype(np.float64) - 8) * scale
        s, minus = int(F16.encode(scale)), int(F16.encode(-1032 * scale))
        machine = Machine()
        separate = machine.mul2(machine.sub2(biased, 0x6408, F16), s, F16)
        folded = machine.fma2(biased, s, minus, F16)
        assert np.array_equal(lanes(separate)[0], F16.encode(exact)), "one rounding"
        worst_exact = max(worst_exact, np.abs(F16.decode(lanes(separate)[0]) - exact).max() / scale)
        worst_folded = max(worst_folded, np.abs(F16.decode(lanes(folded)[0]) - exact).max() / scale)
    assert worst_exact <= 2**-8
    assert 0.3 < worst_folded <= 0.5


# ------------------------------------------------------------------------------------------------------ instructions


@given(st.floats(allow_nan=False, width=64))
def test_rounding_is_that_of_numpy_and_torch(value):
    with np.errstate(over="ignore"):
        assert F16.encode(np.array([value]))[0] == np.array([value]).astype(np.float16).view(np.uint16)[0]
        direct = np.float32(value)
    if float(direct) == value:  # torch rounds float64 to bfloat16 by way of float32
        wanted = torch.tensor([value]).to(torch.bfloat16).view(torch.uint16).item()
        assert BF16.encode(np.array([value]))[0] == wanted


@pytest.mark.parametrize("form", [F16, BF16])
def test_decode_and_encode_are_inverse_on_every_number(form):
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = form.decode(bits)
    numbers = ~np.isnan(values)
    assert np.array_equal(form.encode(values[numbers]), bits[numbers])


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 7), min_size=4, max_size=4))
def test_prmt(a, b, nibbles):
    source = a | b << 32
    selector = sum(nibble << 4 * i for i, nibble in enumerate(nibbles))
    wanted = sum((source >> 8 * nibble & 0xFF) << 8 * i for i, nibble in enumerate(nibbles))
    assert Machine().prmt(np.array([a], dtype=np.uint32), b, selector)[0] == wanted


@given(*[st.integers(0, 2**32 - 1)] * 3)
def test_lop3(a, b, c):
    x = np.array([a], dtype=np.uint32)
    assert Machine().lop3(x, b, c, AND_OR)[0] == (a & b | c)
    assert Machine().lop3(x, b, c, AND_XOR)[0] == (a & b ^ c)
    assert Machine().lop3(x, b, c, 0xF0 ^ 0xCC ^ 0xAA)[0] == a ^ b ^ c


def test_packed_arithmetic_rounds_once():
    x = np.array([splat(int(F16.encode(np.array(1.0)))), splat(0x0001)], dtype=np.uint32)
    eps = 2.0**-11 + 2.0**-13
    product = Machine().fma2(x, 0x3C00, int(F16.encode(np.array(eps))), F16)
    assert F16.decode(lanes(product)[0])[0] == 1 + 2.0**-10
    assert F16.decode(lanes(product)[1])[1] == F16.decode(F16.encode(np.array(2.0**-24 + eps)))


def test_the_model_refuses_what_it_cannot_do_exactly():
    with pytest.raises(ArithmeticError, match="twice"):
        exact_sum(np.array(2.0**60), np.array(2.0**-10))
    with pytest.raises(ValueError, match="0x8000"):
        Machine().prmt(np.array([0], dtype=np.uint32), 0, 0x8000)
