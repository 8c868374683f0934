"""Products in FP8 on the GPU, against fp64 on the quantised operands."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import QuantizedLinear, quantize_activations, quantize_weight, quantized_linear
from tests.linear.test_fp8 import TOLERANCE, exact_product, relative_error

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
@pytest.mark.parametrize("m", [1, 5, 16, 100, 1000])
def test_torchs_product_serves_codes_by_rows(scale, bias, n, k, m):
    weight, x = quantize_weight(numbers(n, k, seed=2).cuda(), format="fp8"), numbers(m, k).cuda()
    given = None if scale is None else torch.tensor(scale, device="cuda")
    added = numbers(n, seed=7).cuda() if bias else None
    y = quantized_linear(x, weight, added, activations="fp8", activation_scale=given)
    want = exact_product(x, weight, given) + (0 if added is None else added.double())
    assert relative_error(y, want) < TOLERANCE


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
