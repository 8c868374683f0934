"""The bulk kernels' own code, run lane by lane: rows and numbers are the formats', bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cute_kernels.formats.kv import HEAD_DIMS, format_of
from cute_kernels.kv_cache import CacheTransform, quantize_kv
from cute_kernels.kv_cache.bulk_ops import half_of, row_blocks
from cute_kernels.kv_cache.config import BulkConfig, RowTransform, row_alignment, row_transform_of, team_lanes
from cute_kernels.kv_cache.reference import quantize, shaped_scale
from simulator import Float32, Gpu, running
from tests.each import each
from tests.kv_cache.awkward import awkward, same_bits, scales_for
from tests.kv_cache.cases import ALL_FORMATS, DTYPES
from tests.kv_cache.simulate import simulate_bulk
from tests.kv_cache.transformed import make_transform
from tests.tensors import among_others

WIDELY = {"bf16", "int4_g8", "int8_token_head", "int8_channel", "e4m3_head"}  # codes and scales of each kind


@each("kv_format, head_dim", [(name, d) for d in HEAD_DIMS for name in ALL_FORMATS if d == 128 or name in WIDELY])
def test_awkward_numbers_become_the_formats_rows(kv_format, head_dim):
    form = format_of(kv_format)
    x = awkward(head_dim).view(-1, 2, head_dim)
    for scale in scales_for(kv_format, 2, head_dim):
        rows = torch.zeros((*x.shape[:-1], form.row_elements(head_dim)), dtype=form.cache_dtype)
        simulate_bulk(BulkConfig("quantize", kv_format, "fp32", head_dim), x, rows, scale)
        want = quantize(form, x, scale).view(form.cache_dtype)
        assert same_bits(rows, want), f"scale {scale}"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kv_format", ALL_FORMATS)
def test_16_bit_numbers_become_the_formats_rows(kv_format, dtype):
    form = format_of(kv_format)
    x = (3 * torch.randn(6, 3, 128, generator=torch.Generator().manual_seed(0))).to(DTYPES[dtype])
    scale = scales_for(kv_format, 3, 128)[0]
    rows = torch.zeros((*x.shape[:-1], form.row_elements(128)), dtype=form.cache_dtype)
    simulate_bulk(BulkConfig("quantize", kv_format, dtype, 128), x, rows, scale)
    assert same_bits(rows, quantize(form, x, scale).view(form.cache_dtype))


@each("dtype", ["bf16", "fp16", "fp32"])
@each("head_dim", [80, 128, 192])
@each("kv_format", ALL_FORMATS)
def test_rows_become_the_formats_numbers(kv_format, head_dim, dtype):
    """All codes occur; headers are those of real rows."""
    form = format_of(kv_format)
    x = 3 * torch.randn(8, 3, head_dim, generator=torch.Generator().manual_seed(0))
    scale = scales_for(kv_format, 3, head_dim)[0]
    rows = quantize(form, x, scale).view(form.cache_dtype)
    if kv_format in ("e5m2", "int8_head", "e4m3_tensor", "int8_channel"):
        rows.view(torch.uint8)[:] = torch.arange(rows.numel()).view(rows.shape).to(torch.uint8)
    numbers = torch.zeros_like(x, dtype=DTYPES[dtype])
    simulate_bulk(BulkConfig("dequantize", kv_format, dtype, head_dim), numbers, rows, scale)
    assert same_bits(numbers, form.dequantize(rows, head_dim, DTYPES[dtype], shaped_scale(form, scale)))


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4", "int8_channel"])
def test_pages_apart_and_numbers_of_a_fused_projection(kv_format):
    """Both ways; what lies between blocks is neither read nor written."""
    form, shape = format_of(kv_format), (4, 4, 2, 64)
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).bfloat16()
    scale = scales_for(kv_format, 2, 64)[0]
    numbers, _ = among_others(x, 2)  # heads of a token lie together
    want = quantize(form, x, scale).view(form.cache_dtype)
    rows, beside = among_others(torch.zeros_like(want), 1)  # pages apart
    config = BulkConfig("quantize", kv_format, "bf16", 64)
    simulate_bulk(config, numbers, rows, scale)
    assert same_bits(rows, want) and bool((beside.view(torch.uint8) == 0xFF).all())
    back, beside = among_others(torch.zeros_like(x), 2)
    simulate_bulk(replace(config, direction="dequantize"), back, rows, scale)
    assert same_bits(back, form.dequantize(want, 64, torch.bfloat16, shaped_scale(form, scale)))
    assert bool(beside.isnan().all())


def test_where_rows_lie_in_two_numbers():
    """Dense rows of a block, and elements from one to the next; None where that is not all."""
    x = torch.zeros(3, 5, 2, 64)
    assert row_blocks(x) == (30, 30 * 64) and row_blocks(x[:1]) == (10, 640)
    assert (
        row_blocks(x[:, :4]) == (8, 640) and row_blocks(x[:, :, :1]) == (1, 128) and row_blocks(x[:, 2:3]) == (2, 640)
    )
    assert row_blocks(x[:2, :, :1]) == (1, 128) and row_blocks(x[:0]) is not None
    assert (
        row_blocks(x[:, :4, :1]) is None and row_blocks(x[..., ::2]) is None and row_blocks(x.transpose(1, 2)) is None
    )
    assert row_blocks(x[:1].expand(3, 5, 2, 64)) is None and row_blocks(x[::2]) == (10, 1280)


@each("head_dim", HEAD_DIMS)
@each("kv_format", ALL_FORMATS)
def test_the_alignment_that_is_asked_for_is_what_the_accesses_need(kv_format, head_dim):
    from cute_kernels.kv_cache.rows import make_row

    row = make_row(kv_format, head_dim, team_lanes(head_dim))
    assert row_alignment(kv_format, head_dim, team_lanes(head_dim)) == max(row.codes.unit, 4 * row.has_header)


def test_quotients_are_ieees():
    """From a guess that may be an ulp off on either side, a / b to the last bit, where rounding is hardest, too."""
    from cute_kernels.device import quotients

    rng = np.random.default_rng(0)
    edge = np.array([0x3F800000, 0x3F800001, 0x3FFFFFFF, 0x3FFFFFFE, 0x3FC00000, 0x3F869913, 0x3FAAAAAC], np.uint32)
    with running(Gpu()):  # for all of them: it takes longer than a trial
        for trial in range(600):
            bits = rng.integers(0x3F800000, 0x40000000, (2, 32), dtype=np.uint32)
            if trial % 2:
                bits[trial // 2 % 2] = rng.choice(edge, 32)
            if trial % 3 == 0:  # quotients next to halfway between two numbers
                halfway = (bits[0].view(np.float32).astype(np.float64) + 2.0**-24) * bits[1].view(np.float32)
                bits[0] = halfway.astype(np.float32).view(np.uint32)
            a, b = (Float32(row.view(np.float32)) for row in bits)
            a = a * np.float32(2.0 ** rng.integers(-12, 12))
            reciprocal = quotients.reciprocal_of(b)
            quotient = quotients.quotient_of(a, b, reciprocal)
            assert (np.asarray(reciprocal) == np.float32(1.0) / np.asarray(b)).all()
            assert (np.asarray(quotient) == np.asarray(a) / np.asarray(b)).all()


def test_maxima_over_the_largest_code_are_ieees():
    from cute_kernels.device import quotients

    rng = np.random.default_rng(1)
    with running(Gpu()):
        for divisor in (15.0, 127.0, 448.0):
            for trial in range(400):
                top = 0x7F7FFFFF if trial % 2 else 0x00900000  # any finite number; subnormals and around
                value = Float32(rng.integers(0, top, 32, dtype=np.uint32).view(np.float32))
                got = quotients.over_constant(value, divisor)
                assert (np.asarray(got) == np.asarray(value) / np.float32(divisor)).all()


@each("operand", ["k", "v"])
@each("head_dim, width", [(64, 64), (128, 32), (128, 1), (256, 128), (80, 1)])
@each("kv_format", ["bf16", "int4_g1", "int4_g4", "int8_token_head", "e5m2"])
def test_transformed_numbers_become_the_formats_rows(kv_format, head_dim, width, operand):
    """Of K with its center and of V; bit for bit those of the transform's reference in fp32."""
    form = format_of(kv_format)
    x = (3 * torch.randn(8, 3, head_dim, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    transform = make_transform(3, head_dim, k_rotation=width, v_rotation=width)
    half = half_of(transform, operand)
    assert half is not None
    config = BulkConfig("quantize", kv_format, "bf16", head_dim, transform=row_transform_of(half, False))
    assert config.can_implement() is None
    rows = torch.zeros((*x.shape[:-1], form.row_elements(head_dim)), dtype=form.cache_dtype)
    simulate_bulk(config, x, rows, None, (half.k_center, half.k_factor))
    change = transform.keys if operand == "k" else transform.values
    assert same_bits(rows, quantize(form, change(x.float()), None).view(form.cache_dtype))
    assert same_bits(rows, quantize_kv(x, kv_format=kv_format, transform=transform, operand=operand))


def test_a_transform_in_bulk_that_does_not_fit_is_refused():
    x = torch.zeros(2, 3, 64)
    with pytest.raises(ValueError, match="operand: got None, want 'k' or 'v' with a transform"):
        quantize_kv(x, kv_format="int4_g4", transform=make_transform(3, 64))
    with pytest.raises(ValueError, match=r"transform: got constants \[2, 64\], want \[3, 64\], x's heads"):
        quantize_kv(x, kv_format="int4_g4", transform=make_transform(2, 64), operand="v")
    with pytest.raises(ValueError, match="transform: got a rotation of 128 columns, want one that divides head_dim 64"):
        quantize_kv(x, kv_format="int4_g4", transform=CacheTransform(k_rotation=128), operand="k")
    with pytest.raises(TypeError, match="transform: got str, want a CacheTransform"):
        quantize_kv(x, kv_format="int4_g4", transform="hadamard", operand="k")  # type: ignore[arg-type]
    base = BulkConfig("quantize", "int4_g4", "bf16", 96, transform=RowTransform(k_rotation=32))
    assert "k_rotation 32 is not 1 with a head_dim of 96" in str(base.can_implement())
    assert replace(base, direction="dequantize", head_dim=64).can_implement() is not None


def test_what_only_the_other_operand_has_changes_nothing():
    x = torch.randn(2, 3, 64)
    plain = quantize_kv(x, kv_format="int4_g4")
    of_k = make_transform(3, 64, k_rotation=64, parts="center factor")
    assert torch.equal(quantize_kv(x, kv_format="int4_g4", transform=of_k, operand="v"), plain)
    compiled = torch.compile(lambda: quantize_kv(x, kv_format="int4_g4", transform=of_k, operand="k"), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    assert torch.equal(compiled(), quantize_kv(x, kv_format="int4_g4", transform=of_k, operand="k"))
