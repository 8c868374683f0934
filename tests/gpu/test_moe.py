"""Layers of experts on a GPU: routing, grouped products of few and of many rows an expert, whole layers, graphs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.linear.config import BF16, FP32, NO_ACTIVATION, SWIGLU
from cute_kernels.linear.experts import PackedExperts, interleave_experts, stack_experts
from cute_kernels.linear.plan import DTYPES
from cute_kernels.linear.weight import padded_shape
from cute_kernels.linear.wgmma.compile import DigitRowsSpec
from cute_kernels.linear.wgmma.config import DigitRowsConfig
from cute_kernels.moe import fused_moe, grouped_linear, ops, plan
from cute_kernels.moe.compile import CombineSpec, GatherSpec, GroupedWgmmaSpec, RoutingSpec, grouped_spec, spec_of
from cute_kernels.moe.config import CombineConfig, GatherConfig, RoutingConfig
from cute_kernels.moe.launch import addresses_of, launch_routing
from cute_kernels.moe.layer import moe_plan_of
from cute_kernels.moe.plan import GroupedPlan, make_product_plan
from cute_kernels.moe.reference import grouped_linear_reference, route_reference
from cute_kernels.moe.schedule import CAPACITIES, GroupedProblem, GroupedSchedule
from cute_kernels.moe.tuned import GroupedCandidate, candidates, key_of
from cute_kernels.moe.wgmma.schedule import GroupedTiles, layouts
from cute_kernels.runtime import tuned as tables
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.tuned import Choice, TunedTable
from tests.linear.cases import known

pytestmark = pytest.mark.gpu

CUDA = "cuda"
# Of the largest result. With few rows an expert W is not rounded, so fp32 results are off from the reference, too.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
FORMATS = [
    pytest.param(bits, dtype, group, zero, id=f"w{bits}-{str(dtype)[6:]}-g{group}{'-zero' if zero else ''}")
    for bits, dtype, group, zero in (
        (4, torch.bfloat16, 128, False),
        (4, torch.float16, 256, False),
        (4, torch.float16, 32, True),
        (8, torch.bfloat16, None, True),
        (8, torch.float16, 64, False),
    )
]
every_format = pytest.mark.parametrize("bits, dtype, group, zero", FORMATS)
COUNTS = {
    "few rows": (1, 0, 3, 8, 0, 2),
    "many rows": (40, 0, 1, 100, 64, 17),
    "one expert has all": (0, 0, 300, 0, 0, 0),
    "no rows": (0, 0, 0, 0, 0, 0),
}
SHAPES = ((200, 520), (1008, 512))  # N, K of an expert
LAYER = (8, 256, 192)  # experts, hidden, intermediate
TOKENS = (1, 5, 33, 200)
FEW_ROWS = (0, *range(1, 17), 0, 33, 0)  # every number of rows of a tile, a tile after two whole ones, and none
SPARE = 2  # places behind those of the experts
TUNED_TOKENS = 33
PAIRS = [(8, None), (None, 16), (32, 8), (None, None)]  # entries of the products' memory-bound kernel, or the other one


def problem(
    places: int, experts: int, n: int, k: int, bits=4, dtype=torch.bfloat16, group: int | None = 128, zero=False
):
    return GroupedProblem(places, experts, n, k, padded_shape((n, k), group)[1], bits, DTYPES[dtype], group or 0, zero)


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    found: list[KernelSpec] = [RoutingSpec(RoutingConfig(bits)) for bits in (32, 64)]
    found += [GatherSpec(GatherConfig(dtype)) for dtype in ("bf16", "fp16")]
    found += [DigitRowsSpec(DigitRowsConfig(dtype)) for dtype in ("bf16", "fp16")]
    found += [CombineSpec(CombineConfig(*pair)) for pair in (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32"))]
    found += [CombineSpec(CombineConfig("fp32", "bf16"))]
    formats: list[Any] = [param.values for param in FORMATS]
    for counts in COUNTS.values():
        places = sum(counts) + SPARE
        found += [grouped_spec(problem(places, len(counts), *SHAPES[0], *form)) for form in formats]
        found += [grouped_spec(problem(places, len(counts), n, k)) for n, k in SHAPES]
    experts, hidden, inner = LAYER
    for tokens in TOKENS:
        found += [grouped_spec(problem(2 * tokens, experts, n, k)) for n, k in ((2 * inner, hidden), (hidden, inner))]
    found += [GroupedWgmmaSpec(layout.config) for layout in layouts(problem(600, 6, *SHAPES[1]))]
    for form in formats:
        found += [GroupedWgmmaSpec(layout.config) for layout in tiles_of_few_rows(*form)]
    for pair in PAIRS:
        found += [spec_of(one.schedule.config) for one in tuned_products(pair).values()]
    return list(dict.fromkeys(found))


def tiles_of_few_rows(bits: int, dtype: torch.dtype, group: int | None, zero: bool) -> list[GroupedTiles]:
    """Synchronous tiles, and those whose activations come in digits, for a product of SHAPES[0]."""
    every = layouts(problem(sum(FEW_ROWS), len(FEW_ROWS), *SHAPES[0], bits, dtype, group, zero))
    return [layout for layout in every if layout.config.synchronous or layout.config.digits]


def tuned_products(pair: tuple[int | None, int | None]) -> dict[str, GroupedCandidate]:
    """For each product of LAYER, by its key, a candidate of the given entries, or of the kernel for many rows."""
    experts, hidden, inner = LAYER
    found = {}
    for capacity, (n, k) in zip(pair, ((2 * inner, hidden), (hidden, inner)), strict=True):
        assert capacity is None or capacity in CAPACITIES
        product = problem(2 * TUNED_TOKENS, experts, n, k)
        found[key_of(product)] = next(
            one
            for one in candidates(product)
            if (one.schedule.config.max_tokens if isinstance(one.schedule, GroupedSchedule) else None) == capacity
        )
    return found


def experts_of(count: int, n: int, k: int, bits=4, group=128, zero=False, dtype=torch.bfloat16) -> PackedExperts:
    return stack_experts([known(n, k, bits, group, zero, dtype, seed).pack() for seed in range(count)])


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    error = (found.double().cpu() - wanted.double().cpu()).abs().max()
    assert error <= tolerance * wanted.abs().max().clamp(min=1e-9).cpu(), f"{error} of {wanted.abs().max()}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens, topk, experts", [(1, 8, 128), (33, 2, 8), (1000, 8, 256), (2048, 4, 512)])
def test_assignments_are_sorted(tokens, topk, experts, dtype):
    ids = torch.randint(-1, experts + 1, (tokens, topk), generator=torch.Generator().manual_seed(tokens)).to(dtype)
    found, wanted = launch_routing(ids.to(CUDA), experts), route_reference(ids, experts)
    total = int(wanted[0][-1])
    assert torch.equal(found.offsets.cpu(), wanted[0])
    assert found.rows is not None and torch.equal(found.rows[:total].cpu(), wanted[1][:total])
    assert found.places is not None and torch.equal(found.places.cpu(), wanted[2])


def routing_of(counts: tuple[int, ...], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets, the row of x at each place): some places at the end are nobody's."""
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    generator = torch.Generator().manual_seed(3)
    return offsets, torch.randint(0, rows, (sum(counts) + SPARE,), generator=generator).int()


