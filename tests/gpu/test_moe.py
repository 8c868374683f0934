"""Layers of experts on a GPU: routing, grouped products of few and of many rows an expert, whole layers, graphs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.moe import launch_routing
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts import fused_moe, grouped_linear
from cute_kernels.gemm.experts.call import MoeCall
from cute_kernels.gemm.experts.choice import GroupedLayout, chosen
from cute_kernels.gemm.experts.compile import layer_specs
from cute_kernels.gemm.experts.config import CombineConfig
from cute_kernels.gemm.experts.plan import LayerForm, as_they_are, few_layouts, make_moe_plan, sorted_products
from cute_kernels.gemm.experts.product import make_product
from cute_kernels.gemm.experts.ranges import schedule as ranges
from cute_kernels.gemm.experts.ranges.schedule import SHAPES as RANGE_SHAPES
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout
from cute_kernels.gemm.experts.reference import grouped_linear_reference, route_reference
from cute_kernels.gemm.experts.router.compile import RouterSpec
from cute_kernels.gemm.experts.router.config import IDS, RouterConfig
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles, layouts
from cute_kernels.gemm.operands.fp8_config import INPUTS, LIMBS, RowsConfig
from cute_kernels.gemm.packed_experts import PackedExperts, interleave_experts, stack_experts
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.product import DTYPES
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma.mainloops import MmaSync
from cute_kernels.runtime.spec import KernelSpec
from tests.linear.cases import known
from tests.moe.candidates import candidates
from tests.moe.launches import launch_grouped

pytestmark = pytest.mark.gpu

CUDA = "cuda"
# Of the largest result. With few rows an expert W is not rounded, so fp32 results are off from the reference, too.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
SHARED_OUT = (1, 0, 3, 8, 0, 2, 5, 1)  # few rows of as many experts as runs of 4 bits in groups of 128 want
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
PAIR_TOKENS = 20
EARLY_TOKENS = (1, 3)
# Kernels of the two products of a layer.
RANGES, TILES = "ranges", "tiles"
PAIRS = [(TILES, TILES), (RANGES, RANGES), (RANGES, TILES), (TILES, RANGES)]
MARGIN = 3  # rows before and behind a result, which nobody writes
EXACT = 1e-4  # of the largest result, of x in limbs and accumulators in fp32
DISTINCT = 4  # experts with a weight of their own; others have one of theirs
# Experts' rows; beyond 128 and 256 experts there are more rounds in which they are found.
RUN_COUNTS = {
    "every number of rows": (0, 1, 7, 8, 9, 16, 17, 300),
    "at most 32 places": (3, 0, 8, 1, 0, 16, 2, 0),
    "all at one expert": (0, 0, 0, 0, 0, 50, 0, 0),
    "one lane's experts": (0, 9, 0, 0),
    "no rows": (0, 0, 0, 0),
    "two rounds": tuple(int(i % 3 == 1) * (i % 11) for i in range(200)),
    "four rounds": (*(0,) * 300, 17, *(int(i % 50 == 3) for i in range(210)), 5),
}
# N, K of an expert: tails of both, an odd number of k blocks, room for the limbs of one entry only, and a room that its
# k blocks fill, which are no multiple of four.
RUN_SIZES = ((1000, 1000), (72, 384), (200, 3584), (200, 4304))


def problem(
    places: int, experts: int, n: int, k: int, bits=4, dtype=torch.bfloat16, group: int | None = 128, zero=False
):
    k_pad = padded_shape((n, k), group)[1]
    return GroupedProblem(places, experts, n, k, k_pad, integers(bits, group, zero), DTYPES[dtype])


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    found: list[KernelSpec] = [RouterSpec(RouterConfig(f"int{bits}", IDS)) for bits in (32, 64)]
    found += [GemmSpec(RowsConfig(dtype, makes=INPUTS)) for dtype in ("bf16", "fp16")]
    found += [GemmSpec(RowsConfig(dtype, makes=LIMBS)) for dtype in ("bf16", "fp16")]
    found += [ExpertSpec(CombineConfig(*pair)) for pair in (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32"))]
    found += [ExpertSpec(CombineConfig("fp32", "bf16"))]
    found += [ExpertSpec(CombineConfig("bf16", id_bits=64, shares=dtype)) for dtype in ("bf16", "fp16")]
    found += [ExpertSpec(CombineConfig(dtype, id_bits=bits)) for dtype in ("bf16", "fp32") for bits in (32, 64)]
    formats: list[Any] = [param.values for param in FORMATS]
    for dtype, (n, k) in itertools.product(TOLERANCE, SHAPES):
        found.append(ExpertSpec(chosen(problem(sum(SHARED_OUT) + SPARE, len(SHARED_OUT), n, k, dtype=dtype)).config))
    for counts in COUNTS.values():
        places = sum(counts) + SPARE
        found += [ExpertSpec(chosen(problem(places, len(counts), *SHAPES[0], *form)).config) for form in formats]
        found += [ExpertSpec(chosen(problem(places, len(counts), n, k)).config) for n, k in SHAPES]
    for tokens in (*TOKENS, *EARLY_TOKENS):
        products = layer_problems(tokens)
        found += layer_specs(2 * tokens, products, [chosen(product) for product in products])
    found += [ExpertSpec(layout.config) for layout in layouts(problem(600, 6, *SHAPES[1]))]
    for form in formats:
        found += [ExpertSpec(layout.config) for layout in tiles_of_few_rows(*form)]
    for counts, (n, k), dtype in RUN_CASES:
        found += [ExpertSpec(layout.config) for layout in run_layouts(counts, n, k, dtype)]
    for pair in PAIRS:
        found += [ExpertSpec(one.config) for one in products_of(pair)]
    return list(dict.fromkeys(found))


def layer_problems(tokens: int) -> list[GroupedProblem]:
    """The products of LAYER."""
    experts, hidden, inner = LAYER
    return [problem(2 * tokens, experts, n, k) for n, k in ((2 * inner, hidden), (hidden, inner))]


def tiles_of_few_rows(bits: int, dtype: torch.dtype, group: int | None, zero: bool) -> list[GroupedTiles]:
    """Synchronous tiles, and those whose activations come in limbs, for a product of SHAPES[0]."""
    every = layouts(problem(sum(FEW_ROWS), len(FEW_ROWS), *SHAPES[0], bits, dtype, group, zero))
    return [layout for layout in every if isinstance(layout.config.mainloop, MmaSync) or layout.config.limbs]


RUN_CASES = [(counts, RUN_SIZES[0], torch.bfloat16) for counts in RUN_COUNTS.values()]
RUN_CASES += [(RUN_COUNTS["every number of rows"], size, torch.bfloat16) for size in RUN_SIZES[1:]]
RUN_CASES += [(RUN_COUNTS["every number of rows"], RUN_SIZES[0], torch.float16)]


def run_layouts(counts: tuple[int, ...], n: int, k: int, dtype: torch.dtype) -> list[RangeLayout]:
    """All work ranges of whole blocks that are possible: chunks of a k block and of two."""
    found = list(ranges.layouts(problem(sum(counts) + SPARE, len(counts), n, k, dtype=dtype)))
    k_blocks = padded_shape((n, k), 128)[1] // 128
    assert len(found) == sum(k_blocks % shape.chunk_k_blocks == 0 for shape in RANGE_SHAPES)
    return found


def kind_of(layout: GroupedLayout) -> str:
    """What of PAIRS a candidate is."""
    return RANGES if isinstance(layout, RangeLayout) else TILES


def products_of(pair: tuple[str, str]) -> list[GroupedLayout]:
    """For each product of LAYER a candidate of the given kind."""
    experts, hidden, inner = LAYER
    sizes = zip(pair, ((2 * inner, hidden), (hidden, inner)), strict=True)
    problems = [(kind, problem(2 * PAIR_TOKENS, experts, n, k)) for kind, (n, k) in sizes]
    return [next(one for one in candidates(product) if kind_of(one) == kind) for kind, product in problems]


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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
def test_runs_of_few_rows(n, k, activation, dtype):
    assert isinstance(chosen(problem(sum(SHARED_OUT) + SPARE, len(SHARED_OUT), n, k, dtype=dtype)), RangeLayout)
    check_grouped(experts_of(len(SHARED_OUT), n, k, dtype=dtype), SHARED_OUT, activation, dtype)


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
    product = make_product(layout, places, len(counts), torch.cuda.current_device())
    results = []
    for _ in range(3):
        out = torch.full((places, n // 2), math.nan, device=CUDA, dtype=torch.bfloat16)
        launch_grouped(product, given, packed, out, activation="swiglu", offsets=starts, rows=None)
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
        product = make_product(layout, total + SPARE, experts, torch.cuda.current_device())
        results = []
        for _ in range(2):
            out = torch.full((total + SPARE, wanted.shape[1]), math.nan, device=CUDA)
            places = {"offsets": starts, "rows": None}
            launch_grouped(product, given, packed, out, bias=added, activation=activation, **places)
            results.append(out)
        assert results[0][total:].isnan().all() and torch.equal(results[0][:total], results[1][:total])
        assert_near(results[0][:total], wanted[:total], TOLERANCE[dtype])


def layer() -> tuple[PackedExperts, PackedExperts]:
    experts, hidden, inner = LAYER
    gate = experts_of(experts, inner, hidden)
    up = stack_experts([*gate][::-1])
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
    wanted = fused_moe(x, gate_up, down, weights, ids, out_dtype=torch.float32)
    gate_up, down = gate_up.to(CUDA), down.to(CUDA)
    for _ in range(2):  # the second call finds its plan
        out = torch.full((tokens, LAYER[1]), math.nan, device=CUDA, dtype=out_dtype)
        fused_moe(x.to(CUDA), gate_up, down, weights.to(CUDA), ids.to(CUDA, id_dtype), out=out)
        assert_near(out, wanted, 6e-3)


@pytest.mark.parametrize("tokens", [1, 3, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_count_what_they_are_in_fp32(tokens, dtype):
    gate_up, down = (experts.to(CUDA) for experts in layer())
    x = numbers(tokens, LAYER[1]).to(CUDA)
    ids, weights = (given.to(CUDA) for given in assignments(tokens))
    weights = weights.to(dtype)
    wanted = fused_moe(x, gate_up, down, weights.float(), ids)
    for given in (weights, weights, weights.repeat_interleave(2, dim=1)[:, ::2]):
        assert torch.equal(fused_moe(x, gate_up, down, given, ids), wanted)


@pytest.mark.parametrize("gap", [LAYER[1], 8, 3])
@pytest.mark.parametrize("tokens", [1, 3, 40, 200])
def test_rows_that_lie_apart_are_those_that_do_not(tokens, gap):
    """Calls one behind the other, each of whose rows are what the one before gave: copies wait for it."""
    gate_up, down = (experts.to(CUDA) for experts in layer())
    wide = numbers(tokens, LAYER[1] + gap).to(CUDA)
    ids, weights = (given.to(CUDA) for given in assignments(tokens))
    wanted, found = wide[:, : LAYER[1]].contiguous(), wide.clone()
    for _ in range(8):
        wanted = wanted + fused_moe(wanted, gate_up, down, weights, ids)
        found[:, : LAYER[1]] += fused_moe(found[:, : LAYER[1]], gate_up, down, weights, ids)
    assert torch.equal(found[:, : LAYER[1]], wanted) and torch.equal(found[:, LAYER[1] :], wide[:, LAYER[1] :])


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_each_product_may_be_any_kernels(pair):
    gate_up, down = layer()
    x, (ids, weights) = numbers(PAIR_TOKENS, LAYER[1]), assignments(PAIR_TOKENS)
    wanted = fused_moe(x, gate_up, down, weights, ids, out_dtype=torch.float32)
    form = LayerForm(PAIR_TOKENS, 2, 8 * ids.element_size(), gate_up.to(CUDA).form, down.to(CUDA).form)
    first, second = (
        make_product(layout, form.count, each.num_experts, each.device_index)
        for layout, each in zip(products_of(pair), (form.gate_up, form.down), strict=True)
    )
    made = make_moe_plan((first, second), form, torch.bfloat16)
    out = torch.full((PAIR_TOKENS, LAYER[1]), math.nan, device=CUDA, dtype=torch.bfloat16)
    made.launch(MoeCall(x.to(CUDA), gate_up.to(CUDA), down.to(CUDA), weights.to(CUDA), ids.to(CUDA), out=out))
    assert_near(out, wanted, 6e-3)


@pytest.mark.parametrize("tokens", EARLY_TOKENS)
@pytest.mark.parametrize("kind", ["as they are", "ranges"])
def test_a_second_product_that_begins_early_gives_the_same_numbers(tokens, kind):
    """Of layers behind each other with new routing each: offsets, limbs, partial results of one are no other's."""
    gate_up, down = (weight.to(CUDA) for weight in layer())
    form, few = LayerForm(tokens, 2, 32, gate_up.form, down.form), kind == "as they are"
    layouts = few_layouts(form)
    assert layouts is not None
    first, second = as_they_are(layouts, form) if few else sorted_products(form)
    assert isinstance(second.schedule, RangeLayout)
    assert second.finds_ids == few and second.waits is False
    both = (first, second), (first, replace(second, waits=True))
    early, late = (make_moe_plan(each, form, torch.float32) for each in both)
    x, weights = numbers(tokens, LAYER[1]).to(CUDA), assignments(tokens)[1].to(CUDA)
    chosen = [assignments(tokens, seed)[0].to(CUDA, torch.int32) for seed in range(200)]

    def results(plan) -> torch.Tensor:
        return torch.stack([plan.launch(MoeCall(x, gate_up, down, weights, ids)) for ids in chosen])

    wanted = results(late)
    assert wanted.isfinite().all() and not torch.equal(wanted[0], wanted[1])
    for _ in range(3):
        assert torch.equal(results(early), wanted)


