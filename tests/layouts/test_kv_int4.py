"""INT4 rows: the bytes are those of the published format, the error is bounded, bad input is named."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts.kv import Int4Row
from layouts.kv.format import adversarial_rows

FORMATS = [Int4Row(d, g) for d in (64, 128, 256) for g in (1, 2, 4, 8)]


@pytest.mark.parametrize(("num_groups", "row_bytes"), [(1, 68), (2, 72), (4, 80), (8, 96)])
def test_row_bytes_at_head_dim_128(num_groups, row_bytes):
    row = Int4Row(128, num_groups)
    assert row.row_bytes == row_bytes
    assert row.row_bytes == 4 * (128 // 8 + num_groups)
    assert row.name == f"int4_g{num_groups}"
    assert row.group_size == 128 // num_groups


def test_bytes_of_a_hand_written_row():
    row = Int4Row(8, 2)
    codes = torch.tensor([0, 15, 1, 2, 3, 4, 5, 6], dtype=torch.uint8)
    packed = row.pack(codes, torch.tensor([1.0, 0.5]).half(), torch.tensor([-2.0, 0.0]).half())
    assert packed.tolist() == [0x00, 0x3C, 0x00, 0xC0, 0x00, 0x38, 0x00, 0x00, 0xF0, 0x21, 0x43, 0x65]
    assert row.dequantize(packed).tolist() == [-2.0, 13.0, -1.0, 0.0, 1.5, 2.0, 2.5, 3.0]


def naive_row(x, row):
    """The definition, one element at a time."""
    out = []
    codes = []
    for g in range(row.num_groups):
        group = x[g * row.group_size : (g + 1) * row.group_size].tolist()
        shift = torch.tensor(min(group)).half()
        scale = ((torch.tensor(max(group)) - torch.tensor(min(group))) / 15).half()
        out += list(torch.stack((scale, shift)).view(torch.uint8).tolist())
        for value in group:
            steps = (torch.tensor(value) - shift.float()) / scale.float()
            codes.append(0 if scale == 0 else min(15, max(0, round(float(steps)))))
    return out + [codes[2 * j] | codes[2 * j + 1] << 4 for j in range(row.head_dim // 2)]


@pytest.mark.parametrize("row", FORMATS, ids=lambda f: f"{f.head_dim}-{f.name}")
def test_vectorised_quantiser_is_the_definition(row):
    x = adversarial_rows(row.head_dim)[::7]
    assert row.quantize(x).tolist() == [naive_row(line, row) for line in x]


@pytest.mark.parametrize("row", FORMATS, ids=lambda f: f"{f.head_dim}-{f.name}")
def test_format_verifies_itself(row):
    assert {proof.method for proof in row.verify()} == {"symbolic", "sampled"}


@settings(max_examples=150, deadline=None)
@given(
    num_groups=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    centre=st.floats(-30000, 30000, width=32),
    log_spread=st.floats(-9, 4.4),
    seed=st.integers(0, 2**31),
)
def test_error_stays_under_the_stated_bound(num_groups, head_dim, centre, log_spread, seed):
    row = Int4Row(head_dim, num_groups)
    noise = torch.rand(4, head_dim, generator=torch.Generator().manual_seed(seed)) - 0.5
    x = centre + noise * 10**log_spread
    for dtype in (torch.float32, torch.float64):
        error = (row.dequantize(row.quantize(x), dtype).double() - x.double()).abs()
        assert (error <= row.error_bound(x)).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), min_size=16, max_size=16), st.sampled_from([1, 2, 4, 8]))
def test_any_float_gives_a_finite_row(values, num_groups):
    row = Int4Row(16, num_groups)
    back = row.dequantize(row.quantize(torch.tensor(values)))
    assert torch.isfinite(back).all()
    for value, got in zip(values, back.tolist(), strict=True):
        if abs(value) <= 65504 and all(abs(other) <= 65504 for other in values):
            assert abs(got - value) <= 65504 * 2 / 15


def test_saturation_and_nan_are_as_documented():
    row = Int4Row(8, 1)
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, 0.0, 65504.0, -65504.0])
    clean = torch.tensor([65504.0, -65504.0, 0.0, 65504.0, -65504.0, 0.0, 65504.0, -65504.0])
    assert torch.equal(row.quantize(x), row.quantize(clean))
    assert row.unpack(row.quantize(x))[2].item() == -65504.0


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -7.25, 65504.0, 6e-8])
def test_constant_group_has_zero_codes_and_gives_the_shift(value):
    row = Int4Row(32, 4)
    codes, scale, shift = row.unpack(row.quantize(torch.full((3, 32), value)))
    assert not codes.any() and not scale.any()
    assert torch.equal(shift, torch.full((3, 4), value).half())
    assert torch.equal(row.dequantize(row.quantize(torch.full((3, 32), value)), torch.float16)[0, 0], shift[0, 0])


def test_range_below_the_smallest_fp16_scale_behaves_as_constant():
    row = Int4Row(8, 1)
    x = 1e-3 + torch.arange(8) * 1e-8
    codes, scale, _ = row.unpack(row.quantize(x))
    assert scale.item() == 0 and not codes.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(128,), (0, 128), (2, 0, 128), (1, 128), (2, 3, 5, 128)])
def test_every_leading_shape_and_dtype(dtype, shape):
    row = Int4Row(128, 4)
    rows = row.quantize(torch.randn(shape).to(dtype))
    assert rows.shape == (*shape[:-1], 80) and rows.dtype == torch.uint8
    assert row.dequantize(rows, dtype).shape == shape
    assert row.dequantize(rows, dtype).dtype == dtype


def test_strided_input_equals_contiguous():
    row = Int4Row(64, 2)
    x = torch.randn(64, 6).t()
    assert torch.equal(row.quantize(x), row.quantize(x.contiguous()))
    wide = torch.randint(0, 256, (5, 2 * row.row_bytes), dtype=torch.uint8)
    assert torch.equal(row.unpack(wide[:, ::2])[0], row.unpack(wide[:, ::2].contiguous())[0])


def test_float64_dequantisation_is_exact():
    from fractions import Fraction

    row = Int4Row(16, 2)
    rows = row.quantize(torch.randn(20, 16) * 100)
    codes, scale, shift = row.unpack(rows)
    got = row.dequantize(rows, torch.float64)
    for i in range(20):
        for j in range(16):
            exact = int(codes[i, j]) * Fraction(float(scale[i, j // 8])) + Fraction(float(shift[i, j // 8]))
            assert Fraction(float(got[i, j])) == exact


def test_describe_maps_every_byte():
    text = Int4Row(128, 4).describe()
    assert text.splitlines()[0] == "int4_g4: 128 elements in 80 bytes"
    assert "[16, 80)" in text and "columns [96, 128)" in text


def test_formats_are_values():
    assert Int4Row(128, 4) == Int4Row(128, 4) and hash(Int4Row(128, 4)) == hash(Int4Row(128, 4))
    assert Int4Row(128, 4) != Int4Row(128, 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Int4Row(0), ValueError, "head_dim is 0"),
        (lambda: Int4Row(128, 3), ValueError, "3 groups"),
        (lambda: Int4Row(12, 4), ValueError, "multiple of 2"),
        (lambda: Int4Row(128.0), TypeError, "head_dim is 128.0"),  # pyright: ignore[reportArgumentType]
        (lambda: Int4Row(128).quantize(torch.zeros(4, 64)), ValueError, r"shape \(4, 64\).*128"),
        (lambda: Int4Row(128).quantize(torch.zeros(4, 128, dtype=torch.int32)), TypeError, "int32"),
        (lambda: Int4Row(128).quantize([0.0] * 128), TypeError, "list"),  # pyright: ignore[reportArgumentType]
        (lambda: Int4Row(128).dequantize(torch.zeros(4, 80, dtype=torch.uint8)), ValueError, "68"),
        (lambda: Int4Row(128).dequantize(torch.zeros(4, 68)), TypeError, "uint8"),
        (lambda: Int4Row(128).dequantize(torch.zeros(4, 68, dtype=torch.uint8), torch.int32), TypeError, "int32"),
        (lambda: Int4Row(4).pack(torch.zeros(4, dtype=torch.uint8)), ValueError, "1 parts"),
        (
            lambda: Int4Row(4).pack(
                torch.full((4,), 16, dtype=torch.uint8), torch.zeros(1).half(), torch.zeros(1).half()
            ),
            ValueError,
            r"\[16, 16\]",
        ),
        (
            lambda: Int4Row(4).pack(
                torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(1, 1).half(), torch.zeros(2, 1).half()
            ),
            ValueError,
            "leading",
        ),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
