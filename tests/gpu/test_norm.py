"""Norms on a GPU: against fp64, poisoned results, strides, graphs, repeatable bits, and in place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_kernels import layer_norm, rms_norm
from cute_kernels.norm.compile import NormSpec
from cute_kernels.norm.config import BOTH, MAX_COLUMNS, ORDERED, SCALED, NormConfig, launch_shape
from tests.gpu.compiled import assert_replays, compiled
from tests.norm.cases import assert_close, in_fp64, random_case

pytestmark = pytest.mark.gpu

KINDS = {"rms": rms_norm, "layer": layer_norm}
SIZES = (8, 64, 520, 2048, 2880, 4096, 5120, 7168, 8192, MAX_COLUMNS)
ROWS = (1, 3, 64, 1000)
INPUT_SIZES = (8, 520, 4096, 5120, 8192, MAX_COLUMNS)  # of rows that a layer reads


def specs() -> list[NormSpec]:
    """The kernels of this module."""
    return [*plain_specs(), *input_specs()]


def plain_specs() -> list[NormSpec]:
    """Those of the sizes above with every option of a norm."""
    return [
        NormSpec(NormConfig(kind, dtype, *shape, residual, bias, weight_dtype))
        for kind in KINDS
        for dtype in ("bf16", "fp16")
        for shape in dict.fromkeys(map(launch_shape, SIZES))
        for residual in (False, True)
        for bias in ((False, True) if kind == "layer" else (False,))
        for weight_dtype in ("own", "fp32")
    ]


def poisoned(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Places for the results, full of NaN."""
    places = {"out": torch.full_like(given["x"], math.nan)}
    if "residual" in given:
        places["residual_out"] = torch.full_like(given["x"], math.nan)
    return places


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", SIZES)
def test_a_norm_is_that_of_fp64(kind, dtype, n):
    for rows in ROWS:
        for residual in (False, True):
            for wide in (False, True):
                weight_dtype = torch.float32 if wide else None
                given = random_case(
                    kind, (rows, n), dtype, residual=residual, bias=rows > 1, weight_dtype=weight_dtype,
                    device="cuda", seed=rows + n,
                )  # fmt: skip
                places = poisoned(given)
                KINDS[kind](**given, **places, eps=1e-5)
                assert_close(places["out"], in_fp64(kind, given, 1e-5))
                if residual:
                    assert torch.equal(places["residual_out"], given["x"] + given["residual"])


def input_specs() -> list[NormSpec]:
    """The kernels of the sizes below that make rows as a layer wants its inputs."""
    return [
        NormSpec(NormConfig(kind, dtype, *shape, residual, kind == "layer", inputs=inputs))
        for kind in KINDS
        for dtype in ("bf16", "fp16")
        for shape in dict.fromkeys(map(launch_shape, INPUT_SIZES))
        for residual in (False, True)
        for inputs in (ORDERED, SCALED, BOTH)
    ] + [
        NormSpec(NormConfig("rms", "bf16", *shape, weight_dtype="fp32", inputs=BOTH))
        for shape in dict.fromkeys(map(launch_shape, INPUT_SIZES))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", INPUT_SIZES)
def test_rows_are_made_as_a_layer_wants_its_inputs(kind, dtype, n):
    order = torch.randperm(n, device="cuda").to(torch.int32)
    scale = torch.randn(n, device="cuda").to(dtype)
    for rows in ROWS:
        for residual in (False, True):
            given = random_case(kind, (rows, n), dtype, residual=residual, bias=True, device="cuda", seed=rows + n)
            found = KINDS[kind](**given)
            want, total = found if residual else (found, torch.empty(0))
            for options, expected in (
                ({"order": order}, want[:, order.long()]),
                ({"input_scale": scale}, want * scale),
                ({"order": order, "input_scale": scale}, (want * scale)[:, order.long()]),
            ):
                places = poisoned(given)
                KINDS[kind](**given, **options, **places)
                assert torch.equal(places["out"], expected)
                assert not residual or torch.equal(places["residual_out"], total)


@pytest.mark.parametrize("n", INPUT_SIZES)
def test_rows_of_fp32_weights_are_made_as_a_layer_wants_its_inputs(n):
    given = random_case("rms", (9, n), weight_dtype=torch.float32, device="cuda")
    order = torch.randperm(n, device="cuda").to(torch.int32)
    scale = torch.randn(n, device="cuda").bfloat16()
    assert torch.equal(rms_norm(**given, order=order, input_scale=scale), (rms_norm(**given) * scale)[:, order.long()])


def test_a_row_may_be_put_in_order_where_it_stands():
    x, weight = torch.randn(9, 8192, device="cuda").bfloat16(), torch.randn(8192, device="cuda").bfloat16()
    order = torch.randperm(8192, device="cuda").to(torch.int32)
    want = rms_norm(x, weight)[:, order.long()]
    rms_norm(x, weight, order=order, out=x)
    assert torch.equal(x, want)


def test_a_row_does_not_depend_on_the_others():
    given = random_case("rms", (300, 4096), residual=True, device="cuda")
    y, total = rms_norm(**given)
    for row in (0, 7, 299):
        alone = {name: t if name == "weight" else t[row : row + 1] for name, t in given.items()}
        assert all(torch.equal(a[0], b[row]) for a, b in zip(rms_norm(**alone), (y, total), strict=True))


def test_rows_of_a_wider_tensor_are_taken_as_they_lie():
    wide = torch.randn(100, 3 * 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(4096, dtype=torch.bfloat16, device="cuda")
    part = wide[:, 4096:8192]
    assert torch.equal(rms_norm(part, weight), rms_norm(part.contiguous(), weight))
    with pytest.raises(ValueError, match="x: got a tensor that starts 8 bytes past"):
        rms_norm(torch.randn(4104, dtype=torch.bfloat16, device="cuda")[4:4100], weight)


def test_in_place_and_in_a_graph():
    given = random_case("rms", (16, 4096), residual=True, device="cuda")
    want, total = rms_norm(**given)
    x, residual = given["x"].clone(), given["residual"].clone()
    rms_norm(x, given["weight"], residual=residual, out=x, residual_out=residual)
    assert torch.equal(x, want) and torch.equal(residual, total)
    others = [random_case("rms", (16, 4096), residual=True, device="cuda", seed=seed) for seed in (1, 2)]

    def step(x, weight, residual):
        y, total = rms_norm(x, weight, residual=residual)
        return rms_norm(y, weight, residual=total)[0]

    order = ("x", "weight", "residual")
    assert_replays(step, [given[name] for name in order], [[other[name] for name in order] for other in others])
    assert torch.equal(compiled(step)(**given), step(**given))


def test_rows_beyond_32_bits_of_bytes():
    n = MAX_COLUMNS
    rows = 2**32 // (2 * n) + 3
    x = torch.zeros(rows, n, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(n, device="cuda")
    weight = torch.randn(n, dtype=torch.bfloat16, device="cuda")
    y = rms_norm(x, weight)
    assert torch.equal(y[-1:], rms_norm(x[-1:].clone(), weight)) and not y[:-1].any()
