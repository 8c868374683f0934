"""Layers of few assignments on a GPU, which no launch sorts: products against exact ones, layers, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.nn import functional

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts import fused_moe
from cute_kernels.gemm.experts.call import MoeCall
from cute_kernels.gemm.experts.plan import LayerForm, make_moe_plan, moe_plan_of, sorted_products
from cute_kernels.gemm.experts.product import AssignedIds, assigned_product
from cute_kernels.gemm.experts.ranges import schedule as ranges
from cute_kernels.gemm.experts.ranges.config import LANE_ASSIGNMENTS
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout, among_assignments
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.packed_experts import ExpertsForm, PackedExperts
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.runtime import KernelSpec, arch_of, load_many
from tests.gpu.compiled import assert_replays, compiled
from tests.gpu.specs import products_needed_by
from tests.gpu.test_moe import (
    CUDA,
    DISTINCT,
    EXACT,
    MARGIN,
    TOLERANCE,
    assert_near,
    numbers,
    poisoned,
    problem,
    weights_of,
)
from tests.moe.launches import launch_grouped

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("product_kernels")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ID_DTYPES = (torch.int32, torch.int64)
OUT_DTYPES = (BF16, FP32)
LAYER_TOLERANCE = 6e-3  # of the largest result: what is between the products is rounded, too
SORTED_TOLERANCE = (
    1e-3  # of the largest result: of the same accumulators, rounded to hidden activations now and then otherwise
)
HIDDEN, INNER = 1000, 200  # with tails of both products' K
# Inner features whose limbs have no room whole, so that the second product is in parts of K, with a tail; and few
# hidden ones beside so many.
LONG_INNER, LONG_HIDDEN, LONG_EXPERTS = 14320, 200, 8
LONG_ROUTES = ((1, 2), (4, 2), (5, 3), (16, 2))  # tokens, experts that each chooses
# Experts: few, a part of a round, a whole round, two.
LAYERS = ((8, BF16), (60, BF16), (128, FP16), (256, BF16))
# Tokens, experts that each chooses: a lane has one of at most 32 assignments, or two of at most 64.
ROUTES = ((1, 8), (2, 8), (3, 8), (4, 8), (1, 1), (32, 1), (1, 32), (16, 2), (5, 3), (5, 8), (8, 8), (64, 1), (2, 17))
# N, K of an expert: tails of both, an odd number of k blocks, and room for the limbs of one entry only.
SIZES = ((1000, 1000), (72, 384), (200, 3584))
# Few experts usually have more than an entry's rows of as many assignments as two a lane.
CASES = [
    (experts, dtype, tokens, topk)
    for experts, dtype in LAYERS
    for tokens, topk in ROUTES
    if tokens * topk <= WARP_THREADS or experts > LAYERS[0][0]
]
every_case = pytest.mark.parametrize(
    "experts, dtype, tokens, topk", CASES, ids=lambda value: str(value).removeprefix("torch.")
)
every_layer = pytest.mark.parametrize("experts, dtype", LAYERS, ids=lambda value: str(value).removeprefix("torch."))
every_id_dtype = pytest.mark.parametrize("id_dtype", ID_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def of_random_experts(tokens: int, topk: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    """Each of a token another one, where there are as many."""
    if topk > experts:
        return torch.randint(0, experts, (tokens, topk), generator=generator)
    return torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)])


def of_the_same_experts(tokens: int, topk: int, experts: int, _: torch.Generator) -> torch.Tensor:
    return (torch.arange(topk) * 7 % experts).repeat(tokens, 1)


def of_one_expert(tokens: int, topk: int, experts: int, _: torch.Generator) -> torch.Tensor:
    """With several entries if there are more than 8 assignments."""
    return torch.full((tokens, topk), experts - 1)


def of_few_experts_and_none(tokens: int, topk: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    ids = torch.randint(0, 3, (tokens, topk), generator=generator)
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.3, none_of(tokens, topk, experts), ids)


def none_of(tokens: int, topk: int, experts: int, _: torch.Generator | None = None) -> torch.Tensor:
    unknown = torch.tensor([-1, experts, 2**31 - 1, -(2**31), experts + 1])
    return unknown[torch.arange(tokens * topk).view(tokens, topk) % len(unknown)]


ROUTING: dict[str, Callable[..., torch.Tensor]] = {
    "random experts": of_random_experts,
    "the same experts": of_the_same_experts,
    "one expert": of_one_expert,
    "few experts and none": of_few_experts_and_none,
    "none": none_of,
}
every_routing = pytest.mark.parametrize("routing", ROUTING)


def assignments(
    routing: str, tokens: int, topk: int, experts: int, id_dtype: torch.dtype = torch.int32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights), NaN of those that are of no expert."""
    generator = torch.Generator().manual_seed(seed)
    ids = ROUTING[routing](tokens, topk, experts, generator)
    shares = torch.rand(tokens, topk, generator=generator) + 0.1
    shares = torch.where((ids >= 0) & (ids < experts), shares / topk**0.5, math.nan)
    return ids.to(CUDA, id_dtype), shares.to(CUDA)


