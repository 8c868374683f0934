"""Layers of experts with ``batch_invariant``: a token's bits are the same whatever is computed with it."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.gemm.experts import fused_moe, grouped_linear
from cute_kernels.gemm.experts.call import MoeCall
from cute_kernels.gemm.experts.plan import LayerForm, as_they_are, make_moe_plan, sorted_products
from cute_kernels.gemm.experts.product import problem_of
from cute_kernels.gemm.experts.reference import route_reference
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.experts.wgmma.schedule import GroupedTiles, entry_tiles, layouts
from cute_kernels.gemm.packed_experts import PackedExperts, interleave_experts, stack_experts
from cute_kernels.runtime import KernelSpec, arch_of, load_many
from cute_kernels.runtime.operator import Plan
from tests.gpu.compiled import compiled
from tests.gpu.moe_forms import BF16, FP16, LAYER_TOLERANCE, Form, numbers
from tests.gpu.specs import products_needed_by
from tests.gpu.test_moe import CUDA, assert_near, problem, run_product
from tests.gpu.test_moe_assigned import ID_DTYPES, ROUTING, assignments
from tests.linear.cases import known

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("product_kernels")]

EXPERTS, TOPK, HIDDEN, INNER = 8, 2, 1024, 640
FORMS = {
    "w4": Form(4, BF16, 128),
    "w4, zero points, groups of 32": Form(4, BF16, 32, True),
    "w4 fp16, a scale a row": Form(4, FP16, None),
    "w8 fp16": Form(8, FP16, 64),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
ALL_TOKENS = 1500
SOME_TOKENS = (1, 2, 7, 30, 260, 600, 1000)
ROUTES = ((1, 2), (2, 8), (5, 3), (11, 1), (16, 2), (8, 8))  # tokens, experts that each chooses, as they are
MANY_EXPERTS = 256  # that usually have no more rows than an entry, of the most assignments
TILES = {16, 32, 64, 128, 256}  # rows, of tiles that there are for every format


def layer(form: Form) -> tuple[PackedExperts, PackedExperts]:
    gate_up, down = _weights(form)
    return gate_up.to(CUDA), down.to(CUDA)


@functools.cache
def _weights(form: Form) -> tuple[PackedExperts, PackedExperts]:
    def experts(n: int, k: int, seed: int) -> PackedExperts:
        seeds = range(seed, seed + EXPERTS)
        return stack_experts([known(n, k, form.bits, form.group, form.zero, form.dtype, one).pack() for one in seeds])

    return interleave_experts(experts(INNER, HIDDEN, 0), experts(INNER, HIDDEN, 50)), experts(HIDDEN, INNER, 100)


def call(form: Form, tokens: int = ALL_TOKENS, device: str = CUDA) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids, some of them of no expert, and the experts' shares, of the first tokens."""
    ids = torch.randint(-1, EXPERTS, (ALL_TOKENS, TOPK), generator=torch.Generator().manual_seed(0))
    shares = numbers(ALL_TOKENS, TOPK, dtype=torch.float32, device="cpu", seed=1).softmax(-1)
    every = numbers(ALL_TOKENS, HIDDEN, dtype=form.dtype, device=device), ids.to(device), shares.to(device)
    x, ids, shares = (one[:tokens].contiguous() for one in every)
    return x, ids, shares


def specs() -> list[KernelSpec]:
    """The kernels of this module."""

    def work() -> None:
        for form in FORMS.values():
            weights = _weights(form)
            for tokens in (*SOME_TOKENS, ALL_TOKENS):
                for batch_invariant in (True, False) if form == FORMS["w4"] else (True,):
                    only_shapes(form, weights, tokens, batch_invariant)
            for tokens, topk in ROUTES:
                for id_dtype in ID_DTYPES:
                    entries_and_sorted(weights, tokens, topk, id_dtype)

    found = products_needed_by(work)
    found += [ExpertSpec(tiles.config) for form in FORMS.values() for tiles in tiles_of(form)]
    return list(dict.fromkeys(found))


def tiles_of(form: Form) -> list[GroupedTiles]:
    """All tiles that may serve batch-invariant products of a layer's first weight."""
    product = problem(ALL_TOKENS * TOPK, EXPERTS, 2 * INNER, HIDDEN, *form)
    found = layouts(replace(product, batch_invariant=True))
    assert {tiles.config.tile_m for tiles in found} >= TILES
    return found


def entries_and_sorted(
    weights: tuple[PackedExperts, PackedExperts], tokens: int, topk: int, id_dtype: torch.dtype
) -> list[Plan[[MoeCall], torch.Tensor]]:
    """The same layer by tiles of entries, whether or not they are what serves it, and by sorted tiles."""
    gate_up, down = (weight.form for weight in weights)
    layer = LayerForm(tokens, topk, 8 * id_dtype.itemsize, gate_up, down, batch_invariant=True)
    problems = [replace(problem_of(layer.count, form, True), num_experts=MANY_EXPERTS) for form in (gate_up, down)]
    found = [entry_tiles(each, tokens) for each in problems]
    layouts = [layout for layout in found if layout is not None]
    assert len(layouts) == len(found)
    both = as_they_are(layouts, layer), sorted_products(layer)
    return [make_moe_plan(products, layer, gate_up.dtype) for products in both]


