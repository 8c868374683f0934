"""Calls of products around a deferred norm: what they compute, what they launch, what they refuse."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import quantized_linear, quantized_linear_norm, rms_norm
from cute_kernels.formats.weights import integers
from cute_kernels.gemm import deferred as host
from cute_kernels.gemm.arguments import GIVES_NORM, TAKES_NORM
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.deferred_choice import deferred
from cute_kernels.gemm.wgmma.deferred_config import TAKES
from cute_kernels.gemm.wgmma.launch import TileSchedule
from tests.launchers import LOWEST_ADDRESS, given_to, recording
from tests.linear.cases import known, problem_of, random_weight, with_parts
from tests.tensors import apart, offset

N, K = 512, 256
M, HALF = 48, torch.float16


def weight(n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return known(n, k, group_size=128, dtype=dtype).pack(**options)


def numbers(*size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def given_of(rows: int = M, **changed: Any) -> dict[str, Any]:
    x = {"x": numbers(rows, K), "weight": weight(), "residual": numbers(rows, N, seed=1), "norm": numbers(N, seed=2)}
    return {**x, "norm_eps": 1e-5, **changed}


def test_on_a_cpu_the_two_calls_are_a_product_a_norm_and_a_product():
    given, following = given_of(norm_offset=1.0), weight(128, N)
    found = quantized_linear_norm(**given)
    rows = quantized_linear(given["x"], given["weight"], residual=given["residual"])
    assert torch.equal(found.rows, rows) and found.deferred is None
    normed = rms_norm(rows, given["norm"], eps=1e-5, weight_offset=1.0)
    assert torch.equal(found.normed(), normed)
    assert torch.equal(
        quantized_linear(found, following, activation="swiglu"),
        quantized_linear(normed, following, activation="swiglu"),
    )


def test_both_calls_are_traced_as_what_they_are_without_kernels():
    given, following = given_of(), weight(128, N)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        rows = quantized_linear_norm(**{**given, "x": x, "residual": residual})
        return quantized_linear(rows, following)

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(given["x"], given["residual"]), layer(given["x"], given["residual"]))


WRONG = {
    "weight: got Tensor, want a PackedWeight": {"weight": torch.ones(N, K)},
    "x: got shape": {"x": numbers(M, K + 8)},
    "x: got a tensor on meta": {"x": numbers(M, K).to("meta")},
    "bias: got shape": {"bias": numbers(N + 8)},
    "residual: got NoneType, want a torch.Tensor": {"residual": None},
    "residual: got dtype torch.float32": {"residual": torch.ones(M, N)},
    "norm: got shape": {"norm": numbers(K)},
    "norm: got dtype torch.float16": {"norm": numbers(N, dtype=torch.float16)},
    "norm_eps: got -1.0": {"norm_eps": -1.0},
    "norm_offset: got nan": {"norm_offset": float("nan")},
    "weight: got 500 rows, want a multiple of 8": {
        "weight": weight(500), "residual": numbers(M, 500), "norm": numbers(500),
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_wrong_arguments_are_refused_by_name(message: str, on_gpu: bool):
    with recording() if on_gpu else nullcontext(), pytest.raises((TypeError, ValueError), match=f"^{message}"):
        quantized_linear_norm(**given_of(**WRONG[message]))


def test_rows_that_are_normed_are_not_normed_again():
    rows = quantized_linear_norm(**given_of())
    with pytest.raises(ValueError, match="^norm: got a tensor for x of NormedRows"):
        quantized_linear(rows, weight(128, N), norm=numbers(N))
    with recording(), pytest.raises(ValueError, match=r"^x: got shape \[48, 512\], want \[..., 256\]"):
        quantized_linear(quantized_linear_norm(**given_of()), weight())


def kinds(launches: list[Any]) -> list[str]:
    """Of launches: "gives", "takes", "norm", "inputs" or "product"."""
    found = []
    for symbol, _ in launches:
        parts = symbol.split("_")
        found.append(parts[-2] if parts[-1] == "norm" else {"norm": "norm"}.get(parts[0], "product"))
        found[-1] = "inputs" if symbol.startswith("linear_inputs") else found[-1]
    return found


def test_no_launch_lies_between_the_two_products():
    with recording() as cache:
        given = given_of(x=numbers(2, M // 2, K), residual=numbers(2, M // 2, N, seed=1))
        rows = quantized_linear_norm(**given)
        found = [quantized_linear(rows, weight(n, N), activation="swiglu") for n in (128, 64)]
    assert kinds(cache.launches) == ["gives", "takes", "takes"]
    assert rows.rows.shape == (2, M // 2, N) and [one.shape for one in found] == [(2, M // 2, 64), (2, M // 2, 32)]
    first, second = (given_to(kind, *cache.launches[i].arguments) for i, kind in ((0, GIVES_NORM), (1, TAKES_NORM)))
    parts = rows.deferred
    assert parts is not None and parts.scaled.shape == (M, N) and parts.squares.shape == (M, N // 64)
    assert first.x.shape == (M, K) and first.norm == given["norm"].data_ptr() and first.out == rows.rows.data_ptr()
    assert first.scaled == second.x.data_ptr() == parts.scaled.data_ptr()
    assert first.squares == second.squares == parts.squares.data_ptr()
    assert (second.parts, second.inverse_k, second.eps) == (N // 64, 1 / N, 1e-5)
    assert first.residual == given["residual"].data_ptr() and first.offset == 0.0


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "one row": ({"x": numbers(1, K), "residual": numbers(1, N)}, {}, ["gives", "takes"]),
    "fp16": (
        {
            "x": numbers(M, K, dtype=HALF), "weight": weight(dtype=HALF), "residual": numbers(M, N, dtype=HALF),
            "norm": numbers(N, dtype=HALF),
        },
        {"weight": weight(128, N, HALF)},
        ["product", "norm", "product"],
    ),
    "no rows": ({"x": numbers(0, K), "residual": numbers(0, N)}, {}, []),
    "many rows": ({"x": numbers(20_000, K), "residual": numbers(20_000, N)}, {}, ["product", "norm", "product"]),
    "an fp32 norm": ({"norm": torch.ones(N)}, {}, ["product", "norm", "product"]),
    "an order": ({"weight": weight(perm=torch.arange(K - 1, -1, -1))}, {}, ["inputs", "gives", "takes"]),
    "rows apart": ({"x": numbers(M, 2 * K)[:, :K]}, {}, ["inputs", "gives", "takes"]),
    "residual apart": ({"residual": numbers(M, 2 * N)[:, :N]}, {}, ["product", "norm", "product"]),
    "batch-invariant": ({}, {"batch_invariant": True}, ["gives", "norm", "product"]),
    "fp32 results": ({}, {"out_dtype": torch.float32}, ["gives", "takes"]),
    "fp32 results and a residual": (
        {}, {"out_dtype": torch.float32, "residual": torch.ones(M, 128)}, ["gives", "norm", "product"],
    ),
    "fp32 results of a gate": (
        {}, {"out_dtype": torch.float32, "activation": "swiglu"}, ["gives", "norm", "product"],
    ),
    "an activation and a residual": (
        {}, {"activation": "silu", "residual": numbers(M, 128)}, ["gives", "norm", "product"],
    ),
    "a residual": ({}, {"residual": numbers(M, 128)}, ["gives", "takes"]),
    "out": ({}, {"out": numbers(M, 128)}, ["gives", "takes"]),
    "another order": (
        {}, {"weight": weight(128, N, perm=torch.arange(N - 1, -1, -1))}, ["gives", "norm", "product"],
    ),
    "results in pieces": ({}, {"weight": weight(100, N)}, ["gives", "norm", "product"]),
}  # fmt: skip


def test_nothing_is_made_for_a_product_that_does_not_take_it():
    for following, want in ((weight(128, N), "gives"), (weight(128, N, perm=torch.arange(N - 1, -1, -1)), "product")):
        with recording() as cache:
            quantized_linear_norm(**given_of(following=following))
        assert kinds(cache.launches) == [want]
    wrong = {
        r"a weight \[128, 256\], want one of 512 inputs": weight(128, K),
        "Tensor, want a PackedWeight": torch.ones(3),
    }
    for message, following in wrong.items():
        with recording(), pytest.raises((TypeError, ValueError), match=f"^following: got {message}"):
            quantized_linear_norm(**given_of(following=following))


@pytest.mark.parametrize(("first", "second", "want"), OTHERWISE.values(), ids=list(OTHERWISE))
def test_what_kernels_do_not_serve_is_served_by_launches_that_do(first, second, want):
    with recording() as cache:
        rows = quantized_linear_norm(**given_of(**first))
        quantized_linear(rows, **{"weight": weight(128, N), **second})
    assert kinds(cache.launches) == want


CALLS = {name: call for name, call in OTHERWISE.items() if call[2]}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_launches_the_same_after_any_other(name: str):
    def outcome_of(other: str) -> Any:
        first, second, _ = CALLS[other]
        del cache.launches[:]
        quantized_linear(quantized_linear_norm(**given_of(**first)), **{"weight": weight(128, N), **second})
        return kinds(cache.launches), [
            [value.shape if isinstance(value, torch.Tensor) else value for value in launch.arguments if small(value)]
            for launch in cache.launches
        ]

    def small(value: Any) -> bool:
        return isinstance(value, torch.Tensor) or value < LOWEST_ADDRESS

    with recording() as cache:
        want = outcome_of(name)
        for other in CALLS:
            outcome_of(other)
            assert outcome_of(name) == want, f"after {other}"


def test_fp32_results_that_three_warpgroups_along_k_stage_go_another_way():
    """Staged in fp32 they would take the memory of the factors."""
    schedule = chosen(problem_of(32, 6144, 4096, 4, torch.bfloat16, 128))
    assert isinstance(schedule, TileSchedule) and schedule.config.k_warpgroups == 3
    assert deferred(schedule, TAKES) is not None
    with recording() as cache:
        other = random_weight(integers(4), torch.bfloat16, 6144, 4096)
        parts = host.DeferredParts(numbers(32, 4096), torch.ones(32, 64))
        rows = host.left_to_next(numbers(32, 4096), numbers(4096), 1e-5, 0.0, parts)
        del cache.launches[:]
        for dtype in (torch.bfloat16, torch.float32):
            quantized_linear(rows, other, out_dtype=dtype)
    assert kinds(cache.launches) == ["takes", "norm", "product"]


BAD_PARTS = {
    "x.deferred.squares: got dtype torch.float64": {"squares": torch.ones(M, N // 64).double()},
    "x.deferred.scaled: got dtype torch.float16": {"scaled": torch.ones(M, N).half()},
    r"x.deferred.squares: got shape \[40, 8\], want \[48, 8\]": {"squares": torch.ones(M - 8, N // 64)},
    r"x.deferred.squares: got strides \(16, 2\)": {"squares": torch.ones(M, N // 32)[:, ::2]},
}


@pytest.mark.parametrize("message", BAD_PARTS)
def test_parts_that_no_product_gives_are_refused(message: str):
    with recording():
        rows = quantized_linear_norm(**given_of())
        assert rows.deferred is not None
        quantized_linear(rows, weight(128, N))  # the like is served
        bad: Any = replace(rows.deferred, **BAD_PARTS[message])
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            quantized_linear(with_parts(rows, bad), weight(128, N))


CHANGES = {
    "norm": {"norm": numbers(N, seed=5)},
    "rows": {"rows": numbers(M, N, seed=6)},
    "eps": {"norm_eps": 1e-3},
    "offset": {"norm_offset": 1.0},
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=list(CHANGES))
def test_what_was_left_of_a_norm_is_not_taken_for_another_one(changed: dict[str, Any]):
    """As where two branches norm the same rows, each with its own weight."""
    with recording() as cache:
        rows = replace(quantized_linear_norm(**given_of()), **changed)
        quantized_linear(rows, weight(128, N))
    assert rows.deferred is None and kinds(cache.launches) == ["gives", "norm", "product"]


APART = {
    "columns": lambda x: x.T.contiguous().T,
    "off 16 bytes": lambda x: offset(x, 2),
    "at an odd distance": lambda x: apart(x, 5),
    "a part of wider rows": apart,
    "one row for all": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("lay", APART.values(), ids=list(APART))
@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_in_any_strides_are_normed_before_a_product(lay, on_gpu: bool):
    norm, after = numbers(N, seed=2), weight(128, N)
    rows = lay(numbers(M, N))
    with recording() if on_gpu else nullcontext() as cache:
        found = quantized_linear(host.NormedRows(rows, norm), after), quantized_linear(rows, after, norm=norm)
    if cache is not None:
        assert kinds(cache.launches) == ["norm", "product"] * 2
    else:
        want = quantized_linear(rms_norm(rows.contiguous(), norm), after)
        assert all(torch.equal(one, want) for one in found)


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_in_any_strides_are_traced(dynamic: bool):
    norm, after = numbers(N, seed=2), weight(128, N)
    compiled = torch.compile(
        lambda x: quantized_linear(x, after, norm=norm), fullgraph=True, backend="eager", dynamic=dynamic
    )
    for lay in APART.values():
        torch.compiler.reset()  # each way to lie is another function
        rows = lay(numbers(M, N))
        assert torch.equal(compiled(rows), quantized_linear(rows, after, norm=norm))


def test_a_norm_off_16_bytes_is_refused_by_its_name():
    norm, message = offset(numbers(N), 2), "^norm: got a tensor that starts 2 bytes past a multiple of 16"
    with recording() as cache:
        for call in (
            lambda: host.NormedRows(numbers(M, N), norm),
            lambda: quantized_linear_norm(**given_of(norm=norm)),
            lambda: quantized_linear(numbers(M, N), weight(128, N), norm=norm),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    assert not cache.launches, "what is refused has launched nothing"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_normed_rows_have_no_gradient_whatever_their_operands_have(on_gpu: bool):
    given = given_of(norm=torch.nn.Parameter(numbers(N)), residual=numbers(M, N).requires_grad_())
    with recording() if on_gpu else nullcontext():
        rows = quantized_linear_norm(**{**given, "x": given["x"].requires_grad_()})
        found = rows.rows, rows.normed(), quantized_linear(rows, weight(128, N))
    assert not any(one.requires_grad for one in found)


def test_results_do_not_take_the_place_of_rows_that_are_read():
    with recording():
        rows = quantized_linear_norm(**given_of())
        assert rows.deferred is not None
        with pytest.raises(ValueError, match="^out: got memory that x takes too"):
            quantized_linear(rows, weight(N, N), out=rows.deferred.scaled)
