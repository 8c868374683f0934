"""Tiles of a last round, cut along K or along rows of x, by CTAs alone or in pairs: each part once, nobody waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma import places, tiles
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import Limbs, MmaSync
from cute_kernels.gemm.wgmma.results import RowCuts, WholeK, WorkspaceSplitK
from cute_kernels.gemm.wgmma.schedule import schedule_of
from cute_kernels.gemm.wgmma.stages import with_stages
from simulator import PlainThread
from tests.linear import plain_work_tiles

ROWS = WgmmaConfig(integers(4), "bf16", row_parts=2, reduction=RowCuts())
ALONG_K = WgmmaConfig(integers(4), "bf16", reduction=WorkspaceSplitK())


@pytest.fixture(autouse=True)
def plain_integers(run_on):
    run_on(PlainThread())


def tile_scheduler(schedule: TileSchedule, m: int, cta: int) -> tiles.TileScheduler:
    """Those of a CTA, as the kernel finds them."""
    shape = plain_work_tiles.shape_of(schedule, m=m)
    return tiles.dense_scheduler(schedule.config, shape, cta, schedule.num_ctas)  # type: ignore


@pytest.mark.parametrize("config, splits", [(ROWS, 2), (ALONG_K, 2), (ALONG_K, 3)])
@pytest.mark.parametrize("multicast", [1, 2])
@pytest.mark.parametrize(
    "m, n, num_sms", [(512, 28672, 132), (256, 57344, 132), (2049, 4000, 10), (300, 2700, 8), (1025, 1100, 6)]
)
def test_every_row_meets_every_weight_once(m, n, num_sms, multicast, config, splits):
    config = with_stages(replace(config, multicast=multicast))
    assert config.can_implement() is None
    problem = LinearProblem(m, n, 2048, 2048, integers(4), "bf16", num_sms=num_sms)
    schedule = schedule_of(problem, config, splits)
    assert schedule is not None and schedule.whole and schedule.num_tiles_cut
    subject = places.DensePlaces(config)
    done = np.zeros((m, schedule.blocks * multicast, schedule.k_blocks), np.int8)
    slots: dict[tuple[int, int], int] = {}
    for first in range(0, schedule.num_ctas, multicast):
        every = [tile_scheduler(schedule, m, first + rank) for rank in range(multicast)]
        assert len({(scheduler.first, scheduler.count, scheduler.stride) for scheduler in every}) == 1
        for index in range(every[0].first, every[0].count, every[0].stride):
            found = [scheduler.work_tile(index) for scheduler in every]
            ranges = {
                (subject.rows_of(scheduler.shape, work_tile), work_tile.begin, work_tile.end)
                for scheduler, work_tile in zip(every, found, strict=True)
            }
            assert len(ranges) == 1  # of x, so that a TMA tile is everybody's
            ((begin, end), k_block, last_k_block) = ranges.pop()
            for rank, (scheduler, work_tile) in enumerate(zip(every, found, strict=True)):
                assert work_tile.block % multicast == rank and 0 <= k_block < last_k_block
                present = places.parts_of(config, subject, scheduler.shape, work_tile)
                assert 1 <= present <= config.row_parts
                done[begin : min(end, begin + present * config.part_m), work_tile.block, k_block:last_k_block] += 1
                if config.reduction.cuts_rows and work_tile.splits > 1:
                    assert present == 1 and begin % config.part_m == 0
                if work_tile.splits > 1:
                    tile = int(work_tile.block), int(work_tile.m_tile)
                    assert slots.setdefault(tile, int(work_tile.number)) == int(work_tile.number)
                if (
                    work_tile.split and not config.reduction.cuts_rows
                ):  # what it waits for are work tiles before its own
                    before = scheduler.work_tile(index - 1)
                    assert (before.block, before.number, before.end) == (
                        work_tile.block,
                        work_tile.number,
                        work_tile.begin,
                    )
    assert (done == 1).all()
    assert sorted(slots.values()) == list(range(schedule.num_tiles_cut * multicast))
    part_words = config.block_rows * config.tile_m
    words = 0 if config.reduction.cuts_rows else schedule.num_tiles_cut * multicast * (splits - 1) * part_words
    assert schedule.workspace_words == words


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"row_parts": 1}, "into more than 1 part"),
        ({"tile_m": 32, "block_k": 128, "mainloop": Limbs()}, "Limbs does not go with RowCuts"),
        ({"mainloop": MmaSync()}, "MmaSync does not go with RowCuts"),
    ],
)
def test_what_cannot_be_cut_along_rows_is_refused(options, reason):
    assert ROWS.can_implement() is None
    assert reason in str(replace(ROWS, **options).can_implement())


def test_rows_are_cut_only_where_a_last_round_is_left():
    """A product of fewer tiles than SMs has smaller tiles, of longer k blocks; one of whole rounds has nothing to
    cut."""
    for m, n in ((512, 4096), (256, 4096)):
        assert schedule_of(LinearProblem(m, n, 4096, 4096, integers(4), "bf16"), with_stages(ROWS), 2) is None
    assert schedule_of(LinearProblem(256, 132 * 128, 4096, 4096, integers(4), "bf16"), with_stages(ROWS), 2) is None
    assert schedule_of(LinearProblem(512, 28672, 4096, 4096, integers(4), "bf16"), with_stages(ROWS), 1) is None
    assert (
        schedule_of(
            LinearProblem(512, 28672, 4096, 4096, integers(4), "bf16"),
            with_stages(replace(ALONG_K, reduction=WholeK())),
            2,
        )
        is None
    )
