"""Parts of K that meet in memory, of which each CTA adds up its share of the rows: lane by lane in NumPy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.schedule import LinearProblem
from cute_kernels.gemm.wgmma import epilogue, places, tiles
from cute_kernels.gemm.wgmma.deferred_config import TAKES, DeferredNormConfig
from cute_kernels.gemm.wgmma.schedule import TileSchedule, share_configs, tile_schedules
from cute_kernels.gemm.wgmma.shares import ShareReduction
from cute_kernels.gemm.wgmma.shares_config import SharedSplitK, SharesWgmma
from simulator import PlainThread, stand_in
from tests.attention import warp as machine
from tests.linear import plain_work_tiles
from tests.linear.warpgroup import WarpgroupWarp

NUMBER = 1  # of the tile among those that are cut


def problem(m: int, n: int, k: int, num_sms: int = 132) -> LinearProblem:
    return LinearProblem(m, n, k, k, integers(4), "bf16", num_sms=num_sms)


CONFIGS = share_configs(problem(256, 8192, 8192))


class SharesWarp(WarpgroupWarp):
    """A warp with what waits for others' words."""

    def load_relaxed(self, address, num_words: int, *, offset: int = 0):
        return self.load_global_words(address, offset, num_words, constant=False)

    def store_global(self, address, values, *, offset: int = 0) -> None:
        places = np.broadcast_to(np.asarray(address, np.int64) + offset, (32,))
        assert not (places % (4 * len(values))).any()
        for i, value in enumerate(values):
            words = np.ascontiguousarray(np.broadcast_to(np.asarray(value), (32,)))
            self.global_memory.view(np.uint32)[places // 4 + i] = words.view(np.uint32)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_each_cta_has_all_of_k_of_its_share_of_the_rows(config, run_on):
    """Added up in one order, whoever comes first; what was stored for others is EMPTY again."""
    parts, warps = config.reduction.parts, config.consumer_warps
    size = 4 * config.block_rows * config.tile_m
    memory = np.full((NUMBER + 1) * (parts - 1) * size, 0xFF, np.uint8)
    run_on(SharesWarp(np.zeros(16, np.uint8), memory))
    subject = ShareReduction(config, epilogue.TileEpilogue(config), places.DensePlaces(config))
    generator = np.random.default_rng(0)
    of_k = generator.standard_normal((parts, warps, config.thread_acc, 32))
    of_k = (of_k * 10.0 ** generator.integers(-3, 4, of_k.shape)).astype(np.float32)
    acc = [[machine.Registers(config.thread_acc, machine.Float32) for _ in range(warps)] for _ in range(parts)]
    operands = SimpleNamespace(workspace=0)
    starts = [subject.place(operands, store_of(warp), NUMBER) for warp in range(warps)]
    for rank in range(parts):
        for warp in range(warps):
            acc[rank][warp][:] = [machine.Float32(value) for value in of_k[rank, warp]]
            for share in range(parts):
                if share != rank:
                    subject.publish_share(starts[warp], acc[rank][warp], share, rank)
            subject.keep_share(acc[rank][warp], rank)
    tile = memory.view(np.uint32)[NUMBER * (parts - 1) * size // 4 :]
    assert (tile != 0xFFFFFFFF).all() and (memory[: NUMBER * (parts - 1) * size] == 0xFF).all()
    own = config.thread_acc // parts
    for rank in reversed(range(parts)):
        for warp in range(warps):
            found = acc[rank][warp]
            subject.add_others(starts[warp] + rank * (own // 4) * 2048, found)
            share = slice(rank * own, (rank + 1) * own)
            wanted = of_k[rank, warp, share]
            for other in (part for part in range(parts) if part != rank):
                wanted = wanted + of_k[other, warp, share]
            assert np.array_equal(np.stack([np.asarray(value) for value in found[:own]]), wanted)
    assert (memory == 0xFF).all()


def store_of(warp: int) -> epilogue.Store:
    group, row_warp = divmod(warp, 4)
    return stand_in(epilogue.Store)(0, group, row_warp * 32 + machine.LANES, row_warp, machine.LANES)


def in_shares(case: LinearProblem) -> list[TileSchedule]:
    found = [one for one in tile_schedules(case) if isinstance(one.config.mainloop, SharesWgmma)]
    return [one for one in found if one.splits > 1]


@pytest.mark.parametrize("m, n, k", [(256, 9216, 4608), (256, 18944, 3584), (128, 3072, 3072), (96, 5376, 5376)])
def test_parts_that_wait_for_one_another_are_neighbours_of_one_round(m, n, k, run_on):
    """So that whoever waits finds the others beside it, with nothing left to do (docs/design/forward_progress)."""
    run_on(PlainThread())
    schedules = in_shares(problem(m, n, k))
    assert schedules
    for schedule in schedules:
        shape = plain_work_tiles.shape_of(schedule)
        done = np.zeros((schedule.blocks, schedule.m_tiles, schedule.k_blocks), int)
        owners: dict[tuple[int, int], list[int]] = {}
        for cta in range(schedule.num_ctas):
            scheduler = stand_in(tiles.TileScheduler)(shape, cta, schedule.num_ctas)
            indices = list(range(scheduler.first, scheduler.count, scheduler.stride))
            for index in indices:
                work_tile = scheduler.work_tile(index)
                done[work_tile.block, work_tile.m_tile, work_tile.begin : work_tile.end] += 1
                if work_tile.splits > 1:
                    assert index == indices[-1] and work_tile.splits == schedule.splits
                    owners.setdefault((work_tile.block, work_tile.m_tile), []).append(cta)
        assert (done == 1).all()
        for ctas in owners.values():
            assert ctas == list(range(ctas[0], ctas[0] + schedule.splits))


@pytest.mark.parametrize("num_sms", [16, 78, 114])
def test_fewer_sms_have_shares_of_one_round_too(num_sms):
    for one in in_shares(problem(256, 9216, 4608, num_sms)):
        assert one.num_tiles_cut * one.splits <= one.num_ctas <= num_sms
        assert one.whole % num_sms == 0


def test_shares_that_cannot_be_are_refused():
    config = CONFIGS[0]
    for options, reason in (
        ({"reduction": SharedSplitK(5)}, "parts 5 is not one of 2"),
        ({"tile_m": 48}, "16 rows each"),
        ({"n_tiles": 2, "tile_m": 64}, "one tile a warpgroup"),
    ):
        assert reason in str(replace(config, **options).can_implement())
    assert "not deferred" in str(DeferredNormConfig(config, TAKES).can_implement())
