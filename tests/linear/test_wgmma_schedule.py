"""Tiles of products of many rows: each part of each once, who waits for whom, waves, and what is chosen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cute_kernels.linear.schedule import Problem
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.schedule import (
    candidate_configs,
    efficiency,
    estimate_us,
    make_tile_schedule,
    schedule_of,
    tile_schedules,
)

SHAPES = [(8192, 8192), (8192, 28672), (57344, 8192), (28672, 4096), (4096, 4096), (100, 128), (64, 64), (1000, 2048)]


def problem(m: int, n: int, k: int, **options) -> Problem:
    return Problem(m, n, k, -(-k // 128) * 128, **{"bits": 4, "dtype": "bf16", "group_size": 128, **options})


def test_smaller_tiles_fill_the_last_wave_better():
    """The example of the Stream-K paper (Osama et al. 2023): 384 x 384 x 128 on 4 SMs."""
    assert efficiency(9, 4) == 0.75  # 128 x 128
    assert efficiency(18, 4) == 0.9  # 128 x 64
    small = problem(384, 384, 128, num_sms=4)
    config = WgmmaConfig(4, "bf16", 128, tokens=128, unit_k=64)
    items = [schedule_of(small, replace(config, tokens=tokens)) for tokens in (128, 64)]
    assert [(item.num_items, item.num_ctas) for item in items if item] == [(9, 4), (18, 4)]


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("m", [17, 64, 128, 256, 1000, 8192])
@pytest.mark.parametrize("bits", [4, 8])
def test_something_is_chosen_and_can_be_compiled(m, n, k, bits):
    case = problem(m, n, k, bits=bits)
    schedule = make_tile_schedule(case)
    assert schedule.config.can_implement() is None
    assert schedule.num_ctas <= case.num_sms and schedule.num_ctas % schedule.config.cluster == 0
    assert schedule.units * schedule.config.unit_k == case.k_pad
    assert (schedule.splits - 1) * schedule.split_units < schedule.units <= schedule.splits * schedule.split_units
    assert estimate_us(case, schedule) == min(estimate_us(case, other) for other in tile_schedules(case))


@pytest.mark.parametrize("group_size", [0, 32, 64, 128, 256])
@pytest.mark.parametrize("bits, dtype, zero_point", [(4, "bf16", False), (8, "fp16", True), (8, "bf16", True)])
def test_every_format_has_configurations_for_any_number_of_rows(bits, dtype, group_size, zero_point):
    for m in (17, 40, 100, 200, 5000):
        k_pad = max(group_size, 64) * 3
        case = Problem(m, 640, k_pad, k_pad, bits, dtype, group_size, zero_point)
        assert len(candidate_configs(case)) >= 1


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    "m, n, splits, num_ctas", [(300, 700, 1, 132), (5000, 700, 1, 8), (70, 4096, 5, 12), (64, 64, 3, 2)]
)
def test_all_parts_of_all_tiles_are_computed_once(m, n, splits, num_ctas, cluster, monkeypatch):
    pytest.importorskip("cutlass")
    from cute_kernels.linear.wgmma import tiles

    monkeypatch.setattr(tiles, "cutlass", SimpleNamespace(min=min))
    monkeypatch.setattr(tiles, "Int32", int)
    schedule = schedule_of(problem(m, n, 2048), WgmmaConfig(4, "bf16", 128, tokens=64, cluster=cluster), splits)
    assert schedule is not None
    shape = SimpleNamespace(splits=splits, split_units=schedule.split_units, units=schedule.units)
    done = np.zeros((schedule.blocks, schedule.token_tiles, schedule.units), int)
    blocks = schedule.blocks // cluster
    total = blocks * schedule.token_tiles * splits
    for cta in range(num_ctas):
        items = tiles.Items(
            shape=shape,  # pyright: ignore[reportArgumentType]
            first=cta // cluster,
            stride=num_ctas // cluster,
            count=total,
            blocks=blocks,
            token_tiles=schedule.token_tiles,
            band=min(8, schedule.token_tiles),
            cluster=cluster,
            rank=cta % cluster,
        )
        for index in range(items.first, items.count, items.stride):
            item = items.item(index)
            assert item.begin < item.end
            done[item.block, item.token_tile, item.begin : item.end] += 1
            if item.split:  # what it waits for comes from the items just before
                before = items.item(index - 1)
                assert (before.block, before.token_tile, before.end) == (item.block, item.token_tile, item.begin)
    assert (done == 1).all()
