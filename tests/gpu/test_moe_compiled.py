"""Layers of experts under torch.compile and in CUDA graphs on a GPU: the bits of eager calls, whatever changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_kernels.gemm.experts import fused_moe, grouped_linear
from cute_kernels.runtime import KernelSpec, arch_of, load_many
from tests.gpu.compiled import assert_one_graph_serves, assert_replays, compiled
from tests.gpu.moe_forms import (
    BF16,
    EXPERTS,
    FORMS,
    HIDDEN,
    INNER,
    LAYER_TOLERANCE,
    MORE_TOKENS,
    PLACES,
    TOKENS,
    call,
    every_form,
    exact_grouped,
    exact_layer,
    grouped_call,
    layer,
    mix_all,
    numbers,
)
from tests.gpu.specs import products_needed_by
from tests.gpu.test_moe import CUDA, TOLERANCE, assert_near

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("product_kernels")]

ID_DTYPES = (torch.int32, torch.int64)
OUT_DTYPES = (BF16, torch.float32)


def specs() -> list[KernelSpec]:
    """The kernels of this module."""

    def work() -> None:
        for form in FORMS.values():
            mix_all(form, ID_DTYPES, OUT_DTYPES if form == FORMS["w4"] else [form.dtype])
            weight = layer(form, device="cpu")[0]
            for places in PLACES:
                x, offsets, rows = grouped_call(form, places, device="cpu")
                grouped_linear(x, weight, offsets, rows=rows)
                grouped_linear(x[rows.long()], weight, offsets)

    return products_needed_by(work)


@pytest.fixture(scope="module")
def product_kernels() -> None:
    """Every kernel of these tests, in memory: from a bundle or the cache, or compiled in parallel now."""
    load_many(specs(), arch_of())


# -- fused_moe ---------------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("id_dtype", ID_DTYPES)
def test_a_compiled_layer_is_the_eager_one(form, tokens, id_dtype):
    x, ids, shares = call(form, tokens)
    weights, ids = layer(form), ids.to(id_dtype)
    eager = fused_moe(x, *weights, shares, ids)
    assert_near(eager, exact_layer(form, x, ids, shares), LAYER_TOLERANCE)
    assert torch.equal(compiled(fused_moe)(x, *weights, shares, ids), eager)


def test_what_is_before_and_after_a_layer_is_compiled_with_it():
    weights, given = layer(FORMS["w4"]), call(FORMS["w4"], 33)

    def step(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return fused_moe((x * 2).T.contiguous().T, *weights, shares.bfloat16(), ids.T.contiguous().T) + 1

    assert torch.equal(compiled(step)(*given), step(*given))


@every_form
@pytest.mark.parametrize("marks", [False, True], ids=["all sizes are dynamic", "tokens are marked"])
def test_one_graph_serves_any_number_of_tokens(form, marks):
    weights = layer(form)

    def step(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return fused_moe(x, *weights, shares, ids)

    assert_one_graph_serves(step, [call(form, tokens, tokens) for tokens in (5, 33, 200, *MORE_TOKENS)], marks)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_a_compiled_layer_fills_the_callers_tensor(out_dtype):
    weights, (x, ids, shares) = layer(FORMS["w4"]), call(FORMS["w4"], 33)
    out = torch.full((33, HIDDEN), math.nan, device=CUDA, dtype=out_dtype)
    result = compiled(fused_moe)(x, *weights, shares, ids, out=out)
    wanted = fused_moe(x, *weights, shares, ids, out_dtype=out_dtype)
    assert torch.equal(out, wanted) and torch.equal(result, wanted)


@every_form
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_layers_operator_passes_opcheck(form, tokens):
    gate_up, down = layer(form)
    x, ids, shares = call(form, tokens)
    tensors = [tensor for w in (gate_up, down) for tensor in (w.codes, w.scales, w.zeros)]
    sizes = [size for w in (gate_up, down) for size in (w.format.key, *w.shape)]
    torch.library.opcheck(torch.ops.cute_kernels.fused_moe.default, (x, *tensors, ids, shares, *sizes, form.dtype))


@every_form
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_captured_layer_takes_new_inputs_and_routing(form, tokens):
    weights = layer(form)

    def step(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return fused_moe(x, *weights, shares, ids)

    for function in (step, compiled(step)):
        assert_replays(function, call(form, tokens), [call(form, tokens, seed) for seed in (1, 2)])


# -- grouped_linear ----------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
@pytest.mark.parametrize("indexed", [True, False], ids=["rows by index", "rows as they lie"])
def test_a_compiled_grouped_product_is_the_eager_one(form, places, activation, indexed):
    weight, (x, offsets, rows) = layer(form)[0], grouped_call(form, places)
    given, index = (x, rows) if indexed else (x[rows.long()], None)
    bias = numbers(EXPERTS, 2 * INNER, dtype=form.dtype, seed=2)
    options: dict[str, Any] = {"rows": index, "bias": bias, "activation": activation}
    eager = grouped_linear(given, weight, offsets, **options)
    assert_near(eager, exact_grouped(given, weight, offsets, **options), TOLERANCE[form.dtype])
    assert torch.equal(compiled(grouped_linear)(given, weight, offsets, **options), eager)


@every_form
@pytest.mark.parametrize("marks", [False, True], ids=["all sizes are dynamic", "places are marked"])
def test_one_graph_serves_any_number_of_places(form, marks):
    weight = layer(form)[0]
    _, *some = grouped_call(form, PLACES[0])

    def step(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x, weight, some[0], rows=rows)[: PLACES[0]]

    calls = [(x, rows) for x, _, rows in (grouped_call(form, places, places) for places in PLACES)]
    assert_one_graph_serves(step, calls, marks)


@every_form
def test_a_compiled_grouped_product_fills_the_callers_tensor(form):
    weight, (x, offsets, rows) = layer(form)[0], grouped_call(form, 60)
    out = torch.full((60, 2 * INNER), math.nan, device=CUDA, dtype=form.dtype)
    result = compiled(grouped_linear)(x, weight, offsets, rows=rows, out=out)
    wanted = grouped_linear(x, weight, offsets, rows=rows)
    assert torch.equal(out, wanted) and torch.equal(result, wanted)


@every_form
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_the_grouped_operator_passes_opcheck(form, places, activation):
    weight, (x, offsets, rows) = layer(form)[0], grouped_call(form, places)
    tensors = x, weight.codes, weight.scales, weight.zeros, offsets, rows
    bias = numbers(EXPERTS, 2 * INNER, dtype=form.dtype, seed=2)
    sizes = weight.format.key, *weight.shape
    operator = torch.ops.cute_kernels.grouped_linear.default
    torch.library.opcheck(operator, (*tensors, bias, *sizes, activation, form.dtype))
    torch.library.opcheck(operator, (x[rows.long()], *tensors[1:5], None, None, *sizes, activation, form.dtype))


@every_form
@pytest.mark.parametrize("places", PLACES)
def test_a_captured_grouped_product_takes_new_inputs_and_routing(form, places):
    weight = layer(form)[0]

    def step(x: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x, weight, offsets, rows=rows)

    for function in (step, compiled(step)):
        assert_replays(function, grouped_call(form, places), [grouped_call(form, places, seed) for seed in (1, 2)])
