"""quantize_kv and dequantize_kv on CPU tensors: the formats themselves, their errors, and the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.formats.kv import format_of
from cute_kernels.kv_cache import dequantize_kv, quantize_kv
from cute_kernels.kv_cache.reference import shaped_scale
from tests.kv_cache.cases import ALL_FORMATS, DTYPES
from tests.tensors import among_others

every_format = pytest.mark.parametrize("kv_format", ALL_FORMATS)


def inputs(kv_format: str, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [2, 3, 4 heads, 96] and the scale that the format wants."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 96, generator=generator).to(dtype)
    granularity = format_of(kv_format).given_scale
    if granularity is None:
        return x, None
    shape = {"tensor": (1,), "head": (4,), "channel": (4, 96)}[granularity]
    return x, 0.02 + 0.02 * torch.rand(shape, generator=generator)


@every_format
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_they_are_the_formats(kv_format, dtype):
    form, (x, scale) = format_of(kv_format), inputs(kv_format, dtype)
    rows = quantize_kv(x, kv_format=kv_format, scale=scale)
    assert rows.dtype == form.cache_dtype and rows.shape == (2, 3, 4, form.row_elements(96))
    assert torch.equal(rows, form.quantize(x, shaped_scale(form, scale)).view(form.cache_dtype))
    back = dequantize_kv(rows, kv_format=kv_format, head_dim=96, dtype=dtype, scale=scale)
    assert torch.equal(back, form.dequantize(rows, 96, dtype, shaped_scale(form, scale)))


@every_format
def test_out_is_written_and_returned(kv_format):
    x, scale = inputs(kv_format)
    rows = quantize_kv(x, kv_format=kv_format, scale=scale)
    for dtype in format_of(kv_format).cache_dtypes:
        room = torch.zeros_like(rows, dtype=dtype)
        assert quantize_kv(x, kv_format=kv_format, scale=scale, out=room) is room
        assert torch.equal(room.view(torch.uint8), rows.view(torch.uint8))
        room = torch.zeros_like(x)
        assert dequantize_kv(rows.view(dtype), kv_format=kv_format, head_dim=96, scale=scale, out=room) is room
        assert torch.equal(room, dequantize_kv(rows, kv_format=kv_format, head_dim=96, scale=scale))


@every_format
def test_blocks_with_gaps_are_read_and_written_between_them(kv_format):
    x, scale = inputs(kv_format)
    rows = quantize_kv(x, kv_format=kv_format, scale=scale)
    room, beside = among_others(rows, 1)
    assert quantize_kv(among_others(x, 2)[0], kv_format=kv_format, scale=scale, out=room) is room
    assert torch.equal(room.view(torch.uint8), rows.view(torch.uint8)) and (beside.view(torch.uint8) == 0xFF).all()
    back = dequantize_kv(room, kv_format=kv_format, head_dim=96, scale=scale)
    assert torch.equal(back, dequantize_kv(rows, kv_format=kv_format, head_dim=96, scale=scale))


BAD_QUANTIZE: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"x": [1.0]}, "x: got list, want a torch.Tensor"),
    "integers": ({"x": torch.zeros(4, 64).int()}, "x: got dtype torch.int32, want one of torch.bfloat16"),
    "one row": ({"x": torch.zeros(64)}, r"x: got shape \[64\], want \[..., num_kv_heads, head_dim\]"),
    "head_dim 60": ({"x": torch.zeros(4, 60)}, "x: got head_dim 60, want one of 64, 80"),
    "gaps": ({"x": torch.zeros(4, 128)[:, ::2]}, "x: got strides .* want rows contiguous, in blocks of dense rows"),
    "unknown format": ({"kv_format": "int3"}, "kv_format: got 'int3', want one of"),
    "a scale too many": (
        {"scale": torch.ones(())},
        "scale: got a tensor of shape .*, want None: int4_g4 has no such scale",
    ),
    "no scale": ({"kv_format": "int8_head"}, r"scale: got None, want torch.float32 \[4\] or \[4, 1\]"),
    "out of another dtype": (
        {"out": torch.zeros(2, 3, 4, 64)},
        "out: got dtype torch.float32, want torch.uint8",
    ),
    "out of another shape": (
        {"out": torch.zeros(2, 3, 4, 65, dtype=torch.uint8)},
        r"out: got shape \[2, 3, 4, 65\], want \[2, 3, 4, 64\]",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_QUANTIZE.values(), ids=list(BAD_QUANTIZE))
def test_what_does_not_quantise_is_refused_by_name(changes, message):
    x, _ = inputs("int4_g4")
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        quantize_kv(**({"x": x, "kv_format": "int4_g4"} | changes))


BAD_DEQUANTIZE: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"rows": 1.0}, "rows: got float, want a torch.Tensor"),
    "signed bytes": ({"rows": torch.zeros(4, 64).char()}, "rows: got dtype torch.int8, want torch.uint8 for int4_g4"),
    "short rows": (
        {"rows": torch.zeros(4, 60, dtype=torch.uint8)},
        r"rows: got shape \[4, 60\], want \[..., num_kv_heads, 64\] for int4_g4 at head_dim 96",
    ),
    "head_dim 100": ({"head_dim": 100}, "head_dim: got 100, want one of 64, 80"),
    "fp64": ({"dtype": torch.float64}, "dtype: got torch.float64, want one of"),
    "out of another dtype": ({"out": torch.zeros(2, 3, 4, 96)}, "out: got dtype torch.float32, want torch.bfloat16"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_DEQUANTIZE.values(), ids=list(BAD_DEQUANTIZE))
def test_what_does_not_dequantise_is_refused_by_name(changes, message):
    rows = quantize_kv(inputs("int4_g4")[0], kv_format="int4_g4")
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        dequantize_kv(**({"rows": rows, "kv_format": "int4_g4", "head_dim": 96} | changes))


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g2", "int8_channel", "e4m3_token_head"])
def test_the_operators_pass_opcheck_and_compile(kv_format):
    torch.compiler.reset()
    x, scale = inputs(kv_format)
    torch.library.opcheck(torch.ops.cute_kernels.quantize_kv.default, (x, kv_format, scale))
    rows = quantize_kv(x, kv_format=kv_format, scale=scale)
    torch.library.opcheck(torch.ops.cute_kernels.dequantize_kv.default, (rows, kv_format, 96, torch.bfloat16, scale))

    def there_and_back(x):
        rows = quantize_kv(x * 2, kv_format=kv_format, scale=scale)
        return dequantize_kv(rows, kv_format=kv_format, head_dim=96, scale=scale) + 1

    torch.testing.assert_close(torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(x), there_and_back(x))
