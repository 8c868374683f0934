"""Which tiles of which experts CTAs compute: the device's own code, thread by thread, and what the host makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.moe.schedule import MAX_EXPERTS, GroupedProblem
from cute_kernels.moe.wgmma import schedule, tiles
from cute_kernels.moe.wgmma.schedule import ENTRY_BYTES, TABLE_BYTES, has_many_rows, layouts, make_tiles, usual_tiles
from cute_kernels.sm90 import MAX_SHARED_BYTES
from tests.moe.machine import Machine

TABLE, UNITS = 64, 5

CASES = {
    "few and many rows": (8, (3, 0, 70, 16, 17, 0, 1, 33)),
    "one expert has all": (8, (0, 0, 0, 0, 0, 200, 0, 0)),
    "bands": (1, (16 * 21 + 3,)),
    "no rows": (3, (0, 0, 0)),
    "more experts than lanes": (100, tuple(17 * (i % 7 == 3) for i in range(100))),
    "as many experts as there may be": (MAX_EXPERTS, tuple(int(i in (0, 15, 16, 511)) for i in range(MAX_EXPERTS))),
}


def items_of(counts: tuple[int, ...], blocks: int, num_ctas: int, tokens: int, monkeypatch) -> list[list[Any]]:
    """What each CTA takes, in its order."""
    machine = Machine()
    machine.install(monkeypatch, tiles)
    monkeypatch.setattr(tiles, "cutlass", machine.cutlass())
    offsets = machine.put(torch.tensor([0, *counts]).cumsum(0).int())
    numbers = dict.fromkeys(("m", "n", "k", "num_tiles", "scale_groups", "whole", "activation", "out_kind"), 0)
    shape = tiles.GroupedShape(
        **numbers, units=UNITS, splits=1, split_units=UNITS, num_experts=len(counts), blocks=blocks
    )
    found: list[list[Any]] = [[] for _ in range(num_ctas)]

    def work() -> None:
        lane, cta = machine.lane, machine.cta.block[0]
        tiles.fill_table.__wrapped__(TABLE, offsets, shape, lane, tokens)
        machine.sync_warp()
        count = machine.ptx().load_shared(TABLE + MAX_EXPERTS * ENTRY_BYTES, 0)
        items = tiles.GroupedItems(shape, cta, num_ctas, count, TABLE, lane, tokens, 8)
        for index in range(items.first, items.count, items.stride):
            item = items.item(index)
            if lane == 5:
                found[cta].append(item)

    machine.run(work, [(cta, 0, 0) for cta in range(num_ctas)], 32)
    return found


@pytest.mark.parametrize("experts, counts", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("blocks, num_ctas", [(3, 2), (1, 5)])
def test_every_tile_of_every_expert_is_computed_once(experts, counts, blocks, num_ctas, monkeypatch):
    tokens = 16
    found = items_of(counts, blocks, num_ctas, tokens, monkeypatch)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    wanted = {
        (expert, block, starts[expert] + first)
        for expert in range(experts)
        for first in range(0, counts[expert], tokens)
        for block in range(blocks)
    }
    taken = [(item.expert, item.block, item.token) for items in found for item in items]
    assert len(taken) == len(set(taken)) and set(taken) == wanted
    for item in (item for items in found for item in items):
        assert item.end_token == starts[item.expert + 1] and (item.begin, item.end) == (0, UNITS)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_tiles_of_an_expert_share_its_weights(monkeypatch):
    """Items that run at the same time are tiles of tokens of the same block first."""
    (items,) = items_of((16 * 10,), 4, 1, 16, monkeypatch)
    order = [(item.block, item.token // 16) for item in items]
    assert order == [(block, tile) for block in range(4) for tile in range(8)] + [
        (block, tile) for block in range(4) for tile in (8, 9)
    ]


def problem(places: int, experts: int, n: int = 4096, k: int = 2048, bits: int = 4, group: int = 128) -> GroupedProblem:
    return GroupedProblem(places, experts, n, k, k, bits, "bf16", group)


@pytest.mark.parametrize("bits, group", [(4, 128), (4, 32), (8, 0), (8, 64)])
@pytest.mark.parametrize("k", [64, 192, 2048])
def test_every_layout_can_be_compiled_and_leaves_room_for_the_table(bits, group, k):
    for layout in layouts(problem(1024, 8, k=k, bits=bits, group=group)):
        config = layout.config
        assert config.can_implement() is None and not config.splits_k
        assert config.smem_bytes + TABLE_BYTES + schedule.SMEM_RESERVE <= MAX_SHARED_BYTES
        assert layout.units * config.unit_k == k


def test_the_usual_number_of_tiles_is_that_of_random_routing():
    generator = torch.Generator().manual_seed(1)
    for places, experts, tokens in ((16384, 8, 256), (1024, 8, 64), (4096, 256, 16), (512, 8, 64)):
        ids = torch.randint(0, experts, (200, places), generator=generator)
        rows = torch.stack([torch.bincount(each, minlength=experts) for each in ids]).double()
        tiles, halves = usual_tiles(problem(places, experts), tokens)
        assert tiles == pytest.approx(float((rows / tokens).ceil().mean()), rel=0.03)
        left = rows % tokens
        assert halves == pytest.approx(float(((left > 0) & (left <= tokens // 2)).double().mean()), abs=0.03)


def test_more_rows_an_expert_mean_wider_tiles():
    assert not has_many_rows(problem(64, 8)) and not has_many_rows(problem(1024, 256))
    assert has_many_rows(problem(256, 8)) and has_many_rows(problem(16384, 256))
    widths = [make_tiles(problem(8 * rows, 8, 28672, 4096)).config.tokens for rows in (16, 32, 128, 2048)]
    assert widths == sorted(widths) and widths[0] <= 32 and widths[-1] >= 128


# us of the first GEMM (w4, groups of 128, bf16) by tile, on an H200. Experts, those of a token, hidden and inner size.
MIXTRAL, QWEN3, DEEPSEEK_V3 = (8, 2, 4096, 14336), (128, 8, 2048, 768), (256, 8, 7168, 2048)
MEASURED = {
    (MIXTRAL, 64): {"128x1": 269, "64x1": 208, "64x2": 180, "32x2": 170, "16x2": 215},
    (MIXTRAL, 128): {"128x1": 248, "64x1": 211, "64x2": 191, "32x2": 275, "16x2": 370},
    (MIXTRAL, 512): {"256x1": 470, "128x1": 447, "64x1": 520, "64x2": 482},
    (MIXTRAL, 2048): {"256x1": 1782, "128x1": 1548, "64x1": 2078, "64x2": 1853},
    (MIXTRAL, 8192): {"256x1": 5461, "128x1": 5692, "64x1": 8446, "64x2": 7211},
    (QWEN3, 512): {"256x1": 173, "128x1": 116, "64x1": 102, "64x2": 94},
    (QWEN3, 2048): {"256x1": 248, "128x1": 233, "64x1": 265, "64x2": 237},
    (QWEN3, 8192): {"256x1": 693, "128x1": 661, "64x1": 873, "64x2": 772},
    (DEEPSEEK_V3, 2048): {"256x1": 2851, "128x1": 2577, "64x1": 3216, "64x2": 2863},
    (DEEPSEEK_V3, 8192): {"256x1": 7474, "128x1": 7185, "64x1": 9955, "64x2": 8116},
}


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_chosen_tile_is_nearly_the_fastest_measured(case):
    (experts, chosen, hidden, inner), tokens = case
    config = make_tiles(problem(tokens * chosen, experts, 2 * inner, hidden)).config
    times = MEASURED[case]
    assert times[f"{config.tokens}x{config.m_tiles}"] <= 1.05 * min(times.values())
