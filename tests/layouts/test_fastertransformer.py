"""FasterTransformer / TensorRT-LLM preprocessing against loops written from the formats, byte for byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts.transform import pack, unpack
from layouts.weights import fastertransformer as ft
from tests.each import each

INT8_ROWS = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
INT4_ROWS = [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]
INT4_ROWS += [4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31]
FP8_ROWS = [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23]
FP8_ROWS += [8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31]
ROWS = {(8, 16): INT8_ROWS, (4, 16): INT4_ROWS, (4, 8): FP8_ROWS}


def weight(k, n, bits, experts=None, seed=0):
    shape = (k, n * bits // 8) if experts is None else (experts, k, n * bits // 8)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def elements(q, bits):
    """Nested lists [K][N] of unsigned elements of one matrix."""
    return unpack(q, bits).tolist()


def packed(rows, bits):
    return pack(torch.tensor(rows, dtype=torch.uint8), bits).view(torch.int8)


def naive_preprocess(q, bits, arch, activation_bits=16):
    """One matrix, step by step, one element at a time; returns the stored bytes flat."""
    w = elements(q, bits)
    k, n = len(w), len(w[0])
    if arch not in (70, 100):
        order = ROWS[bits, activation_bits]
        w = [w[t // len(order) * len(order) + order[t % len(order)]] for t in range(k)]
    if arch == 70:
        flat = [w[i][j] for i in range(k) for j in range(n)]
    else:
        flat = [w[i][j] for j in range(n) for i in range(k)]
    if arch not in (70, 90, 100):
        rows, columns = 1024 // activation_bits, activation_bits // bits
        out = [0] * len(flat)
        for j in range(n):
            for i in range(k):
                line = (j // columns) * (k // rows) + i // rows
                out[(line * columns + j % columns) * rows + i % rows] = flat[j * k + i]
        flat = out
    if arch != 100:
        order = [0, 2, 1, 3] if bits == 8 else [0, 2, 4, 6, 1, 3, 5, 7]
        width = len(order)
        flat = [(flat[t // width * width + order[t % width]] + (1 << bits - 1)) % (1 << bits) for t in range(len(flat))]
    return packed(flat, bits)


CASES = [(8, arch, 16) for arch in (70, 75, 80, 86, 89, 90, 100, 120)]
CASES += [(4, arch, 16) for arch in (70, 75, 80, 86, 89, 90, 100, 120)]
CASES += [(4, arch, 8) for arch in (89, 90, 100, 120)]


@each("bits, arch, activation_bits", CASES)
@each("k, n", [(128, 8), (128, 40), (384, 16)])
def test_bytes_are_those_of_the_definition(bits, arch, activation_bits, k, n):
    q = weight(k, n, bits)
    got = ft.preprocess(q, bits, arch, activation_bits)
    assert got.shape == q.shape and got.dtype == torch.int8
    assert torch.equal(got.flatten(), naive_preprocess(q, bits, arch, activation_bits))
    assert torch.equal(ft.restore(got, bits, arch, activation_bits), q)


@pytest.mark.parametrize(("bits", "arch", "activation_bits"), CASES)
def test_expert_stacks_take_the_ampere_layout_from_hopper_on(bits, arch, activation_bits):
    q = weight(128, 16, bits, experts=3)
    got = ft.preprocess(q, bits, arch, activation_bits)
    same_as = 120 if arch >= 90 else arch
    for expert in range(3):
        assert torch.equal(got[expert].flatten(), naive_preprocess(q[expert], bits, same_as, activation_bits))
    assert torch.equal(ft.restore(got, bits, arch, activation_bits), q)


@pytest.mark.parametrize("bits", [4, 8])
def test_each_step_alone_and_chained(bits):
    q = weight(128, 16, bits)
    w = elements(q, bits)
    order = ROWS[bits, 16]
    s1 = ft.permute_rows(q, bits)
    assert elements(s1, bits) == [w[t // len(order) * len(order) + order[t % len(order)]] for t in range(128)]
    s2 = ft.transpose(s1, bits)
    assert elements(s2, bits) == [list(column) for column in zip(*elements(s1, bits), strict=True)]
    s3 = ft.interleave_columns(s2, bits)
    columns = 16 // bits
    assert s3.shape == (16 // columns, columns * s2.shape[-1])
    first_line = [value for j in range(columns) for value in elements(s2, bits)[j][:64]]
    assert elements(s3, bits)[0][: 64 * columns] == first_line
    assert torch.equal(ft.add_bias_and_interleave(s3, bits).view(q.shape), ft.preprocess(q, bits, 80))


def test_step_four_on_one_register():
    q = packed([[0, 1, 2, 3, 4, 5, 6, 7]], 4)
    assert elements(ft.add_bias_and_interleave(q, 4), 4) == [[8, 10, 12, 14, 9, 11, 13, 15]]
    q = torch.tensor([[0, 1, -128, 127]], dtype=torch.int8)
    assert ft.add_bias_and_interleave(q, 8).view(torch.uint8).tolist() == [[128, 0, 129, 255]]


@settings(max_examples=60)
@given(
    st.sampled_from(CASES),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 2**31),
)
def test_restore_inverts_preprocess(case, tiles, eights, experts, seed):
    bits, arch, activation_bits = case
    q = weight(128 * tiles, 8 * eights, bits, experts, seed)
    assert torch.equal(ft.restore(ft.preprocess(q, bits, arch, activation_bits), bits, arch, activation_bits), q)


@pytest.mark.parametrize(("bits", "arch", "activation_bits"), CASES)
def test_every_preprocessing_is_proved_on_a_power_of_two_tile(bits, arch, activation_bits):
    whole = ft.transform(128, 16, bits, arch, activation_bits)
    assert {proof.method for proof in whole.verify()} == {"symbolic", "matrix", "exhaustive"}
    assert whole.bit_map().is_bit_permutation
    product = ft.steps(128, 16, bits, arch, activation_bits)
    matrix = product[0].bit_map()
    for step in product[1:]:
        matrix = matrix @ step.bit_map()
    assert matrix == whole.bit_map()


def test_the_whole_int4_preprocessing_moves_each_byte_once_with_three_exchanges():
    plan = ft.transform(8192, 8192, 4, 80)._plan
    assert (plan.word_bits, len(plan.exchanges), len(plan.swaps)) == (32, 3, 0)


# ---------------------------------------------------------------------------------------------------- quantisation


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("experts", [None, 2])
def test_quantisation_error_is_half_a_step_and_nothing_saturates(bits, scale_dtype, experts):
    shape = (64, 24) if experts is None else (experts, 64, 24)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.05
    w[..., 3, 5] = 4.0
    q, scale = ft.symmetric_quantize(w, bits, scale_dtype)
    assert scale.dtype == scale_dtype and scale.shape == (*shape[:-2], 24) and q.dtype == torch.int8
    error = (ft.dequantize(q, scale, bits) - w).abs()
    rounding = torch.finfo(scale_dtype).eps * w.abs().amax(dim=-2, keepdim=True)
    assert (error <= scale.float().unsqueeze(-2) / 2 + rounding + 1e-7).all()


@pytest.mark.parametrize(("bits", "high"), [(4, 7), (8, 127)])
def test_the_whole_range_is_used(bits, high):
    w = torch.tensor([[1.0, -1.0, 0.0, 1.0], [0.5, 0.25, 0.0, -1.0]])
    q, scale = ft.symmetric_quantize(w, bits, torch.float32)
    assert scale.tolist() == pytest.approx([1 / high, 1 / (high + 1), 0.0, 1 / high])
    codes = ft.dequantize(q, torch.ones(4), bits)
    assert codes[0].tolist() == [high, -high - 1, 0, high]
    assert codes[:, 2].tolist() == [0, 0], "a zero column gives zero codes"


def test_compat_reproduces_the_original_codes():
    w = torch.tensor([[1.0, -1.0, 0.0, 0.3], [0.5 / 8, -2.5 / 8, 0.0, -1.0]])
    q, scale = ft.symmetric_quantize(w, 4, torch.float32, compat=True)
    assert scale.tolist() == pytest.approx([1 / 8, 1 / 8, 0.0, 1 / 8])
    codes = ft.dequantize(q, torch.ones(4), 4)
    assert codes.tolist() == [[7, -8, -8, 2], [1, -3, -8, -8]], "saturated maximum, ties away from zero, zero column"
    q, _ = ft.symmetric_quantize(w, 8, torch.float32, compat=True)
    assert q.tolist() == [[127, -128, 127, 38], [8, -40, 127, -128]]


def test_scales_below_the_dtype_give_zero_codes():
    q, scale = ft.symmetric_quantize(torch.full((4, 2), 1e-7), 8, torch.float16)
    assert not q.any() and not scale.any()


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ft.preprocess(weight(96, 8, 8), 8, 80), ValueError, "K is 96; want a positive multiple of 64"),
        (lambda: ft.preprocess(weight(24, 8, 8), 8, 80), ValueError, "K is 24; want a positive multiple of 16"),
        (lambda: ft.preprocess(weight(64, 8, 4), 4, 89, 8), ValueError, "K is 64; want a positive multiple of 128"),
        (lambda: ft.preprocess(weight(64, 12, 8), 8, 80), ValueError, "N is 12; want a positive multiple of 8"),
        (lambda: ft.preprocess(weight(64, 12, 4), 4, 100), ValueError, "N is 12"),
        (lambda: ft.preprocess(weight(64, 8, 8), 8, 61), ValueError, "arch is 61"),
        (lambda: ft.preprocess(weight(64, 8, 8), 3, 80), ValueError, "bits is 3"),
        (lambda: ft.preprocess(weight(64, 8, 8), 8, 89, 8), ValueError, "activation_bits is 8 with 8-bit"),
        (lambda: ft.preprocess(weight(128, 8, 4), 4, 80, 8), ValueError, "FP8 activations want one of"),
        (lambda: ft.preprocess(weight(64, 8, 8)[0], 8, 80), ValueError, r"shape \(8,\)"),
        (lambda: ft.preprocess(weight(64, 8, 8).float(), 8, 80), TypeError, "float32"),
        (lambda: ft.preprocess(weight(64, 8, 8).to(torch.uint8), 8, 80), TypeError, "uint8"),
        (lambda: ft.add_bias_and_interleave(weight(1, 2, 8), 8), ValueError, r"K \* N is 2"),
        (lambda: ft.transpose(weight(3, 8, 4), 4), ValueError, "K is 3"),
        (lambda: ft.symmetric_quantize(torch.zeros(4, 5), 4), ValueError, "N = 5"),
        (lambda: ft.symmetric_quantize(torch.zeros(4, 4, dtype=torch.int32), 4), TypeError, "int32"),
        (lambda: ft.symmetric_quantize(torch.zeros(4, 4), 4, torch.int8), TypeError, "scale_dtype"),
        (lambda: ft.symmetric_quantize(torch.zeros(4), 4), ValueError, r"shape \(4,\)"),
        (lambda: ft.symmetric_quantize(torch.full((2, 2), float("nan")), 8), ValueError, "NaN"),
        (lambda: ft.symmetric_quantize(torch.full((2, 2), 1e9), 8), ValueError, "beyond torch.float16"),
    ],
)
def test_bad_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
