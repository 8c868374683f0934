"""Norms on a CPU: against fp64, options, in place, torch.compile, and every argument that does not fit."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from cute_kernels import layer_norm, rms_norm
from cute_kernels.arguments import row_stride
from cute_kernels.norm.config import MAX_COLUMNS, VECTOR, NormConfig, launch_shape
from tests.launchers import recording
from tests.norm.cases import assert_close, in_fp64, random_case

KINDS = {"rms": rms_norm, "layer": layer_norm}
SHAPES = [(1, 8), (3, 4096), (2, 5, 264), (4096,), (0, 64), (2, MAX_COLUMNS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_is_that_of_fp64(kind, dtype, shape):
    for residual, bias, wide in itertools.product((False, True), repeat=3):
        given = random_case(
            kind, shape, dtype, residual=residual, bias=bias, weight_dtype=torch.float32 if wide else None
        )
        got = KINDS[kind](**given, eps=1e-5)
        if residual:
            got, total = got
            assert torch.equal(total, given["x"] + given["residual"])
        assert got.shape == shape and got.dtype == dtype
        if got.numel():
            assert_close(got, in_fp64(kind, given, 1e-5))


def test_a_large_mean_costs_a_layer_norm_no_accuracy():
    given = random_case("layer", (4, 1024), torch.float16, mean=900.0)
    assert_close(layer_norm(**given), in_fp64("layer", given, 1e-5), least=1e-4)


def test_a_weight_offset_is_added_to_the_weight():
    given = random_case("rms", (3, 128))
    assert_close(rms_norm(**given, weight_offset=1.0), in_fp64("rms", given, 1e-6, 1.0))


def test_results_go_where_they_are_told_to_even_in_place():
    given = random_case("rms", (5, 64), residual=True)
    want, total = rms_norm(**given)
    out, residual_out = torch.empty_like(want), torch.empty_like(total)
    assert rms_norm(**given, out=out, residual_out=residual_out)[0] is out
    assert torch.equal(out, want) and torch.equal(residual_out, total)
    x, residual = given["x"].clone(), given["residual"].clone()
    rms_norm(x, given["weight"], residual=residual, out=x, residual_out=residual)
    assert torch.equal(x, want) and torch.equal(residual, total)
    parameter = torch.nn.Parameter(torch.empty_like(want))
    assert rms_norm(**given, out=parameter)[0] is parameter and torch.equal(parameter, want)


def test_rows_of_a_wider_tensor_are_taken_as_they_lie():
    wide = torch.randn(6, 3 * 64, dtype=torch.bfloat16)
    weight = torch.randn(64, dtype=torch.bfloat16)
    part = wide[:, 64:128]
    assert row_stride(part) == 192
    assert torch.equal(rms_norm(part, weight), rms_norm(part.contiguous(), weight))


def test_rows_at_no_one_distance_are_refused():
    x = torch.randn(4, 3, 2, 64, dtype=torch.bfloat16)[:, :2]
    assert row_stride(x) is None
    with pytest.raises(ValueError, match=r"x: got strides \(384, 128, 64, 1\).*rows at one distance"):
        rms_norm(x, torch.ones(64, dtype=torch.bfloat16))


def test_a_compiled_function_holds_the_call():
    given = random_case("rms", (5, 64), residual=True)

    order = torch.randperm(64).to(torch.int32)

    def step(x, weight, residual):
        y, total = rms_norm(x, weight, residual=residual)
        return y + total, rms_norm(x, weight), rms_norm(x, weight, order=order, input_scale=weight)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(**given), step(**given), strict=True):
        assert torch.equal(got, want)


def test_the_operator_has_shapes_without_data():
    x = torch.empty(3, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(64, dtype=torch.bfloat16, device="meta")
    y, total = rms_norm(x, weight, residual=x)
    assert y.shape == total.shape == x.shape and y.device.type == "meta"


def test_autocast_changes_nothing():
    given = random_case("layer", (3, 64), bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer_norm(**given), layer_norm(**given))
        got = layer_norm(**given)
    assert torch.equal(got, layer_norm(**given))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_made_as_a_layer_wants_its_inputs(kind):
    given = random_case(kind, (5, 64), residual=True, bias=True)
    order = torch.randperm(64).to(torch.int32)
    scale = torch.randn(64).to(torch.bfloat16)
    want, total = KINDS[kind](**given)
    for options, expected in (
        ({"order": order}, want[:, order.long()]),
        ({"input_scale": scale}, want * scale),
        ({"order": order, "input_scale": scale}, (want * scale)[:, order.long()]),
    ):
        got = KINDS[kind](**given, **options)
        assert torch.equal(got[0], expected) and torch.equal(got[1], total)


X, W = torch.randn(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, "x: got list, want a torch.Tensor"),
    ({"x": X.float()}, TypeError, "x: got dtype torch.float32, want torch.bfloat16 or torch.float16"),
    ({"x": X[:, :60]}, ValueError, "x: got shape [4, 60], want [..., n] with n a multiple of 8"),
    ({"x": torch.tensor(1.0, dtype=torch.bfloat16)}, ValueError, "x: got shape []"),
    ({"x": torch.empty(1, MAX_COLUMNS + 8, dtype=torch.bfloat16)}, ValueError, "up to 16384"),
    ({"weight": W.half()}, TypeError, "weight: got dtype torch.float16, want torch.bfloat16 or torch.float32"),
    ({"weight": W[:56]}, ValueError, "weight: got shape [56], want [64]"),
    (
        {"weight": torch.ones(128, dtype=torch.bfloat16)[::2]},
        ValueError,
        "weight: got strides (2,) for shape [64], want a contiguous tensor",
    ),
    ({"residual": X.half()}, TypeError, "residual: got dtype torch.float16, want torch.bfloat16, that of x"),
    ({"residual": X[:3]}, ValueError, "residual: got shape [3, 64], want [4, 64], that of x"),
    ({"residual": X.T.contiguous().T}, ValueError, "residual: got strides (1, 4)"),
    ({"residual_out": X.clone()}, ValueError, "residual_out: got a tensor without a residual"),
    ({"out": X.T.contiguous().T}, ValueError, "out: got strides (1, 4)"),
    ({"out": W}, ValueError, "out: got shape [64], want [4, 64]"),
    ({"order": torch.arange(64)}, TypeError, "order: got dtype torch.int64, want torch.int32"),
    ({"order": torch.arange(32, dtype=torch.int32)}, ValueError, "order: got shape [32], want [64]"),
    (
        {"order": torch.zeros(64, dtype=torch.int32)},
        ValueError,
        "order: got indices that are missing or repeated, want each of 0 to 63 once",
    ),
    ({"input_scale": W.float()}, TypeError, "input_scale: got dtype torch.float32, want torch.bfloat16"),
    ({"input_scale": W[:56]}, ValueError, "input_scale: got shape [56], want [64]"),
    ({"eps": -1.0}, ValueError, "eps: got -1.0, want a finite number of at least 0"),
    ({"eps": "1e-6"}, TypeError, "eps: got '1e-6', want a number"),
    ({"weight_offset": float("nan")}, ValueError, "weight_offset: got nan, want a finite number"),
    ({"residual": X.clone(), "out": (same := X.clone()), "residual_out": same}, ValueError, "residual_out: got memory"),
]


@pytest.mark.parametrize("wrong, error, message", MISTAKES)
def test_what_does_not_fit_is_named(wrong, error, message):
    with pytest.raises(error, match=re.escape(message)):
        rms_norm(**({"x": X, "weight": W} | wrong))


def test_a_result_over_a_part_of_an_input_is_refused():
    memory = torch.randn(6, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="out: got memory that x takes too"):
        rms_norm(memory[:4], W, out=memory[1:5])


def test_a_repeated_launch_refuses_memory_that_the_first_did_not_share():
    """Places of results are no part of what a plan is kept for."""
    memory, apart = torch.zeros(10, 64, dtype=torch.bfloat16), torch.zeros(4, 64, dtype=torch.bfloat16)
    x, residual = memory[:4], torch.zeros_like(apart)
    with recording() as cache:
        rms_norm(x, W, residual=residual, out=apart, residual_out=residual)
        rms_norm(x, W, residual=residual, out=memory[4:8], residual_out=memory[:4])
        for name, wrong in {"out": memory[1:5], "residual_out": memory[2:6]}.items():
            results = {"out": apart, "residual_out": residual} | {name: wrong}
            with pytest.raises(ValueError, match=f"{name}: got memory that x takes too"):
                rms_norm(x, W, residual=residual, out=results["out"], residual_out=results["residual_out"])
        with pytest.raises(ValueError, match="residual_out: got memory that out takes too"):
            rms_norm(x, W, residual=residual, out=memory[4:8], residual_out=memory[6:10])
    assert len(cache.launches) == 2


def test_every_row_length_has_a_kernel():
    for n in range(VECTOR, MAX_COLUMNS + 1, VECTOR):
        config = NormConfig("rms", "bf16", *launch_shape(n))
        assert config.can_implement() is None and config.columns >= n


@pytest.mark.parametrize(
    "config, reason",
    [
        (NormConfig("batch", "bf16", 64, 1), "kind 'batch'"),
        (NormConfig("rms", "fp32", 64, 1), "dtype 'fp32'"),
        (NormConfig("rms", "bf16", 96, 1), "96 threads"),
        (NormConfig("rms", "bf16", 1024, 4), "32768 columns"),
        (NormConfig("rms", "bf16", 64, 1, has_bias=True), "no bias"),
        (NormConfig("rms", "bf16", 64, 1, weight_dtype="bf16"), "weight_dtype 'bf16'"),
        (NormConfig("rms", "bf16", 64, 1, inputs="sorted"), "inputs 'sorted'"),
    ],
)
def test_what_no_kernel_can_be_is_said(config, reason):
    assert reason in str(config.can_implement())
