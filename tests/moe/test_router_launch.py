"""What a router on a GPU launches: which kernel, with what, and where torch computes instead. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cute_kernels.gemm.experts import Routing, route
from cute_kernels.gemm.experts.router import ops
from cute_kernels.gemm.experts.router.arguments import ROUTER, SELECT
from cute_kernels.gemm.experts.router.call import RouteCall
from cute_kernels.gemm.experts.router.plan import expert_shift_of
from cute_kernels.runtime import native
from tests.launchers import RecordingCache, assert_launched_alike_after_any_other, outcome, recording
from tests.tensors import offset

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="the stand-ins are made with nvidia-cutlass-dsl")

BF16, FP16 = torch.bfloat16, torch.float16
SIGMOID = Routing(4, "sigmoid", True, 2.5, 4, 2)


@pytest.fixture
def cache() -> Iterator[RecordingCache]:
    ops.launch.plans.clear()
    with recording() as cache:
        yield cache
    ops.launch.plans.clear()


def call(tokens: int = 3, experts: int = 128, k: int = 64, dtype: torch.dtype = BF16, **others: Any) -> dict[str, Any]:
    given = {"hidden": torch.ones(tokens, k, dtype=dtype), "weight": torch.ones(experts, k, dtype=dtype)}
    return {**given, "routing": Routing(2), **others}


CALLS: dict[str, Any] = {
    "plain": lambda: call(),
    "one token": lambda: call(1),
    "more tokens": lambda: call(64),
    "fp32 weight": lambda: call(weight=torch.ones(128, 64)),
    "another routing": lambda: call(routing=SIGMOID),
    "fp16": lambda: call(dtype=FP16),
    "bias": lambda: call(bias=torch.ones(128, dtype=BF16)),
    "fp32 bias": lambda: call(bias=torch.ones(128)),
    "correction": lambda: call(correction=torch.ones(128)),
    "padding": lambda: call(padding=torch.tensor([False, True, True])),
    "256 experts": lambda: call(experts=256),
    "weight off its place": lambda: call(weight=offset(torch.ones(128, 64, dtype=BF16), 2)),
    "many tokens": lambda: call(65),
    "short rows": lambda: call(k=60),
    "fp32": lambda: call(dtype=torch.float32),
    "no tokens": lambda: call(0),
    "wrong": lambda: call(weight=torch.ones(128, 63, dtype=BF16)),
}
KERNELS = {
    "plain": "moe_router_bf16_e128t8_pdl",
    "one token": "moe_router_bf16_e128t1_pdl",
    "fp32 weight": "moe_router_bf16_wfp32_e128t8_pdl",
    "fp16": "moe_router_fp16_e128t8_pdl",
    "256 experts": "moe_router_bf16_e256t8_pdl",
    "weight off its place": "moe_select_bf16_e128_pdl",
    "many tokens": "moe_select_bf16_e128_pdl",
    "short rows": "moe_select_bf16_e128_pdl",
}


@pytest.mark.parametrize("name", KERNELS)
def test_shapes_and_dtypes_decide_the_kernel(name, cache):
    route(**CALLS[name]())
    assert [launch.symbol for launch in cache.launches] == [KERNELS[name]]


def test_a_launch_depends_on_its_call_alone(cache):
    made = {name: make() for name, make in CALLS.items()}

    def outcome_of(name: str) -> Any:
        return outcome(cache.launches, lambda: ops.route(RouteCall(**made[name])), made[name])

    assert_launched_alike_after_any_other(CALLS, outcome_of, ops.launch.plans)


def test_a_launch_is_told_all_of_its_routing(cache):
    more: dict[str, Any] = {"bias": torch.ones(256, dtype=BF16), "padding": torch.zeros(5, dtype=torch.bool)}
    given = call(5, 256, routing=SIGMOID, correction=torch.ones(256), **more)
    given["weight"] = nn.Parameter(given["weight"])  # as in a model
    ids, weights = route(**given)
    (launch,) = cache.launches
    told = dict(zip(ROUTER.names, launch.arguments, strict=True))
    assert told.pop("hidden").data_ptr() == given["hidden"].data_ptr()
    assert told == {
        "weight": given["weight"].data_ptr(), "bias": given["bias"].data_ptr(), "ids": ids.data_ptr(),
        "correction": given["correction"].data_ptr(), "weights": weights.data_ptr(),
        "padding": given["padding"].data_ptr(),
        "top_k": 4, "scoring": 1, "ranks_logits": 0, "renormalize": 1, "groups": 4, "kept_groups": 2, "scale": 2.5,
        "bias_wide": 0, "correction_wide": 1, "experts": 256, "expert_shift": 1,
        "workspace": 5 * 256,
    }  # fmt: skip
    assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((5, 4), torch.int32, (5, 4), torch.float32)


def test_many_tokens_have_their_logits_from_torch(cache):
    given = call(70, 8)
    route(**given)
    told = dict(zip(SELECT.names, cache.launches[-1].arguments, strict=True))
    assert torch.equal(told["logits"], torch.full((70, 8), 64.0)) and told["ranks_logits"] == 1


def test_rows_that_lie_apart_or_off_their_place_are_copied(cache):
    for hidden in (torch.ones(3, 128, dtype=BF16)[:, :64], offset(torch.ones(3, 64, dtype=BF16), 2)):
        route(**call(hidden=hidden))
        *copies, (told, *_) = (launch.arguments for launch in cache.launches)
        assert told.is_contiguous() and told.data_ptr() % 16 == 0 and told.data_ptr() != hidden.data_ptr()
        assert [copy[0].data_ptr() for copy in copies] in ([], [told.data_ptr()])
        cache.launches.clear()


@pytest.mark.parametrize(
    "others",
    [
        {"dtype": torch.float32},
        {"experts": 513},
        {"routing": Routing(33)},
        {"routing": Routing(2, "sigmoid", groups=64, kept_groups=2)},
        {"bias": torch.ones(128, dtype=FP16)},
        {"correction": torch.ones(256)[::2]},
    ],
)
def test_torch_computes_what_no_kernel_does(others, cache):
    given = call(**others)
    ids, weights = route(**given)
    assert not cache.launches
    with_none = route(**{**given, "hidden": given["hidden"].clone()})
    assert torch.equal(ids, with_none[0]) and torch.equal(weights, with_none[1])
    assert int(ids.min()) >= 0


def test_the_operator_launches_what_the_call_does(cache):
    given = call(routing=SIGMOID, correction=torch.ones(128))
    arguments = given["hidden"], given["weight"], None, given["correction"], *SIGMOID.fields
    want = outcome(cache.launches, lambda: route(**given), given)
    assert outcome(cache.launches, lambda: ops._on_cuda(*arguments), given) == want
    given["padding"] = torch.zeros(3, dtype=torch.bool)
    want = outcome(cache.launches, lambda: route(**given), given)
    assert outcome(cache.launches, lambda: ops._on_cuda(*arguments, given["padding"]), given) == want


@pytest.mark.parametrize(
    "experts, num_sms, shift",
    [(1, 132, 0), (128, 132, 0), (133, 132, 1), (256, 132, 1), (512, 132, 2), (512, 64, 3), (512, 16, 3)],
)
def test_as_many_sms_as_there_are_read_the_weight(experts, num_sms, shift):
    assert expert_shift_of(experts, num_sms) == shift
