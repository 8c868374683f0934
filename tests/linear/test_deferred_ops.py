"""Operators of products around a deferred norm: what they compute without a GPU, and what they launch with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import quantized_linear, rms_norm
from cute_kernels.gemm import deferred, deferred_ops, ops, served
from cute_kernels.gemm.product import problem_of as problem_on
from cute_kernels.runtime import native
from cute_kernels.runtime.cache import default_cache
from tests.launchers import recording
from tests.linear.test_deferred_calls import HALF, K, M, N, kinds, numbers, weight

EPS = 1e-5


def given(rows: int = M, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> dict[str, Any]:
    """Arguments of the first operator; its weight by name."""
    return {
        "x": numbers(rows, K, dtype=dtype),
        "weight": weight(dtype=dtype),
        "residual": numbers(rows, N, dtype=dtype, seed=1),
        "norm": numbers(N, dtype=dtype, seed=2),
        "bias": None,
        **changed,
    }


def both(call: dict[str, Any], second: Any, activation: str | None = None, bias: Any = None) -> tuple[Any, ...]:
    """(rows, the product of their norm, by the two operators)."""
    first = call["weight"]
    rows, x, squares = deferred_ops.giving(
        call["x"], first.codes, first.scales, first.zeros, call["bias"], call["residual"], first.format.key,
        *first.shape, call["norm"], EPS, second.format.key, second.shape[0],
    )  # fmt: skip
    assert squares.shape == (len(rows), N // 64) and x.shape == rows.shape
    y = deferred_ops.taking(
        x, squares, rows, call["norm"], EPS, first.format.key, first.shape[1], second.codes, second.scales,
        second.zeros, bias, second.format.key, *second.shape, activation,
    )  # fmt: skip
    return rows, y


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("rows", [0, 5])
def test_without_kernels_they_are_a_product_a_norm_and_a_product(rows, activation):
    call, second, bias = given(rows, bias=numbers(N, seed=3)), weight(128, N), numbers(128, seed=4)
    total, y = both(call, second, activation, bias)
    want = quantized_linear(call["x"], call["weight"], call["bias"], residual=call["residual"])
    assert torch.equal(total, want)
    normed = rms_norm(want, call["norm"], eps=EPS)
    assert torch.equal(y, quantized_linear(normed, second, bias, activation=activation))


def test_they_pass_opcheck():
    first, second = weight(), weight(128, N)
    fields = first.codes, first.scales, None, None, numbers(3, N)
    sizes = (first.format.key, *first.shape)
    terms = numbers(N), EPS
    giving = torch.ops.cute_kernels.weight_only_linear_norm.default
    # But for values: sums of squares have no meaning here, as nothing was left.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(giving, (numbers(3, K), *fields, *sizes, *terms, "w4_g128", 128), test_utils=tests)
    taking = torch.ops.cute_kernels.weight_only_linear_of_normed.default
    rows = numbers(3, N), torch.zeros(3, N // 64), numbers(3, N)
    its = second.codes, second.scales, None, None, second.format.key, *second.shape, "swiglu"
    torch.library.opcheck(taking, (*rows, *terms, first.format.key, K, *its))


LAUNCHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "few rows": (given(3), ["gives", "takes"]),
    "some rows": (given(), ["gives", "takes"]),
    "many rows": (given(20_000), ["product", "norm", "product"]),
    "fp16": (given(dtype=HALF), ["product", "norm", "product"]),
    "an fp32 norm": (given(norm=torch.ones(N)), ["product", "norm", "product"]),
    "parameters": (given(norm=torch.nn.Parameter(numbers(N), requires_grad=False)), ["gives", "takes"]),
}


@pytest.mark.parametrize(("call", "want"), LAUNCHES.values(), ids=list(LAUNCHES))
def test_both_find_the_same_answer(call, want):
    with recording() as cache:
        both(call, weight(128, N, call["x"].dtype), "swiglu")
    assert kinds(cache.launches) == want


def test_a_product_that_cannot_take_a_norm_is_left_none():
    """Results of 100 columns are stored in pieces: right, if for a launch more."""
    with recording() as cache:
        both(given(), weight(100, N))
    assert kinds(cache.launches) == ["gives", "norm", "product"]


# -- whether a norm is left --------------------------------------------------------------------------------------------


def test_a_norm_is_left_where_both_kernels_have_the_means():
    first, second = weight(), weight(128, N)
    assert not deferred.leaves_norm(M, first, second)  # no GPU
    with recording():
        assert deferred.leaves_norm(M, first, second) and deferred.leaves_norm(1, first, second)
        assert not deferred.leaves_norm(0, first, second) and not deferred.leaves_norm(20_000, first, second)
        assert not deferred.leaves_norm(M, first, weight(128, N, perm=torch.arange(N - 1, -1, -1)))
        assert not deferred.leaves_norm(M, first, weight(128, K))
        assert not deferred.leaves_norm(M, first, weight(128, N, HALF))
        assert not deferred.leaves_norm(M, weight(dtype=HALF), weight(128, N, HALF))


def test_a_norm_is_a_launch_where_its_kernel_would_have_to_be_compiled_and_cannot():
    """Without the compiler, and in a server, whose steps wait for nothing that was not made ready."""
    first, second = weight(), weight(128, N)
    with recording(), native.having(dsl_version=lambda: None):
        assert not deferred.leaves_norm(M, first, second)
    with recording():
        problem = problem_on(1, N, K, first.format, torch.bfloat16, 0, False)
        served.note_ready(problem, [M])
        try:
            assert not deferred.leaves_norm(M, first, second)
        finally:
            served.forget_ready()
    assert default_cache() is not None


def test_fields_of_a_weight_are_refused_as_often_as_they_are_wrong():
    """What decides is looked at once, and again where it is another."""
    packed = weight(N, K)
    fields = packed.codes, packed.scales, packed.zeros, packed.format, packed.shape
    for _ in range(2):
        made = ops.weight_of(*fields)
        assert set(made._fields) == {*packed.tensor_names, "format", "shape"}  # what a weight gets later is not missing
        assert all(getattr(made, one) is getattr(packed, one) for one in (*packed.tensor_names, "format", "shape"))
    wrong: dict[str, tuple[Any, ...]] = {
        "codes": (packed.codes[:-1], *fields[1:]),
        "scales": (packed.codes, packed.scales.float(), *fields[2:]),
        "zeros": (packed.codes, packed.scales, packed.scales, *fields[3:]),
    }
    for name, given in wrong.items():
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=name):
                ops.weight_of(*given)


def test_parameters_and_leaves_become_plain_tensors():
    x = torch.zeros(3)
    leaf, parameter = torch.zeros(3, requires_grad=True), torch.nn.Parameter(x, requires_grad=False)
    assert ops.plain(x) is x and ops.plain(None) is None
    for given in (leaf, parameter):
        found = ops.plain(given)
        assert type(found) is torch.Tensor and not found.requires_grad and found.data_ptr() == given.data_ptr()
