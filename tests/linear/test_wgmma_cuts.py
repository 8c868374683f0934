"""Tiles of a last round, cut along K or along rows of x, by CTAs alone or in pairs: each part once, nobody waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.linear.schedule import Problem
from cute_kernels.linear.wgmma import copies, kernel, tiles
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.rings import with_ring
from cute_kernels.linear.wgmma.schedule import TileSchedule, schedule_of
from tests.linear import plain_items

ROWS = WgmmaConfig(4, "bf16", 128, row_parts=2, cuts_rows=True)
ALONG_K = WgmmaConfig(4, "bf16", 128, splits_k=True)


@pytest.fixture(autouse=True)
def plain_integers(monkeypatch):
    plain_items.install(monkeypatch, kernel, copies)


def items_of(subject: kernel.WgmmaKernel, schedule: TileSchedule, m: int, cta: int) -> tiles.Items:
    """Those of a CTA, as the kernel finds them."""
    shape = plain_items.shape_of(schedule, m=m)
    return subject.items_of(shape, cta, schedule.num_ctas)  # type: ignore


@pytest.mark.parametrize("config, splits", [(ROWS, 2), (ALONG_K, 2), (ALONG_K, 3)])
@pytest.mark.parametrize("sharing", [1, 2])
@pytest.mark.parametrize(
    "m, n, num_sms", [(512, 28672, 132), (256, 57344, 132), (2049, 4000, 10), (300, 2700, 8), (1025, 1100, 6)]
)
def test_every_row_meets_every_weight_once(m, n, num_sms, sharing, config, splits):
    config = with_ring(replace(config, sharing=sharing))
    assert config.can_implement() is None
    problem = Problem(m, n, 2048, 2048, 4, "bf16", 128, num_sms=num_sms)
    schedule = schedule_of(problem, config, splits)
    assert schedule is not None and schedule.whole and schedule.num_tiles_cut
    subject = kernel.WgmmaKernel(config)
    done = np.zeros((m, schedule.blocks * sharing, schedule.units), np.int8)
    slots: dict[tuple[int, int], int] = {}
    for first in range(0, schedule.num_ctas, sharing):
        every = [items_of(subject, schedule, m, first + rank) for rank in range(sharing)]
        assert len({(items.first, items.count, items.stride) for items in every}) == 1
        for index in range(every[0].first, every[0].count, every[0].stride):
            found = [items.item(index) for items in every]
            ranges = {
                (subject.rows_of(items.shape, item), item.begin, item.end)
                for items, item in zip(every, found, strict=True)
            }
            assert len(ranges) == 1  # of x, so that a box is everybody's
            ((begin, end), unit, last_unit) = ranges.pop()
            for rank, (items, item) in enumerate(zip(every, found, strict=True)):
                assert item.block % sharing == rank and 0 <= unit < last_unit
                present = subject.parts_of(items.shape, item)
                assert 1 <= present <= config.row_parts
                done[begin : min(end, begin + present * config.part_tokens), item.block, unit:last_unit] += 1
                if config.cuts_rows and item.splits > 1:
                    assert present == 1 and begin % config.part_tokens == 0
                if item.splits > 1:
                    assert slots.setdefault((item.block, item.token_tile), item.number) == item.number
                if item.split and not config.cuts_rows:  # what it waits for are items before its own
                    before = items.item(index - 1)
                    assert (before.block, before.number, before.end) == (item.block, item.number, item.begin)
    assert (done == 1).all()
    assert sorted(slots.values()) == list(range(schedule.num_tiles_cut * sharing))
    part_words = config.block_rows * config.tokens
    words = 0 if config.cuts_rows else schedule.num_tiles_cut * sharing * (splits - 1) * part_words
    assert schedule.workspace_words == words


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"splits_k": True}, "not along K"),
        ({"row_parts": 1}, "into more than 1 part"),
        ({"cluster": 2}, "wants one tile a warpgroup"),
        ({"tokens": 32, "unit_k": 128, "digits": True}, "not in digits or clusters"),
    ],
)
def test_what_cannot_be_cut_along_rows_is_refused(options, reason):
    assert ROWS.can_implement() is None
    assert reason in str(replace(ROWS, **options).can_implement())


@pytest.mark.parametrize(
    "options", [{"tokens": 16, "unit_k": 128, "digits": True}, {"tokens": 32}, {"cluster": 2}, {"synchronous": True}]
)
def test_what_tma_does_not_store_is_refused(options):
    assert replace(ALONG_K, bulk_stores=True).can_implement() is None
    assert replace(ALONG_K, **{"tokens": 16, **options}, bulk_stores=True).can_implement() is not None


def test_rows_are_cut_only_where_a_last_round_is_left():
    """A product of fewer tiles than SMs has smaller tiles, of longer units; one of whole rounds has nothing to cut."""
    for m, n in ((512, 4096), (256, 4096)):
        assert schedule_of(Problem(m, n, 4096, 4096, 4, "bf16", 128), with_ring(ROWS), 2) is None
    assert schedule_of(Problem(256, 132 * 128, 4096, 4096, 4, "bf16", 128), with_ring(ROWS), 2) is None
    assert schedule_of(Problem(512, 28672, 4096, 4096, 4, "bf16", 128), with_ring(ROWS), 1) is None
    assert (
        schedule_of(Problem(512, 28672, 4096, 4096, 4, "bf16", 128), with_ring(replace(ALONG_K, splits_k=False)), 2)
        is None
    )
