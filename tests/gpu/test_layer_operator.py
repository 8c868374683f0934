"""The operator of a layer's products on a GPU: the launch or the calls that it stands for, in graphs, for any rows."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.gemm.layer import call as layer_call
from cute_kernels.gemm.layer import operator
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.spec import KernelSpec
from tests.gpu import test_linear_layer as layers
from tests.gpu.specs import ARCH
from tests.gpu.test_linear_layer import EPS, SMALL, Layer

pytestmark = pytest.mark.gpu

ROWS = (1, 3, 4000)


def specs() -> list[KernelSpec]:
    """The kernels of this module: those of its neighbour, and one for many rows, which compiles on demand."""
    return layers.specs()


def arguments(layer: Layer) -> tuple:
    o, gate_up, down, qkv = ((one.codes, one.scales) for one in layer.weights)
    first, second = layer.norms
    sizes = SMALL.heads, SMALL.hidden, SMALL.inner, SMALL.qkv, EPS
    return layer.x, layer.residual, *o, first, *gate_up, *down, second, *qkv, *sizes


def call_of(layer: Layer) -> layer_call.LayerCall:
    return layer.call()._replace(offset=0.0)


@pytest.mark.parametrize("m", ROWS)
def test_it_is_the_launch_or_the_calls_that_it_stands_for(m: int):
    layer = Layer(SMALL, m)
    layers.poison(layer)
    rows, qkv = operator.layer_products(*arguments(layer))
    call = call_of(layer)
    assert layer_call.is_one_launch(call) == layer_call.serves_rows(m)
    want = layer_call.layer(call)
    assert want.qkv is not None
    if m < 4000:
        assert torch.equal(rows, want.rows.rows) and torch.equal(qkv, want.qkv)
    assert layers.error(rows, want.rows.rows) <= 1e-2 and layers.error(qkv, want.qkv) <= 1e-2


@pytest.mark.parametrize("m", [1, 3])
def test_a_captured_one_has_the_same_bits_at_each_replay(m: int):
    layer = Layer(SMALL, m)
    given = arguments(layer)
    for _ in range(2):
        want = [one.clone() for one in operator.layer_products(*given)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = operator.layer_products(*given)
        second = operator.layer_products(*given[:1], first[0], *given[2:])
    found = []
    for _ in range(5):
        for one in (*first, *second):
            one.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(first, want, strict=True))
        found.append([one.clone() for one in second])
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))
    assert not any(one.isnan().any() for one in found[0])


def test_a_traced_one_has_the_same_bits():
    layer = Layer(SMALL, 1)
    given = arguments(layer)

    def run(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, qkv = torch.ops.cute_kernels.layer_products(x, residual, *given[2:])
        return rows, qkv * 2

    want = operator.layer_products(*given)
    for m in (1, 3):
        layer = Layer(SMALL, m)
        rows, qkv = torch.compile(run, dynamic=True, backend="aot_eager")(layer.x, layer.residual)
        assert not m == 1 or (torch.equal(rows, want[0]) and torch.equal(qkv, want[1] * 2))
        assert rows.shape == (m, SMALL.hidden) and qkv.shape == (m, SMALL.qkv)


def test_the_kernel_that_ships_has_the_same_bits_for_fewer_inputs():
    layer = Layer(SMALL, 1)
    want, (own, shipped) = layers.results(layer.run()), layer_call.configs_for(SMALL.inner)
    assert own.num_stages > shipped.num_stages
    plan = layer_call.make_plan(layer.call(), shipped, load(GemmSpec(shipped), ARCH), layer_call.GPU.num_sms(0))
    for _ in range(3):
        layers.poison(layer)
        assert all(torch.equal(a, b) for a, b in zip(layers.results(plan.launch(layer.call())), want, strict=True))
