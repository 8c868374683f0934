"""`pack_weight`: codes and scales of checkpoints are the packed weight's, bit by bit; and what is refused."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import grouped_linear, quantized_linear
from cute_kernels.formats.weights import MXFP4, weight_format
from cute_kernels.gemm import PackedWeight, pack_experts, pack_weight

N, K = 200, 520  # tails of tiles and groups
LEVELS = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def bytes_of(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def fp8_codes(*shape: int) -> torch.Tensor:
    codes = bytes_of(*shape)
    return torch.where(codes & 0x7F == 0x7F, 5, codes)


def scales_of(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 1e-3


def powers(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.double() - 127).float()


def spread(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales of blocks, one for each weight."""
    return scales.repeat_interleave(rows, 0)[:N].repeat_interleave(columns, 1)[:, :K]


def fp4_numbers(codes: torch.Tensor) -> torch.Tensor:
    """The lower four bits of a byte are the even input's."""
    return torch.stack((LEVELS[(codes & 15).long()], LEVELS[(codes >> 4).long()]), dim=-1).flatten(-2)


def exactly(weight: PackedWeight, wanted: torch.Tensor) -> bool:
    return torch.equal(weight.dequantize(torch.float32), wanted)


@pytest.mark.parametrize("view", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2], ids=str)
def test_mxfp4_is_what_the_standard_says(view):
    codes, scales = bytes_of(N, K // 2), bytes_of(N, 17, low=0, high=254)
    wanted = fp4_numbers(codes) * spread(powers(scales), 1, 32)
    assert exactly(pack_weight("mxfp4", codes.view(view), scales), wanted)
    assert exactly(pack_weight(MXFP4, codes.view(view), scales.view(torch.float8_e8m0fnu)), wanted)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("rows", [(), (1,), (N,), (N, 1)], ids=str)
def test_the_second_level_of_nvfp4_multiplies_or_divides(rows, divides):
    codes, scales = bytes_of(N, K // 2), bytes_of(N, 33, high=0x7F)
    second = 2.0 ** (scales_of(*rows) * 4000).round() * 0.75
    numbers = scales.view(torch.float8_e4m3fn).float()
    factor = (1 / second if divides else second).reshape(-1, 1)
    wanted = fp4_numbers(codes) * spread(numbers, 1, 16) * factor
    weight = pack_weight("nvfp4", codes, scales.view(torch.float8_e4m3fn), second, second_divides=divides)
    assert exactly(weight, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (N,), (N, 1)], ids=str)
def test_fp8_has_a_scale_of_a_tensor_or_of_each_row(shape, dtype):
    codes, scales = fp8_codes(N, K), scales_of(*shape)
    numbers = codes.view(torch.float8_e4m3fn).float()
    weight = pack_weight("fp8", numbers.to(torch.float8_e4m3fn), scales, dtype=dtype)
    assert weight.dtype == dtype and exactly(weight, numbers * scales.reshape(-1, 1))
    assert exactly(pack_weight("fp8", codes, scales.bfloat16()), numbers * scales.bfloat16().float().reshape(-1, 1))


@pytest.mark.parametrize(
    ("name", "size", "by_row"),
    [("fp8_block", 128, False), ("fp8_block_e8m0", 128, False), ("mxfp8", 32, False), ("mxfp8", 32, True)],
)
def test_fp8_blocks_and_groups_are_exact(name, size, by_row):
    """Weights are what torch makes of code.float() * scale, rounded to bf16 by the same call."""
    codes, groups = fp8_codes(N, K), -(-K // size)
    shape = (N if by_row else -(-N // size), groups)
    scales = scales_of(*shape) if name == "fp8_block" else bytes_of(*shape, low=90, high=160)
    numbers = scales if name == "fp8_block" else powers(scales)
    weight = pack_weight(name, codes, scales)
    wanted = codes.view(torch.float8_e4m3fn).float() * spread(numbers, 1 if by_row else size, size)
    assert exactly(weight, wanted) and torch.equal(weight.dequantize(), wanted.bfloat16())
    assert exactly(PackedWeight.from_state_dict(weight.state_dict()), wanted)


def test_ends_of_the_ranges_of_scales_are_numbers():
    """E8M0 0 is 2**-127; scales of 0 make zeros."""
    codes = fp8_codes(64, 64)
    numbers = codes.view(torch.float8_e4m3fn).double()
    weight = pack_weight("mxfp8", codes, torch.tensor([[0, 254]], dtype=torch.uint8).expand(64, 2))
    wanted = (numbers * 2.0 ** torch.tensor([-127, 127]).repeat_interleave(32)).float()
    assert exactly(weight, wanted)
    assert not pack_weight("fp8", codes, 0 * scales_of(64)).dequantize().any()
    zeros = pack_weight("nvfp4", bytes_of(64, 32), torch.zeros(64, 4, dtype=torch.uint8), 0.5)
    assert not zeros.dequantize().any()


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "fp8_block_e8m0", "mxfp8"])
@pytest.mark.parametrize("nan", [0x7F, 0xFF])
def test_a_nan_code_makes_its_feature_nan_and_no_other(name, nan):
    codes, form = fp8_codes(N, K), weight_format(name)
    codes[7, 300] = nan
    shape = (N, -(-K // form.group_size)) if form.group_size else (N,)
    scales = scales_of(*shape) if form.scale_bytes > 1 else bytes_of(*shape, low=120, high=130)
    weight = pack_weight(name, codes, scales)
    assert weight.dequantize().isnan().any(dim=1).nonzero().tolist() == [[7]]
    found = quantized_linear(torch.zeros(2, K, dtype=torch.bfloat16), weight)
    assert found.isnan().nonzero().tolist() == [[0, 7], [1, 7]]


def test_a_scale_that_is_nan_stays_it_or_is_refused():
    codes, nan = fp8_codes(64, 64), torch.full((64, 2), 255, dtype=torch.uint8)
    assert pack_weight("mxfp8", codes, nan).dequantize().isnan().all()
    with pytest.raises(ValueError, match="^scales: got 255, which is NaN"):
        pack_weight("mxfp4", bytes_of(64, 32), nan)
    with pytest.raises(ValueError, match="^scales: got a byte of 127 or more"):
        pack_weight("nvfp4", bytes_of(64, 32), nan.repeat(1, 2), 1.0)


def test_experts_are_weights_of_their_own():
    codes, scales = bytes_of(3, N, K // 2), bytes_of(3, N, 33, high=0x7F)
    second = torch.tensor([0.25, 1.0, 3.0])
    experts = pack_experts("nvfp4", codes, scales, second)
    for i, expert in enumerate(experts):
        one = pack_weight("nvfp4", codes[i], scales[i], second[i])
        assert torch.equal(expert.dequantize(torch.float32), one.dequantize(torch.float32))
    x, offsets = torch.randn(4, K).bfloat16(), torch.tensor([0, 1, 1, 4], dtype=torch.int32)
    found = grouped_linear(x, experts, offsets)
    assert torch.equal(found[:1], quantized_linear(x[:1], experts[0]))
    with pytest.raises(ValueError, match=r"^second: got shape \[2\], want 3 experts"):
        pack_experts("nvfp4", codes, scales, second[:2])


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            ("fp9", bytes_of(4, 8), scales_of(4)),
            ValueError,
            "format: got 'fp9', want one such.*did you mean fp8",
        ),
        (("w4_g32z", bytes_of(4, 8), scales_of(4)), ValueError, "format: got w4g32z, which has zero points"),
        (("fp8", scales_of(4, 8), scales_of(4)), TypeError, "codes: got dtype torch.float32, want one of torch.uint8"),
        (("fp8", scales_of(4, 8).to(torch.float8_e5m2), scales_of(4)), TypeError, "codes: got dtype torch.float8_e5m2"),
        (("fp8", bytes_of(4, 8), bytes_of(4)), TypeError, "scales: got dtype torch.uint8, want torch.float32"),
        (("fp8", bytes_of(4, 8), scales_of(3)), ValueError, r"scales: got shape \[3\], want one number or \[4\]"),
        (("mxfp8", bytes_of(4, 64), scales_of(4, 2)), TypeError, "scales: got dtype torch.float32, want torch.uint8"),
        (("mxfp8", bytes_of(64, 64), bytes_of(64, 3)), ValueError, r"scales: .* want \[64, 2\], or \[2, 2\] of blocks"),
        (("nvfp4", bytes_of(4, 8), bytes_of(4, 1, high=9)), ValueError, "second: got None"),
        (
            ("mxfp4", bytes_of(4, 16), bytes_of(4, 1), 1.0),
            ValueError,
            "second: got scales of a second level, want None",
        ),
        (("fp8", bytes_of(4, 8), scales_of(4) + 2.0**27), ValueError, r"scales: got .*want fp32 scales below 2\*\*27"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        pack_weight(*arguments)


@pytest.mark.parametrize("second", [0.0, torch.inf, torch.nan])
def test_a_second_level_that_divides_is_a_number_and_not_0(second):
    with pytest.raises(ValueError, match=f"^second: got {second:g}, want a finite number, and 1 over it"):
        pack_weight("nvfp4", bytes_of(4, 8), bytes_of(4, 1, high=9), torch.tensor(second), second_divides=True)
