"""The operator of a layer's products: what it computes without a GPU, and what it launches with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import quantized_layer
from cute_kernels.gemm import served
from cute_kernels.gemm.layer import call as layer_call
from cute_kernels.gemm.layer import operator
from cute_kernels.gemm.layer.compile import SHIPPED_K
from cute_kernels.gemm.product import problem_of
from cute_kernels.gemm.spec import GemmSpec
from tests.launchers import recording
from tests.linear.test_layer_products import layer_call as call_of

HIDDEN, HEADS, INNER, QKV = 512, 256, 768, 384


def arguments(given: dict[str, Any]) -> tuple[Any, ...]:
    """The operator's, of a call of `quantized_layer`."""
    fields = {name: (given[name].codes, given[name].scales) for name in ("o", "gate_up", "down", "qkv")}
    tensors = (*fields["o"], given["norm"], *fields["gate_up"], *fields["down"], given["following_norm"])
    return given["x"], given["residual"], *tensors, *fields["qkv"], HEADS, HIDDEN, INNER, QKV, given["norm_eps"]


def run(given: dict[str, Any]) -> Any:
    return operator.layer_products(*arguments(given))


def kinds(launches: Any) -> list[bool]:
    """Of each launch, whether it is that of a layer."""
    return ["layer_products" in one.symbol for one in launches]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_without_kernels_it_is_the_calls_that_it_stands_for(rows: int):
    given = call_of(rows)
    total, qkv = run(given)
    want = quantized_layer(**given)
    assert torch.equal(total, want.rows.rows) and want.qkv is not None and torch.equal(qkv, want.qkv)


def test_it_passes_opcheck():
    torch.library.opcheck(torch.ops.cute_kernels.layer_products.default, arguments(call_of(3)))


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 4), (5, 4)])
def test_rows_that_one_launch_serves_are_one_launch(rows: int, count: int):
    given = call_of(rows)
    with recording() as cache:
        for _ in range(2):
            total, qkv = run(given)
    assert kinds(cache.launches) == [count == 1] * 2 * count
    assert total.shape == (rows, HIDDEN) and qkv.shape == (rows, QKV)


def test_parameters_are_served():
    given = call_of(1)
    values = list(arguments(given))
    values[4:6] = (torch.nn.Parameter(one, requires_grad=False) for one in values[4:6])
    with recording() as cache:
        operator.layer_products(*values)
    assert kinds(cache.launches) == [True]


def test_a_server_waits_for_no_kernel_that_was_not_made_ready(monkeypatch):
    class Empty:
        def has(self, *_: Any) -> bool:
            return False

    given = call_of(1)
    with recording() as cache:
        served.note_ready(problem_of(1, HIDDEN, INNER, given["down"].format, torch.bfloat16, 0, False), [1])
        try:
            with monkeypatch.context() as patch:
                patch.setattr(operator, "default_cache", lambda: Empty())
                run(given)
            assert cache.launches and not any(kinds(cache.launches))
        finally:
            served.forget_ready()
    with recording() as cache, monkeypatch.context() as patch:
        patch.setattr(layer_call, "compiler_version", lambda: None)
        patch.setattr(layer_call, "default_cache", lambda: Empty())
        run(given)
    assert cache.launches and not any(kinds(cache.launches))


def test_weights_that_no_launch_serves_are_known_before_there_are_rows():
    plain = [("w4_g128", HIDDEN, HEADS), ("w4_g128", HIDDEN, INNER)]
    assert operator.may_serve(plain)
    assert not operator.may_serve([*plain, ("w4_g64", HIDDEN, HEADS)])
    assert not operator.may_serve([*plain, ("w4_g128", HIDDEN + 32, HEADS)])
    assert not operator.may_serve([*plain, ("w4_g128", HIDDEN, HEADS + 128)])


def test_the_kernel_that_ships_serves_fewer_inputs_where_nothing_can_be_compiled(monkeypatch):
    (own, shipped), (only,) = layer_call.configs_for(INNER), layer_call.configs_for(SHIPPED_K)
    assert only == shipped != own
    assert [config.groups for config in layer_call.configs_for(28672)] == [224]

    class Shipped:
        def has(self, spec: Any, _: str) -> bool:
            return spec == GemmSpec(shipped)

    with recording() as cache, monkeypatch.context() as patch:
        patch.setattr(layer_call, "compiler_version", lambda: None)
        patch.setattr(layer_call, "default_cache", lambda: Shipped())
        run(call_of(1))
    assert [one.symbol for one in cache.launches] == [shipped.name]


# -- whether a call is one launch --------------------------------------------------------------------------------------


def call(rows: int = 1, **changed: Any) -> layer_call.LayerCall:
    given = {**call_of(rows), **changed}
    given["eps"], given["offset"] = given.pop("norm_eps"), 0.0
    return layer_call.LayerCall(**given)


def test_a_caller_can_ask_whether_a_call_is_one_launch():
    assert not layer_call.is_one_launch(call())  # no GPU
    with recording() as cache:
        assert layer_call.is_one_launch(call()) and layer_call.is_one_launch(call(qkv=None))
        assert not layer_call.is_one_launch(call(2)) and not layer_call.is_one_launch(call(0))
        wrong = call(norm=torch.rand(HIDDEN + 1).bfloat16())
        assert not layer_call.is_one_launch(wrong) and not layer_call.is_one_launch(wrong)
        assert not layer_call.is_one_launch(call(norm=torch.rand(HIDDEN)))
        assert not cache.launches
        for one in (call(), call(qkv=None)):
            layer_call.layer(one)
        assert kinds(cache.launches) == [True] * 2
        with pytest.raises(ValueError, match="^norm: "):
            layer_call.layer(wrong)
