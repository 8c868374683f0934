"""Two activations that this file alone knows of: registering them takes them to every kernel and every reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm import quantize_weight, quantized_linear
from cute_kernels.gemm.activate import Activate
from cute_kernels.gemm.activations import (
    STANDARD,
    ActivationFunction,
    ClampedSwiglu,
    Gelu,
    Relu2,
    Silu,
    Swiglu,
    activation_named,
    register,
    registered,
)
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred_choice import beside_a_norm, deferred
from cute_kernels.gemm.experts import fused_moe, grouped_linear, quantize_experts
from cute_kernels.gemm.experts.choice import assigned
from cute_kernels.gemm.experts.choice import chosen as chosen_of_experts
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.experts.stored import known_experts
from cute_kernels.gemm.experts.wgmma.schedule import entry_tiles
from cute_kernels.gemm.layer.config import config_for
from cute_kernels.gemm.problem import GroupedProblem, LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.stream.schedule import make_schedule as make_stream
from cute_kernels.gemm.wgmma.deferred_config import TAKES
from cute_kernels.runtime.sources import reached
from cute_kernels.runtime.wanted import record_of, spec_of
from simulator import Float32, Warp, running

if TYPE_CHECKING:
    from cute_kernels.device.float_math import FloatMath


@register
@dataclass(frozen=True)
class SquaredRelu(ActivationFunction):
    """max(x, 0)^2."""

    kind: ClassVar[str] = "squared_relu"

    def reference(self, *values: torch.Tensor) -> torch.Tensor:
        return values[0].clamp(min=0) ** 2

    def device(self, math: FloatMath, *values: Any) -> Any:
        x = math.max_or_nan(values[0], 0.0)
        return x * x


@register
@dataclass(frozen=True)
class ScaledGate(ActivationFunction):
    """up / (1 + exp(-slope * gate))."""

    slope: float = 2.0
    kind: ClassVar[str] = "scaled_gate"
    gated: ClassVar[bool] = True

    def reference(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.slope * values[0]) * values[1]

    def device(self, math: FloatMath, *values: Any) -> Any:
        return math.sigmoid(values[0], self.slope) * values[1]


@register
@dataclass(frozen=True)
class Hinge(SquaredRelu):
    """max(x - 1, 0)."""

    kind: ClassVar[str] = "hinge"

    def reference(self, *values: torch.Tensor) -> torch.Tensor:
        return (values[0] - 1).clamp(min=0)

    def device(self, math: FloatMath, *values: Any) -> Any:
        return math.max_or_nan(values[0] - 1.0, 0.0)


OWN = (SquaredRelu(), ScaledGate(3))
SYMBOLS = {"squared_relu": "_squared_relu", "scaled_gate(3.0)": "_scaled_gate_3p0"}


def kernels(own: ActivationFunction | None) -> Iterator[GemmSpec | ExpertSpec]:
    """One of each kind of kernel, of products that are served by it."""
    form = integers(4)
    for m, n, k in ((1, 4096, 4096), (8, 4096, 4096), (16, 4096, 4096), (64, 9216, 4096), (512, 8192, 8192)):
        problem = LinearProblem(m, n, k, k, form, "bf16", activation=own)
        schedule = chosen(problem)
        yield GemmSpec(schedule.config)
        if (config := deferred(beside_a_norm(problem, schedule, TAKES), TAKES)) is not None:
            yield GemmSpec(config)
    yield GemmSpec(
        make_stream(LinearProblem(4, 4096, 4096, 4096, integers(8, 128, True), "fp16", activation=own)).config
    )
    problems = [GroupedProblem(16, 128, n, k, k, form, "bf16", activation=own) for n, k in ((1536, 2048), (2048, 768))]
    layouts = [chosen_of_experts(problem) for problem in problems]
    found = assigned(16, problems, layouts)
    assert found is not None
    rows = (replace(problems[0], places=places) for places in (512, 2048, 65536))
    more = (*layouts, *found, *map(chosen_of_experts, rows))
    yield from (ExpertSpec(layout.config) for layout in more)
    entries = entry_tiles(replace(problems[0], batch_invariant=True), 2)
    assert entries is not None
    yield ExpertSpec(entries.config)
    layer = config_for(14336)
    assert layer is not None
    yield GemmSpec(replace(layer, activation=own))


def held(value: object, seen: set[int]) -> Iterator[Activate]:
    """All that a kernel applies activations by."""
    if isinstance(value, Activate):
        yield value
    elif id(value) not in seen and type(value).__module__.startswith("cute_kernels."):
        seen.add(id(value))
        for each in getattr(value, "__dict__", {}).values():
            yield from held(each, seen)


FAMILIES = {
    "StreamKernel", "WgmmaKernel", "ResidentKernel", "deferred_kernel", "grouped_tiles_kernel",
    "RangeKernel", "EntryKernel", "LayerProductsKernel",
}  # fmt: skip


@pytest.mark.parametrize("own", OWN, ids=str)
def test_every_kind_of_kernel_holds_it_and_is_named_by_it(own):
    families = set()
    for spec, standard in zip(kernels(own), kernels(None), strict=True):
        module, _, name = spec.kernel.made_by.partition(":")
        families.add(name)
        made = getattr(import_module(module), name)(spec.config)
        assert {each.own for each in held(made, set())} == {own}, name
        assert SYMBOLS[own.name] in spec.symbol and spec.symbol.replace(SYMBOLS[own.name], "") == standard.symbol
        assert reached(spec).digest != reached(standard).digest
        assert spec.identity_json() != standard.identity_json()
    assert families == FAMILIES


def test_kernels_of_this_package_are_listed_with_theirs():
    for spec in kernels(ClampedSwiglu()):
        assert spec_of(record_of(spec)) == spec


@pytest.mark.parametrize("own", OWN, ids=str)
def test_references_and_operators_compute_it(own):
    torch.manual_seed(0)
    x, w = torch.randn(5, 64).bfloat16(), torch.randn(32, 64)
    weight, bias = quantize_weight(w, dtype=torch.bfloat16), torch.randn(32).bfloat16()
    want = own.of_rows(x.double() @ weight.dequantize().double().T + bias.double())
    compiled = torch.compile(quantized_linear, fullgraph=True, backend="eager")
    for function in (quantized_linear, compiled):
        for given in (own, own.name):
            found = function(x, weight, bias, activation=given, out_dtype=torch.float32)
            assert (found.double() - want).norm() < 1e-5 * want.norm()
    experts = quantize_experts(torch.stack((w, -w)), dtype=torch.bfloat16)
    biases, offsets = torch.stack((bias, bias)), torch.tensor([0, 0, 5], dtype=torch.int32)
    found = grouped_linear(x, experts, offsets, bias=biases, activation=own, out_dtype=torch.float32)
    want = own.of_rows(x.double() @ experts.dequantize().double()[1].T + bias.double())
    assert (found.double() - want).norm() < 1e-5 * want.norm()
    if own.gated:
        down = quantize_experts(torch.randn(2, 24, 16), dtype=torch.bfloat16)
        ids, shares = torch.ones(5, 1, dtype=torch.int32), torch.ones(5, 1)
        found = fused_moe(x, experts, down, shares, ids, activation=own.name, gate_up_bias=biases)
        want = want.bfloat16().double() @ down.dequantize().double()[1].T
        assert (found.double() - want).norm() < 6e-3 * want.norm()


def test_experts_without_a_gate_are_known_by_it():
    experts = torch.nn.Module()
    experts.register_parameter("up_proj", torch.nn.Parameter(torch.zeros(2, 48, 16)))
    experts.register_parameter("down_proj", torch.nn.Parameter(torch.zeros(2, 16, 48)))
    setattr(experts, "act_fn", lambda x: torch.relu(x - 1))  # noqa: B010
    known = known_experts(experts)
    assert known is not None and known[1] == Hinge()


def test_messages_name_those_that_there_are():
    x, weight = torch.zeros(1, 64).bfloat16(), quantize_weight(torch.ones(33, 64), dtype=torch.bfloat16)
    names = [each.name for each in registered()]
    assert names[:3] == ["silu", "gelu", "swiglu"] and {"squared_relu", "scaled_gate(2.0)"} <= {*names}
    with pytest.raises(ValueError, match=r"got 'tanh', want None, 'silu', 'gelu', 'swiglu'.*'scaled_gate\(2.0\)'"):
        quantized_linear(x, weight, activation="tanh")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"got 'scaled_gate\(3.0\)' for a weight of 33 rows, want an even number"):
        quantized_linear(x, weight, activation=ScaledGate(3))
    with pytest.raises(ValueError, match="squared_relu: got another activation of that name"):
        register(type("Other", (SquaredRelu,), {}))
    for wrong in ("scaled_gate(1,2)", "scaled_gate(x)", "scaled_gate()", "squared_relu(1.0)", ""):
        with pytest.raises(ValueError, match="^activation: got "):
            activation_named(wrong)
    assert (
        activation_named("scaled_gate(0.125)") == ScaledGate(0.125) and activation_named("scaled_gate") == ScaledGate()
    )


# -- the device code, lane by lane -------------------------------------------------------------------------------------

EDGES = (0.0, -0.0, 7.0, -7.0, 7.5, -7.5, 1e4, -1e4, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-30, -88.0, 5.5)
EVERY = (*OWN, Hinge(), Relu2(), ClampedSwiglu(), ClampedSwiglu(1.0, 10.0, 0.0), Silu(), Gelu(), Swiglu())


def shape_of(own: ActivationFunction) -> SimpleNamespace:
    return SimpleNamespace(activation=own.number)


def applied(own: ActivationFunction, values: np.ndarray) -> np.ndarray:
    """[results, 32] of values [neighbours, 32], by what the kernels call."""
    activate, results = Activate(None if own.number else own), [Float32(row) for row in values]
    with running(Warp(np.zeros(0, np.uint8), np.zeros(0, np.uint8))), np.errstate(all="ignore"):
        activate.neighbours(shape_of(own), results, len(values))
    return np.stack([np.asarray(each) for each in results[: len(values) // (2 if own.gated else 1)]])


@pytest.mark.parametrize("own", EVERY, ids=lambda own: own.name)
def test_what_kernels_apply_is_the_reference(own):
    generator = np.random.default_rng(0)
    values = (generator.standard_normal((16, 32)) * generator.choice((1, 9, 60), (16, 32))).astype(np.float32)
    found = applied(own, values)
    columns = torch.from_numpy(values.T.astype(np.float64))
    want = own.of_rows(columns).numpy().T
    assert np.abs(found - want).max() <= 2e-6 * np.abs(want).max()
    assert np.allclose(found, want, rtol=4e-6, atol=1e-6)


def test_clamps_are_reached_and_nan_stays():
    own = ClampedSwiglu()
    edges = np.array(EDGES, np.float32)
    gates, ups = np.repeat(edges, len(edges)), np.tile(edges, len(edges))
    found = applied(own, np.stack((gates, ups)).reshape(2, -1, 32).transpose(1, 0, 2).reshape(-1, 32)).reshape(-1)
    want = own.reference(torch.from_numpy(gates).double(), torch.from_numpy(ups).double()).numpy()
    known = ~np.isnan(want)
    assert np.array_equal(np.isnan(found), ~known)
    assert np.allclose(found[known], want[known], rtol=2e-6, atol=1e-30)
    assert 8 * 7 * 0.9999 < found[known].max() <= 56 and found[known].min() >= -6 * 7


def test_the_standard_ones_are_chosen_by_their_numbers():
    assert [each.name for each in STANDARD] == ["silu", "gelu", "swiglu"]
    values = np.linspace(-4, 4, 128, dtype=np.float32).reshape(4, 32)
    results = [Float32(row) for row in values]
    with running(Warp(np.zeros(0, np.uint8), np.zeros(0, np.uint8))):
        Activate(None).neighbours(SimpleNamespace(activation=0), results, 4)
    assert np.array_equal(np.stack([np.asarray(each) for each in results]), values)
