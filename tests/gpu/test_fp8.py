"""Products in FP8 on the GPU, against fp64 on the quantised operands."""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_kernels import (
    QuantizedLinear,
    fused_moe,
    grouped_linear,
    quantize_activations,
    quantize_experts,
    quantize_weight,
    quantized_linear,
)
from cute_kernels.gemm import fp8
from cute_kernels.gemm.activations import ClampedSwiglu
from cute_kernels.gemm.operands.fp8 import dequantize_activations, fp8_rows
from tests.linear.test_fp8 import FORMATS, TOLERANCE, exact_product, relative_error

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


@pytest.mark.parametrize("group_size", [0, 128])
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 4096), (257, 1416)])
def test_activations_are_those_of_the_reference(shape, group_size):
    x = numbers(*shape)
    found, wanted = quantize_activations(x.cuda(), group_size), quantize_activations(x, group_size)
    assert torch.equal(found[1].cpu(), wanted[1])
    assert torch.equal(found[0].cpu().view(torch.uint8), wanted[0].view(torch.uint8))


@pytest.mark.parametrize("scale", [None, 0.02])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(80, 320), (4096, 4096), (1280, 8192)])
@pytest.mark.parametrize("m", [1, 5, 16, 64, 65, 100, 1000])
def test_products_with_a_scale_a_row_are_exact_on_rounded_operands(scale, bias, n, k, m):
    weight, x = quantize_weight(numbers(n, k, seed=2).cuda(), format="fp8"), numbers(m, k).cuda()
    given = None if scale is None else torch.tensor(scale, device="cuda")
    added = numbers(n, seed=7).cuda() if bias else None
    y = quantized_linear(x, weight, added, activations="fp8", activation_scale=given)
    want = exact_product(x, weight, given) + (0 if added is None else added.double())
    assert relative_error(y, want) < TOLERANCE


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(200, 256), (1000, 4096), (200, 140), (1000, 2880)])  # 140, 2880: half k blocks
@pytest.mark.parametrize("m", [1, 3, 9, 16, 17, 64, 65, 100, 520])
def test_our_product_is_exact_on_rounded_operands(name, n, k, m):
    """Also with an epilogue, which no other library's takes."""
    weight, x = quantize_weight(numbers(n, k, seed=2).cuda(), format=name, dtype=BF16), numbers(m, k).cuda()
    y = quantized_linear(x, weight, activations="fp8", out_dtype=torch.float32)
    want = exact_product(x, weight)
    assert relative_error(y, want) < TOLERANCE
    bias, residual = numbers(n, seed=3).cuda(), numbers(m, n // 2, seed=4).cuda()
    y = quantized_linear(x, weight, bias, residual=residual, activation="swiglu", activations="fp8")
    if m <= fp8.FEW_BLOCK_ROWS:  # 16-bit products of rounded rows, bit for bit
        rows = fp8_rows(x, weight.format).to(BF16)
        assert torch.equal(y, quantized_linear(rows, weight, bias, residual=residual, activation="swiglu"))
        return
    sums = want + bias.double()
    want = torch.nn.functional.silu(sums[:, ::2]) * sums[:, 1::2] + residual.double()
    assert relative_error(y, want) < TOLERANCE


@pytest.mark.parametrize("name", ["fp8_block", "w4g128"])
def test_batch_invariant_rows_are_those_of_each_by_itself(name):
    weight, x = quantize_weight(numbers(512, 2048, seed=2).cuda(), format=name, dtype=BF16), numbers(150, 2048).cuda()
    options = {"activations": "fp8", "batch_invariant": True}
    whole = quantized_linear(x, weight, **options)
    for row in (0, 70, 149):
        assert torch.equal(quantized_linear(x[row : row + 1], weight, **options)[0], whole[row])


@pytest.mark.parametrize("m", [21, 40])
def test_what_is_not_finite_makes_the_rows_products_nan_and_no_others(m):
    weight, x = (
        quantize_weight(numbers(256, 512, seed=2).cuda(), format="fp8_block", dtype=BF16),
        numbers(m, 512).cuda(),
    )
    x[3, 300], x[20, 5] = torch.inf, torch.nan
    y = quantized_linear(x, weight, activations="fp8")
    bad = y.isnan().all(dim=1)
    assert bad.nonzero().flatten().tolist() == [3, 20] and y[~bad].isfinite().all()


def test_a_static_scale_saturates():
    weight, x = quantize_weight(numbers(256, 512, seed=2).cuda(), format="w4g128", dtype=BF16), numbers(40, 512).cuda()
    scale = torch.tensor(1e-3, device="cuda")  # beyond 0.448
    y = quantized_linear(x, weight, activations="fp8", activation_scale=scale, out_dtype=torch.float32)
    assert relative_error(y, exact_product(x, weight, scale)) < TOLERANCE


def test_sums_of_long_rows_with_a_mean_keep_what_is_small():
    """What sums in the tensor cores alone lose."""
    weight = quantize_weight(numbers(256, 16384, seed=2).cuda(), format="fp8_block", dtype=BF16)
    x = (numbers(64, 16384) + 4).cuda()
    y = quantized_linear(x, weight, activations="fp8", out_dtype=torch.float32)
    assert relative_error(y, exact_product(x, weight)) < TOLERANCE


def test_a_layer_is_captured_and_compiled():
    layer = QuantizedLinear(quantize_weight(numbers(256, 512, seed=2).cuda(), format="fp8"))
    layer.activations = "fp8"
    x = numbers(4, 512).cuda()
    want = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert torch.equal(y, want)
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), want)


