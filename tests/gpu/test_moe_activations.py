"""Layers of experts with biases and activations of their own, with gates and without, on a GPU. Against fp64.

On every path: sorted, as they are, in parts of K, by entries, of many rows; and dense products with such an activation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels.gemm import quantize_weight, quantized_linear
from cute_kernels.gemm.activations import ActivationFunction, ClampedSwiglu, Gelu, Relu2
from cute_kernels.gemm.experts import PackedExperts, fused_moe, grouped_linear, stack_experts
from cute_kernels.runtime import KernelSpec
from cute_kernels.runtime.cache import load_many
from cute_kernels.runtime.device import arch_of
from tests.gpu.specs import products_needed_by

pytestmark = pytest.mark.gpu

CUDA, BF16 = "cuda", torch.bfloat16
GPT_OSS, DEEPSEEK = ClampedSwiglu(), ClampedSwiglu(1.0, 10.0, 0.0)
TOPK = 4
TOLERANCE = 8e-3  # relative L2 norm: what is between the products is rounded, and results are


class Layer(NamedTuple):
    """experts, hidden and inner sizes, a format, an activation, and whether both products have biases."""

    experts: int
    hidden: int
    inner: int
    format: str
    activation: ActivationFunction
    biased: bool = True


LAYERS = {
    "gpt-oss": Layer(8, 2880, 2880, "mxfp4", GPT_OSS),  # its tails of K and N
    "integers": Layer(32, 1024, 512, "w4g128", GPT_OSS),  # work ranges, entries, limbs
    "parts of K": Layer(4, 256, 14336, "w4g128", GPT_OSS),
    "DeepSeek": Layer(16, 1024, 512, "mxfp4", DEEPSEEK, biased=False),
    "Nemotron-H": Layer(32, 1024, 512, "w4g128", Relu2(), biased=False),  # without a gate
    "without a gate": Layer(8, 2688, 1856, "mxfp4", Relu2()),  # sizes of Nemotron 3 Nano, tails of K
    "a standard one": Layer(8, 256, 512, "w4g128", Gelu()),  # which a launch's number says
}
TOKENS = (1, 2, 16, 300)
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))


class Weights(NamedTuple):
    """Both products' weights and biases."""

    gate_up: PackedExperts
    down: PackedExperts
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


def weights_of(layer: Layer, device: str = CUDA) -> Weights:
    """gates and ups of some tens, so that limits are reached."""
    generator = torch.Generator().manual_seed(0)

    def experts_of(n: int, k: int, size: float) -> PackedExperts:
        """All with one weight."""
        one = quantize_weight(torch.randn(n, k, generator=generator) * size / k**0.5, dtype=BF16, format=layer.format)
        return stack_experts([one] * layer.experts).to(device)

    rows = layer.inner * (2 if layer.activation.gated else 1)
    gate_up, down = experts_of(rows, layer.hidden, 10.0), experts_of(layer.hidden, layer.inner, 1.0)
    biases = [torch.randn(layer.experts, n, generator=generator).to(device, BF16) for n in (rows, layer.hidden)]
    return Weights(gate_up, down, *(biases if layer.biased else (None, None)))


def call_of(layer: Layer, tokens: int, device: str = CUDA) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, shares, and ids, some of them of no expert of this rank; experts that nobody asks for have no rows."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, layer.hidden, generator=generator).to(device, BF16)
    ids = torch.rand(tokens, layer.experts, generator=generator).argsort(1)[:, :TOPK]
    ids[0, 0] = -1
    return x, torch.rand(tokens, TOPK, generator=generator).to(device), ids.to(device, torch.int32)


def computed(layer: Layer, weights: Weights, given: tuple[torch.Tensor, ...], **options: Any) -> torch.Tensor:
    x, shares, ids = given
    own = {"activation": layer.activation, "gate_up_bias": weights.gate_up_bias, "down_bias": weights.down_bias}
    return fused_moe(x, weights.gate_up, weights.down, shares, ids, **own, **options)


