"""Tiles as work ranges, whose parts of K meet in memory: lane by lane in NumPy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma import epilogue, places, ranges
from cute_kernels.gemm.wgmma.deferred_config import TAKES, with_norm
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.results import RangeSplitK
from cute_kernels.gemm.wgmma.schedule import range_configs, schedule_of, tile_schedules
from simulator import PlainThread, stand_in
from tests.attention import warp as machine
from tests.linear import plain_work_tiles
from tests.linear.warpgroup import WarpgroupWarp

CASES = [(256, 9216, 4608), (256, 18944, 3584), (256, 8456, 1152), (200, 13696, 4096), (100, 17000, 8192)]


class PublishingWarp(WarpgroupWarp):
    """A warp with what waits for others' words."""

    def load_relaxed(self, address, num_words: int, *, offset: int = 0):
        return self.load_global_words(address, offset, num_words, constant=False)

    def store_global(self, address, values, *, offset: int = 0) -> None:
        places = np.broadcast_to(np.asarray(address, np.int64) + offset, (32,))
        assert not (places % (4 * len(values))).any()
        for i, value in enumerate(values):
            words = np.ascontiguousarray(np.broadcast_to(np.asarray(value), (32,)))
            self.global_memory.view(np.uint32)[places // 4 + i] = words.view(np.uint32)


def store_of(warp: int) -> epilogue.Store:
    group, row_warp = divmod(warp, 4)
    return stand_in(epilogue.Store)(0, group, row_warp * 32 + machine.LANES, row_warp, machine.LANES)


def problem(m: int, n: int, k: int, num_sms: int = 132) -> LinearProblem:
    return LinearProblem(m, n, k, k, integers(4), "bf16", num_sms=num_sms)


CONFIGS = range_configs(problem(97, 20_000, 8192))


def in_ranges(case: LinearProblem) -> list[TileSchedule]:
    found = (schedule_of(case, config) for config in range_configs(case))
    return [one for one in found if one is not None]


def shape_of(schedule: TileSchedule):
    reduction = schedule.config.reduction
    assert isinstance(reduction, RangeSplitK)
    units = schedule.k_blocks + reduction.end
    base, rest = divmod(schedule.blocks * schedule.m_tiles * units, schedule.num_ctas)
    plain = plain_work_tiles.shape_of(schedule)
    fields = (0, 0, 0, plain.num_tiles, plain.k_blocks, 1, plain.whole, plain.splits, plain.split_k_blocks, 0, 0)
    return stand_in(ranges.TileRangeSizes)(*fields, plain.grid, ranges.Divisor.of(units), base, rest)


def work_tiles_of(shape, cta: int) -> list:
    scheduler = stand_in(ranges.RangeScheduler).of(shape, cta)
    return [scheduler.work_tile(index) for index in range(scheduler.first, scheduler.count, scheduler.stride)]


@pytest.mark.parametrize("num_sms", [16, 78, 132])
@pytest.mark.parametrize("m, n, k", CASES)
def test_ranges_are_all_of_k_of_all_tiles_once(m, n, k, num_sms, run_on):
    run_on(PlainThread())
    for schedule in in_ranges(problem(m, n, k, num_sms)):
        shape = shape_of(schedule)
        done = np.zeros((schedule.blocks, schedule.m_tiles, schedule.k_blocks), int)
        for cta in range(schedule.num_ctas):
            found = work_tiles_of(shape, cta)
            for one in found:
                done[one.block, one.m_tile, one.begin : one.end] += 1
        assert (done == 1).all()


@pytest.mark.parametrize("m, n, k", CASES)
def test_a_cta_leaves_what_another_wants_before_it_waits_for_the_one_before(m, n, k, run_on):
    """It leaves one part at most, and takes one, of its last work tile. The one before has left that."""
    run_on(PlainThread())
    for schedule in in_ranges(problem(m, n, k)):
        shape, before = shape_of(schedule), None
        for cta in range(schedule.num_ctas):
            *_, last = found = work_tiles_of(shape, cta)
            left = [one for one in found if one.end < schedule.k_blocks]
            takes = [one for one in found if one.begin > 0]
            assert left in ([], found[:1]) and takes in ([], [last]) and (not takes or last is not found[0])
            assert all(one.end == schedule.k_blocks for one in takes)
            assert (before is not None) == bool(takes)
            if before is not None:
                assert (before.number, before.begin, before.end) == (last.number, 0, last.begin)
            before = left[0] if left else None
        assert before is None


@pytest.mark.parametrize("m, n, k", CASES)
def test_no_cta_has_much_more_to_do_than_others(m, n, k, run_on):
    run_on(PlainThread())
    for schedule in in_ranges(problem(m, n, k)):
        shape, reduction = shape_of(schedule), schedule.config.reduction
        assert isinstance(reduction, RangeSplitK)
        end = reduction.end
        most = -(-schedule.whole * (schedule.k_blocks + end) // schedule.num_ctas)
        for cta in range(schedule.num_ctas):
            found = work_tiles_of(shape, cta)
            k_blocks = sum(one.end - one.begin for one in found)
            stored = sum(one.end == schedule.k_blocks for one in found)
            assert k_blocks + end * max(stored - 1, 0) <= most


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_the_cta_with_the_end_of_a_tile_adds_what_the_one_before_left(config, run_on):
    """What was left is EMPTY again."""
    run_on(PlainThread())
    schedule = schedule_of(problem(config.tile_m, 20_000, 4096), config)
    assert schedule is not None
    shape, cta = shape_of(schedule), 2
    left, own = work_tiles_of(shape, cta - 1)[0], work_tiles_of(shape, cta)[-1]
    assert (left.number, left.end) == (own.number, own.begin) and own.end == schedule.k_blocks
    warps, size = config.consumer_warps, 4 * config.block_rows * config.tile_m
    memory = np.full((cta + 1) * size, 0xFF, np.uint8)
    run_on(PublishingWarp(np.zeros(16, np.uint8), memory))
    subject = ranges.RangeReduction(config, epilogue.TileEpilogue(config), places.DensePlaces(config))
    generator = np.random.default_rng(0)
    of_k = generator.standard_normal((2, warps, config.thread_acc, 32)).astype(np.float32)
    operands = SimpleNamespace(workspace=0)
    acc = [[machine.Registers(config.thread_acc, machine.Float32) for _ in range(warps)] for _ in range(2)]
    for warp in range(warps):
        for part in range(2):
            acc[part][warp][:] = [machine.Float32(value) for value in of_k[part, warp]]
        subject.finish(operands, shape, None, store_of(warp), left, acc[0][warp], 0, 0)
    place = memory[(cta - 1) * size : cta * size].view(np.uint32)
    assert (place != 0xFFFFFFFF).all() and (memory[: (cta - 1) * size] == 0xFF).all()
    for warp in range(warps):
        subject.collect(operands, shape, store_of(warp), own, acc[1][warp])
        found = np.stack([np.asarray(value) for value in acc[1][warp]])
        assert np.array_equal(found, of_k[1, warp] + of_k[0, warp])
    assert (memory == 0xFF).all()


@pytest.mark.parametrize("num_sms", [16, 78, 114])
def test_fewer_sms_have_ranges_too(num_sms):
    for one in in_ranges(problem(256, 9216, 4608, num_sms)):
        assert one.num_ctas == num_sms and one.workspace_words == num_sms * one.config.block_rows * one.config.tile_m


def test_ranges_that_cannot_be_are_refused():
    config = CONFIGS[0]
    assert "one tile a warpgroup" in str(replace(config, n_tiles=2, tile_m=64).can_implement())
    assert "negative" in str(replace(config, reduction=RangeSplitK(-1)).can_implement())
    assert "not deferred" in str(with_norm(config, TAKES).can_implement())


def test_ranges_of_less_than_a_tile_are_not_taken():
    """Some CTAs would have a middle part, for which others would wait."""
    small = problem(128, 8192, 1024)
    assert all(schedule_of(small, config) is None for config in range_configs(small))
    assert not [one for one in tile_schedules(small) if isinstance(one.config.reduction, RangeSplitK)]
