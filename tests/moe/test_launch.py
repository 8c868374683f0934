"""What a layer of experts on a GPU launches depends on that call alone, whatever was launched and kept before.

With functions in the kernels' places that look at what they are given as those do and launch nothing: no GPU is needed.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.activations import number_of
from cute_kernels.gemm.experts import PackedExperts, fused_moe, grouped_linear, ops, plan
from cute_kernels.gemm.experts import call as checks
from cute_kernels.gemm.experts import product as products_of
from cute_kernels.gemm.experts.choice import chosen
from cute_kernels.gemm.experts.plan import Scratch
from cute_kernels.gemm.experts.ranges.schedule import RangeLayout
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles
from cute_kernels.gemm.product import OUT_KINDS
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.runtime import native
from tests.launchers import assert_launched_alike_after_any_other, outcome, recording
from tests.moe.candidates import candidates
from tests.observed import calls_of
from tests.tensors import apart, offset

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="the stand-ins are made with nvidia-cutlass-dsl")

BF16, FP16 = torch.bfloat16, torch.float16
EXPERTS, TOPK, HIDDEN, INNER = 8, 2, 192, 128
ROUTING, GATHER, LIMBS, COMBINE = "moe_routing", "linear_inputs", "linear_limbs", "moe_combine"


@functools.cache
def experts(
    n: int, k: int, zero_point: bool = False, dtype: torch.dtype = BF16, count: int = EXPERTS, group: int = 128
) -> PackedExperts:
    n_pad, k_pad = padded_shape((n, k), group)
    codes = torch.zeros(count, n_pad // 64, k_pad // 64, 2048, dtype=torch.uint8)
    scales = torch.ones(count, n_pad // 64, k_pad // group, 64, dtype=dtype)
    zeros = torch.zeros_like(scales, dtype=torch.uint8) if zero_point else None
    return PackedExperts(codes, scales, zeros, integers(4, group, zero_point), (n, k))


def call(tokens: int = 3, hidden: int = HIDDEN, inner: int = INNER, dtype: torch.dtype = BF16) -> dict[str, Any]:
    return {
        "x": torch.ones(tokens, hidden, dtype=dtype),
        "gate_up": experts(2 * inner, hidden, dtype=dtype),
        "down": experts(hidden, inner, dtype=dtype),
        "topk_ids": torch.zeros(tokens, TOPK, dtype=torch.int32),
        "topk_weights": torch.ones(tokens, TOPK),
    }


def but(**others: Any) -> dict[str, Any]:
    return call() | others


def sparse(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_sparse()


CALLS: dict[str, Any] = {
    "plain": call,
    "one token": lambda: call(1),
    "more tokens": lambda: call(20),
    "many tokens": lambda: call(700),
    "no tokens": lambda: call(0),
    "fp16": lambda: call(dtype=FP16),
    "x of fp16 for bf16": lambda: but(x=torch.ones(3, HIDDEN, dtype=FP16)),
    "x with gaps": lambda: but(x=apart(torch.ones(3, HIDDEN, dtype=BF16))),
    "x with small gaps": lambda: but(x=apart(torch.ones(3, HIDDEN, dtype=BF16), 3)),
    "x off 16 bytes": lambda: but(x=offset(torch.ones(3, HIDDEN, dtype=BF16), 2)),
    "x, a parameter": lambda: but(x=torch.nn.Parameter(torch.ones(3, HIDDEN, dtype=BF16))),
    "x, sparse": lambda: but(x=sparse(torch.ones(3, HIDDEN, dtype=BF16))),
    "x in a list": lambda: but(x=[1.0]),
    "short rows": lambda: call(hidden=180),
    "short rows between the products": lambda: call(inner=100),
    "zero points": lambda: but(gate_up=experts(2 * INNER, HIDDEN, True), down=experts(HIDDEN, INNER, True)),
    "another layer's weight": lambda: but(down=experts(HIDDEN, 2 * INNER)),
    "ids of 64 bits": lambda: but(topk_ids=torch.zeros(3, TOPK, dtype=torch.int64)),
    "ids of 16 bits": lambda: but(topk_ids=torch.zeros(3, TOPK, dtype=torch.int16)),
    "ids with gaps": lambda: but(topk_ids=torch.zeros(3, 2 * TOPK, dtype=torch.int32)[:, ::2]),
    "ids, sparse": lambda: but(topk_ids=sparse(torch.ones(3, TOPK, dtype=torch.int32))),
    "ids of other tokens": lambda: but(topk_ids=torch.zeros(2, TOPK, dtype=torch.int32)),
    "more experts a token": lambda: but(topk_ids=torch.zeros(3, 3, dtype=torch.int32), topk_weights=torch.ones(3, 3)),
    "weights of bf16": lambda: but(topk_weights=torch.ones(3, TOPK, dtype=BF16)),
    "weights with gaps": lambda: but(topk_weights=torch.ones(3, 2 * TOPK)[:, ::2]),
    "weights, a parameter": lambda: but(topk_weights=torch.nn.Parameter(torch.ones(3, TOPK))),
    "weights, sparse": lambda: but(topk_weights=sparse(torch.ones(3, TOPK))),
    "weights of fp64": lambda: but(topk_weights=torch.ones(3, TOPK, dtype=torch.float64)),
    "fp32 results": lambda: but(out_dtype=torch.float32),
    "int8 results": lambda: but(out_dtype=torch.int8),
    "results in a list": lambda: but(out_dtype=[BF16]),
    "out": lambda: but(out=torch.empty(3, HIDDEN, dtype=BF16)),
    "out of fp32": lambda: but(out=torch.empty(3, HIDDEN)),
    "out with gaps": lambda: but(out=torch.empty(3, 2 * HIDDEN, dtype=BF16)[:, ::2]),
    "out of other tokens": lambda: but(out=torch.empty(2, HIDDEN, dtype=BF16)),
    "batch-invariant": lambda: but(batch_invariant=True),
    "batch-invariant by a number": lambda: but(batch_invariant=1),
    "an activation there is not": lambda: but(activation="relu"),
    "without a gate": lambda: but(gate_up=experts(INNER, HIDDEN), activation="relu2"),
    "rows of gates, without a gate": lambda: but(activation="gelu"),
    "a list of activations": lambda: but(activation=["silu"]),
}
REFUSED = {
    "x of fp16 for bf16": "x", "x, sparse": "x", "x in a list": "x", "another layer's weight": "down",
    "ids of 16 bits": "topk_ids", "ids, sparse": "topk_ids", "ids of other tokens": "topk_ids",
    "weights, sparse": "topk_weights", "weights of fp64": "topk_weights", "int8 results": "out_dtype",
    "results in a list": "out_dtype", "out with gaps": "out", "out of other tokens": "out",
    "batch-invariant by a number": "batch_invariant",
    "an activation there is not": "activation", "a list of activations": "activation",
    "rows of gates, without a gate": "down",
}  # fmt: skip
WAITS = -3  # among a product's arguments
KINDS = ("ranges", "tiles", "limbs", "modelled")  # of kernels that the products are by
# Of a layer of few tokens: those of runs find assignments as they are.
NUM_LAUNCHES = {"ranges": 3, "tiles": 5, "limbs": 6, "modelled": 3}

made = functools.cache(lambda name: CALLS[name]())


def checked(config: Any) -> Any:
    """A function that refuses what no compiled function takes as its one tensor."""

    def function(tensor: torch.Tensor, *numbers: int) -> None:
        assert tensor.dim() == 2 and tensor.is_contiguous() and tensor.layout is torch.strided
        whole = tensor.shape[1] % 8 == 0 and tensor.data_ptr() % 16 == 0
        assert whole or config.name.startswith((ROUTING, COMBINE))
        assert all(isinstance(number, int) for number in numbers)

    return function


@pytest.fixture
def products(request):
    """Which kernels serve the products: a kind of KINDS."""
    return getattr(request, "param", "modelled")


@pytest.fixture
def launches(monkeypatch, products):
    def taken(problem: Any) -> Any:
        if products == "modelled":
            return chosen(problem)
        kind = {"ranges": RangeLayout, "tiles": GroupedTiles, "limbs": GroupedTiles}[products]
        for one in candidates(problem):
            limbs = bool(getattr(one.config, "limbs", False))
            if isinstance(one, kind) and limbs == (products == "limbs"):
                return one
        return chosen(problem)

    monkeypatch.setattr(products_of, "chosen", taken)
    with recording(lambda spec: checked(spec.config)) as recorded:
        yield recorded.launches


def through_operator(**given: Any) -> torch.Tensor:
    """A call by the operator's own function for a GPU."""
    if "down" in given:
        return ops._moe_of(checks.check_moe(checks.MoeCall(**given)), ops._moe_fields_on_cuda)
    return ops._grouped_of(checks.check_grouped(checks.GroupedCall(**given)), ops._grouped_fields_on_cuda)