def form_of(experts: int, n: int, k: int, dtype: torch.dtype) -> ExpertsForm:
    """Of experts on a CPU."""
    return ExpertsForm(experts, n, k, padded_shape((n, k), 128)[1], integers(4), dtype, -1)


def specs() -> list[KernelSpec]:
    """The kernels of this module."""

    def plan_all() -> None:
        for experts, dtype in LAYERS:
            forms = form_of(experts, 2 * INNER, HIDDEN, dtype), form_of(experts, HIDDEN, INNER, dtype)
            for tokens, topk in ROUTES:
                for id_dtype in ID_DTYPES:
                    for out_dtype in {dtype, *OUT_DTYPES}:
                        form = LayerForm(tokens, topk, 8 * id_dtype.itemsize, *forms)
                        few = (experts, dtype, tokens, topk) in CASES
                        assert moe_plan_of(form, out_dtype).products[1].finds_ids == few
                        make_moe_plan(sorted_products(form), form, out_dtype)

    found = dict.fromkeys(products_needed_by(plan_all))
    found |= dict.fromkeys(products_needed_by(plan_in_parts))
    for experts, (n, k), dtype in PRODUCTS:
        found |= dict.fromkeys(ExpertSpec(layout.config) for layout in layouts_of(experts, n, k, dtype, 1))
    return list(found)


def plan_in_parts() -> None:
    """Plans what `test_a_second_product_in_parts_of_k` launches."""
    for dtype in (BF16, FP16):
        sizes = (2 * LONG_INNER, LONG_HIDDEN), (LONG_HIDDEN, LONG_INNER)
        forms = [form_of(LONG_EXPERTS, n, k, dtype) for n, k in sizes]
        for tokens, topk in LONG_ROUTES:
            for id_dtype in ID_DTYPES:
                _, second = moe_plan_of(
                    LayerForm(tokens, topk, 8 * id_dtype.itemsize, forms[0], forms[1]), FP32
                ).products
                assert second.finds_ids and second.schedule.part_bits


PRODUCTS = [(experts, SIZES[0], dtype) for experts, dtype in LAYERS]
PRODUCTS += [(8, size, dtype) for size in SIZES[1:] for dtype in (BF16, FP16)]
every_product = pytest.mark.parametrize(
    "experts, size, dtype", PRODUCTS, ids=lambda value: str(value).removeprefix("torch.")
)