@every_format
@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_each_place_is_multiplied_with_its_experts_weight(counts, activation, bits, dtype, group, zero):
    n, k = SHAPES[0]
    weight = experts_of(len(counts), n, k, bits, group, zero, dtype)
    check_grouped(weight, counts, activation, dtype)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=list(COUNTS))
@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
def test_whole_vectors_and_tails(counts, activation):
    n, k = SHAPES[1]
    check_grouped(experts_of(len(counts), n, k), counts, activation, torch.bfloat16)


def check_grouped(weight: PackedExperts, counts: tuple[int, ...], activation: str | None, dtype: torch.dtype) -> None:
    """With bias; in x's dtype and in fp32; with rows by index and as they lie; what is nobody's is not written."""
    n, k = weight.shape
    offsets, rows = routing_of(counts, 50)
    x, bias = numbers(50, k, dtype=dtype), numbers(len(counts), n, dtype=dtype, seed=2)
    packed, places, total = weight.to(CUDA), rows.shape[0], sum(counts)
    for given, index in ((x, rows), (x[rows.long()].contiguous(), None)):
        options: dict[str, Any] = {"rows": index, "bias": bias, "activation": activation}
        wanted = grouped_linear_reference(given, weight, offsets, **options, out_dtype=torch.float32)
        on_gpu = {"rows": None if index is None else index.to(CUDA), "bias": bias.to(CUDA), "activation": activation}
        for out_dtype in (dtype, torch.float32):
            out = torch.full((places, wanted.shape[1]), math.nan, device=CUDA, dtype=out_dtype)
            grouped_linear(given.to(CUDA), packed, offsets.to(CUDA), out=out, **on_gpu)
            assert out[total:].isnan().all()
            if total:
                assert_near(out[:total], wanted[:total], TOLERANCE[dtype])