def run(launches: list[Any], given: dict[str, Any], function: Any = None) -> Any:
    tensors, function = dict(given), function or (fused_moe if "down" in given else grouped_linear)
    for name in given.keys() & {"gate_up", "down", "weight"}:
        tensors |= {f"{name}.{part}": getattr(given[name], part, None) for part in ("codes", "scales", "zeros")}
    return outcome(launches, lambda: function(**given), tensors)


def check_launches_after_any_other(calls, refused, run_other, kept):
    """Each of ``calls`` launches the same, or is refused by the same name, whichever of them came before it."""
    want = assert_launched_alike_after_any_other(calls, run_other, kept)
    assert {name for name, outcome in want.items() if isinstance(outcome, tuple)} == refused.keys()
    for name, argument in refused.items():
        error, message = want[name]
        assert error in (TypeError, ValueError) and message.startswith(f"{argument}: got "), name


def test_a_call_launches_the_same_after_any_other(launches):
    check_launches_after_any_other(CALLS, REFUSED, lambda other: run(launches, made(other)), ops.launch_moe.plans)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in {*REFUSED, "no tokens", "x, a parameter"}])
def test_a_repeated_call_is_not_checked_again(name, launches):
    first = run(launches, made(name))
    with calls_of(checks.check_experts) as repeated:
        assert run(launches, made(name)) == first
    assert not repeated


