"""Which tiles of which experts CTAs compute: the device's own code, thread by thread, and what the host makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.architecture import HOPPER
from cute_kernels.device.division import Divisor
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts.schedule import MAX_EXPERTS, usual_rows
from cute_kernels.gemm.experts.wgmma import schedule, tiles
from cute_kernels.gemm.experts.wgmma.schedule import (
    ENTRY_BYTES,
    TABLE_BYTES,
    TABLE_WARPS,
    estimate_clocks,
    layouts,
    make_tiles,
    usual_tiles,
)
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.wgmma.config import M_TILE_BAND
from cute_kernels.gemm.wgmma.consumers import in_loop_of
from cute_kernels.gemm.wgmma.costs import CLOCKS_PER_US, START_CLOCKS
from cute_kernels.gemm.wgmma.mainloops import MmaSync
from simulator import stand_in
from tests.each import each
from tests.moe import measured
from tests.moe.machine import Machine

TABLE, K_BLOCKS = 64, 5

CASES = {
    "few and many rows": (8, (3, 0, 70, 16, 17, 0, 1, 33)),
    "one expert has all": (8, (0, 0, 0, 0, 0, 200, 0, 0)),
    "bands": (1, (16 * 21 + 3,)),
    "no rows": (3, (0, 0, 0)),
    "more experts than lanes": (100, tuple(17 * (i % 7 == 3) for i in range(100))),
    "as many experts as there may be": (MAX_EXPERTS, tuple(int(i in (0, 15, 16, 511)) for i in range(MAX_EXPERTS))),
}


def tile_scheduler(counts: tuple[int, ...], blocks: int, num_ctas: int, tokens: int, run_on) -> list[list[Any]]:
    """What each CTA takes, in its order."""
    machine = Machine()
    run_on(machine)
    offsets = machine.put(torch.tensor([0, *counts]).cumsum(0).int())
    numbers = dict.fromkeys(("m", "n", "k", "num_tiles", "scale_groups", "whole", "activation", "out_kind"), 0)
    shape = stand_in(tiles.GroupedTileSizes)(
        **numbers,
        k_blocks=K_BLOCKS,
        splits=1,
        split_k_blocks=K_BLOCKS,
        grid=None,
        num_experts=len(counts),
        offsets=offsets,
        blocks=blocks,
        band_tiles=Divisor.of(M_TILE_BAND * blocks),
        num_ctas=Divisor.of(num_ctas),
    )
    found: list[list[Any]] = [[] for _ in range(num_ctas)]

    def work() -> None:
        warp, lane, cta = machine.warp, machine.lane, machine.cta.block[0]
        tiles.fill_table(TABLE, offsets, shape, warp, lane, tokens)
        machine.cute().arch.sync_threads()
        count = machine.ptx().load_shared(TABLE + MAX_EXPERTS * ENTRY_BYTES, 0)
        scheduler = stand_in(tiles.GroupedTileScheduler)(shape, cta, num_ctas, count, TABLE, lane, tokens)
        for index in range(scheduler.first, scheduler.count, scheduler.stride):
            work_tile = scheduler.work_tile(index)
            if (warp, lane) == (3, 5):
                found[cta].append(work_tile)

    machine.run(work, [(cta, 0, 0) for cta in range(num_ctas)], TABLE_WARPS * 32)
    return found


@pytest.mark.parametrize("experts, counts", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("blocks, num_ctas, tokens", [(3, 2, 16), (1, 5, 16), (2, 3, 48)])
def test_every_tile_of_every_expert_is_computed_once(experts, counts, blocks, num_ctas, tokens, run_on):
    found = tile_scheduler(counts, blocks, num_ctas, tokens, run_on)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    wanted = {
        (expert, block, starts[expert] + first)
        for expert in range(experts)
        for first in range(0, counts[expert], tokens)
        for block in range(blocks)
    }
    taken = [(work_tile.expert, work_tile.block, work_tile.token) for scheduler in found for work_tile in scheduler]
    assert len(taken) == len(set(taken)) and set(taken) == wanted
    for work_tile in (work_tile for scheduler in found for work_tile in scheduler):
        assert work_tile.end_token == starts[work_tile.expert + 1] and (work_tile.begin, work_tile.end) == (0, K_BLOCKS)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_tiles_of_an_expert_share_its_weights(run_on):
    """Items that run at the same time are tiles of tokens of the same block first."""
    (scheduler,) = tile_scheduler((16 * 10,), 4, 1, 16, run_on)
    order = [(work_tile.block, work_tile.token // 16) for work_tile in scheduler]
    assert [block for block, _ in order] == [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8 + [0] * 2 + [1] * 2 + [2] * 2 + [
        3
    ] * 2
    for first in range(0, 32, 8):
        assert sorted(tile for _, tile in order[first : first + 8]) == list(range(8))
    for first in range(32, 40, 2):
        assert sorted(tile for _, tile in order[first : first + 2]) == [8, 9]


@pytest.mark.parametrize("rows, blocks, num_ctas", [((24, 24, 24), 8, 4), ((40,) * 6, 6, 6), ((24,) * 5, 12, 6)])
def test_no_cta_gets_every_short_tile(rows, blocks, num_ctas, run_on):
    """Of tiles of 16 rows, experts' last ones have 8; counted through they would all be the same CTAs'."""
    loads = [
        sum(min(16, work_tile.end_token - work_tile.token) for work_tile in scheduler)
        for scheduler in tile_scheduler(rows, blocks, num_ctas, 16, run_on)
    ]
    assert max(loads) - min(loads) <= 16


def problem(places: int, experts: int, n=4096, k=2048, bits=4, group=128, zero=False) -> GroupedProblem:
    return GroupedProblem(places, experts, n, k, k, integers(bits, group, zero), "bf16")


@pytest.mark.parametrize("bits, group", [(4, 128), (4, 32), (8, 0), (8, 64)])
@pytest.mark.parametrize("k", [64, 192, 2048])
def test_every_layout_can_be_compiled_and_leaves_room_for_the_table(bits, group, k):
    for layout in layouts(problem(1024, 8, k=k, bits=bits, group=group)):
        config = layout.config
        assert config.can_implement() is None and not config.reduction.splits_k
        assert config.smem_bytes + TABLE_BYTES + schedule.SMEM_RESERVE <= HOPPER.shared_bytes
        assert layout.k_blocks * config.block_k == k


def test_the_usual_number_of_tiles_is_that_of_random_routing():
    generator = torch.Generator().manual_seed(1)
    for places, experts, tokens in ((16384, 8, 256), (1024, 8, 64), (4096, 256, 16), (512, 8, 64)):
        ids = torch.randint(0, experts, (200, places), generator=generator)
        rows = torch.stack([torch.bincount(each, minlength=experts) for each in ids]).double()
        left = rows % tokens
        for parts in (1, 2, 4):
            counts = usual_tiles(problem(places, experts), tokens, parts)
            assert len(counts) == parts and sum(counts) == pytest.approx(float((rows / tokens).ceil().mean()), rel=0.03)
            for part, count in enumerate(counts[:-1]):
                reach = (left * parts > tokens * part) & (left * parts <= tokens * (part + 1))
                assert count == pytest.approx(float(reach.double().mean()), abs=0.03)


def test_more_rows_an_expert_mean_wider_tiles():
    widths = [make_tiles(problem(8 * rows, 8, 28672, 4096)).config.tile_m for rows in (16, 32, 128, 2048)]
    assert widths == sorted(widths) and widths[0] <= 32 and widths[-1] >= 128


def measured_problem(case: measured.Case, zero: bool = True) -> GroupedProblem:
    """``zero``: with zero points, of which codes are decoded as those were that the first tables are of."""
    (experts, chosen, hidden, inner), tokens, product = case
    n, k = ((2 * inner, hidden), (hidden, inner))[product - 1]
    return problem(tokens * chosen, experts, n, k, zero=zero)


def measured_layouts(case: measured.Case, times: Mapping[Any, float], zero: bool = True) -> list[tuple[float, float]]:
    """(expected, measured) microseconds of every tile that was measured."""
    grouped = measured_problem(case, zero)
    found = [(layout, times.get(measured.tile_of(layout.config))) for layout in layouts(grouped)]
    return [
        ((estimate_clocks(grouped, layout) + START_CLOCKS) / CLOCKS_PER_US, us)
        for layout, us in found
        if us is not None
    ]


@pytest.mark.parametrize("case", measured.MICROSECONDS, ids=str)
def test_the_chosen_tile_is_nearly_the_fastest_measured(case):
    times = measured.MICROSECONDS[case]
    _, us = min(measured_layouts(case, times))
    assert us <= 1.02 * min(times.values())
    chosen = measured.tile_of(make_tiles(measured_problem(case)).config)
    elsewhere = {16, *next(iter(measured.SIZES.values()))}
    assert chosen in times or chosen[0] in elsewhere, "what is chosen was measured, here or in another run"


@each("bits, model, tokens, product", measured.SIZES)
def test_the_chosen_size_of_a_large_tile_is_nearly_the_fastest_measured(bits, model, tokens, product):
    """Within 5 %."""
    times = measured.SIZES[bits, model, tokens, product]
    grouped = replace(measured_problem((model, tokens, product), zero=False), format=integers(bits))
    expected = {one.config.tile_m: estimate_clocks(grouped, one) for one in layouts(grouped) if not one.config.limbs}
    assert times[min(times, key=lambda size: expected[size])] <= 1.05 * min(times.values())


@each("case", measured.MICROSECONDS)
def test_expected_times_are_near_the_measured_ones(case):
    times = measured.MICROSECONDS[case]
    for expected, us in measured_layouts(case, times):
        if us <= 1.1 * min(times.values()):
            assert expected == pytest.approx(us, rel=0.15)


@pytest.mark.parametrize("case", measured.FEW_ROWS, ids=str)
def test_with_few_rows_the_chosen_tile_is_nearly_the_fastest(case):
    times: Any = measured.FEW_ROWS[case]
    config = make_tiles(measured_problem(case)).config
    us = times[measured.tile_of(config)]
    assert isinstance(config.mainloop, MmaSync) and us <= 1.05 * min(times.values())
    if usual_rows(measured_problem(case)) > 7:  # of fewer the model's numbers of tiles are too large
        for expected, us in measured_layouts(case, times):
            if us <= 1.1 * min(times.values()):
                assert expected == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize("case", measured.SYMMETRIC, ids=str)
def test_weights_without_zero_points_are_served_by_what_is_nearly_the_fastest(case):
    grouped, times = measured_problem(case, zero=False), measured.SYMMETRIC[case]
    fastest = min(times.values())
    assert times[measured.tile_of(make_tiles(grouped).config)] <= 1.09 * fastest
    for expected, us in measured_layouts(case, times, zero=False) if grouped.places >= 2 * grouped.num_experts else ():
        if us <= 1.1 * fastest:
            assert expected == pytest.approx(us, rel=0.25)


def test_limbs_are_of_weights_without_zero_points_in_large_groups():
    def tiles_of(**options: Any) -> list[int]:
        return [layout.config.tile_m for layout in layouts(problem(64, 8, **options)) if layout.config.limbs]

    assert tiles_of() == tiles_of(group=256) == [16, 32, 64]
    assert not tiles_of(zero=True) and not tiles_of(bits=8) and not tiles_of(group=64) and not tiles_of(group=0)


@pytest.mark.parametrize("layout", layouts(problem(1024, 8)), ids=lambda layout: layout.config.name)
def test_a_tile_is_multiplied_by_the_narrowest_loop_that_takes_its_rows(layout):
    config = layout.config
    for present in range(1, config.row_parts + 1):
        enough = [count for count in config.loop_parts if count >= present]
        # As `multiply_parts` asks, one loop after the other; the last takes what is left.
        taken = next((one for one in config.loop_parts[:-1] if in_loop_of(config, present, one)), config.row_parts)
        assert taken == min(enough)
    assert config.loop_parts[-1] == config.row_parts and len(config.loop_parts) <= (6 if config.limbs else 4)


def test_synchronous_tiles_are_of_few_rows_only():
    few = [layout.config for layout in layouts(problem(64, 8)) if isinstance(layout.config.mainloop, MmaSync)]
    assert [(config.tile_m, config.warpgroups) for config in few] == [(16, 2)]
    assert "more than the 32 of" in str(replace(few[0], tile_m=64).can_implement())
    assert "warpgroups 3" in str(replace(few[0], warpgroups=3).can_implement())
    assert not isinstance(make_tiles(problem(24 * 8, 8)).config.mainloop, MmaSync)