def layouts_of(experts: int, n: int, k: int, dtype: torch.dtype, count: int) -> list[RangeLayout]:
    """All that are possible among so many assignments: chunks of a k block, and of two; a lane's one, and its two."""
    rooms = [number * WARP_THREADS for number in LANE_ASSIGNMENTS if count <= number * WARP_THREADS]
    every = ranges.layouts(problem(count, experts, n, k, dtype=dtype))
    among = [among_assignments(layout, room) for layout in every for room in rooms]
    found = [layout for layout in among if layout is not None]
    assert len(found) == len(rooms) * (2 - padded_shape((n, k), 128)[1] // 128 % 2)
    return found


@pytest.fixture(scope="module")
def product_kernels() -> None:
    """Every kernel of these tests, in memory: from a bundle or the cache, or compiled in parallel now."""
    load_many(specs(), arch_of())


kept_weights_of = lru_cache(maxsize=16)(weights_of)


# -- products ----------------------------------------------------------------------------------------------------------


def run_product(
    layout: RangeLayout,
    weight: PackedExperts,
    x: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    out: torch.Tensor,
) -> None:
    """Launches a product of all assignments, ids [rows of x, assignments of each]; all tensors are on the GPU."""
    described = AssignedIds(ids.numel(), ids.element_size() // 4, ids.shape[1], True)
    product = assigned_product(layout, described, len(weight), torch.cuda.current_device())
    launch_grouped(product, x, weight, out, bias=bias, activation=activation, ids=ids)


def exact_product(
    x: torch.Tensor, dense: torch.Tensor, ids: torch.Tensor, experts: int, bias: torch.Tensor | None, activation
) -> torch.Tensor:
    """fp64 results of all assignments, of weights of DISTINCT experts; NaN of those that are of none."""
    found = torch.full((ids.numel(), dense.shape[1]), math.nan, dtype=torch.float64, device=x.device)
    for place, expert in known(ids, experts):
        found[place] = dense[expert % DISTINCT] @ x[place // ids.shape[1]].double()
        if bias is not None:
            found[place] += bias[expert].double()
    if activation == "swiglu":
        return functional.silu(found[:, ::2]) * found[:, 1::2]
    return functional.silu(found) if activation == "silu" else found


def known(ids: torch.Tensor, experts: int) -> Iterator[tuple[int, int]]:
    """(assignment, expert) of those that are of one."""
    return ((place, one) for place, one in enumerate(ids.flatten().tolist()) if 0 <= one < experts)


@every_product
@pytest.mark.parametrize("routing", ["random experts", "one expert", "few experts and none", "none"])
@pytest.mark.parametrize("tokens, topk", [(1, 8), (4, 8), (32, 1), (5, 3), (8, 8), (11, 3)])
@every_id_dtype
def test_every_assignment_is_multiplied_with_its_experts_weight(experts, size, dtype, routing, tokens, topk, id_dtype):
    """With bias and activation; those of no expert are not written, and the same numbers come again."""
    n, k = size
    weight, dense = kept_weights_of(experts, n, k, dtype)
    x, bias = numbers(tokens, k, dtype=dtype).to(CUDA), numbers(experts, n, dtype=dtype, seed=2).to(CUDA)
    ids, _ = assignments(routing, tokens, topk, experts, id_dtype)
    count, places = ids.numel(), [place for place, _ in known(ids, experts)]
    for activation, added in ((None, None), ("silu", bias), ("swiglu", bias)):
        wanted = exact_product(x, dense, ids, experts, added, activation)
        for layout in layouts_of(experts, n, k, dtype, count):
            for out_dtype, tolerance in ((dtype, TOLERANCE[dtype]), (FP32, EXACT)):
                results = []
                for _ in range(2):
                    whole, out = poisoned(count, wanted.shape[1], out_dtype)
                    run_product(layout, weight, x, ids, added, activation, out)
                    assert whole[:MARGIN].isnan().all() and whole[MARGIN + count :].isnan().all()
                    assert torch.equal(out.isnan(), wanted.isnan())
                    results.append(out[places])
                assert torch.equal(*results)
                if places:
                    assert_near(results[0], wanted[places], tolerance)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_assignments_return_the_weights_of_rows_with_a_single_one(dtype):
    experts, (n, k), (tokens, topk) = 8, SIZES[0], (16, 2)
    weight, dense = kept_weights_of(experts, n, k, dtype)
    inputs = torch.arange(tokens, device=CUDA) * 37 % k
    ids, _ = assignments("random experts", tokens, topk, experts)
    wanted = dense[ids.flatten().long() % DISTINCT, :, inputs.repeat_interleave(topk)].float()
    for layout in layouts_of(experts, n, k, dtype, tokens * topk):
        _, out = poisoned(tokens * topk, n, FP32)
        run_product(layout, weight, functional.one_hot(inputs, k).to(dtype), ids, None, None, out)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("routing", ["random experts", "one expert"])
def test_rows_of_assignments_that_are_not_finite_are_nan_alone(routing):
    experts, (n, k), (tokens, topk) = 8, SIZES[0], (10, 3)
    weight, _ = kept_weights_of(experts, n, k, BF16)
    x = numbers(tokens, k).to(CUDA)
    x[2, 5], x[4, k - 1], x[7, 300] = math.inf, -math.inf, math.nan
    broken = torch.isin(torch.arange(tokens), torch.tensor([2, 4, 7])).repeat_interleave(topk).to(CUDA)
    ids, _ = assignments(routing, tokens, topk, experts)
    for layout in layouts_of(experts, n, k, BF16, tokens * topk):
        _, out = poisoned(tokens * topk, n, FP32)
        run_product(layout, weight, x, ids, None, None, out)
        assert out[broken].isnan().all() and out[~broken].isfinite().all()


# -- layers ------------------------------------------------------------------------------------------------------------


def layer(
    experts: int, dtype: torch.dtype, hidden: int = HIDDEN, inner: int = INNER
) -> tuple[PackedExperts, PackedExperts, torch.Tensor, torch.Tensor]:
    """(gate and up, down; fp64 weights of DISTINCT experts of both)."""
    gate_up, dense = kept_weights_of(experts, 2 * inner, hidden, dtype)
    down, dense_down = kept_weights_of(experts, hidden, inner, dtype)
    return gate_up, down, dense, dense_down


def exact_layer(
    experts: int, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, inner: int = INNER
) -> torch.Tensor:
    """In fp64 but for hidden activations, which are rounded once."""
    _, _, dense, dense_down = layer(experts, x.dtype, x.shape[1], inner)
    hidden = exact_product(x, dense, ids, experts, None, "swiglu").to(x.dtype).double()
    found = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for place, expert in known(ids, experts):
        result = dense_down[expert % DISTINCT] @ hidden[place]
        found[place // ids.shape[1]] += shares.flatten()[place].double() * result
    return found


def leave_nan_behind() -> None:
    """In memory that the next tensors are made of: what nobody writes is not to be read."""
    del [torch.full((1 << 17,), math.nan, device=CUDA) for _ in range(16)][:]


@every_case
@every_routing
@every_id_dtype
def test_a_layer_of_few_assignments_is_the_weighted_sum_of_its_experts(experts, dtype, tokens, topk, routing, id_dtype):
    """To the same bits each time; what is of no expert counts for nothing, whatever its weight; nothing around the
    result is written."""
    gate_up, down, *_ = layer(experts, dtype)
    x = numbers(tokens, HIDDEN, dtype=dtype).to(CUDA)
    ids, shares = assignments(routing, tokens, topk, experts, id_dtype)
    wanted = exact_layer(experts, x, ids, shares)
    for out_dtype in (dtype, FP32):
        results = []
        for _ in range(3):
            whole, out = poisoned(tokens, HIDDEN, out_dtype)
            leave_nan_behind()
            assert fused_moe(x, gate_up, down, shares, ids, out=out) is out
            assert whole[:MARGIN].isnan().all() and whole[MARGIN + tokens :].isnan().all()
            results.append(out)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        assert_near(results[0], wanted, LAYER_TOLERANCE)
    if routing == "none":
        assert not results[0].any()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("tokens, topk", LONG_ROUTES)
@every_routing
@every_id_dtype
def test_a_second_product_in_parts_of_k(dtype, tokens, topk, routing, id_dtype):
    """Results of all parts are added up, to the same bits each time."""
    gate_up, down, *_ = layer(LONG_EXPERTS, dtype, LONG_HIDDEN, LONG_INNER)
    x = numbers(tokens, LONG_HIDDEN, dtype=dtype).to(CUDA)
    ids, shares = assignments(routing, tokens, topk, LONG_EXPERTS, id_dtype)
    wanted = exact_layer(LONG_EXPERTS, x, ids, shares, LONG_INNER)
    results = []
    for _ in range(3):
        whole, out = poisoned(tokens, LONG_HIDDEN, FP32)
        leave_nan_behind()
        fused_moe(x, gate_up, down, shares, ids, out=out)
        assert whole[:MARGIN].isnan().all() and whole[MARGIN + tokens :].isnan().all()
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    if routing == "none":
        assert not results[0].any()
    else:
        assert_near(results[0], wanted, LAYER_TOLERANCE)


@every_case
@pytest.mark.parametrize("routing", ["random experts", "one expert", "few experts and none"])
def test_layers_of_sorted_assignments_agree(experts, dtype, tokens, topk, routing):
    gate_up, down, *_ = layer(experts, dtype)
    form = LayerForm(tokens, topk, 32, gate_up.form, down.form)
    x, (ids, shares) = numbers(tokens, HIDDEN, dtype=dtype).to(CUDA), assignments(routing, tokens, topk, experts)
    assigned, of_sorted = moe_plan_of(form, FP32), make_moe_plan(sorted_products(form), form, FP32)
    assert assigned.products[1].finds_ids and not of_sorted.products[1].finds_ids
    found, wanted = (plan.launch(MoeCall(x, gate_up, down, shares, ids)) for plan in (assigned, of_sorted))
    assert found.isfinite().all()
    assert_near(found, wanted, SORTED_TOLERANCE)


@every_id_dtype
@pytest.mark.parametrize("tokens, topk", [(4, 8), (1, 8), (32, 1), (8, 8)])
def test_tensors_with_gaps_are_taken(tokens, topk, id_dtype):
    experts, dtype = LAYERS[1]
    gate_up, down, *_ = layer(experts, dtype)
    x, (ids, shares) = numbers(tokens, HIDDEN).to(CUDA), assignments("random experts", tokens, topk, experts, id_dtype)
    wanted = fused_moe(x, gate_up, down, shares, ids)
    spread_ids = torch.stack([ids, torch.full_like(ids, 1)], dim=-1)[..., 0]
    spread_shares = torch.stack([shares, torch.full_like(shares, math.nan)], dim=-1)[..., 0]
    padded = functional.pad(x, (0, 8), value=math.nan)[:, :HIDDEN]
    by_columns = ids.T.contiguous().T, shares.T.contiguous().T
    for given in ((x, spread_ids, spread_shares), (padded, ids, shares), (x, *by_columns)):
        assert torch.equal(fused_moe(given[0], gate_up, down, *given[:0:-1]), wanted)
    rounded = shares.bfloat16()
    assert torch.equal(fused_moe(x, gate_up, down, rounded, ids), fused_moe(x, gate_up, down, rounded.float(), ids))


@every_layer
@pytest.mark.parametrize("tokens, topk", [(1, 8), (4, 8), (32, 1), (8, 8)])
@every_id_dtype
def test_captured_layers_of_few_assignments_take_new_inputs_and_routing(experts, dtype, tokens, topk, id_dtype):
    gate_up, down, *_ = layer(experts, dtype)

    def call(routing: str, seed: int) -> tuple[torch.Tensor, ...]:
        x = numbers(tokens, HIDDEN, dtype=dtype, seed=seed).to(CUDA)
        return x, *assignments(routing, tokens, topk, experts, id_dtype, seed)

    def step(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return fused_moe(x, gate_up, down, shares, ids)

    others = [call(routing, seed) for seed, routing in enumerate(ROUTING, 1)]
    for function in (step, compiled(step)):
        assert_replays(function, call("random experts", 0), others)


@pytest.mark.parametrize("tokens, topk", [(1, 8), (4, 8)])
def test_layers_behind_each_other_read_what_those_before_have_written(tokens, topk):
    """Each begins while the last one ends: on rows of its result, by ids and weights that have just been made of it."""
    experts, dtype = LAYERS[3]
    gate_up, down, *_ = layer(experts, dtype)
    router = numbers(HIDDEN, experts, dtype=FP32, seed=5).to(CUDA)

    def chain(pause: Callable[[], Any]) -> torch.Tensor:
        x = numbers(tokens, HIDDEN, dtype=dtype).to(CUDA)
        for _ in range(40):
            shares, ids = (x.float() @ router).softmax(-1).topk(topk)
            pause()
            y = fused_moe(x, gate_up, down, shares, ids)
            pause()
            again = fused_moe(y, gate_up, down, shares, ids)  # no launch of another kind between
            pause()
            x = functional.layer_norm((x + y + again).float(), (HIDDEN,)).to(dtype)
        return x

    wanted = chain(torch.cuda.synchronize)
    assert wanted.isfinite().all()
    for _ in range(5):
        assert torch.equal(chain(lambda: None), wanted)
