"""quantize_kv and dequantize_kv on a GPU are the formats on the CPU, to the bit."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.formats.kv import HEAD_DIMS, format_of
from cute_kernels.kv_cache import dequantize_kv, quantize_kv
from cute_kernels.kv_cache.compile import BulkSpec
from cute_kernels.kv_cache.config import BulkConfig
from cute_kernels.kv_cache.reference import quantize, shaped_scale
from cute_kernels.runtime import arch_of, load_many
from tests.kv_cache.awkward import awkward, same_bits, scales_for
from tests.kv_cache.cases import ALL_FORMATS, DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("bulk_kernels")]

CUDA = "cuda"
FORMATS_OF_CODES = ("int4_g8", "int8_channel", "int8_g2", "e4m3_token_head", "e5m2")
every_format = pytest.mark.parametrize("kv_format", ALL_FORMATS)


def specs() -> list[BulkSpec]:
    """All kernels of this file, to be compiled beforehand: `python -m tests.gpu.prepare`."""
    configs = [BulkConfig("quantize", name, "fp32", head_dim) for name in ALL_FORMATS for head_dim in HEAD_DIMS]
    configs += [
        BulkConfig(direction, name, dtype, 128)
        for direction in ("quantize", "dequantize")
        for name in ALL_FORMATS
        for dtype in DTYPES
    ]
    configs += [
        BulkConfig("dequantize", name, dtype, head_dim)
        for name in FORMATS_OF_CODES
        for head_dim in HEAD_DIMS
        for dtype in DTYPES
    ]
    configs += [BulkConfig("quantize", "int8_g4", "bf16", 64), BulkConfig("dequantize", "int8_g4", "bf16", 64)]
    return [BulkSpec(config) for config in dict.fromkeys(configs)]


@pytest.fixture(scope="module")
def bulk_kernels() -> None:
    load_many(specs(), arch_of())


def to_gpu(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to(CUDA)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@every_format
def test_awkward_numbers(kv_format, head_dim):
    form = format_of(kv_format)
    x = awkward(head_dim).view(-1, 2, head_dim)
    for scale in scales_for(kv_format, 2, head_dim):
        rows = quantize_kv(x.to(CUDA), kv_format=kv_format, scale=to_gpu(scale)).cpu()
        assert rows.dtype == form.cache_dtype
        assert same_bits(rows, quantize(form, x, scale).view(form.cache_dtype)), f"scale {scale}"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (33, 5, 2), (1000, 8)], ids=str)
@every_format
def test_there_and_back(kv_format, shape, dtype):
    """Numbers of rows that end anywhere in a CTA."""
    form = format_of(kv_format)
    x = (3 * torch.randn(*shape, 128, generator=torch.Generator().manual_seed(0))).to(dtype)
    scale = scales_for(kv_format, shape[-1], 128)[0]
    want = quantize(form, x, scale).view(form.cache_dtype)
    rows = quantize_kv(x.to(CUDA), kv_format=kv_format, scale=to_gpu(scale))
    assert same_bits(rows.cpu(), want)
    back = dequantize_kv(rows, kv_format=kv_format, head_dim=128, dtype=dtype, scale=to_gpu(scale))
    assert same_bits(back.cpu(), form.dequantize(want, 128, dtype, shaped_scale(form, scale)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_format", FORMATS_OF_CODES)
def test_every_code_comes_back(kv_format, head_dim):
    form = format_of(kv_format)
    x = torch.randn(64, 4, head_dim, generator=torch.Generator().manual_seed(1))
    scale = scales_for(kv_format, 4, head_dim)[0]
    rows = quantize(form, x, scale).view(form.cache_dtype)
    header = form.row_bytes(head_dim) - head_dim // (2 if kv_format.startswith("int4") else 1)
    codes = rows.view(torch.uint8)[..., header:]
    codes[:] = torch.arange(codes.numel()).view(codes.shape).to(torch.uint8)
    for dtype in DTYPES.values():
        got = dequantize_kv(rows.to(CUDA), kv_format=kv_format, head_dim=head_dim, dtype=dtype, scale=to_gpu(scale))
        assert same_bits(got.cpu(), form.dequantize(rows, head_dim, dtype, shaped_scale(form, scale)))


def test_more_than_2_to_the_31_elements():
    num_rows = 2**31 // 64 + 77
    x = torch.zeros(num_rows, 1, 64, dtype=torch.bfloat16, device=CUDA)
    tail = torch.randn(1000, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[-1000:] = tail.to(CUDA)
    rows = quantize_kv(x, kv_format="int8_g4")
    assert same_bits(rows[-1000:].cpu(), format_of("int8_g4").quantize(tail))
    assert not rows[:-1000].any(dim=-1).any()
    back = dequantize_kv(rows, kv_format="int8_g4", head_dim=64, out=x)
    assert torch.equal(back[-1000:].cpu(), format_of("int8_g4").dequantize(rows[-1000:].cpu(), 64, torch.bfloat16))


def test_no_rows_are_no_work_and_misaligned_ones_are_refused():
    empty = quantize_kv(torch.empty(0, 4, 128, device=CUDA), kv_format="int4_g4")
    assert empty.shape == (0, 4, 80)
    x = torch.zeros(129, device=CUDA)[1:].view(1, 1, 128)
    with pytest.raises(ValueError, match="x: got a tensor that starts 4 bytes past a multiple of 16"):
        quantize_kv(x, kv_format="int4_g4")


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g2", "int8_channel", "e4m3_token_head"])
def test_the_operators_pass_opcheck(kv_format):
    x = torch.randn(5, 2, 128, device=CUDA)
    scale = to_gpu(scales_for(kv_format, 2, 128)[0])
    torch.library.opcheck(torch.ops.cute_kernels.quantize_kv.default, (x, kv_format, scale))
    rows = quantize_kv(x, kv_format=kv_format, scale=scale)
    torch.library.opcheck(torch.ops.cute_kernels.dequantize_kv.default, (rows, kv_format, 128, torch.bfloat16, scale))


def test_a_captured_graph_replays():
    x = torch.randn(64, 4, 128, device=CUDA)
    rows = quantize_kv(x, kv_format="int4_g4")
    out = torch.empty_like(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_kv(x, kv_format="int4_g4", out=out)
    x.neg_()
    graph.replay()
    assert torch.equal(out, quantize_kv(x, kv_format="int4_g4"))
