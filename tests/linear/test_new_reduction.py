"""A reduction that this file alone knows of is taken by the mainloop that it names, makes kernels of its own, and is
chosen where it is the fastest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.kernel import WgmmaKernel
from cute_kernels.gemm.wgmma.launch import MainloopCost, TileSchedule
from cute_kernels.gemm.wgmma.mainloops import MmaSync, RegisterWgmma, ResidentLimbs
from cute_kernels.gemm.wgmma.places import corner_of
from cute_kernels.gemm.wgmma.results import Dsmem, Reduction, WholeK
from cute_kernels.gemm.wgmma.schedule import CANDIDATES, shipped_configs
from cute_kernels.gemm.wgmma.tiles import DenseRounds, dense_scheduler
from cute_kernels.runtime.sources import reached


@dataclass(frozen=True)
class Alone(Reduction):
    """A work tile has all of K."""

    splits_k: ClassVar[bool] = False
    mainloops: ClassVar[tuple[type, ...]] = (RegisterWgmma,)
    made_by: ClassVar[str] = f"{__name__}:AloneReduction"
    name: ClassVar[str] = "_alone"

    def partial_words(self, schedule: TileSchedule) -> int:
        return 77 * schedule.num_ctas

    def launch_clocks(self, problem: LinearProblem, schedule: TileSchedule, cost: MainloopCost) -> float:
        return super().launch_clocks(problem, schedule, cost) / 2


class AloneRounds(DenseRounds):
    """Tiles in rounds."""

    @staticmethod
    def scheduler(config: WgmmaConfig, shape: Any, cta: Any, num_ctas: Any) -> Any:
        return dense_scheduler(config, shape, cta, num_ctas)


class AloneReduction:
    """Stores what it is given."""

    rounds, prepares = AloneRounds, False

    def __init__(self, config: WgmmaConfig, epilogue: Any, places: Any):
        self.config, self.epilogue, self.places = config, epilogue, places

    def begin(self) -> None:
        """Nothing."""

    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank) -> None:
        corner = corner_of(self.config, self.places, shape, work_tile, first_tile)
        self.epilogue.run(operands, shape, store, corner, acc, 0, 0)


CONFIG = WgmmaConfig(integers(4), "bf16", tile_m=64, reduction=Alone())


def test_it_is_a_part_of_the_kernel_and_of_its_name():
    assert CONFIG.can_implement() is None
    kernel = WgmmaKernel(CONFIG)
    assert isinstance(kernel.consumers.reduction, AloneReduction)
    assert getattr(kernel.scheduling, "rounds") is AloneRounds  # noqa: B009
    spec, whole = GemmSpec(CONFIG), GemmSpec(replace(CONFIG, reduction=WholeK()))
    assert spec.symbol == f"{whole.symbol}_alone"
    assert any(file.name == "test_new_reduction.py" for file in reached(spec).files)
    assert not any(file.name == "test_new_reduction.py" for file in reached(whole).files)


def test_other_mainloops_do_not_take_it():
    assert "MmaSync does not go with Alone" in str(replace(CONFIG, tile_m=16, mainloop=MmaSync()).can_implement())


def test_resident_limbs_have_no_other_reduction_than_the_one_that_their_kernel_makes():
    """The kernel would ignore it, and compute what the configuration does not say."""

    @dataclass(frozen=True)
    class Other(Dsmem):
        mainloops: ClassVar[tuple[type, ...]] = (ResidentLimbs,)
        made_by: ClassVar[str] = f"{__name__}:AloneReduction"

    config = next(one for one in shipped_configs() if isinstance(one.mainloop, ResidentLimbs))
    GemmSpec(config).check()
    config = replace(config, reduction=Other(config.cluster, config.k_warpgroups))
    assert config.can_implement() is None
    with pytest.raises(ValueError, match="a reduction of resident limbs .*AloneReduction' is not one of .*:Cluster"):
        GemmSpec(config).check()


def test_it_is_chosen_where_it_is_the_fastest():
    def candidates(problem: LinearProblem) -> list[WgmmaConfig]:
        return [replace(CONFIG, tile_m=256, num_stages=4)] if problem.m > 512 else []

    problems = [LinearProblem(m, 8000, 4096, 4096, integers(4), "bf16", num_sms=131) for m in (64, 4096)]
    CANDIDATES.append(candidates)
    try:
        few, many = map(chosen, problems)
    finally:
        CANDIDATES.remove(candidates)
    assert not isinstance(getattr(few.config, "reduction", None), Alone)
    assert isinstance(many, TileSchedule) and isinstance(many.config.reduction, Alone)
    assert (many.splits, many.num_ctas, many.workspace_words) == (1, 131, 77 * 131)