@pytest.mark.parametrize(
    "products, kernels",
    [
        ("ranges", [ROUTING, "_ranges1", "_ranges1", COMBINE]),
        ("tiles", [ROUTING, GATHER, "grouped", "grouped", COMBINE]),
        ("limbs", [ROUTING, LIMBS, "grouped", LIMBS, "grouped", COMBINE]),
    ],
    indirect=["products"],
)
def test_one_launch_a_step(products, kernels, launches):
    fused_moe(**call(33))
    assert len(launches) == len(kernels)
    assert all(kernel in launch.symbol for kernel, launch in zip(kernels, launches, strict=True)), launches


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "operator"])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_weights_that_limbs_do_not_take_are_multiplied_by_tiles_of_entries(batch_invariant, direct, launches):
    """Of few rows an expert, among assignments as they are: three launches."""
    given = call(1, hidden=256)
    given |= {"gate_up": experts(2 * INNER, 256, True), "down": experts(256, INNER, True)}
    given |= {"batch_invariant": batch_invariant}
    fused_moe(**given) if direct else through_operator(**given)
    assert len(launches) == 3 and all("entries1" in launch.symbol for launch in launches[:2])


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "operator"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_batch_invariant_products_of_few_rows_find_assignments_as_they_are(tokens, direct, launches):
    """By tiles of decoded weights as well, whose results are of x's dtype: three launches."""
    given = call(tokens, hidden=256)
    given |= {"batch_invariant": True}
    fused_moe(**given) if direct else through_operator(**given)
    kernels = [launch.symbol for launch in launches]
    assert [kernel.split("_w4")[0] for kernel in kernels[:2]] == ["grouped_linear_wgmma"] * 2
    assert all("entries1" in kernel for kernel in kernels[:2])
    assert [kernel.split("_pdl")[0] for kernel in kernels[2:]] == [f"{COMBINE}_bf16_of_bf16_i32"]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "operator"])
@pytest.mark.parametrize("tokens, hidden", [(1, HIDDEN), (16, HIDDEN), (16, 256), (700, 256)])
def test_batch_invariant_products_are_by_tiles_of_decoded_weights(tokens, hidden, direct, launches):
    """Of many rows, or a K that is not whole: sorted, with rows in order, neither in limbs nor by runs."""
    given = call(tokens, hidden)
    given |= {"batch_invariant": True}
    fused_moe(**given) if direct else through_operator(**given)
    kernels = [launch.symbol for launch in launches]
    assert [kernel.split("_w4")[0] for kernel in kernels[2:4]] == ["grouped_linear_wgmma"] * 2
    assert not any("limbs" in kernel or "sync" in kernel for kernel in kernels)
    assert kernels[0].startswith(ROUTING) and kernels[1].startswith(GATHER) and "_of_bf16" in kernels[4]


