"""The products of a layer in one launch on a GPU: against fp64, against the calls it stands for, repeats, few CTAs, two
streams, graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from cute_kernels import PackedWeight, quantized_layer
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred_choice import deferred
from cute_kernels.gemm.layer import call as layer_call
from cute_kernels.gemm.layer.call import LayerCall, LayerRows
from cute_kernels.gemm.layer.config import config_for
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.deferred_config import GIVES, TAKES
from cute_kernels.runtime.spec import KernelSpec
from tests.gpu.test_linear import activations, check_back_to_back
from tests.linear.cases import known, problem_of

pytestmark = pytest.mark.gpu

EPS, OFFSET = 1e-5, 0.25


@dataclass(frozen=True)
class Sizes:
    """Of a model's layer."""

    hidden: int
    heads: int
    inner: int
    qkv: int

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of each."""
        hidden, inner = self.hidden, self.inner
        return (hidden, self.heads), (2 * inner, hidden), (hidden, inner), (self.qkv, hidden)


# Stages of a work tile that are no multiple of the warps; work tiles of a product fewer than CTAs; a model's layer.
SMALL, ODD, WIDE = Sizes(1024, 512, 2048, 1536), Sizes(768, 1280, 1792, 64), Sizes(8192, 1024, 3584, 1280)
LLAMA = Sizes(4096, 4096, 14_336, 6144)
CASES = (SMALL, ODD, LLAMA, WIDE)
every_case = pytest.mark.parametrize("sizes", CASES, ids=str)


# Beside the calls that they stand for.
BESIDE = (SMALL, LLAMA)


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    found: dict[KernelSpec, None] = {}
    for sizes in CASES:
        config = config_for(max(sizes.hidden, sizes.heads, sizes.inner))
        assert config is not None
        found[GemmSpec(config)] = None
    for sizes in BESIDE:
        for number, shape in enumerate(sizes.products):
            schedule = chosen(problem_of(1, *shape, 4, torch.bfloat16, 128, False))
            config = deferred(schedule, TAKES if number % 2 else GIVES)
            found[GemmSpec(schedule.config) if config is None else GemmSpec(config)] = None
    return list(found)


@cache
def weight_of(n: int, k: int, seed: int) -> tuple[PackedWeight, torch.Tensor]:
    """A weight, and what it stands for in fp64."""
    reference = known(n, k, group_size=128, seed=seed)
    there = {name: getattr(reference, name).cuda() for name in ("codes", "scales", "group_of")}
    return reference.pack().to("cuda"), replace(reference, **there).dense


class Layer:
    """A layer's weights, and rows for it."""

    def __init__(self, sizes: Sizes, m: int = 1, seed: int = 0):
        hidden, heads = sizes.hidden, sizes.heads
        both = [weight_of(*shape, seed + number) for number, shape in enumerate(sizes.products)]
        self.weights, self.dense = [one for one, _ in both], [other for _, other in both]
        self.x, self.residual = activations(m, heads, torch.bfloat16, m), activations(m, hidden, torch.bfloat16, 2)
        self.norms = [activations(1, hidden, torch.bfloat16, number)[0] for number in (3, 8)]

    def call(self, qkv: bool = True) -> LayerCall:
        weights = self.weights if qkv else [*self.weights[:3], None]
        return LayerCall(self.x, *weights, self.residual, *self.norms, EPS, OFFSET)  # type: ignore[arg-type]

    def run(self, qkv: bool = True) -> LayerRows:
        call = self.call(qkv)
        kernel = layer_call.kernel_of(max(weight.shape[1] for weight in call.weights), 0)
        assert kernel is not None
        return layer_call.make_plan(call, *kernel, layer_call.GPU.num_sms(0)).launch(call)

    def run_public(self) -> LayerRows:
        call = self.call()
        norms = {"norm": call.norm, "following_norm": call.following_norm, "norm_eps": EPS, "norm_offset": OFFSET}
        weights: Any = call.o, call.gate_up, call.down, call.qkv
        return quantized_layer(call.x, *weights, residual=call.residual, **norms)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, qkv) in fp64, from x on."""
        middle = self.x.double() @ self.dense[0].T + self.residual.double()
        both = self.normed(middle, 0) @ self.dense[1].T
        gated = torch.nn.functional.silu(both[:, ::2]) * both[:, 1::2]
        rows = gated @ self.dense[2].T + middle
        return rows, self.normed(rows, 1) @ self.dense[3].T

    def normed(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return rows * scale * (self.norms[number].double() + OFFSET)


def results(found: LayerRows) -> list[torch.Tensor]:
    return [found.rows.rows] if found.qkv is None else [found.rows.rows, found.qkv]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest of any row, of the row's norm."""
    return float(((found.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1)).max())


