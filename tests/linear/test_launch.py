"""What a call of a linear layer on a GPU launches depends on that call alone, whatever was launched and kept before.

With compiled functions that launch nothing (`tests.host_functions`), so that no GPU is needed.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.gemm import NormedRows, PackedWeight, call, ops, quantized_linear
from cute_kernels.gemm.operands.fp8_config import RowsConfig
from cute_kernels.norm.config import NormConfig
from cute_kernels.runtime import native
from tests.launchers import assert_launched_alike_after_any_other, outcome, recording
from tests.linear.cases import known
from tests.observed import calls_of
from tests.tensors import apart, offset

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")

BF16, FP16 = torch.bfloat16, torch.float16
N, K = 192, 256


@functools.cache
def weight(bits: int = 4, group_size: int | None = 128, zero_point: bool = False, dtype=BF16, k: int = K):
    return known(N, k, bits, group_size, zero_point, dtype).pack()


def rows(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(*shape, K, dtype=dtype)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=BF16)


def permuted() -> PackedWeight:
    return known(N, K, 4, 128).pack(perm=torch.arange(K - 1, -1, -1))


def scaled() -> PackedWeight:
    return replace(weight(), input_scale=torch.full((K,), 2.0, dtype=BF16))


CALLS: dict[str, Any] = {
    "one row": lambda: {"x": rows(1), "weight": weight()},
    "three rows": lambda: {"x": rows(3), "weight": weight()},
    "three rows of three dimensions": lambda: {"x": rows(1, 3), "weight": weight()},
    "many rows": lambda: {"x": rows(20), "weight": weight()},
    "no rows": lambda: {"x": rows(0), "weight": weight()},
    "rows with gaps": lambda: {"x": apart(rows(3)), "weight": weight()},
    "rows off 16 bytes": lambda: {"x": offset(rows(3), 2), "weight": weight()},
    "short rows": lambda: {"x": torch.ones(3, 250, dtype=BF16), "weight": weight(k=250)},
    "sparse rows": lambda: {"x": rows(3).to_sparse(), "weight": weight()},
    "nested rows": lambda: {"x": torch.nested.nested_tensor([rows(3), rows(2)]), "weight": weight()},
    "a parameter": lambda: {"x": torch.nn.Parameter(rows(3)), "weight": weight()},
    "8 bits": lambda: {"x": rows(3), "weight": weight(8)},
    "other groups": lambda: {"x": rows(3), "weight": weight(group_size=64)},
    "no groups": lambda: {"x": rows(3), "weight": weight(group_size=None)},
    "zero points": lambda: {"x": rows(3), "weight": weight(zero_point=True)},
    "part of wider rows": lambda: {"x": torch.ones(3, 2 * K, dtype=BF16)[:, K:], "weight": weight()},
    "part of wider rows of three dimensions": lambda: {
        "x": torch.ones(2, 3, 2 * K, dtype=BF16)[..., :K],
        "weight": weight(),
    },
    "rows at two distances": lambda: {"x": torch.ones(2, 4, K, dtype=BF16)[:, :3], "weight": weight()},
    "part of wider rows off 16 bytes": lambda: {
        "x": torch.ones(3, 2 * K, dtype=BF16)[:, 1 : K + 1],
        "weight": weight(),
    },
    "many parts of wider rows": lambda: {"x": torch.ones(64, 2 * K, dtype=BF16)[:, K:], "weight": weight()},
    "many parts of wider rows of three dimensions": lambda: {
        "x": torch.ones(2, 32, 2 * K, dtype=BF16)[..., :K],
        "weight": weight(),
    },
    "many rows in each other": lambda: {"x": torch.ones(1, K, dtype=BF16).expand(64, K), "weight": weight()},
    "input scale": lambda: {"x": rows(3), "weight": scaled()},
    "input scale of many rows": lambda: {"x": rows(20), "weight": scaled()},
    "input scale of rows with gaps": lambda: {"x": apart(rows(3)), "weight": scaled()},
    "norm": lambda: {"x": rows(1), "weight": weight(), "norm": ones(K)},
    "norm of other numbers": lambda: {
        "x": rows(1, 1),
        "weight": weight(),
        "norm": ones(K),
        "norm_eps": 0.5,
        "norm_offset": -2.0,
    },
    "short norm": lambda: {"x": rows(3), "weight": weight(), "norm": ones(K - 1)},
    "norm of fp16": lambda: {"x": rows(3), "weight": weight(), "norm": torch.ones(K, dtype=FP16)},
    "norm by less than nothing": lambda: {"x": rows(3), "weight": weight(), "norm": ones(K), "norm_eps": -1.0},
    "act-order and input scale": lambda: {
        "x": rows(1, 3),
        "weight": replace(permuted(), input_scale=scaled().input_scale),
    },
    "act-order": lambda: {"x": rows(3), "weight": permuted()},
    "fp16": lambda: {"x": rows(3, dtype=FP16), "weight": weight(dtype=FP16)},
    "fp16 with the weight of bf16": lambda: {"x": rows(3, dtype=FP16), "weight": weight()},
    "too wide": lambda: {"x": torch.ones(3, K + 8, dtype=BF16), "weight": weight()},
    "bias": lambda: {"x": rows(3), "weight": weight(), "bias": torch.ones(N, dtype=BF16)},
    "bias, a parameter": lambda: {
        "x": rows(3),
        "weight": weight(),
        "bias": torch.nn.Parameter(torch.ones(N, dtype=BF16)),
    },
    "bias with gaps": lambda: {"x": rows(3), "weight": weight(), "bias": torch.ones(2 * N, dtype=BF16)[::2]},
    "bias of fp16": lambda: {"x": rows(3), "weight": weight(), "bias": torch.ones(N, dtype=FP16)},
    "sparse bias": lambda: {"x": rows(3), "weight": weight(), "bias": torch.ones(N, dtype=BF16).to_sparse()},
    "short bias": lambda: {"x": rows(3), "weight": weight(), "bias": torch.ones(N - 1, dtype=BF16)},
    "a list for a bias": lambda: {"x": rows(3), "weight": weight(), "bias": [0.0]},
    "residual": lambda: {"x": rows(3), "weight": weight(), "residual": torch.ones(3, N, dtype=BF16)},
    "residual with gaps": lambda: {
        "x": rows(3),
        "weight": weight(),
        "residual": torch.ones(3, 2 * N).bfloat16()[:, ::2],
    },
    "residual of other rows": lambda: {"x": rows(3), "weight": weight(), "residual": torch.ones(2, N, dtype=BF16)},
    "silu": lambda: {"x": rows(3), "weight": weight(), "activation": "silu"},
    "swiglu": lambda: {"x": rows(3), "weight": weight(), "activation": "swiglu"},
    "an activation there is not": lambda: {"x": rows(3), "weight": weight(), "activation": "relu"},
    "a list of activations": lambda: {"x": rows(3), "weight": weight(), "activation": ["silu"]},
    "fp32 results": lambda: {"x": rows(3), "weight": weight(), "out_dtype": torch.float32},
    "int8 results": lambda: {"x": rows(3), "weight": weight(), "out_dtype": torch.int8},
    "out": lambda: {"x": rows(3), "weight": weight(), "out": torch.empty(3, N, dtype=BF16)},
    "out of fp32": lambda: {"x": rows(3), "weight": weight(), "out": torch.empty(3, N)},
    "out of fp32 for bf16": lambda: {"x": rows(3), "weight": weight(), "out": torch.empty(3, N), "out_dtype": BF16},
    "out with gaps": lambda: {"x": rows(3), "weight": weight(), "out": torch.empty(3, 2 * N, dtype=BF16)[:, ::2]},
    "out of other rows": lambda: {"x": rows(3), "weight": weight(), "out": torch.empty(2, N, dtype=BF16)},
    "out of square": lambda: {"x": ones(3, N), "weight": weight(k=N), "out": ones(3, N)},
    "out where x is": lambda: {"weight": weight(k=N)} | dict.fromkeys(("x", "out"), ones(3, N)),
    "batch-invariant": lambda: {"x": rows(3), "weight": weight(), "batch_invariant": True},
    "batch-invariant by a number": lambda: {"x": rows(3), "weight": weight(), "batch_invariant": 1},
}
REFUSED = {
    "sparse rows", "nested rows", "sparse bias",
    "fp16 with the weight of bf16", "too wide", "bias with gaps", "bias of fp16", "short bias", "a list for a bias",
    "residual of other rows", "an activation there is not", "a list of activations", "int8 results",
    "short norm", "norm of fp16", "norm by less than nothing",
    "out of fp32 for bf16", "out with gaps", "out of other rows", "out where x is", "batch-invariant by a number",
}  # fmt: skip
PREPARED = {
    "rows with gaps": "linear_inputs_bf16",
    "part of wider rows": "linear_inputs_bf16",
    "part of wider rows of three dimensions": "linear_inputs_bf16",
    "many rows in each other": "linear_inputs_bf16",
    "input scale": "linear_inputs_bf16_scaled",
    "input scale of many rows": "linear_inputs_bf16_scaled",
    "input scale of rows with gaps": "linear_inputs_bf16_scaled",
    "act-order": "linear_inputs_bf16_order8192",
    "act-order and input scale": "linear_inputs_bf16_order8192_scaled",
}  # what is launched first

made = functools.cache(lambda name: CALLS[name]())


@pytest.fixture
def launches():
    from tests.host_functions import input_rows_function, norm_function, product_function

    makers = {RowsConfig: input_rows_function, NormConfig: norm_function}

    def function_of(spec: Any) -> Any:
        return makers.get(type(spec.config), product_function)(spec.config)

    with recording(function_of) as recorded:
        yield recorded.launches


def run(launches: list[Any], given: dict[str, Any]) -> Any:
    tensors = {**given, **{name: getattr(given["weight"], name) for name in ("codes", "scales", "zeros")}}
    return outcome(launches, lambda: quantized_linear(**given), tensors)


def test_a_call_launches_the_same_after_any_other(launches):
    want = assert_launched_alike_after_any_other(CALLS, lambda other: run(launches, made(other)), ops.launch.plans)
    assert {name for name, outcome in want.items() if isinstance(outcome, tuple)} == REFUSED


@pytest.mark.parametrize("name", [name for name in CALLS if name not in REFUSED | {"no rows", "a parameter"}])
def test_a_repeated_call_is_not_checked_again(name, launches):
    first = run(launches, made(name))
    with calls_of(call.rows_wanted) as repeated:
        assert run(launches, made(name)) == first
    assert not repeated


@pytest.mark.parametrize("name", CALLS)
def test_rows_that_are_not_as_products_take_them_are_prepared_in_one_launch(name, launches):
    if name in REFUSED:
        return
    run(launches, made(name))
    symbols = [launch.symbol for launch in launches]
    assert [symbol for symbol in symbols if symbol.startswith("linear_inputs")] == [
        symbol for symbol in symbols[:1] if symbol == PREPARED.get(name)
    ]
    if name in PREPARED:
        rows, x, end, numbers, order, factors, stride, parts = launches[0].arguments
        assert not (end or numbers)
        given = made(name)
        assert (
            symbols[0] == PREPARED[name]
            and launches[1].arguments[0] is rows
            and rows.shape == (given["x"].numel() // K, K)
        )
        assert x == given["x"].data_ptr() and stride == given["x"].stride(-2) and parts == 1
        for address, tensor in ((order, given["weight"].perm), (factors, given["weight"].input_scale)):
            assert address == (0 if tensor is None else tensor.data_ptr())


@pytest.mark.parametrize("name", ["norm", "norm of other numbers"])
def test_a_norm_of_one_row_is_a_launch_before_the_product(name, launches):
    run(launches, made(name))
    first, second = launches
    assert first.symbol.startswith("norm_rms")
    launches.clear()
    quantized_linear(rows(1), weight())
    assert second.symbol == launches[0].symbol


@pytest.mark.parametrize("m", [1, 3, 20])
def test_a_norm_makes_rows_as_the_layer_wants_them(m, launches):
    """In act-order and scaled: so the product's launch is that of a layer which wants neither."""
    norm = ones(K)
    for weight_of, end in ((permuted, "_ordered"), (scaled, "_scaled")):
        launches.clear()
        quantized_linear(NormedRows(rows(m), norm), weight_of())
        first, second = launches
        assert first.symbol.startswith("norm_rms") and first.symbol.endswith(end)
        assert second.arguments[0].data_ptr() == first.arguments[0].data_ptr()
        factors = (weight_of().perm, None) if end == "_ordered" else (None, weight_of().input_scale)
        assert [address != 0 for address in first.arguments[-2:]] == [tensor is not None for tensor in factors]
        launches.clear()
        quantized_linear(rows(m), weight())
        assert second.symbol == launches[-1].symbol


@pytest.mark.parametrize("name", ["many parts of wider rows", "many parts of wider rows of three dimensions"])
def test_many_rows_that_lie_apart_are_taken_where_they_lie(name, launches):
    run(launches, made(name))
    (only,) = launches
    x, given = only.arguments[0], made(name)["x"]
    assert x.data_ptr() == given.data_ptr() and x.shape == (64, K) and x.stride() == (2 * K, 1)


@pytest.mark.parametrize("again", [False, True])
def test_results_have_the_shape_of_the_call_and_no_gradient(again, launches):
    x = rows(2, 1, 3)
    x.requires_grad_()
    for _ in range(1 + again):
        result = quantized_linear(x, weight(), activation="swiglu", out_dtype=torch.float32)
    assert result.shape == (2, 1, 3, N // 2) and result.dtype == torch.float32 and result.is_contiguous()
    assert not result.requires_grad and launches[-1].arguments[0].shape == (6, K)