@pytest.mark.parametrize("products", KINDS, indirect=True)
@pytest.mark.parametrize(
    "name", ["plain", "short rows", "short rows between the products", "x with small gaps", "fp32 results"]
)
def test_the_operator_launches_what_the_call_does(name, products, launches):
    want = run(launches, made(name))
    assert run(launches, made(name), through_operator) == want and len(want) == NUM_LAUNCHES[products]


def test_more_tokens_than_the_grid_has_room_for_are_launched_nowhere(launches):
    given = call(65536)
    with pytest.raises(ValueError, match="^x: got 65536 rows, want at most 65535"):
        fused_moe(**given)
    # As a compiled program calls the operator, whose call was not looked at.
    weights = given["gate_up"], given["down"]
    tensors: list[Any] = [
        given["x"],
        *(part for weight in weights for part in (weight.codes, weight.scales, weight.zeros)),
    ]
    numbers: list[Any] = [value for weight in weights for value in (weight.format.key, *weight.shape)]
    with pytest.raises(ValueError, match="^x: got 65536 rows, want at most 65535"):
        ops._moe_fields_on_cuda(*[*tensors, given["topk_ids"], given["topk_weights"], *numbers, BF16])
    assert not launches


@pytest.mark.parametrize("products", KINDS[:3], indirect=True)
def test_what_a_launch_writes_is_where_the_next_one_reads(products, launches):
    given = call(33)
    result = fused_moe(**given)
    (ids, offsets, rows, places, count), *between, (out, results, places_read, shares, *sizes) = (
        launch.arguments for launch in launches
    )
    assert ids is given["topk_ids"] and count == EXPERTS and sizes == [TOPK, EXPERTS, 0]
    assert out is result and places_read == places and shares == given["topk_weights"].data_ptr()
    end = offsets + 4 * EXPERTS
    if products == "ranges":
        first, second = between
        assert first[0] is given["x"] and first[5:7] == (offsets, rows) and second[5:7] == (offsets, 0)
        assert first[WAITS] and not second[WAITS]  # the second's weights are asked for while the first ends
        assert [product[11:13] for product in between] == [(EXPERTS, 33 * TOPK)] * 2
    elif products == "tiles":
        gather, first, second = between
        assert gather[0] is first[0] and gather[1:6] == (given["x"].data_ptr(), end, rows, 0, 0)
        assert gather[6] == given["x"].stride(0)
        assert first[0].shape == (33 * TOPK, HIDDEN) and first[6] == second[6] == offsets
    else:
        limbs, first, more_limbs, second = between
        assert limbs[:3] == (given["x"], end, rows) and more_limbs[1:3] == (end, 0)
        for made_at, product in ((limbs, first), (more_limbs, second)):
            assert (made_at[4], made_at[5]) == (product[0].data_ptr(), product[3]) and product[6] == offsets
            assert product[0].shape[0] == made_at[6] == 33 * TOPK
    hidden = (more_limbs if products == "limbs" else second)[0]
    out_at = 4 if products == "ranges" else 5  # which has no zero points
    assert first[out_at] == hidden.data_ptr() and hidden.shape[1] == INNER and second[out_at] == results
    assert hidden.data_ptr() < offsets < rows < places < results


def test_a_product_by_itself_waits_for_whatever_made_its_offsets(launches):
    grouped_linear(torch.ones(6, HIDDEN, dtype=BF16), experts(64, HIDDEN), torch.zeros(EXPERTS + 1, dtype=torch.int32))
    (product,) = launches
    assert "grouped_linear_w4" in product.symbol and product.arguments[WAITS]


def test_a_second_product_waits_behind_one_of_another_kind(launches):
    """Only work ranges are known to wait for the routing before they let the next launch begin."""
    tiles, ranges = (products_of.product_of(6, experts(HIDDEN, INNER, zero_point).form) for zero_point in (True, False))
    assert isinstance(tiles.schedule, GroupedTiles) and isinstance(ranges.schedule, RangeLayout)
    assert tiles.waits is None and ranges.waits
    for first, waits in ((ranges, False), (tiles, True)):
        _, found = plan.behind_each_other(first, ranges)
        assert found == replace(ranges, waits=waits)


# -- assignments as they are -------------------------------------------------------------------------------------------


def routed(tokens: int, topk: int, id_dtype: torch.dtype = torch.int32, **others: Any) -> dict[str, Any]:
    """A layer's call with so many assignments."""
    return (
        call(tokens)
        | {"topk_ids": torch.zeros(tokens, topk, dtype=id_dtype), "topk_weights": torch.ones(tokens, topk)}
        | others
    )