def exact(layer: Layer, weights: Weights, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """fp64 [tokens, hidden]; the hidden activations are rounded to bf16."""
    x, shares, ids = given
    y = torch.zeros(len(x), layer.hidden, dtype=torch.float64, device=x.device)
    for expert in range(layer.experts):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        pairs = x[rows].double() @ weights.gate_up[expert].dequantize().double().T
        if weights.gate_up_bias is not None:
            pairs += weights.gate_up_bias[expert].double()
        hidden = layer.activation.of_rows(pairs).to(BF16).double()
        out = hidden @ weights.down[expert].dequantize().double().T
        if weights.down_bias is not None:
            out += weights.down_bias[expert].double()
        y.index_add_(0, rows, out * shares[rows, places, None].double())
    return y


def specs() -> list[KernelSpec]:
    """The kernels of this module."""

    def work() -> None:
        for layer in LAYERS.values():
            some = weights_of(layer, "cpu")
            for tokens in TOKENS:
                for invariant in (False, True):
                    x, shares, ids = call_of(layer, tokens, "cpu")
                    computed(layer, some, (x, shares, torch.full_like(ids, -1)), batch_invariant=invariant)
        weight = quantize_weight(torch.zeros(512, 2048), dtype=BF16)
        for m in (1, 8, 64):
            quantized_linear(torch.zeros(m, 2048, dtype=BF16), weight, activation=GPT_OSS)

    return products_needed_by(work)


@pytest.fixture(scope="module", autouse=True)
def product_kernels() -> None:
    """Every kernel of these tests, in memory."""
    load_many(specs(), arch_of())


def near(found: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((found.double() - want).norm() <= TOLERANCE * want.norm())


@every_layer
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_layer_is_its_formula_and_is_captured(layer, tokens, invariant):
    weights, given = weights_of(layer), call_of(layer, tokens)
    assert near(computed(layer, weights, given, batch_invariant=invariant), exact(layer, weights, given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = computed(layer, weights, given, batch_invariant=invariant)
    given[2].copy_(given[2].flip(0))
    graph.replay()
    assert near(found, exact(layer, weights, given))


@every_layer
def test_tokens_do_not_depend_on_each_other(layer):
    weights, given = weights_of(layer), call_of(layer, TOKENS[-1])
    everything = computed(layer, weights, given, batch_invariant=True)
    for tokens in TOKENS[:-1]:
        some = [each[:tokens].contiguous() for each in given]
        found = computed(layer, weights, (some[0], some[1], some[2]), batch_invariant=True)
        assert torch.equal(found, everything[:tokens])


def test_biases_alone_are_what_zeros_make():
    """Each assignment adds its experts' biases once, whatever parts K is in."""
    layer = LAYERS["parts of K"]
    weights, (x, shares, ids) = weights_of(layer), call_of(layer, 1)
    given = torch.zeros_like(x), shares, ids
    assert near(computed(layer, weights, given), exact(layer, weights, given))
    offsets = torch.tensor([0] * layer.experts + [1], dtype=torch.int32, device=CUDA)
    found = grouped_linear(given[0], weights.gate_up, offsets, bias=weights.gate_up_bias)
    assert weights.gate_up_bias is not None and torch.equal(found[0], weights.gate_up_bias[-1])


@pytest.mark.parametrize("m", [1, 8, 64])
def test_dense_products_take_it_too(m):
    torch.manual_seed(m)
    weight = quantize_weight(torch.randn(512, 2048, device=CUDA), dtype=BF16)
    x, bias = torch.randn(m, 2048, device=CUDA).to(BF16) / 8, torch.randn(512, device=CUDA).to(BF16)
    want = GPT_OSS.of_rows(x.double() @ weight.dequantize().double().T + bias.double())
    named: Any = GPT_OSS.name
    for given in (GPT_OSS, named):
        assert near(quantized_linear(x, weight, bias, activation=given), want)