def only_shapes(form: Form, weights: tuple[PackedExperts, PackedExperts], tokens: int, batch_invariant: bool) -> None:
    """The calls of so many tokens, on the CPU and all of no expert, which takes no time."""
    x, ids, shares = call(form, tokens, "cpu")
    nowhere, places = torch.full_like(ids, -1), torch.zeros(tokens * TOPK, dtype=torch.int32)
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    fused_moe(x, *weights, shares, nowhere, batch_invariant=batch_invariant)
    grouped_linear(x, weights[0], offsets, rows=places, activation="swiglu", batch_invariant=batch_invariant)


@pytest.fixture(scope="module")
def product_kernels() -> None:
    """Every kernel of these tests, in memory: from a bundle or the cache, or compiled in parallel now."""
    load_many(specs(), arch_of())


@every_form
def test_tokens_do_not_depend_on_each_other(form):
    weights, given = layer(form), call(form)
    everything = fused_moe(*given[:1], *weights, *given[:0:-1], batch_invariant=True)
    assert_near(everything, fused_moe(*given[:1], *weights, *given[:0:-1]).float().cpu(), LAYER_TOLERANCE)
    for tokens in SOME_TOKENS:
        for first in (0, ALL_TOKENS - tokens):
            x, ids, shares = (one[first : first + tokens] for one in given)
            some = fused_moe(x, *weights, shares, ids, batch_invariant=True)
            assert torch.equal(some, everything[first : first + tokens])


def test_without_it_few_tokens_are_added_up_otherwise():
    """Or else nothing here would show that with it they are not."""
    weights, given = layer(FORMS["w4"]), call(FORMS["w4"])
    everything = fused_moe(*given[:1], *weights, *given[:0:-1])
    x, ids, shares = (one[:7] for one in given)
    assert not torch.equal(fused_moe(x, *weights, shares, ids), everything[:7])


@every_form
def test_places_do_not_depend_on_each_other(form):
    weight, (x, ids, _) = layer(form)[0], call(form)
    options: dict[str, Any] = {"activation": "swiglu", "batch_invariant": True}
    offsets, rows, places = (one.to(CUDA) for one in route_reference(ids.cpu(), EXPERTS))
    everything = grouped_linear(x, weight, offsets, rows=rows, **options)
    for tokens in SOME_TOKENS:
        some_offsets, some_rows, some_places = (one.to(CUDA) for one in route_reference(ids[:tokens].cpu(), EXPERTS))
        some = grouped_linear(x[:tokens], weight, some_offsets, rows=some_rows, **options)
        known_ids = ids[:tokens] >= 0
        assert torch.equal(some[some_places[known_ids].long()], everything[places[:tokens][known_ids].long()])


def test_compiled_tokens_do_not_depend_on_each_other():
    weights, given = layer(FORMS["w4"]), call(FORMS["w4"])
    step = compiled(lambda x, ids, shares: fused_moe(x, *weights, shares, ids, batch_invariant=True))
    everything = fused_moe(*given[:1], *weights, *given[:0:-1], batch_invariant=True)
    for tokens in (1, 30, ALL_TOKENS):
        assert torch.equal(step(*(one[:tokens] for one in given)), everything[:tokens])


@every_form
def test_every_tile_adds_up_alike(form):
    """In fp32, as accumulators are: so any of them may serve any number of rows."""
    weight, (x, ids, _) = layer(form)[0], call(form)
    offsets, rows, _ = (one.to(CUDA) for one in route_reference(ids.cpu(), EXPERTS))
    given = x[rows.long()].contiguous()
    results = []
    for tiles in tiles_of(form):
        out = torch.full((len(rows), weight.out_features), math.nan, device=CUDA)
        run_product(tiles, weight, given, offsets, None, None, None, out)
        results.append(out[: int(offsets[-1])])
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert results[0].isfinite().all()


@every_form
@pytest.mark.parametrize("id_dtype", ID_DTYPES, ids=str)
@pytest.mark.parametrize("tokens, topk", ROUTES)
@pytest.mark.parametrize("routing", ROUTING)
def test_entries_have_the_bits_of_sorted_tiles(routing, tokens, topk, id_dtype, form):
    """Of experts with more rows than an entry too, and of none."""
    weights = layer(form)
    ids, shares = assignments(routing, tokens, topk, EXPERTS, id_dtype)
    x = numbers(tokens, HIDDEN, dtype=form.dtype, seed=3)
    entries, tiles = entries_and_sorted(weights, tokens, topk, id_dtype)
    want = tiles.launch(MoeCall(x, *weights, shares, ids))
    for _ in range(3):
        assert torch.equal(entries.launch(MoeCall(x, *weights, shares, ids)), want)
    assert want.isfinite().all()