@pytest.mark.parametrize("number", range(len(layouts(problem(600, 6, *SHAPES[1])))))
@pytest.mark.parametrize("counts", [(40, 0, 1, 270, 256, 17), (1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 0, 0)])
def test_every_tile_gives_the_same_numbers_each_time(number, counts):
    n, k = SHAPES[1]
    layout = layouts(problem(600, 6, n, k))[number]
    weight = experts_of(len(counts), n, k)
    offsets, _ = routing_of(counts, 1)
    places = max(sum(counts), 1)
    x = numbers(places, k)
    wanted = grouped_linear_reference(x, weight, offsets, activation="swiglu", out_dtype=torch.float32)
    packed, given, starts = weight.to(CUDA), x.to(CUDA), offsets.to(CUDA)
    plan = make_product_plan(layout, places, len(counts), torch.cuda.current_device())
    results = []
    for _ in range(3):
        out = torch.full((places, n // 2), math.nan, device=CUDA, dtype=torch.bfloat16)
        plan.run(given, (*addresses_of(packed), 0, out.data_ptr()), (starts.data_ptr(), 0), (n, SWIGLU, BF16))
        results.append(out[: sum(counts)])
    if sum(counts):
        assert_near(results[0], wanted[: sum(counts)], TOLERANCE[torch.bfloat16])
    assert all(torch.equal(results[0], other) for other in results[1:])


@every_format
@pytest.mark.parametrize("swiglu", [True, False], ids=["first product", "second product"])
def test_tiles_of_every_number_of_few_rows(swiglu, bits, dtype, group, zero):
    (n, k), experts = SHAPES[0], len(FEW_ROWS)
    weight = experts_of(experts, n, k, bits, group, zero, dtype)
    offsets, _ = routing_of(FEW_ROWS, 1)
    total = sum(FEW_ROWS)
    x, bias = numbers(total + SPARE, k, dtype=dtype), numbers(experts, n, dtype=dtype, seed=2)
    activation = "swiglu" if swiglu else None
    wanted = grouped_linear_reference(x, weight, offsets, bias=bias, activation=activation, out_dtype=torch.float32)
    packed, given, starts, added = weight.to(CUDA), x.to(CUDA), offsets.to(CUDA), bias.to(CUDA)
    for layout in tiles_of_few_rows(bits, dtype, group, zero):
        plan = make_product_plan(layout, total + SPARE, experts, torch.cuda.current_device())
        results = []
        for _ in range(2):
            out = torch.full((total + SPARE, wanted.shape[1]), math.nan, device=CUDA)
            addresses = (*addresses_of(packed), added.data_ptr(), out.data_ptr())
            plan.run(given, addresses, (starts.data_ptr(), 0), (n, SWIGLU if swiglu else NO_ACTIVATION, FP32))
            results.append(out)
        assert results[0][total:].isnan().all() and torch.equal(results[0][:total], results[1][:total])
        assert_near(results[0][:total], wanted[:total], TOLERANCE[dtype])


def layer() -> tuple[PackedExperts, PackedExperts]:
    experts, hidden, inner = LAYER
    gate, up = experts_of(experts, inner, hidden), stack_experts([*experts_of(experts, inner, hidden)][::-1])
    return interleave_experts(gate, up), experts_of(experts, hidden, inner)


def assignments(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(-1, LAYER[0], (tokens, 2), generator=torch.Generator().manual_seed(seed))
    return ids, numbers(tokens, 2, dtype=torch.float32, seed=4).softmax(-1)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_a_layer_is_the_weighted_sum_of_its_experts(tokens, out_dtype, id_dtype):
    gate_up, down = layer()
    x = numbers(tokens, LAYER[1])
    ids, weights = assignments(tokens)
    wanted = fused_moe(x, gate_up, down, ids, weights, out_dtype=torch.float32)
    gate_up, down = gate_up.to(CUDA), down.to(CUDA)
    for _ in range(2):  # the second call finds its plan
        out = torch.full((tokens, LAYER[1]), math.nan, device=CUDA, dtype=out_dtype)
        fused_moe(x.to(CUDA), gate_up, down, ids.to(CUDA, id_dtype), weights.to(CUDA), out=out)
        assert_near(out, wanted, 6e-3)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_table_may_give_each_product_to_either_kernel(pair, tmp_path, monkeypatch):
    entries = {key: Choice(*one.name, us=1.0, model_us=1.0) for key, one in tuned_products(pair).items()}
    TunedTable(torch.cuda.get_device_name(), None, entries).write(tmp_path / "table.json")
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path / "table.json"))
    gate_up, down = layer()
    x, (ids, weights) = numbers(TUNED_TOKENS, LAYER[1]), assignments(TUNED_TOKENS)
    wanted = fused_moe(x, gate_up, down, ids, weights, out_dtype=torch.float32)
    try:
        forget()
        out = torch.full((TUNED_TOKENS, LAYER[1]), math.nan, device=CUDA, dtype=torch.bfloat16)
        fused_moe(x.to(CUDA), gate_up.to(CUDA), down.to(CUDA), ids.to(CUDA), weights.to(CUDA), out=out)
        (made,) = ops._plans.values()
    finally:
        forget()
    assert_near(out, wanted, 6e-3)
    products = made.gate_up, made.down
    assert [type(product) is GroupedPlan for product in products] == [capacity is not None for capacity in pair]


def forget() -> None:
    """What was decided with other tables."""
    tables.tables.cache_clear()
    plan.plan_of.cache_clear()
    moe_plan_of.cache_clear()
    ops._plans.clear()


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_second_product_that_begins_early_gives_the_same_numbers(tokens):
    """Of layers behind each other with new routing each: offsets and partial results of one are not another's."""
    gate_up, down = (weight.to(CUDA) for weight in layer())
    early = moe_plan_of(tokens, 2, 32, gate_up.form, down.form, torch.float32)
    assert isinstance(early.down, GroupedPlan) and not early.down.waits
    late = replace(early, down=replace(early.down, waits=True))
    x, weights = numbers(tokens, LAYER[1]).to(CUDA), assignments(tokens)[1].to(CUDA)
    chosen = [assignments(tokens, seed)[0].to(CUDA, torch.int32) for seed in range(200)]

    def results(plan) -> torch.Tensor:
        return torch.stack([plan.run(x, gate_up, down, ids, weights, None) for ids in chosen])

    wanted = results(late)
    assert wanted.isfinite().all() and not torch.equal(wanted[0], wanted[1])
    for _ in range(3):
        assert torch.equal(results(early), wanted)


@pytest.mark.parametrize("tokens", [5, 200])
def test_graphs_replay_with_other_routing(tokens):
    gate_up, down = layer()
    on_gpu = gate_up.to(CUDA), down.to(CUDA)
    x = numbers(tokens, LAYER[1])
    given, (ids, weights) = x.to(CUDA), [tensor.to(CUDA) for tensor in assignments(tokens)]
    fused_moe(given, *on_gpu, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_moe(given, *on_gpu, ids, weights)
    for seed in (1, 2):
        other, _ = assignments(tokens, seed)
        ids.copy_(other)
        graph.replay()
        assert_near(out, fused_moe(x, gate_up, down, other, weights.cpu(), out_dtype=torch.float32), 6e-3)


def test_what_a_repeated_call_may_not_change_is_checked_again():
    gate_up, down = (weight.to(CUDA) for weight in layer())
    x, (ids, weights) = numbers(5, LAYER[1]).to(CUDA), [tensor.to(CUDA) for tensor in assignments(5)]
    fused_moe(x, gate_up, down, ids, weights)
    with pytest.raises(ValueError, match="x: got shape"):
        fused_moe(x[:, :-8], gate_up, down, ids, weights)
    with pytest.raises(TypeError, match="topk_ids: got dtype"):
        fused_moe(x, gate_up, down, ids.short(), weights)
    with pytest.raises(ValueError, match="topk_weights: got a tensor on cpu"):
        fused_moe(x, gate_up, down, ids, weights.cpu())
    with pytest.raises(ValueError, match="out: got shape"):
        fused_moe(x, gate_up, down, ids, weights, out=x[:4])


def test_a_product_of_no_places():
    weight = experts_of(3, *SHAPES[1]).to(CUDA)
    offsets = torch.zeros(4, dtype=torch.int32, device=CUDA)
    x = torch.empty((0, SHAPES[1][1]), dtype=torch.bfloat16, device=CUDA)
    assert grouped_linear(x, weight, offsets).shape == (0, SHAPES[1][0])