@pytest.mark.parametrize("tokens", [5, 33, 200])
def test_graphs_replay_with_other_routing(tokens):
    gate_up, down = layer()
    on_gpu = gate_up.to(CUDA), down.to(CUDA)
    x = numbers(tokens, LAYER[1])
    given, (ids, weights) = x.to(CUDA), [tensor.to(CUDA) for tensor in assignments(tokens)]
    fused_moe(given, *on_gpu, weights, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_moe(given, *on_gpu, weights, ids)
    for seed in (1, 2):
        other, _ = assignments(tokens, seed)
        ids.copy_(other)
        graph.replay()
        assert_near(out, fused_moe(x, gate_up, down, weights.cpu(), other, out_dtype=torch.float32), 6e-3)


def test_what_a_repeated_call_may_not_change_is_checked_again():
    gate_up, down = (weight.to(CUDA) for weight in layer())
    x, (ids, weights) = numbers(5, LAYER[1]).to(CUDA), [tensor.to(CUDA) for tensor in assignments(5)]
    fused_moe(x, gate_up, down, weights, ids)
    with pytest.raises(ValueError, match="x: got shape"):
        fused_moe(x[:, :-8], gate_up, down, weights, ids)
    with pytest.raises(TypeError, match="topk_ids: got dtype"):
        fused_moe(x, gate_up, down, weights, ids.short())
    with pytest.raises(ValueError, match="topk_weights: got a tensor on cpu"):
        fused_moe(x, gate_up, down, weights.cpu(), ids)
    with pytest.raises(ValueError, match="out: got shape"):
        fused_moe(x, gate_up, down, weights, ids, out=x[:4])


def test_a_product_of_no_places():
    weight = experts_of(3, *SHAPES[1]).to(CUDA)
    offsets = torch.zeros(4, dtype=torch.int32, device=CUDA)
    x = torch.empty((0, SHAPES[1][1]), dtype=torch.bfloat16, device=CUDA)
    assert grouped_linear(x, weight, offsets).shape == (0, SHAPES[1][0])


# -- work ranges of whole blocks
# ----------------------------------------------------------------------------------------------


def weights_of(count: int, n: int, k: int, dtype: torch.dtype) -> tuple[PackedExperts, torch.Tensor]:
    """(``count`` experts on the GPU, those of DISTINCT ones in turn; fp64 [DISTINCT, n, k])."""
    one = experts_of(DISTINCT, n, k, dtype=dtype)
    turn = torch.arange(count) % DISTINCT
    every = PackedExperts(one.codes[turn], one.scales[turn], None, one.format, (n, k), check_values=False)
    return every.to(CUDA), one.dequantize(torch.float64).to(CUDA)


def run_product(
    layout: RangeLayout | GroupedTiles,
    weight: PackedExperts,
    x: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """Launches a product of a layout; all tensors are on the GPU."""
    product = make_product(layout, out.shape[0], len(weight), torch.cuda.current_device())
    launch_grouped(product, x, weight, out, bias=bias, activation=activation, offsets=offsets, rows=rows)


def exact_product(x: torch.Tensor, dense: torch.Tensor, counts, bias, activation: str | None) -> torch.Tensor:
    """fp64 results of rows of x, which are those of the experts' places one after the other."""
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(x.device)
    found = torch.empty(x.shape[0], dense.shape[1], dtype=torch.float64, device=x.device)
    for turn in range(DISTINCT):
        own = expert % DISTINCT == turn
        found[own] = x[own].double() @ dense[turn].T
    if bias is not None:
        found += bias[expert].double()
    if activation == "swiglu":
        return torch.nn.functional.silu(found[:, ::2]) * found[:, 1::2]
    return torch.nn.functional.silu(found) if activation == "silu" else found


def poisoned(places: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(NaN with a margin around a result, the result)."""
    whole = torch.full((places + 2 * MARGIN, columns), math.nan, device=CUDA, dtype=dtype)
    return whole, whole[MARGIN : MARGIN + places]


def run_ids(case: tuple[tuple[int, ...], tuple[int, int], torch.dtype]) -> str:
    counts, (n, k), dtype = case
    return f"{next(name for name, one in RUN_COUNTS.items() if one == counts)}-n{n}-k{k}-{DTYPES[dtype]}"


@pytest.mark.parametrize("case", RUN_CASES, ids=run_ids)
def test_runs_multiply_every_row_of_every_expert(case):
    """By index and as they lie; what is nobody's is not written, and the same numbers come again."""
    counts, (n, k), dtype = case
    weight, dense = weights_of(len(counts), n, k, dtype)
    offsets, rows = (tensor.to(CUDA) for tensor in routing_of(counts, 50))
    total, places = sum(counts), rows.shape[0]
    x, bias = numbers(50, k, dtype=dtype).to(CUDA), numbers(len(counts), n, dtype=dtype, seed=2).to(CUDA)
    taken = x[rows.long()].contiguous()
    for activation, added in ((None, None), ("silu", bias), ("swiglu", bias)):
        wanted = exact_product(taken[:total], dense, counts, added, activation)
        for layout in run_layouts(counts, n, k, dtype):
            for given, index, out_dtype in ((x, rows, dtype), (x, rows, torch.float32), (taken, None, torch.float32)):
                results = []
                for _ in range(2):
                    whole, out = poisoned(places, wanted.shape[1], out_dtype)
                    run_product(layout, weight, given, offsets, index, added, activation, out)
                    assert whole[:MARGIN].isnan().all() and whole[MARGIN + total :].isnan().all()
                    results.append(out[:total])
                assert torch.equal(*results)
                if total:
                    assert_near(results[0], wanted, EXACT if out_dtype == torch.float32 else TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_return_the_weights_of_rows_with_a_single_one(dtype):
    counts, (n, k) = RUN_COUNTS["every number of rows"], RUN_SIZES[0]
    weight, dense = weights_of(len(counts), n, k, dtype)
    total = sum(counts)
    inputs = torch.arange(total, device=CUDA) * 37 % k
    x = torch.nn.functional.one_hot(inputs, k).to(dtype)
    offsets = routing_of(counts, 1)[0].to(CUDA)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(CUDA)
    wanted = dense[expert % DISTINCT, :, inputs].float()
    for layout in run_layouts(counts, n, k, dtype):
        _, out = poisoned(total, n, torch.float32)
        run_product(layout, weight, x, offsets, None, None, None, out)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", ["every number of rows", "at most 32 places"])
def test_rows_of_runs_that_are_not_finite_are_nan_alone(name):
    counts, (n, k) = RUN_COUNTS[name], RUN_SIZES[0]
    weight, _ = weights_of(len(counts), n, k, torch.bfloat16)
    offsets, rows = (tensor.to(CUDA) for tensor in routing_of(counts, 9))
    x = numbers(9, k).to(CUDA)
    x[2, 5], x[4, k - 1], x[7, 300] = math.inf, -math.inf, math.nan
    broken = torch.isin(rows, torch.tensor([2, 4, 7], device=CUDA, dtype=rows.dtype))[: sum(counts)]
    assert broken.any() and not broken.all()
    for layout in run_layouts(counts, n, k, torch.bfloat16):
        _, out = poisoned(rows.shape[0], n, torch.float32)
        run_product(layout, weight, x, offsets, rows, None, None, out)
        found = out[: sum(counts)]
        assert found[broken].isnan().all() and found[~broken].isfinite().all()


@pytest.mark.parametrize("number", range(len(RANGE_SHAPES)), ids=lambda number: str(tuple(RANGE_SHAPES[number])))
def test_graphs_of_runs_replay_with_other_routing(number):
    counts, (n, k) = RUN_COUNTS["every number of rows"], RUN_SIZES[0]
    weight, dense = weights_of(len(counts), n, k, torch.bfloat16)
    layout = run_layouts(counts, n, k, torch.bfloat16)[number]
    x = numbers(50, k).to(CUDA)
    offsets, rows = (tensor.to(CUDA) for tensor in routing_of(counts, 50))
    _, out = poisoned(rows.shape[0], n, torch.float32)
    run_product(layout, weight, x, offsets, rows, None, None, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_product(layout, weight, x, offsets, rows, None, None, out)
    for other in (counts[::-1], (0,) * len(counts), (2,) * len(counts)):
        total = sum(other)
        offsets.copy_(routing_of(other, 1)[0])
        rows.copy_(torch.randint(0, 50, rows.shape, generator=torch.Generator().manual_seed(total)))
        out.fill_(math.nan)
        graph.replay()
        assert out[total:].isnan().all()
        if total:
            assert_near(out[:total], exact_product(x[rows[:total].long()], dense, other, None, None), EXACT)