OF_A_LANE = ((1, 1), (3, TOPK), (16, TOPK), (4, 8), (32, 1), (1, 32), (10, 3))  # tokens, assignments of each
OF_TWO = ((8, 8), (64, 1), (11, 3))  # of which experts usually have more rows than an entry, by the model


@pytest.mark.parametrize(
    "products, tokens, topk",
    [("ranges", *route) for route in OF_A_LANE + OF_TWO] + [("modelled", *route) for route in OF_A_LANE],
    indirect=["products"],
)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_few_assignments_are_not_sorted(tokens, topk, id_dtype, products, launches):
    """Three launches: each product is given the ids, as is what adds up; the second begins before the first ends."""
    given = routed(tokens, topk, id_dtype)
    result = fused_moe(**given)
    (made_plan,) = ops.launch_moe.plans.values()
    ids, shares, words = given["topk_ids"].data_ptr(), given["topk_weights"].data_ptr(), id_dtype.itemsize // 4
    first, second, combine = (launch.arguments for launch in launches)
    gate_up, down = given["gate_up"], given["down"]
    assert first[0] is given["x"] and first[1:4] == (gate_up.codes.data_ptr(), gate_up.scales.data_ptr(), 0)
    assert second[1:4] == (down.codes.data_ptr(), down.scales.data_ptr(), 0)
    hidden, results = second[0], second[4]
    assert first[4] == hidden.data_ptr() and hidden.shape[1] == INNER
    assert hidden.data_ptr() + 2 * tokens * topk * INNER <= results
    common = 132, EXPERTS, tokens * topk
    assert all(one.finds_ids for one in made_plan.products)
    slots = [one.schedule.x_slots for one in made_plan.products]
    assert first[5:] == (
        ids, 2 * INNER, 4, 2, *common, slots[0], words, -(-(2**16) // topk), 0, True, number_of("swiglu"),
        OUT_KINDS[BF16],
    )  # fmt: skip
    assert second[5:] == (
        ids, HIDDEN, 3, 1, *common, slots[1], words, 2**16, 0, False, 0, OUT_KINDS[torch.float32],
    )  # fmt: skip
    assert combine[0] is result and combine[1:] == (results, ids, shares, topk, EXPERTS, 0)
    symbols = [launch.symbol for launch in launches]
    lanes = 1 if tokens * topk <= WARP_THREADS else 2
    assert all(symbol.endswith(f"_assigned{lanes}") for symbol in symbols[:2])
    assert symbols[2].startswith(f"{COMBINE}_bf16_i{32 * words}")


def of_six_experts() -> dict[str, Any]:
    return routed(3, 2, gate_up=experts(2 * INNER, HIDDEN, count=6), down=experts(HIDDEN, INNER, count=6))


SORTED: dict[str, Any] = {
    "one assignment too many": lambda: routed(65, 1),
    "one token's too many": lambda: routed(1, 65),
    "twice as many": lambda: routed(16, 8),
    "a first product of long K": lambda: call(3, hidden=14336),
    "a second product in groups of 16": lambda: but(down=experts(HIDDEN, INNER, group=16)),
    "a first product in groups of 16": lambda: but(gate_up=experts(2 * INNER, HIDDEN, group=16)),
    "a second product with zero points": lambda: but(down=experts(HIDDEN, INNER, True)),
    "a number of experts that is no multiple of 4": of_six_experts,
}


@pytest.mark.parametrize("name", SORTED)
def test_assignments_that_are_too_many_or_go_to_other_kernels_are_sorted(name, launches):
    given = SORTED[name]()
    result = fused_moe(**given)
    (made_plan,) = ops.launch_moe.plans.values()
    assert not any(one.finds_ids for one in made_plan.products)
    routing, *between, combine = launches
    topk, count = given["topk_ids"].shape[1], len(given["gate_up"])
    ids, offsets, _, places, known = routing.arguments
    assert routing.symbol.startswith(ROUTING) and ids is given["topk_ids"] and known == count
    assert not any("_assigned" in launch.symbol for launch in launches)
    products = [launch for launch in between if "grouped" in launch.symbol]
    assert len(products) == 2 and all(offsets in launch.arguments[1:] for launch in products)
    assert combine.symbol.startswith(f"{COMBINE}_bf16") and "_i" not in combine.symbol.removeprefix(COMBINE)
    shares = given["topk_weights"].data_ptr()
    assert combine.arguments[0] is result and combine.arguments[2:] == (places, shares, topk, count, 0)


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_second_product_of_long_k_is_in_parts_that_are_added_up(tokens, launches):
    """Each part has results of its own, of all assignments, behind the hidden activations."""
    result = fused_moe(**(given := call(tokens, inner=14336)))
    (made_plan,) = ops.launch_moe.plans.values()
    assert all(one.finds_ids for one in made_plan.products)
    _, second, combine = (launch.arguments for launch in launches)
    hidden, results, count = second[0], second[4], tokens * TOPK
    k_blocks, part_bits = second[8], second[-4]
    assert (k_blocks << part_bits) * 128 == 14336 and part_bits == 1
    assert hidden.data_ptr() + 2 * count * 14336 <= results
    assert results + 4 * (count << part_bits) * HIDDEN <= hidden.data_ptr() + hidden.nbytes
    ids, shares = given["topk_ids"].data_ptr(), given["topk_weights"].data_ptr()
    assert combine == (result, results, ids, shares, TOPK, EXPERTS, part_bits)


@pytest.mark.parametrize("products", KINDS, indirect=True)
@pytest.mark.parametrize("function", [fused_moe, grouped_linear])
def test_rows_that_lie_apart_are_copied_by_a_launch_that_lets_the_next_begin(function, products, launches):
    given = call() if function is fused_moe else product()
    function(**given)
    plain = [launch.symbol for launch in launches]
    for _ in range(2):  # the second is a kept plan's
        launches.clear()
        function(**given | {"x": (x := apart(given["x"]))})
        copy, address, *gathered, stride, parts = launches[0].arguments
        assert (copy.shape, address, *gathered) == (x.shape, x.data_ptr(), 0, 0, 0, 0)
        assert (stride, parts) == (2 * HIDDEN, 1)
        later = [one for launch in launches[1:] for one in launch.arguments]
        assert copy.data_ptr() in [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in later]
        assert [launch.symbol for launch in launches] == ["linear_inputs_bf16", *plain]
    launches.clear()
    function(**given | {"x": apart(given["x"], 3)})  # no whole pieces of 16 bytes: torch copies
    assert [launch.symbol for launch in launches] == plain


@pytest.mark.parametrize("products", ["ranges"], indirect=True)
def test_what_is_made_contiguous_for_assignments_is_what_kernels_are_given(products, launches):
    given = but(
        x=apart(torch.ones(3, HIDDEN, dtype=BF16)),
        topk_ids=torch.zeros(3, 2 * TOPK, dtype=torch.int64)[:, ::2],
        topk_weights=torch.ones(3, 2 * TOPK)[:, ::2],
    )
    fused_moe(**given)
    rows, first, second, combine = (launch.arguments for launch in launches)
    assert first[5] == second[5] == combine[2] != given["topk_ids"].data_ptr()
    assert combine[3] != given["topk_weights"].data_ptr()
    assert rows[0].data_ptr() == first[0].data_ptr() and first[0].is_contiguous()


@pytest.mark.parametrize("dtype, name", [(BF16, "bf16"), (FP16, "fp16")])
def test_weights_of_16_bits_are_read_where_they_are(dtype, name, launches):
    given = but(topk_weights=torch.ones(3, TOPK, dtype=dtype))
    for _ in range(2):  # the second is a kept plan's
        launches.clear()
        fused_moe(**given)
        assert f"_by_{name}" in launches[-1].symbol
        assert launches[-1].arguments[3] == given["topk_weights"].data_ptr()


@pytest.mark.parametrize(
    "places, columns, result_bytes", [(1, 8, 32), (6, 128, 6 * 192 * 4), (700, 1000, 700 * 64 * 2)]
)
def test_parts_of_the_memory_between_launches_do_not_overlap(places, columns, result_bytes):
    scratch = Scratch.of(places, EXPERTS, columns, result_bytes, BF16)
    (rows, width), strides, dtype = scratch.hidden
    assert (width, strides, dtype) == (columns, (columns, 1), BF16)
    starts = [0, scratch.offsets, scratch.token_rows, scratch.places, scratch.results, 2 * rows * columns]
    sizes = [2 * places * columns, 4 * (EXPERTS + 1), 4 * places, 4 * places, result_bytes]
    for start, size, following in zip(starts[:-1], sizes, starts[1:], strict=True):
        assert start % 16 == 0 and start + size <= following


@pytest.mark.parametrize("again", [False, True])
def test_a_result_has_no_gradient(again, launches):
    given = call()
    given["x"].requires_grad_()
    for _ in range(1 + again):
        out = fused_moe(**given)
    assert out.shape == (3, HIDDEN) and out.dtype == BF16 and not out.requires_grad


# -- one product -------------------------------------------------------------------------------------------------------

OFFSETS = torch.tensor([0, 1, 1, 2, 3, 3, 3, 3, 3], dtype=torch.int32)
ROWS = torch.tensor([2, 0, 1], dtype=torch.int32)


def product(**others: Any) -> dict[str, Any]:
    x = torch.ones(3, HIDDEN, dtype=BF16)
    return {"x": x, "weight": experts(2 * INNER, HIDDEN), "expert_offsets": OFFSETS} | others


def square(out: torch.Tensor | None) -> dict[str, Any]:
    """A product whose results are as x, written to ``out`` or over x."""
    given = product(weight=experts(HIDDEN, HIDDEN))
    return given | {"out": given["x"] if out is None else out}


PRODUCTS: dict[str, Any] = {
    "plain": product,
    "rows by index": lambda: product(rows=ROWS),
    "more places than rows": lambda: product(rows=ROWS.repeat(2)),
    "no places": lambda: product(rows=ROWS[:0], expert_offsets=torch.zeros_like(OFFSETS)),
    "x with gaps": lambda: product(x=apart(torch.ones(3, HIDDEN, dtype=BF16))),
    "x off 16 bytes": lambda: product(x=offset(torch.ones(3, HIDDEN, dtype=BF16), 2)),
    "x, a parameter": lambda: product(x=torch.nn.Parameter(torch.ones(3, HIDDEN, dtype=BF16))),
    "x, sparse": lambda: product(x=torch.ones(3, HIDDEN, dtype=BF16).to_sparse()),
    "short rows": lambda: product(x=torch.ones(3, 180, dtype=BF16), weight=experts(2 * INNER, 180)),
    "short rows by index": lambda: product(x=torch.ones(3, 180, dtype=BF16), weight=experts(64, 180), rows=ROWS),
    "another weight": lambda: product(weight=experts(HIDDEN, INNER)),
    "a layer's weight": lambda: product(weight="gate_up"),
    "zero points": lambda: product(weight=experts(2 * INNER, HIDDEN, True)),
    "offsets of fewer experts": lambda: product(expert_offsets=OFFSETS[:-1]),
    "offsets of 64 bits": lambda: product(expert_offsets=OFFSETS.long()),
    "offsets with gaps": lambda: product(expert_offsets=OFFSETS.repeat_interleave(2)[::2]),
    "offsets, sparse": lambda: product(expert_offsets=OFFSETS.to_sparse()),
    "offsets off 16 bytes": lambda: product(expert_offsets=offset(OFFSETS, 4)),
    "rows of 64 bits": lambda: product(rows=ROWS.long()),
    "rows with gaps": lambda: product(rows=ROWS.repeat_interleave(2)[::2]),
    "bias": lambda: product(bias=torch.ones(EXPERTS, 2 * INNER, dtype=BF16)),
    "bias of fp32": lambda: product(bias=torch.ones(EXPERTS, 2 * INNER)),
    "bias in a list": lambda: product(bias=[1.0]),
    "swiglu": lambda: product(activation="swiglu"),
    "a list of activations": lambda: product(activation=["silu"]),
    "an activation there is not": lambda: product(activation="relu"),
    "fp32 results": lambda: product(out_dtype=torch.float32),
    "int8 results": lambda: product(out_dtype=torch.int8),
    "out": lambda: product(out=torch.empty(3, 2 * INNER, dtype=BF16)),
    "out of fp32": lambda: product(out=torch.empty(3, 2 * INNER)),
    "out of swiglu's columns": lambda: product(out=torch.empty(3, INNER, dtype=BF16)),
    "batch-invariant": lambda: product(batch_invariant=True),
    "batch-invariant by a number": lambda: product(batch_invariant=1),
    "out of square": lambda: square(torch.empty(3, HIDDEN, dtype=BF16)),
    "out where x is": lambda: square(None),
}
REFUSED_PRODUCTS = {
    "x, sparse": "x", "another weight": "x", "a layer's weight": "weight", "offsets of fewer experts": "expert_offsets",
    "offsets of 64 bits": "expert_offsets", "offsets with gaps": "expert_offsets", "offsets, sparse": "expert_offsets",
    "rows of 64 bits": "rows", "rows with gaps": "rows", "bias of fp32": "bias", "bias in a list": "bias",
    "a list of activations": "activation", "an activation there is not": "activation", "int8 results": "out_dtype",
    "out of swiglu's columns": "out", "out where x is": "out", "batch-invariant by a number": "batch_invariant",
}  # fmt: skip

product_made = functools.cache(lambda name: PRODUCTS[name]())


def test_a_product_launches_the_same_after_any_other(launches):
    def run_other(other):
        return run(launches, product_made(other))

    check_launches_after_any_other(PRODUCTS, REFUSED_PRODUCTS, run_other, ops.launch_grouped.plans)


NOT_AT_ONCE = {*REFUSED_PRODUCTS, "no places", "x, a parameter"}


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in NOT_AT_ONCE])
def test_a_repeated_product_is_not_checked_again(name, launches):
    first = run(launches, product_made(name))
    with calls_of(checks.check_experts) as repeated:
        assert run(launches, product_made(name)) == first
    assert not repeated


