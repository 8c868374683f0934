"""8-bit and MLA rows: bytes, values, stated error bounds, scales inside and outside the row, bad input."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layouts.decode import e4m3_value, e5m2_value
from layouts.kv import Fp8E4M3, Fp8E5M2, Int4Row, Int8, MlaDense, MlaFp8, MlaModel1
from layouts.kv.mla import power_of_two_scale
from layouts.kv.scaled import GRANULARITIES

SCALED = [kind(128, granularity) for kind in (Int8, Fp8E4M3) for granularity in GRANULARITIES if granularity != "group"]
SCALED += [kind(128, "group", groups) for kind in (Int8, Fp8E4M3) for groups in (1, 2, 4)]
FORMATS = [*SCALED, Fp8E5M2(128), Fp8E5M2(64, truncate=True), MlaFp8(), MlaModel1(), Int4Row(128, 4)]
FORMATS += [MlaDense(), MlaDense("fp16"), MlaDense("bf16", 512)]
IDS = [fmt.name for fmt in FORMATS]


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_format_verifies_itself(fmt):
    assert len(fmt.verify()) == 3


def test_names_are_unique_and_formats_are_values():
    assert len({(fmt.name, fmt.head_dim) for fmt in FORMATS}) == len(FORMATS)
    assert Int8(128, "group", 2) == Int8(128, "group", 2) != Fp8E4M3(128, "group", 2)


@pytest.mark.parametrize(
    ("fmt", "row_bytes"),
    [
        (Int8(128), 132),
        (Int8(128, "tensor"), 128),
        (Int8(128, "group", 4), 144),
        (Fp8E4M3(128, "head"), 128),
        (Fp8E5M2(256), 256),
        (MlaFp8(), 656),
        (MlaModel1(), 584),
        (MlaDense("fp16"), 1152),
        (MlaDense("bf16", 512), 1024),
    ],
)
def test_row_bytes(fmt, row_bytes):
    assert fmt.row_bytes == row_bytes
    assert fmt.describe().startswith(f"{fmt.name}: {fmt.head_dim} elements in {row_bytes} bytes")


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
@given(seed=st.integers(0, 2**31), log_size=st.floats(-30, 30))
def test_scaled_rows_stay_under_their_bound(fmt, seed, log_size):
    x = gaussian(3, 2, 128, seed=seed) * 10**log_size
    scale = fmt.compute_scale(x)
    rows = fmt.quantize(x, scale)
    for dtype in (torch.float32, torch.float64):
        back = fmt.dequantize(rows, dtype, None if fmt.scale_in_row else scale)
        error = (back.double() - x.double()).abs()
        assert (error <= fmt.error_bound(x, scale) + 2**-24 * x.double().abs()).all()


@pytest.mark.parametrize("fmt", SCALED, ids=lambda f: f.name)
def test_a_given_scale_is_used_and_saturates(fmt):
    x = gaussian(4, 2, 128)
    scale = fmt.compute_scale(x) / 2
    rows = fmt.quantize(x, scale)
    back = fmt.dequantize(rows, torch.float64, None if fmt.scale_in_row else scale)
    assert back.abs().amax() == pytest.approx(float(fmt.code_max * scale.double().amax()))
    assert ((back - x.double()).abs() <= fmt.error_bound(x, scale)).all()


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [("tensor", ()), ("channel", (2, 128)), ("head", (2, 1)), ("token", (5, 3, 1, 1)), ("token_head", (5, 3, 2, 1))],
)
def test_scale_shapes_and_values(granularity, shape):
    x = gaussian(5, 3, 2, 128)
    scale = Int8(128, granularity).compute_scale(x)
    assert scale.shape == shape and scale.dtype == torch.float32
    assert (torch.broadcast_to(scale, x.shape) * 127 >= x.abs() * (1 - 1e-6)).all(), "nothing saturates"
    assert float(scale.max()) == pytest.approx(float(x.abs().max()) / 127)


def test_int8_codes_are_symmetric_and_rounded_to_even():
    fmt = Int8(8, "tensor")
    x = torch.tensor([[-1000.0, 1000.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.0]])
    rows = fmt.quantize(x, torch.tensor(1.0))
    assert fmt.unpack(rows)[0].tolist() == [[-127, 127, 0, 2, 2, 0, -2, 0]]


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_zero_rows_give_zeros(fmt):
    x = torch.zeros(2, 1, fmt.head_dim)
    args = (fmt.compute_scale(x),) if fmt in SCALED else ()
    keep = {} if not args or fmt.scale_in_row else {"scale": args[0]}
    assert not fmt.dequantize(fmt.quantize(x, *args), **keep).any()


@pytest.mark.parametrize("fmt", FORMATS, ids=IDS)
def test_any_input_gives_finite_rows(fmt):
    x = gaussian(2, 1, fmt.head_dim)
    x[0, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 1e38])
    args = (fmt.compute_scale(x),) if fmt in SCALED else ()
    keep = {} if not args or fmt.scale_in_row else {"scale": args[0]}
    back = fmt.dequantize(fmt.quantize(x, *args), torch.float64, **keep)
    assert torch.isfinite(back).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", [Int8(64), Fp8E4M3(64), Fp8E5M2(64), Fp8E5M2(64, truncate=True)], ids=lambda f: f.name)
@pytest.mark.parametrize("lead", [(), (0,), (2, 3)])
def test_every_dtype_and_leading_shape(dtype, fmt, lead):
    x = gaussian(*lead, 64).to(dtype)
    rows = fmt.quantize(x)
    assert rows.shape == (*lead, fmt.row_bytes) and rows.dtype == torch.uint8
    assert fmt.dequantize(rows, dtype).shape == x.shape


# ----------------------------------------------------------------------------------------------------- FP8 codes


def nearest(values, table):
    """Index of the nearest finite table entry, ties to the even code; NumPy definition."""
    finite = np.where(np.isfinite(table), table, np.inf)
    distance = np.abs(values[:, None] - finite[None, :])
    best = distance.min(axis=1, keepdims=True)
    candidates = distance == best
    even_first = np.argsort(np.arange(256) % 2, kind="stable")
    return even_first[np.argmax(candidates[:, even_first], axis=1)]


@pytest.mark.parametrize(
    ("fmt", "table", "top"), [(Fp8E4M3(512, "tensor"), e4m3_value, 448), (Fp8E5M2(512), e5m2_value, 57344)]
)
def test_fp8_rounding_is_to_the_nearest_and_even(fmt, table, top):
    codes = np.arange(256, dtype=np.uint32)
    numbers = np.sort(np.unique(table(codes)[np.isfinite(table(codes))]))
    ties = (numbers[:-1] + numbers[1:]) / 2
    x = np.concatenate((numbers, ties))
    x = np.resize(np.concatenate((x, np.random.default_rng(0).uniform(-top, top, 512))), 1024)
    args = (torch.tensor(1.0),) if isinstance(fmt, Fp8E4M3) else ()
    rows = fmt.quantize(torch.from_numpy(x).float().view(2, 512), *args).flatten().numpy()
    assert np.array_equal(table(rows.astype(np.uint32)), table(nearest(x, table(codes)).astype(np.uint32)))


def test_e5m2_is_the_high_byte_of_fp16():
    fmt = Fp8E5M2(256)
    every = torch.arange(256, dtype=torch.uint8)
    halves = (every.to(torch.int16) << 8).view(torch.float16)
    assert torch.equal(fmt.dequantize(every, torch.float16).nan_to_num(7), halves.nan_to_num(7))
    x = (gaussian(40, 256) * 100).half()
    high = x.view(torch.uint8).unflatten(-1, (-1, 2))[..., 1]
    assert torch.equal(Fp8E5M2(256, truncate=True).quantize(x), high)


@given(st.lists(st.floats(-57344, 57344, width=32), min_size=8, max_size=8))
def test_truncation_goes_towards_zero(values):
    x = torch.tensor(values)
    fmt = Fp8E5M2(8, truncate=True)
    back = fmt.dequantize(fmt.quantize(x))
    assert (back.abs() <= x.abs()).all() and ((back - x).abs() <= fmt.error_bound(x)).all()


# ----------------------------------------------------------------------------------------------------------- MLA


@pytest.mark.parametrize("token", [MlaFp8(), MlaModel1(), MlaDense(), MlaDense("fp16", 512)], ids=lambda t: t.name)
@given(seed=st.integers(0, 2**31), log_size=st.floats(-6, 4))
def test_mla_tokens_stay_under_their_bound(token, seed, log_size):
    x = gaussian(2, token.head_dim, seed=seed) * 10**log_size
    error = (token.dequantize(token.quantize(x), torch.float64) - x.double()).abs()
    assert (error <= token.error_bound(x)).all()


@pytest.mark.parametrize("token", [MlaFp8(), MlaModel1(), MlaDense()], ids=lambda t: t.name)
def test_rope_columns_are_kept_in_bf16(token):
    x = gaussian(3, token.head_dim).bfloat16()
    back = token.dequantize(token.quantize(x), torch.bfloat16)
    assert torch.equal(back[..., -64:], x[..., -64:])


@given(st.floats(2.0**-100, 2.0**100))
def test_scales_are_the_power_of_two_above(absmax):
    value = torch.tensor(absmax)
    scale = float(power_of_two_scale(value))
    wanted = max(float(value / 448), float(torch.tensor(1e-4)))
    assert math.log2(scale) == int(math.log2(scale))
    assert scale / 2 < wanted <= scale


def test_bytes_of_a_v32_token():
    token = MlaFp8()
    x = torch.zeros(576)
    x[:512] = torch.arange(4).repeat_interleave(128) + 1.0
    x[512:] = 1.5
    raw = token.quantize(x)
    scales = raw[512:528].view(torch.float32)
    assert scales.tolist() == [2.0**-8, 2.0**-7, 2.0**-7, 2.0**-6]
    assert raw[:512].view(torch.float8_e4m3fn).float().unflatten(0, (4, 128))[:, 0].tolist() == [256, 256, 384, 256]
    assert raw[528:].view(torch.bfloat16).tolist() == [1.5] * 64


def test_golden_bytes_of_a_v32_token():
    # Worked out by hand. Tile 0: the largest is 448, the scale 1, the codes are the numbers in E4M3. Tile 1: only 1e-9,
    # scale 2**-13. Tile 2: 449 is just above 448, scale 2. Tile 3: NaN counts as 0, infinity as bf16's largest,
    # 2**128 * (1 - 2**-8), which is more than 448 * 2**119.
    x = torch.zeros(576)
    x[:6] = torch.tensor([448.0, -448.0, 1.0, -0.0, 2.0**-9, 17.0])
    x[128] = 1e-9
    x[256:259] = torch.tensor([449.0, -3.0, 34.0])
    x[384:387] = torch.tensor([math.nan, -math.inf, 2.0**127])
    x[512:515] = torch.tensor([1.0, -math.inf, math.nan])
    raw = MlaFp8().quantize(x).tolist()
    assert raw[:6] == [0x7E, 0xFE, 0x38, 0x80, 0x01, 0x58]  # 17 lies between 16 and 18: to even
    assert raw[128] == 0
    assert raw[256:259] == [0x76, 0xBC, 0x58]  # 224.5 becomes 224, -1.5, 17 becomes 16
    assert raw[384:387] == [0x00, 0xF8, 0x70]  # in units of 2**120: -255, which becomes -256, and 128
    assert [raw[at : at + 4] for at in range(512, 528, 4)] == [
        [0, 0, 0x80, 0x3F], [0, 0, 0, 0x39], [0, 0, 0, 0x40], [0, 0, 0x80, 0x7B],
    ]  # fmt: skip
    assert raw[528:534] == [0x80, 0x3F, 0x7F, 0xFF, 0, 0]
    assert not any(raw[6:128] + raw[129:256] + raw[259:384] + raw[387:512] + raw[534:])


def test_golden_bytes_of_a_model1_token():
    x = torch.zeros(512)
    x[0], x[64], x[447] = 448.0, 449.0, -7.0
    x[511] = 3.0
    raw = MlaModel1().quantize(x).tolist()
    assert (raw[0], raw[64], raw[447]) == (0x7E, 0x76, 0xFE)
    assert raw[574:576] == [0x40, 0x40]
    assert raw[576:] == [127, 128, 114, 114, 114, 114, 121, 0]  # a tile of zeros has scale 2**-13


def test_golden_bytes_of_16_bit_tokens():
    x = torch.zeros(576)
    x[:3] = torch.tensor([1.0, math.nan, -math.inf])
    x[575] = -2.5
    bf16, fp16 = (MlaDense(dtype).quantize(x).tolist() for dtype in ("bf16", "fp16"))
    assert bf16[:6] == [0x80, 0x3F, 0, 0, 0x7F, 0xFF] and bf16[1150:] == [0x20, 0xC0]
    assert fp16[:6] == [0x00, 0x3C, 0, 0, 0xFF, 0xFB] and fp16[1150:] == [0x00, 0xC1]


def test_bytes_of_a_model1_page():
    token = MlaModel1()
    rows = token.quantize(gaussian(5, 2, 512))
    pages = token.to_pages(rows)
    assert pages.shape == (5, 2 * 584)
    assert torch.equal(pages[:, 576 : 2 * 576], rows[:, 1, :576])
    assert torch.equal(pages[:, 2 * 576 + 8 :], rows[:, 1, 576:])
    assert torch.equal(token.from_pages(pages, 2), rows)
    assert (rows[..., 583] == 0).all()
    padded = token.to_pages(rows, alignment=576)
    assert padded.shape == (5, 3 * 576) and torch.equal(token.from_pages(padded, 2), rows)
    exponent = rows[0, 0, 576].item() - 127
    assert 2.0**exponent == float(power_of_two_scale(token.dequantize(rows)[0, 0, :64].abs().amax()))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Int8(128, "row"), ValueError, "granularity is 'row'"),
        (lambda: Int8(128, "tensor", 2), ValueError, "num_groups is 2"),
        (lambda: Int8(128, "group", 3), ValueError, "does not split"),
        (lambda: Int8(-1), ValueError, "head_dim is -1"),
        (lambda: Int8(8, "tensor").quantize(torch.zeros(8)), ValueError, "outside the row; want scale"),
        (lambda: Int8(8, "tensor").quantize(torch.zeros(8), torch.zeros((), dtype=torch.int32)), TypeError, "int32"),
        (lambda: Int8(8, "channel").quantize(torch.zeros(3, 2, 8), torch.zeros(3, 8)), ValueError, "shape \\(3, 8\\)"),
        (lambda: Int8(8, "head").compute_scale(torch.zeros(8)), ValueError, "num_kv_heads"),
        (lambda: Int8(8).quantize(torch.zeros(3, 8), torch.zeros(3, 2)), ValueError, "num_groups"),
        (
            lambda: Int8(8).dequantize(torch.zeros(3, 12, dtype=torch.uint8), scale=torch.zeros(3, 1)),
            ValueError,
            "keeps its scales in the row",
        ),
        (lambda: Int8(8).pack(torch.zeros(8, dtype=torch.int8)), ValueError, "want 2: codes, scales"),
        (lambda: Int8(8).pack(torch.zeros(8), torch.zeros(1)), TypeError, "codes has dtype"),
        (lambda: Fp8E5M2(8).dequantize(torch.zeros(3, 9, dtype=torch.uint8)), ValueError, "8"),
        (lambda: MlaFp8(head_dim=512), ValueError, "this format has"),
        (lambda: MlaFp8().quantize(torch.zeros(2, 512)), ValueError, "576"),
        (lambda: MlaFp8().pack(torch.zeros(1)), ValueError, "1 parts"),
        (lambda: MlaDense("fp32"), ValueError, "dtype is 'fp32'"),
        (lambda: MlaDense("bf16", 128), ValueError, "head_dim is 128"),
        (lambda: MlaDense().pack(torch.zeros(1)), ValueError, "1 parts"),
        (lambda: MlaDense().pack(torch.zeros(512), torch.zeros(64)), TypeError, "latent has dtype"),
        (lambda: MlaModel1().to_pages(torch.zeros(584, dtype=torch.uint8)), ValueError, "page_size"),
        (lambda: MlaModel1().from_pages(torch.zeros(584, dtype=torch.uint8), 2), ValueError, ">= 1168"),
        (lambda: MlaModel1().from_pages(torch.zeros(584, dtype=torch.uint8), -1), ValueError, "page_size is -1; want"),
        (lambda: MlaModel1().page_bytes(cast(Any, 2.5)), TypeError, "page_size is 2.5; want an int"),
        (lambda: MlaModel1().page_bytes(2, 0), ValueError, "alignment is 0; want a positive int"),
        (lambda: MlaModel1().from_pages(torch.zeros(1168), 2), TypeError, "float32"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    "fmt", [Int4Row(64, 1), Int8(64), Fp8E4M3(64), Fp8E5M2(64), MlaFp8(), MlaModel1(), MlaDense()], ids=lambda f: f.name
)
def test_rows_at_any_offset_and_stride(fmt):
    rows = fmt.quantize(gaussian(4, fmt.head_dim))
    memory = torch.zeros(3 + 4 * (fmt.row_bytes + 5), dtype=torch.uint8)
    view = memory[3:].unflatten(0, (4, fmt.row_bytes + 5))[:, : fmt.row_bytes]
    view.copy_(rows)
    for ours, wanted in ((view, rows), (view[1], rows[1]), (view[::2], rows[::2])):
        assert torch.equal(fmt.dequantize(ours), fmt.dequantize(wanted))
        assert torch.equal(fmt.pack(*fmt.unpack(ours)), wanted)