def poison(layer: Layer) -> None:
    """The allocator hands the same memory out again."""
    held = [
        torch.full((len(layer.x), w.shape[0]), torch.nan, device="cuda", dtype=torch.bfloat16)
        for w in layer.weights
        for _ in "ab"
    ]
    del held


@every_case
def test_a_layer_is_that_of_fp64(sizes):
    layer = Layer(sizes)
    poison(layer)
    for mine, exact in zip(results(layer.run()), layer.exact(), strict=True):
        assert error(mine, exact) <= 1e-2, error(mine, exact)


@pytest.mark.parametrize("sizes", BESIDE, ids=str)
def test_a_layer_is_that_of_the_calls_it_stands_for(sizes):
    layer = Layer(sizes)
    found, apart = results(layer.run()), results(layer_call.layer_apart(layer.call()))
    for mine, other, exact in zip(found, apart, layer.exact(), strict=True):
        assert error(mine, exact) <= 1.3 * error(other, exact) + 1e-4, (error(mine, exact), error(other, exact))
        assert error(mine, other) <= 8e-3


@every_case
def test_one_launch_serves(sizes):
    layer = Layer(sizes)
    layer_call._layer.plans.clear()
    want = results(layer.run())
    assert all(torch.equal(a, b) for a, b in zip(results(layer.run_public()), want, strict=True))
    assert torch.equal(results(layer.run(qkv=False))[0], want[0])
    assert all(plan.products for plan in layer_call._layer.plans.values())


@every_case
def test_results_repeat_to_the_bit(sizes):
    layer, first = Layer(sizes), None
    for _ in range(20):
        poison(layer)
        found = results(layer.run())
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
        assert not any(one.isnan().any() for one in found)


@pytest.mark.parametrize("num_ctas", [1, 2, 7, 64])
@pytest.mark.parametrize("sizes", [SMALL, ODD, LLAMA], ids=str)
def test_few_ctas_have_the_same_bits(sizes, num_ctas):
    layer = Layer(sizes)
    want, call = results(layer.run()), layer.call()
    kernel = layer_call.kernel_of(max(sizes.hidden, sizes.heads, sizes.inner), 0)
    assert kernel is not None
    plan = layer_call.make_plan(call, *kernel, num_ctas)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(results(plan.launch(call)), want, strict=True))


def test_layers_on_two_streams_end_and_have_the_same_bits():
    layers = [Layer(LLAMA, seed=4 * number) for number in range(2)]
    want = [results(layer.run()) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for layer, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append([results(layer.run()) for _ in range(4)])
        torch.cuda.synchronize()
        for of_layer, wanted in zip(found, want, strict=True):
            assert all(torch.equal(a, b) for one in of_layer for a, b in zip(one, wanted, strict=True))


@pytest.mark.parametrize("sizes", [SMALL, LLAMA], ids=str)
def test_a_launch_that_begins_early_waits_for_the_one_before(sizes):
    """Of a chain in which each layer reads what the last one wrote."""
    layer = Layer(sizes)
    start, x = layer.residual.clone(), layer.x

    def chain(after) -> torch.Tensor:
        layer.residual = start.clone()
        for _ in range(6):
            rows = layer.run(qkv=False).rows.rows
            after()
            layer.residual = (rows * 0.1).contiguous()
        return layer.residual

    assert x is layer.x and not check_back_to_back(chain).isnan().any()


def test_weights_that_have_just_been_written_are_read():
    layer = Layer(SMALL)
    other = weight_of(SMALL.hidden, SMALL.heads, 9)[0]
    own = PackedWeight(other.codes.clone(), other.scales.clone(), None, other.format, other.shape)
    both = (layer.weights[0], other)
    wanted = []
    for weight in both:
        layer.weights[0] = weight
        wanted.append(results(layer.run()))
    layer.weights[0] = own
    for number in range(40):
        own.scales.copy_(both[number % 2].scales)
        own.codes.copy_(both[number % 2].codes)
        assert all(torch.equal(a, b) for a, b in zip(results(layer.run()), wanted[number % 2], strict=True))