@pytest.mark.parametrize("products", KINDS, indirect=True)
@pytest.mark.parametrize("name", ["plain", "rows by index", "short rows by index", "bias", "swiglu", "fp32 results"])
def test_the_products_operator_launches_what_the_call_does(name, products, launches):
    want = run(launches, product_made(name))
    assert run(launches, product_made(name), through_operator) == want and want


@pytest.mark.parametrize("products", KINDS[:3], indirect=True)
def test_rows_by_index_are_brought_in_order_where_a_kernel_wants_them_so(products, launches):
    given = product(rows=ROWS)
    out = grouped_linear(**given)
    assert out.shape == (3, 2 * INNER) and out.dtype == BF16 and out.is_contiguous()
    offsets, rows = OFFSETS.data_ptr(), ROWS.data_ptr()
    *before, last = (launch.arguments for launch in launches)
    assert last[4 if products == "ranges" else 5] == out.data_ptr() and offsets in last[1:]
    if products == "ranges":
        assert not before and last[0] is given["x"] and last[6] == rows
    elif products == "tiles":
        ((gathered, source, *others),) = before
        assert gathered is last[0] and gathered.shape == (3, HIDDEN) and source == given["x"].data_ptr()
        assert others[:5] == [offsets + 4 * EXPERTS, rows, 0, 0, HIDDEN]
    else:
        ((source, *others),) = before
        assert source is given["x"] and others[:4] == [offsets + 4 * EXPERTS, rows, 0, last[0].data_ptr()]