# -- experts ----------------------------------------------------------------------------------------------------------


def group_of(weight) -> int:
    """Returns how many inputs of a row of x share a scale."""
    return 128 if weight.group_size and weight.bits == 8 else 0


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "mxfp4", "w4g128"])
@pytest.mark.parametrize("counts", [(1, 0, 2), (0, 70, 300), (1000, 3, 129)])
@pytest.mark.parametrize("k", [512, 2880])
def test_products_of_experts_are_exact_on_rounded_operands(name, counts, k):
    n, places = 192, sum(counts)
    weight = quantize_experts(numbers(3, n, k, seed=2).cuda(), format=name, dtype=BF16)
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
    rows = torch.randint(0, 50, (places,), generator=torch.Generator().manual_seed(5)).int().cuda()
    x = numbers(50, k).cuda()
    y = grouped_linear(x, weight, offsets, rows=rows, out_dtype=torch.float32, activations="fp8")
    codes, scales = quantize_activations(x, group_of(weight))
    of_rows = dequantize_activations(codes, scales, group_of(weight)).double()[rows.long()]
    parts = [part @ weight[e].dequantize(torch.float32).double().T for e, part in enumerate(of_rows.split(counts))]
    assert relative_error(y, torch.cat(parts)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 33, 2000])
def test_a_layer_of_experts_agrees_with_the_reference(tokens):
    gate_up = quantize_experts(numbers(8, 512, 256, seed=2), format="fp8_block", dtype=BF16)
    down = quantize_experts(numbers(8, 256, 256, seed=3), format="fp8_block", dtype=BF16)
    x, generator = numbers(tokens, 256), torch.Generator().manual_seed(6)
    ids, shares = torch.randint(0, 8, (tokens, 2), generator=generator), torch.rand(tokens, 2, generator=generator)
    want = fused_moe(x, gate_up, down, shares, ids, activations="fp8")
    y = fused_moe(x.cuda(), gate_up.to("cuda"), down.to("cuda"), shares.cuda(), ids.cuda(), activations="fp8")
    assert relative_error(y.cpu(), want.double()) < 1e-2  # hidden activations near the middle of two codes


@pytest.mark.parametrize("tokens", [1, 33, 500])
def test_experts_of_gpt_oss_are_on_the_fast_path(tokens):
    """Of 2880 inputs, with clamps and biases."""
    sizes = 5760, 2880
    gate_up, down = (quantize_experts(numbers(4, n, 2880, seed=n) * 0.02, format="mxfp4", dtype=BF16) for n in sizes)
    x, generator = numbers(tokens, 2880), torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 4, generator=generator).argsort(1)[:, :2]
    shares, biases = torch.rand(tokens, 2, generator=generator), [numbers(4, n, seed=n + 1) for n in sizes]

    def layer(device: str) -> torch.Tensor:
        up_bias, down_bias = (one.to(device) for one in biases)
        return fused_moe(
            x.to(device), gate_up.to(device), down.to(device), shares.to(device), ids.to(device),
            activation=ClampedSwiglu(), gate_up_bias=up_bias, down_bias=down_bias, activations="fp8",
        )  # fmt: skip

    assert relative_error(layer("cuda").cpu(), layer("cpu").double()) < 1e-2
