"""Equal runs of units for all CTAs: every unit once, whose sums lie where, and that nobody waits for who waits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.linear.schedule import Problem
from cute_kernels.linear.wgmma import tiles
from cute_kernels.linear.wgmma.config import TOKEN_BAND, WgmmaConfig
from cute_kernels.linear.wgmma.schedule import TileSchedule, schedule_of, with_ring

CONFIG = with_ring(WgmmaConfig(4, "bf16", 128, tokens=128, unit_k=128, splits_k=True, runs=True))


def items_of(schedule: TileSchedule, cta: int) -> list[tiles.RunItem]:
    shape = SimpleNamespace(whole=schedule.whole, units=schedule.units)
    band = min(TOKEN_BAND, schedule.token_tiles)
    found = tiles.RunItems.of(shape, cta, schedule.num_ctas, schedule.blocks, schedule.token_tiles, band)  # pyright: ignore[reportArgumentType]
    return [found.item(index) for index in range(found.first, found.count, found.stride)]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    choose = SimpleNamespace(min=min, max=max, select_=lambda condition, one, other: one if condition else other)
    monkeypatch.setattr(tiles, "cutlass", choose)
    monkeypatch.setattr(tiles, "Int32", int)


@pytest.mark.parametrize(
    "m, n, k, sms",
    [
        (128, 28672, 4096, 132),
        (256, 28672, 4096, 132),
        (100, 1000, 1152, 132),  # fewer units than CTAs
        (300, 4096, 128, 132),
        (1300, 8192, 384, 132),
        (512, 5120, 2048, 78),
        (128, 16384, 4096, 132),  # runs that end with tiles
        (128, 128 * 131, 640, 132),  # runs of almost a tile
        (128, 128, 8192, 132),
    ],
)
def test_every_unit_is_in_one_run_and_every_sum_has_a_place_of_its_own(m, n, k, sms):
    schedule = schedule_of(Problem(m, n, k, -(-k // 128) * 128, 4, "bf16", 128, num_sms=sms), CONFIG)
    assert schedule is not None
    done = np.zeros((schedule.blocks, schedule.token_tiles, schedule.units), int)
    left: dict[int, tuple[int, int]] = {}  # place among the parts: tile
    wanted: dict[tuple[int, int], list[int]] = {}
    sizes = []
    for cta in range(schedule.num_ctas):
        items = items_of(schedule, cta)
        sizes.append(sum(item.end - item.begin for item in items))
        for number, item in enumerate(items):
            assert item.begin < item.end
            tile = item.block, item.token_tile
            done[(*tile, slice(item.begin, item.end))] += 1
            assert 0 <= item.split < item.splits
            if item.split < item.splits - 1:
                assert number == 0  # before anything that waits
                place = item.first_part + item.split
                assert place == cta and place not in left and place < schedule.num_ctas
                left[place] = tile
            elif item.splits > 1:
                assert item.end == schedule.units
                wanted[tile] = list(range(item.first_part, item.first_part + item.splits - 1))
    assert (done == 1).all()
    assert sorted(place for places in wanted.values() for place in places) == sorted(left)
    assert all(left[place] == tile for tile, places in wanted.items() for place in places)
    rest = schedule.num_tiles_cut * schedule.units
    whole = schedule.whole // sms * schedule.units
    assert max(sizes) == whole + -(-rest // sms)
    parts = schedule.workspace_words // (CONFIG.block_rows * CONFIG.tokens)
    assert parts == schedule.num_ctas


def test_whole_rounds_need_no_runs():
    problem = Problem(128, 128 * 132, 4096, 4096, 4, "bf16", 128)
    assert schedule_of(problem, CONFIG) is None
    assert schedule_of(replace(problem, n=8192), CONFIG, 2) is None


def test_runs_of_clusters_are_refused():
    assert "runs" in str(replace(CONFIG, cluster=2).can_implement())
    assert "runs" in str(replace(CONFIG, splits_k=False).can_implement())
