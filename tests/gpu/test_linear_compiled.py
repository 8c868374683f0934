"""`linear` under torch.compile on a GPU: the bits of eager calls, whatever is around it and whatever changes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels import quantized_linear
from cute_kernels.runtime import KernelSpec, arch_of, load_many
from tests.gpu.compiled import assert_one_graph_serves, compiled
from tests.gpu.linear_forms import (
    BF16,
    FORMS,
    MORE_ROWS,
    ROWS,
    Form,
    K,
    N,
    all_forms,
    exact,
    multiply_all,
    numbers,
    plain_forms,
)
from tests.gpu.specs import products_needed_by
from tests.gpu.test_linear import TOLERANCE, assert_near

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("product_kernels")]

INVARIANT = FORMS["w4"]


class Epilogue(NamedTuple):
    """What follows a product."""

    bias: bool = False
    residual: bool = False
    activation: str | None = None


EPILOGUES = {
    "none": Epilogue(),
    "bias, silu": Epilogue(bias=True, activation="silu"),
    "bias, residual, gelu": Epilogue(bias=True, residual=True, activation="gelu"),
    "residual, swiglu": Epilogue(residual=True, activation="swiglu"),
}
every_epilogue = pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=list(EPILOGUES))


def specs() -> list[KernelSpec]:
    """The kernels of this module."""

    def work() -> None:
        multiply_all(FORMS.values())
        multiply_all([INVARIANT], batch_invariant=True)

    return products_needed_by(work)


@pytest.fixture(scope="module")
def product_kernels() -> None:
    """Every kernel of these tests, in memory: from a bundle or the cache, or compiled in parallel now."""
    load_many(specs(), arch_of())


def options_of(form: Form, epilogue: Epilogue, m: int, seed: int = 0) -> dict[str, Any]:
    columns = N // 2 if epilogue.activation == "swiglu" else N
    return {
        "bias": numbers(1, N, dtype=form.dtype, seed=seed + 1)[0] if epilogue.bias else None,
        "residual": numbers(m, columns, dtype=form.dtype, seed=seed + 2) if epilogue.residual else None,
        "activation": epilogue.activation,
    }


@plain_forms
@every_epilogue
@pytest.mark.parametrize("m", ROWS)
def test_a_compiled_product_is_the_eager_one(form, epilogue, m):
    weight, options = form.pack(), options_of(form, epilogue, m)
    x = numbers(m, K, dtype=form.dtype)
    eager = quantized_linear(x, weight, **options)
    assert_near(eager, exact(x, weight, **options), TOLERANCE[form.dtype])
    assert torch.equal(compiled(quantized_linear)(x, weight, **options), eager)


@all_forms
def test_what_is_before_and_after_a_product_is_compiled_with_it(form):
    weight = form.pack()

    def step(x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x.view(2, 8, K) * 2, weight).transpose(1, 2) + 1

    x = numbers(16, K, dtype=form.dtype)
    assert torch.equal(compiled(step)(x), step(x))


@plain_forms
@pytest.mark.parametrize("marks", [False, True], ids=["all sizes are dynamic", "rows are marked"])
def test_one_graph_serves_any_number_of_rows(form, marks):
    weight, bias = form.pack(), numbers(1, N, dtype=form.dtype)[0]

    def step(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, weight, bias, residual=residual, activation="silu")

    calls = [
        (numbers(m, K, dtype=form.dtype, seed=m), numbers(m, N, dtype=form.dtype, seed=m + 1))
        for m in (*MORE_ROWS, 8, 16, 100)
    ]
    assert_one_graph_serves(step, calls, marks)


def test_one_row_after_others_is_compiled_anew_and_right():
    """PyTorch takes sizes of 1 to be constants."""
    weight = FORMS["w4"].pack()
    step = torch.compile(lambda x: quantized_linear(x, weight), fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (5, 1, 9, 1):
        x = numbers(m, K, seed=m)
        assert torch.equal(step(x), quantized_linear(x, weight))


def test_compiled_rows_do_not_depend_on_each_other_if_that_is_asked_for():
    weight, x = INVARIANT.pack(), numbers(100, K)
    invariant = compiled(lambda x: quantized_linear(x, weight, batch_invariant=True))
    everything = invariant(x)
    assert_near(everything, exact(x, weight), TOLERANCE[BF16])
    for m in (1, 8, 16, 40):
        assert torch.equal(invariant(x[:m]), everything[:m])


@every_epilogue
def test_a_compiled_product_fills_the_callers_tensor(epilogue):
    form = FORMS["w4"]
    weight, options, x = form.pack(), options_of(form, epilogue, 8), numbers(8, K)
    wanted = quantized_linear(x, weight, **options)
    out = torch.full_like(wanted, math.nan)
    result = compiled(quantized_linear)(x, weight, **options, out=out)
    assert torch.equal(out, wanted) and torch.equal(result, wanted)


@plain_forms
@every_epilogue
def test_the_operator_passes_opcheck(form, epilogue):
    weight, options = form.pack(), options_of(form, epilogue, 8)
    tensors = numbers(8, K, dtype=form.dtype), weight.codes, weight.scales, weight.zeros
    added = options["bias"], options["residual"]
    numbers_of_weight = weight.format.key, N, K
    torch.library.opcheck(
        torch.ops.cute_kernels.weight_only_linear.default,
        (*tensors, *added, *numbers_of_weight, epilogue.activation, form.dtype, False),
    )
