"""Products of experts in FP8: what they mean, on CPU tensors; what they launch; their layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from cute_kernels import (
    PackedExperts,
    QuantizedMoE,
    fused_moe,
    grouped_linear,
    quantize_activations,
    quantize_experts,
)
from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm.experts.arguments import ASSIGNED
from cute_kernels.gemm.experts.module import QuantizedRoutedExperts
from cute_kernels.gemm.experts.product import takes_codes
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.experts.wgmma.schedule import make_fp8_tiles
from cute_kernels.gemm.operands.fp8 import dequantize_activations
from cute_kernels.gemm.operands.fp8_config import BY_GROUP, BY_ROW, Fp8Wgmma
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.problem import GroupedProblem
from tests.launchers import recording

BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = ("fp8", "fp8_block", "mxfp4", "w4g128")
IDS = torch.tensor([[0, 2], [2, 1], [1, -1], [2, 0], [0, 1]])
SHARES = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def experts(form: str, n: int = 64, k: int = 256, seed: int = 2) -> PackedExperts:
    return quantize_experts(numbers(3, n, k, seed=seed), format=form, dtype=BF16)


def rounded(x: torch.Tensor, weight: PackedExperts) -> torch.Tensor:
    size = 128 if weight.group_size and weight.bits == 8 else 0
    return dequantize_activations(*quantize_activations(x, size), size).double()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("form", FORMATS)
def test_a_grouped_product_is_that_of_rounded_rows(form: str):
    weight, x, bias = experts(form), numbers(6, 256), numbers(3, 64, seed=3)
    offsets, rows = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([5, 1, 0, 3, 3], dtype=torch.int32)
    y = grouped_linear(x, weight, offsets, rows=rows, bias=bias, out_dtype=FP32, activations="fp8")
    dense, x_of = [weight[e].dequantize(torch.float64) for e in (0, 0, 2, 2, 2)], rounded(x, weight)[rows.long()]
    want = torch.stack([w @ row for w, row in zip(dense, x_of, strict=True)]) + bias.double()[[0, 0, 2, 2, 2]]
    assert relative_error(y, want) < 1e-6
    assert not torch.equal(y, grouped_linear(x, weight, offsets, rows=rows, bias=bias, out_dtype=FP32))


@pytest.mark.parametrize("form", FORMATS)
def test_a_layer_rounds_what_goes_into_both_products(form: str):
    gate_up, down, x = experts(form, 512), experts(form, 64, 256, seed=3), numbers(5, 256)
    y = fused_moe(x, gate_up, down, SHARES, IDS, out_dtype=FP32, activations="fp8")
    want = torch.zeros(5, 64, dtype=torch.float64)
    for token, slot in ((token, slot) for token in range(5) for slot in range(2)):
        expert = int(IDS[token, slot])
        if expert < 0:
            continue
        sums = gate_up[expert].dequantize(torch.float64) @ rounded(x[token], gate_up)
        hidden = (nn.functional.silu(sums[::2]) * sums[1::2]).to(BF16)
        want[token] += SHARES[token, slot] * (down[expert].dequantize(torch.float64) @ rounded(hidden, down))
    assert relative_error(y, want) < 3e-3
    traced = torch.compile(
        lambda x: fused_moe(x, gate_up, down, SHARES, IDS, out_dtype=FP32, activations="fp8"),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(traced(x), y)


def test_formats_that_are_no_fp8_operands_are_refused():
    weight, good = experts("w8g128"), experts("fp8", 64, 32)
    offsets = torch.tensor([0, 1, 1, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="activations: got 'fp8' for weights in"):
        grouped_linear(numbers(1, 256), weight, offsets, activations="fp8")
    with pytest.raises(ValueError, match="activations: got 'fp8' for weights in"):
        fused_moe(numbers(5, 256), weight, good, SHARES, IDS, activations="fp8")
    layer = QuantizedRoutedExperts(weight, good)
    with pytest.raises(ValueError, match="activations: got 'fp8' for weights in"):
        layer.activations = "fp8"
    assert layer.activations is None and layer.products == "16-bit products"
    short = QuantizedRoutedExperts(experts("fp8", 64, 256), good)
    with pytest.raises(ValueError, match="activations: got 'fp8' for a weight of 64 inputs with padding"):
        short.activations = "fp8"  # of 32 inputs of the second product
    assert short.activations is None
    with pytest.raises(ValueError, match="activations: got 'fp8' for a weight of 64 inputs with padding"):
        fused_moe(numbers(5, 256), experts("fp8", 64, 256), good, SHARES, IDS, activations="fp8")


class Router(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, SHARES[: len(x)], IDS[: len(x)]


def test_layers_round_what_they_are_told_to():
    gate_up, down, x = experts("fp8", 512), experts("fp8", 256, 256, seed=3), numbers(5, 256)
    alone, whole = QuantizedRoutedExperts(gate_up, down), QuantizedMoE(Router(), gate_up, down)
    plain = alone(x, IDS, SHARES)
    alone.activations = whole.activations = "fp8"
    want = fused_moe(x, gate_up, down, SHARES, IDS, activations="fp8")
    assert torch.equal(alone(x, IDS, SHARES), want) and torch.equal(whole(x), want) and not torch.equal(plain, want)
    assert alone.products == whole.products == "FP8 products"


# -- launches ---------------------------------------------------------------------------------------------------------


def routed(tokens: int, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns shares and experts, two of ``count``, of some tokens."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, count, generator=generator).argsort(1)[:, :2]
    return torch.rand(tokens, 2, generator=generator), ids


@pytest.mark.parametrize("form", FORMATS)
def test_few_rows_are_rounded_before_each_16_bit_product(form: str):
    k, inner = (1024, 512) if form == "fp8" else (1000, 520)  # whole pieces of 16 bytes
    gate_up = quantize_experts(numbers(16, 2 * inner, k, seed=2), format=form, dtype=BF16)
    down, x = quantize_experts(numbers(16, k, inner, seed=3), format=form, dtype=BF16), numbers(5, k)
    shares, ids = routed(5, count=16)
    with recording() as plain:
        fused_moe(x, gate_up, down, shares, ids)
    with recording() as cache:
        fused_moe(x, gate_up, down, shares, ids, activations="fp8")
    products = [launch.symbol for launch in plain.launches]
    rows = f"linear_fp8_rows_bf16_{BY_GROUP if form == 'fp8_block' else BY_ROW}_rounded"
    assert [launch.symbol for launch in cache.launches] == [rows, products[0], rows, *products[1:]]
    first, up, second, out, _ = cache.launches
    assert first.arguments[0].data_ptr() == x.data_ptr() and not first.arguments[2]  # all tokens, each once
    assert up.arguments[0].data_ptr() == first.arguments[4] and tuple(up.arguments[0].shape) == (5, k)
    assert second.arguments[0].data_ptr() in up.arguments[1:]  # the hidden activations
    assert out.arguments[0].data_ptr() == second.arguments[4] and tuple(out.arguments[0].shape) == (10, inner)
    waits = [product.arguments[ASSIGNED.names.index("waits")] for product in (plain.launches[0], up, out)]
    assert waits == [True, False, False]  # for the ids: the launch that rounds x has waited for them


def test_a_grouped_product_of_few_rows_rounds_each_row_of_x_once():
    weight, x = quantize_experts(numbers(16, 512, 1024, seed=2), format="mxfp4", dtype=BF16), numbers(6, 1024)
    offsets, rows = torch.arange(17, dtype=torch.int32).clamp(max=9), torch.tensor([5, 1, 0, 3, 3, 2, 4, 4, 1]).int()
    with recording() as cache:
        grouped_linear(x, weight, offsets, rows=rows, activations="fp8")
    rounded_x, product = cache.launches
    assert rounded_x.symbol == f"linear_fp8_rows_bf16_{BY_ROW}_rounded" and not rounded_x.arguments[2]
    assert product.arguments[0].data_ptr() == rounded_x.arguments[4] and tuple(product.arguments[0].shape) == (6, 1024)
    assert rows.data_ptr() in product.arguments[1:]


@pytest.mark.parametrize("options", [{"batch_invariant": True}, {"dtype": torch.float16}])
def test_batch_invariant_and_fp16_products_of_few_rows_take_codes(options: dict[str, Any]):
    options = dict(options)
    dtype = options.pop("dtype", BF16)
    gate_up, down = (quantize_experts(numbers(16, n, 512, seed=n), format="w4g128", dtype=dtype) for n in (1024, 512))
    with recording() as cache:
        fused_moe(numbers(5, 512).to(dtype), gate_up, down, *routed(5, count=16), activations="fp8", **options)
    symbols = [launch.symbol for launch in cache.launches]
    assert sum("_e4m3r" in symbol for symbol in symbols) == 2 and not any("rounded" in symbol for symbol in symbols)


@pytest.mark.parametrize(("form", "tokens", "in_16_bits"), [
    ("fp8_block", 1024, True), ("fp8_block", 1280, False), ("mxfp4", 128, True), ("mxfp4", 160, False),
    ("fp8", 1024, False), ("w4g128", 1024, False),
])  # fmt: skip
def test_up_to_how_many_rows_products_are_in_16_bits(form: str, tokens: int, in_16_bits: bool):
    count, topk = (128, 4) if form == "mxfp4" else (256, 8)
    problem = GroupedProblem(topk * tokens, count, 4096, 2048, 2048, weight_format(form), "bf16")
    product = ExpertsForm(count, 4096, 2048, 2048, problem.format, BF16, 0, "fp8")
    assert takes_codes(product, problem) is not in_16_bits
    assert takes_codes(product, replace(problem, batch_invariant=True))


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_each_product_of_many_rows_is_two_launches(form: str):
    gate_up, down, x = experts(form, 512), experts(form, 64, 256, seed=3), numbers(100, 256)
    with recording() as cache:
        fused_moe(x, gate_up, down, *routed(100), activations="fp8")
    names = [launch.symbol for launch in cache.launches]
    rows = f"linear_fp8_rows_bf16_{BY_GROUP if form == 'mxfp8' else BY_ROW}"
    assert names[1] == names[3] == rows and len(names) == 6
    assert names[2].startswith("grouped_linear_wgmma_") and "_e4m3r" in names[2] and "_e4m3r" in names[4]
    first, second = cache.launches[1].arguments, cache.launches[3].arguments
    assert first[2] and not second[2]  # rows by index, and in their order
    for made, product in ((first, cache.launches[2]), (second, cache.launches[4])):
        x_of_product = product.arguments[0]
        assert x_of_product.data_ptr() == made[4] and tuple(x_of_product.shape) == (200, 128)
        assert {made[5], made[10]} <= {*product.arguments[1:]}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("places", [1, 64, 2048, 65536])
def test_every_product_has_tiles(form: str, places: int):
    problem = GroupedProblem(places, 256, 4096, 7168, 7168, weight_format(form), "bf16")
    layout = make_fp8_tiles(problem)
    assert isinstance(layout.config.mainloop, Fp8Wgmma) and layout.config.can_implement() is None
    assert layout.k_blocks * layout.config.block_k == 7168
    spec: Any = ExpertSpec(layout.config)
    assert "x_scales" in spec.kernel.arguments.names and spec.kernel.made_by.endswith("grouped_tiles_kernel")
