"""Short products, with every epilogue: parts of K of which each CTA adds up a share of the rows, tiles as work ranges,
tiles of 64 and 192 features."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_kernels.gemm.compile import spec_of
from cute_kernels.gemm.plan import ACTIVATIONS, OUT_KINDS, make_tile_plan
from cute_kernels.gemm.reference import linear_reference
from cute_kernels.gemm.schedule import LinearProblem
from cute_kernels.gemm.wgmma.schedule import (
    ROUND_SHAPES,
    TileSchedule,
    range_configs,
    schedule_of,
    share_configs,
    tile_configs,
    tile_schedules,
)
from cute_kernels.gemm.wgmma.shares_config import SharesWgmma
from cute_kernels.runtime.spec import KernelSpec
from tests.gpu.test_linear import CUDA, TOLERANCE, activations, assert_near
from tests.gpu.test_linear_wgmma import check_sums, launch
from tests.linear.cases import known, problem_of

pytestmark = pytest.mark.gpu

ALL_CUT = ((1000, 2048), (66, 1152), (1000, 2176))  # N, K: the last has parts of unequal length
MORE_THAN_A_ROUND = (256, 8456, 2048)  # M, N, K: 132 tiles of 128 x 128, and a few that are cut
# The same of tiles in ranges, which are at least as many as SMs: hardly more, more by a half, several rounds.
RANGES = ((17_000, 1152), (25_000, 2176), (40_000, 1152))
ROWS = (65, 100, 128, 200, 255, 256)


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    case = problem_of(128, 1000, 2048)
    fewer = problem_of(112, 1000, 2048)  # for which tiles of fewer rows are there, too
    configs = (*share_configs(case), *tile_configs(case, ROUND_SHAPES), *range_configs(fewer))
    return [spec_of(config) for config in configs]


def in_rounds(case: LinearProblem) -> list[TileSchedule]:
    """Tiles of 64 and 192 features, whole and in parts of K."""
    configs = tile_configs(case, ROUND_SHAPES)
    found = (schedule_of(case, config, splits) for config in configs for splits in (1, 2, 3))
    return [one for one in found if one is not None]


def in_shares(case: LinearProblem, *, cut: bool = True) -> list[TileSchedule]:
    found = [one for one in tile_schedules(case) if isinstance(one.config.mainloop, SharesWgmma)]
    return [one for one in found if one.splits > 1 or not cut]


def in_ranges(case: LinearProblem) -> list[TileSchedule]:
    found = (schedule_of(case, config) for config in range_configs(case))
    return [one for one in found if one is not None]


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("n, k", RANGES)
def test_ranges_are_products_of_fp64_and_nothing_lies_beside_them(n, k, m):
    packed, x = known(n, k, group_size=128).pack(), activations(m, k, torch.bfloat16)
    exact = x.double() @ packed.dequantize(torch.bfloat16).to(CUDA).double().T
    schedules = in_ranges(problem_of(m, n, k))
    assert schedules
    for schedule in schedules:
        check_sums(schedule, packed.to(CUDA), x, exact)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("n, k", ALL_CUT)
def test_products_are_those_of_fp64_and_nothing_lies_beside_them(n, k, m):
    packed, x = known(n, k, group_size=128).pack(), activations(m, k, torch.bfloat16)
    exact = x.double() @ packed.dequantize(torch.bfloat16).to(CUDA).double().T
    schedules = in_shares(problem_of(m, n, k), cut=False), in_rounds(problem_of(m, n, k))
    assert all(schedules)
    for schedule in (*schedules[0], *schedules[1]):
        check_sums(schedule, packed.to(CUDA), x, exact)


def test_whole_tiles_come_first():
    m, n, k = MORE_THAN_A_ROUND
    packed, x = known(n, k, group_size=128).pack(), activations(m, k, torch.bfloat16)
    exact = x.double() @ packed.dequantize(torch.bfloat16).to(CUDA).double().T
    schedules = in_shares(problem_of(m, n, k))
    assert any(one.whole for one in schedules)
    for schedule in schedules:
        check_sums(schedule, packed.to(CUDA), x, exact)


@pytest.mark.parametrize("m, n, k", [(250, 1000, 2048), MORE_THAN_A_ROUND])
def test_the_same_bits_twice_and_of_one_hot_rows_the_weights(m, n, k):
    packed = known(n, k, group_size=128).pack()
    inputs = (torch.arange(m) * 61 + 7) % k
    one_hot = torch.zeros(m, k, dtype=torch.bfloat16)
    one_hot[torch.arange(m), inputs] = 1
    columns = packed.dequantize(torch.bfloat16)[:, inputs].T.to(CUDA, torch.float32)
    weight, x = packed.to(CUDA), activations(m, k, torch.bfloat16)
    for schedule in (*in_shares(problem_of(m, n, k)), *in_ranges(problem_of(m, n, k))):
        assert torch.equal(launch(schedule, weight, one_hot.to(CUDA)), columns)
        first = launch(schedule, weight, x)
        for _ in range(5):
            assert torch.equal(launch(schedule, weight, x), first)


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "swiglu"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m, n, k", [(200, 1000, 2048), MORE_THAN_A_ROUND])
def test_epilogues(m, n, k, out_dtype, activation):
    """With bias and residual, neither, and each of them."""
    weight, x = known(n, k, group_size=128).pack().to(CUDA), activations(m, k, torch.bfloat16)
    columns = n // 2 if activation == "swiglu" else n
    bias, residual = activations(1, n, torch.bfloat16, 1)[0], activations(m, columns, out_dtype, 2)
    for given in ({}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
        options: dict[str, Any] = {**given, "activation": activation, "out_dtype": torch.float64}
        exact = linear_reference(x, weight, compute_dtype=torch.float64, **options)
        case = problem_of(m, n, k)
        for schedule in (*in_shares(case), *in_rounds(case), *in_ranges(case)):
            out = torch.full((m, columns), math.nan, device=CUDA, dtype=out_dtype)
            added = (given[name].data_ptr() if name in given else 0 for name in ("bias", "residual"))
            addresses = (weight.codes.data_ptr(), weight.scales.data_ptr(), 0, *added, out.data_ptr())
            plan = make_tile_plan(schedule, m, torch.cuda.current_device())
            plan.run(x, addresses, n, ACTIVATIONS[activation], OUT_KINDS[out_dtype])
            assert_near(out, exact, TOLERANCE[torch.bfloat16])
