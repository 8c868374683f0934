"""33 to 64 rows in tiles of 128 features with a DSMEM reduction, and of 256: against fp64, with every epilogue."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma
from cute_kernels.gemm.wgmma.results import Dsmem
from cute_kernels.gemm.wgmma.schedule import tile_schedules
from cute_kernels.runtime.spec import KernelSpec
from tests.gpu.test_linear import CUDA, activations, check_epilogues
from tests.gpu.test_linear_wgmma import as_multiplied, check_sums, launch
from tests.linear.cases import known, problem_of

pytestmark = pytest.mark.gpu

FORMATS = {  # bits, dtype, group, zero points
    "w4": (4, torch.bfloat16, 128, False),
    "w4 zero": (4, torch.bfloat16, 128, True),
    "w4 fp16 zero": (4, torch.float16, 128, True),
    "w4 g32": (4, torch.bfloat16, 32, False),
    "w4 g64 zero": (4, torch.bfloat16, 64, True),
    "w4 channel": (4, torch.bfloat16, None, False),
}
ROWS = (33, 40, 48, 49, 63, 64)
SHAPES = ((1000, 2048), (200, 640), (66, 256))
LAYERS = ((8192, 1024), (28_672, 256))  # one is served by either of them


def specs() -> list[KernelSpec]:
    """The kernels of this module."""
    problems = [problem_of(m, *shape, *form) for form in FORMATS.values() for m in (48, 64) for shape in SHAPES]
    configs = [schedule.config for problem in problems for schedule in in_pairs(problem)]
    configs += [chosen(problem_of(m, *layer)).config for m in (40, 64) for layer in LAYERS]
    return [GemmSpec(config) for config in dict.fromkeys(configs)]


def in_pairs(case: LinearProblem) -> list[TileSchedule]:
    """Schedules of two warpgroups with tiles of their own: one each and a DSMEM reduction, or two each."""
    return [schedule for schedule in tile_schedules(case) if is_in_pairs(schedule.config)]


def is_in_pairs(config: Any) -> bool:
    if type(config.mainloop) is not RegisterWgmma or config.tile_m not in (48, 64) or config.warpgroups != 2:
        return False
    return (config.n_tiles, type(config.reduction)) == (1, Dsmem) or (
        config.n_tiles == 2 and not config.reduction.dsmem
    )


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("bits, dtype, group, zero", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("n, k", SHAPES)
def test_products_are_those_of_fp64_and_nothing_lies_beside_them(n, k, bits, dtype, group, zero, m):
    weight, x = known(n, k, bits, group, zero, dtype).pack().to(CUDA), activations(m, k, dtype)
    exact = x.double() @ as_multiplied(weight).double().T
    schedules = in_pairs(problem_of(m, n, k, bits, dtype, group, zero))
    assert len({schedule.config for schedule in schedules}) >= 2
    for schedule in schedules:
        check_sums(schedule, weight, x, exact)


@pytest.mark.parametrize("bits, dtype, group, zero", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("m", [40, 64])
def test_one_hot_rows_return_the_weights(bits, dtype, group, zero, m):
    packed = known(1000, 2048, bits, group, zero, dtype).pack()
    inputs = torch.arange(m) * 31 + 7
    x = torch.zeros(m, 2048, dtype=dtype)
    x[torch.arange(m), inputs] = 1
    for schedule in in_pairs(problem_of(m, 1000, 2048, bits, dtype, group, zero)):
        found = launch(schedule, packed.to(CUDA), x.to(CUDA))
        assert torch.equal(found.cpu(), as_multiplied(packed).float()[:, inputs].T)


@pytest.mark.parametrize("activation", [None, "silu", "swiglu"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [40, 64])
@pytest.mark.parametrize("n, k", LAYERS)
def test_epilogues(n, k, m, activation, out_dtype):
    if m == 40 or n > 8192:
        assert is_in_pairs(chosen(problem_of(m, n, k)).config)
    check_epilogues(known(n, k, group_size=128), m, activation, out_dtype)