@pytest.mark.parametrize("products", KINDS[:3], indirect=True)
@pytest.mark.parametrize("num_bytes", [4, 8, 12])
def test_offsets_that_are_not_on_16_bytes_are_laid_there(num_bytes, products, launches):
    """All launches of the product see the same copy, which has what was given."""
    place = {"ranges": 5, "tiles": 6, "limbs": 6}[products]
    seen: list[tuple[int, bytes]] = []

    def reading(spec: Any) -> Any:
        def launch(*arguments: Any) -> None:
            if spec.symbol.startswith("grouped"):
                seen.append((arguments[place], ctypes.string_at(arguments[place], OFFSETS.nbytes)))

        return launch

    given = product(rows=ROWS, expert_offsets=offset(OFFSETS, num_bytes))
    assert given["expert_offsets"].data_ptr() % 16
    with recording(reading) as recorded:
        grouped_linear(**given)
    ((address, content),) = seen
    assert address % 16 == 0 and content == OFFSETS.numpy().tobytes()
    for before in recorded.launches[:-1]:
        assert address + 4 * EXPERTS in before.arguments[1:]


@pytest.mark.parametrize("direct", [True, False])
def test_values_are_looked_at_in_every_call_where_that_is_asked_for(direct, launches):
    right, wrong = product(), product(expert_offsets=OFFSETS.flip(0).contiguous())
    function = grouped_linear if direct else through_operator
    with checks.arguments.checking_values():
        function(**right)
        with pytest.raises(ValueError, match="^expert_offsets: got .*, want them to rise from 0 to at most 3"):
            function(**wrong)
