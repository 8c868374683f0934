"""A reduction that this file alone knows of is taken by the mainloop that it names, makes kernels of its own, adds up
parts of K, and is chosen where it is the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("cutlass")

import cutlass.cute as cute
from cutlass import Int64

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.kernel import WgmmaKernel
from cute_kernels.gemm.wgmma.launch import MainloopCost, TileSchedule
from cute_kernels.gemm.wgmma.mainloops import MmaSync, RegisterWgmma, ResidentLimbs
from cute_kernels.gemm.wgmma.places import DensePlaces
from cute_kernels.gemm.wgmma.reduction import StoringReduction, add_published, publish_acc
from cute_kernels.gemm.wgmma.results import Dsmem, Reduction, WorkspaceSplitK
from cute_kernels.gemm.wgmma.schedule import CANDIDATES, schedule_of, shipped_configs
from cute_kernels.gemm.wgmma.stages import of_format
from cute_kernels.gemm.wgmma.tiles import DenseRounds, dense_scheduler
from cute_kernels.runtime.sources import reached
from simulator import PlainThread
from tests import golden
from tests.attention import warp as machine
from tests.golden import collect
from tests.linear import plain_work_tiles
from tests.linear.test_wgmma_ranges import PublishingWarp, store_of

# -- the whole reduction -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairSplitK(Reduction):
    """K of a tile in a last round is cut into two parts. Two neighbouring CTAs compute them, and the second stores."""

    mainloops: ClassVar[tuple[type, ...]] = (RegisterWgmma,)
    made_by: ClassVar[str] = f"{__name__}:PairReduction"
    name: ClassVar[str] = "_pairs"

    def is_fitted(self, config: WgmmaConfig) -> bool:
        return config.tile_m == 16

    def can_cut(self, config: WgmmaConfig, splits: int, k_blocks: int) -> bool:
        return splits == 2 <= k_blocks

    def partial_words(self, schedule: TileSchedule) -> int:
        return schedule.num_tiles_cut * schedule.config.block_rows * schedule.config.tile_m

    def launch_clocks(self, problem: LinearProblem, schedule: TileSchedule, cost: MainloopCost) -> float:
        return super().launch_clocks(problem, schedule, cost) / 4  # so that it is the fastest


def pair_configs(problem: LinearProblem) -> list[WgmmaConfig]:
    """The configurations that the chooser is to consider."""
    tile_m = 16 if problem.m <= 16 else 256
    config = of_format(problem, tile_m=tile_m, num_stages=4, mainloop=RegisterWgmma(), reduction=PairSplitK())
    return [config] if problem.m not in range(17, 513) else []


class PairRounds(DenseRounds):
    """Tiles in rounds."""

    @staticmethod
    def scheduler(config: WgmmaConfig, shape: Any, cta: Any, num_ctas: Any) -> Any:
        return dense_scheduler(config, shape, cta, num_ctas)


class PairReduction(StoringReduction):
    """The CTA with the second part of K adds the first one, which its neighbour has published, and stores."""

    rounds = PairRounds

    @cute.jit
    def prepare(self, operands, shape, store, work_tile, first_tile, k_rank):
        if work_tile.split == work_tile.splits - 1:
            self.prepare_tiles(operands, shape, store, work_tile, first_tile)

    @cute.jit
    def finish(self, operands, shape, memory, store, work_tile, acc, first_tile, k_rank):
        config = self.config
        own = store.warpgroup * (config.acc_bytes // config.warpgroups) + store.tid * 16
        place = operands.workspace + Int64(work_tile.number) * config.acc_bytes + own
        if work_tile.split < work_tile.splits - 1:
            publish_acc(acc, place, config.thread_vectors)
        else:
            if work_tile.splits > 1:
                add_published(acc, 0, place, config.thread_vectors, 0)
            self.store_tiles(operands, shape, store, work_tile, acc, first_tile)


# -- what it is taken by -----------------------------------------------------------------------------------------------

CONFIG = WgmmaConfig(integers(4), "bf16", tile_m=64, reduction=PairSplitK())


def test_it_is_a_part_of_the_kernel_and_of_its_name():
    assert CONFIG.can_implement() is None
    kernel = WgmmaKernel(CONFIG)
    assert isinstance(kernel.consumers.reduction, PairReduction)
    assert getattr(kernel.scheduling, "rounds") is PairRounds  # noqa: B009
    spec, other = GemmSpec(CONFIG), GemmSpec(replace(CONFIG, reduction=WorkspaceSplitK()))
    assert spec.symbol == other.symbol.replace("_split", "_pairs")
    assert any(file.name == "test_new_reduction.py" for file in reached(spec).files)
    assert not any(file.name == "test_new_reduction.py" for file in reached(other).files)


def test_its_kernel_is_traced_like_any_other(compiler_kept):
    digests = {
        collect.trace((GemmSpec(replace(CONFIG, reduction=one)), golden.ARCH))
        for one in (PairSplitK(), WorkspaceSplitK())
    }
    assert len(digests) == 2


def test_other_mainloops_do_not_take_it():
    assert "MmaSync does not go with PairSplitK" in str(replace(CONFIG, tile_m=16, mainloop=MmaSync()).can_implement())


def test_resident_limbs_have_no_other_reduction_than_the_one_that_their_kernel_makes():
    """The kernel would ignore it, and compute what the configuration does not say."""

    @dataclass(frozen=True)
    class Other(Dsmem):
        mainloops: ClassVar[tuple[type, ...]] = (ResidentLimbs,)
        made_by: ClassVar[str] = f"{__name__}:PairReduction"

    config = next(one for one in shipped_configs() if isinstance(one.mainloop, ResidentLimbs))
    GemmSpec(config).check()
    config = replace(config, reduction=Other(config.cluster, config.k_warpgroups))
    assert config.can_implement() is None
    with pytest.raises(ValueError, match="a reduction of resident limbs .*PairReduction' is not one of .*:Cluster"):
        GemmSpec(config).check()


def test_the_second_cta_of_a_pair_adds_the_first_ones_part_and_stores(run_on: Callable[[Any], None]):
    """What was published is EMPTY again."""
    run_on(PlainThread())
    schedule = schedule_of(LinearProblem(64, 8192, 2048, 2048, integers(4), "bf16", num_sms=131), CONFIG, 2)
    assert schedule is not None and (schedule.whole, schedule.num_ctas) == (0, 128)
    shape = plain_work_tiles.shape_of(schedule, m=64)
    schedulers = [PairRounds.scheduler(CONFIG, shape, cta, schedule.num_ctas) for cta in (2, 3)]
    first, second = (each.work_tile(each.first) for each in schedulers)
    assert (first.block, first.begin, first.end) == (second.block, 0, second.begin) and second.end == schedule.k_blocks
    warps, count = CONFIG.consumer_warps, CONFIG.thread_acc
    parts = np.random.default_rng(0).standard_normal((2, warps, count, 32)).astype(np.float32)
    memory, stored = np.full(4 * schedule.workspace_words, 0xFF, np.uint8), []

    def store(operands, shape, store, corner, acc, first, ordinal) -> None:
        stored.append((int(corner.row), np.stack([np.asarray(value) for value in acc[:count]])))

    epilogue: Any = SimpleNamespace(dense=False, prepare=None, run=store)
    reduction = PairReduction(CONFIG, epilogue, DensePlaces(CONFIG))
    run_on(PublishingWarp(np.zeros(16, np.uint8), memory))
    for work_tile, of_k in zip((first, second), parts, strict=True):
        assert stored == []
        for warp in range(warps):
            acc = machine.Registers(count, machine.Float32)
            acc[:] = [machine.Float32(value) for value in of_k[warp]]
            tile = warp // 4
            reduction.finish(SimpleNamespace(workspace=0), shape, None, store_of(warp), work_tile, acc, tile, 0)
    assert [row for row, _ in stored] == [128 + 64 * (warp // 4) for warp in range(warps)]
    assert np.array_equal(np.stack([acc for _, acc in stored]), parts.sum(0))
    assert (memory == 0xFF).all()


def test_it_is_chosen_where_it_is_the_fastest():
    """With few rows only where it says that the model of time is fitted."""
    problems = [LinearProblem(m, 8000, 4096, 4096, integers(4), "bf16", num_sms=131) for m in (4, 64, 4096)]
    before = list(map(chosen, problems))
    CANDIDATES.append(pair_configs)
    chosen.cache_clear()
    try:
        few, some, many = map(chosen, problems)
    finally:
        CANDIDATES.remove(pair_configs)
        chosen.cache_clear()
    assert some == before[1] and few != before[0] and many != before[2]
    for found in (few, many):
        assert isinstance(found, TileSchedule) and isinstance(found.config.reduction, PairSplitK)
        assert found.splits == 2 and found.workspace_words == found.num_tiles_cut * 128 * found.config.tile_m
