"""Tiles of products of many rows: each part of each once, who waits for whom, waves, and what is chosen."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean, mean
from typing import TypeGuard

import numpy as np
import pytest

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.stream.schedule import StreamSchedule
from cute_kernels.gemm.weight import padded_shape
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.costs import cost_of
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import RegisterWgmma, ResidentLimbs
from cute_kernels.gemm.wgmma.results import Dsmem, RangeSplitK, RowExchange, WorkspaceSplitK
from cute_kernels.gemm.wgmma.schedule import (
    LARGE_TILE_M,
    candidate_configs,
    dsmem_configs,
    estimate_us,
    expected_us,
    is_short,
    make_tile_schedule,
    schedule_of,
    tile_schedules,
)
from cute_kernels.gemm.wgmma.stages import with_stages
from simulator import PlainThread, stand_in
from tests.each import each
from tests.linear import measured
from tests.linear.measured_between import BETWEEN
from tests.linear.measured_k_warpgroups import FORM_K_WARPGROUPS, K_WARPGROUPS, MORE_K_WARPGROUPS
from tests.linear.measured_tiles import RANGES, TILES

SHAPES = [(8192, 8192), (8192, 28672), (57344, 8192), (28672, 4096), (4096, 4096), (100, 128), (64, 64), (1000, 2048)]


def problem(
    m: int, n: int, k: int, *, bits=4, dtype="bf16", group_size=128, zero_point=False, **options
) -> LinearProblem:
    form = integers(bits, group_size, zero_point)
    return LinearProblem(m, n, k, -(-k // 128) * 128, form, dtype, **options)


def unscaled(m: int, n: int, k: int) -> LinearProblem:
    """As `problem`, of the dtype whose codes are still decoded, then scaled: bf16's were so when most was measured."""
    return problem(m, n, k, dtype="fp16")


def test_smaller_tiles_fill_the_last_wave_better():
    """The example of the Stream-K paper (Osama et al. 2023): 384 x 384 x 128 on 4 SMs."""
    small = problem(384, 384, 128, num_sms=4)
    config = WgmmaConfig(integers(4), "bf16", tile_m=128, block_k=64)
    scheduler = [schedule_of(small, replace(config, tile_m=tile_m)) for tile_m in (128, 64)]
    assert [(work_tile.num_work_tiles, work_tile.num_ctas) for work_tile in scheduler if work_tile] == [(9, 4), (18, 4)]


def test_only_the_last_round_is_cut():
    """448 tiles of 128 x 256 on 132 SMs: three rounds, and 52 tiles in halves for half a round."""
    case = problem(256, 57344, 8192)
    alone = [one for one in tile_schedules(case) if one.config.reduction.splits_k and one.config.multicast == 1]
    schedule = min(alone, key=lambda one: estimate_us(case, one))
    assert (schedule.config.tile_m, schedule.config.block_rows) == (256, 128)
    assert (schedule.whole, schedule.num_tiles_cut, schedule.splits) == (396, 52, 2)
    uncut = schedule_of(case, schedule.config)
    assert uncut and estimate_us(case, schedule) < 0.9 * estimate_us(case, uncut)
    assert schedule.workspace_words == 52 * 128 * 256


@each("n, k, m", measured.MICROSECONDS)
def test_the_model_finds_what_was_fastest(n, k, m):
    """Its choice of tile, and what it takes for the fastest of those measured, are within 5 % of the fastest."""
    case, times = unscaled(m, n, k), measured.MICROSECONDS[n, k, m]
    expected = {variant: estimate_us(case, measured_schedule(case, *variant)) for variant in times}
    assert times[min(times, key=expected.__getitem__)] <= 1.05 * min(times.values())
    # Of weights with zero points, which are not multiplied by limbs: those are measured below.
    chosen = make_tile_schedule(replace(case, format=integers(4, zero_points=True))).config
    if chosen.cluster > 1:
        return  # measured in another run, see below
    of_tile = [us for (*tile, _), us in times.items() if tile == [chosen.tile_m, chosen.block_rows]]
    assert min(of_tile) <= 1.05 * min(times.values())
    assert min(of_tile) <= 1.05 * measured.CUBLAS[n, k, m]


@each("n, k, m", measured.LIMBS)
def test_limbs_are_chosen_where_they_were_faster(n, k, m):
    """Within 7 % of the fastest, or within 1.1 us, which is about what times of small layers differ between runs."""
    before, _ = measured.LIMBS[n, k, m]  # and times of limbs that a launch before made, which there is no more
    times = measured.RESIDENT.get((n, k, m), {}) | measured.RESIDENT_LAYERS.get((n, k, m), (0, {}))[1]
    case = problem(m, n, k)
    served = chosen(case)
    us = times[variant_of(served)] if is_in_limbs(served) else before
    if interleaves_k(served):
        us = k_warpgroups_us(case, served)
    fastest = min([before, *times.values()])
    assert us <= max(1.07 * fastest, fastest + 1.1)
    for one in tile_schedules(case):
        us = times.get(variant_of(one)) if is_in_limbs(one) else None
        if us is not None and us <= 1.1 * fastest:
            assert estimate_us(case, one) == pytest.approx(us, rel=0.13), one


@each("n, k, m", measured.RESIDENT_LAYERS)
def test_limbs_of_large_blocks_are_chosen_where_they_were_faster(n, k, m):
    """Within 4 % of the fastest; what they are expected to take is within 13 % of what they took."""
    before, times = measured.RESIDENT_LAYERS[n, k, m]
    case = problem(m, n, k)
    served = chosen(case)
    us = times.get(variant_of(served), before) if is_in_limbs(served) else before
    assert us <= 1.04 * min(before, *times.values())
    for one in tile_schedules(case):
        if isinstance(one.config.mainloop, ResidentLimbs) and variant_of(one) in times:
            assert estimate_us(case, one) == pytest.approx(times[variant_of(one)], rel=0.13), one


def is_in_limbs(schedule: StreamSchedule | TileSchedule) -> TypeGuard[TileSchedule]:
    return isinstance(schedule, TileSchedule) and schedule.config.limbs


def variant_of(schedule: TileSchedule) -> tuple[int, int, int, bool]:
    """As `measured.LIMBS` and `measured.RESIDENT` name schedules."""
    config = schedule.config
    if isinstance(config.mainloop, ResidentLimbs):
        return config.block_rows, schedule.splits, config.k_warpgroups, config.mainloop.loads
    tile_m = max(config.tile_m, 16)  # of which eight were multiplied where there are no more
    return tile_m, config.block_rows, schedule.splits, config.reduction.dsmem


def test_few_rows_alone_are_in_limbs():
    case = problem(16, 28672, 4096)
    assert make_tile_schedule(case).config.limbs
    assert not any(one.config.limbs for one in tile_schedules(replace(case, m=25)))


@pytest.mark.parametrize(
    "tile_m, row_parts, possible", [(160, 5, True), (224, 7, True), (80, 2, False), (96, 5, False)]
)
def test_parts_of_rows_are_equal_powers_of_two(tile_m, row_parts, possible):
    """By which the device counts how many of them have rows."""
    reason = WgmmaConfig(integers(4), "bf16", tile_m=tile_m, row_parts=row_parts).can_implement() or ""
    assert ("parts of" in reason) != possible


@pytest.mark.parametrize("tile_m", RegisterWgmma.tile_m_sizes)
def test_what_is_stored_at_a_time_are_all_rows_of_a_tile_once(tile_m):
    config = WgmmaConfig(integers(4), "bf16", tile_m=tile_m)
    stored = [start + i for start, count in config.chunks for i in range(count)]
    assert stored == list(range(tile_m))
    assert all(count <= config.chunk_m and (count % 16 == 0 or tile_m == 8) for _, count in config.chunks)


@pytest.mark.parametrize("n_tiles", [1, 2])
@pytest.mark.parametrize("tile_m", RegisterWgmma.tile_m_sizes)
def test_every_vector_of_another_part_is_waited_for_once_and_no_other(tile_m, n_tiles):
    """Whoever waits for one that no thread stores waits for ever."""
    config = WgmmaConfig(integers(4), "bf16", tile_m=tile_m, n_tiles=n_tiles, reduction=WorkspaceSplitK())
    vectors, batch = config.thread_vectors, config.combine_batch
    waited = [first + i for first in range(0, vectors, batch) for i in range(batch)]
    assert waited == list(range(vectors)) and 4 * vectors == config.thread_acc


@each("n, k, m", measured.CLUSTERS)
def test_clusters_are_chosen_where_they_were_faster(n, k, m):
    times, fastest_other = measured.CLUSTERS[n, k, m]
    case = unscaled(m, n, k)
    found = {
        one.config.tile_m: one
        for one in tile_schedules(case)
        if one.config.cluster > 1 and not one.config.reduction.dsmem
    }
    for tile_m, us in times.items():
        assert estimate_us(case, found[tile_m]) == pytest.approx(us, rel=0.13), tile_m
    others = [one for one in tile_schedules(case) if not one.config.reduction.dsmem]
    chosen = min(others, key=lambda one: estimate_us(case, one)).config
    assert (chosen.cluster > 1) == (min(times.values()) < fastest_other)
    if chosen.cluster > 1:
        assert times[chosen.tile_m] == min(times.values())


def measured_schedule(case: LinearProblem, tile_m: int, rows: int, splits: int) -> TileSchedule:
    warpgroups = 2 if rows % 192 else 3
    config = WgmmaConfig(
        integers(4), case.dtype, tile_m=tile_m, warpgroups=warpgroups, n_tiles=rows // 64 // warpgroups
    )
    large = tile_m * config.n_tiles == 256
    schedule = schedule_of(
        case, with_stages(replace(config, block_k=64 if large else 128, reduction=WorkspaceSplitK())), splits
    )
    assert schedule is not None
    return schedule


@each("n, k, m", measured.MICROSECONDS)
def test_expected_times_are_near_the_measured_ones(n, k, m):
    """With many rows the GPU lowers its clock, which the model does not know."""
    case, times = unscaled(m, n, k), measured.MICROSECONDS[n, k, m]
    tolerance = 0.13 if m <= 256 else 0.2
    for variant, us in times.items():
        assert estimate_us(case, measured_schedule(case, *variant)) == pytest.approx(us, rel=tolerance), variant


@each("n, k, bits, m", measured.SCALED)
def test_codes_that_are_scaled_as_they_are_decoded_take_less(n, k, bits, m):
    """What the model takes for the fastest is within 7 % of it, and within the run's noise of cuBLAS where table or
    model choose; times are met within 17 %."""
    cublas, times = measured.SCALED[n, k, bits, m]
    case = problem(m, n, k, bits=bits)
    found = {
        (one.config.tile_m, one.config.block_rows, one.splits, one.config.cluster): one
        for one in tile_schedules(case)
        if not (one.config.limbs or one.config.reduction.dsmem or is_large(one) or measured_later(one))
    }
    expected = {variant: estimate_us(case, found[variant]) for variant in times}
    assert times[min(times, key=expected.__getitem__)] <= 1.07 * min(times.values())
    assert min(times.values()) <= 1.05 * cublas
    for variant, us in times.items():
        assert expected[variant] == pytest.approx(us, rel=0.17), variant


@each("n, k, bits, m", measured.LARGE)
def test_a_last_round_is_cut_as_was_fastest(n, k, bits, m):
    """The model's choice among large tiles that were measured is within 1 % of the fastest."""
    times = measured.LARGE[n, k, bits, m]
    case = problem(m, n, k, bits=bits)
    found = {
        (one.config.reduction.cuts_rows, one.config.multicast, one.splits): one
        for one in tile_schedules(case)
        if one.config.tile_m == LARGE_TILE_M and one.config.cluster == 1
    }
    expected = {variant: estimate_us(case, found[variant]) for variant in times}
    assert times[min(times, key=expected.__getitem__)] <= 1.01 * min(times.values())


def is_large(schedule: TileSchedule) -> bool:
    """Whether CTAs share activations by TMA multicast, or a last round is cut along rows of x."""
    return schedule.config.multicast > 1 or schedule.config.reduction.cuts_rows


def measured_later(schedule: TileSchedule) -> bool:
    """Whether CTAs have a share of the rows each, or a work range: measured in other runs."""
    return isinstance(schedule.config.reduction, RangeSplitK)


def between_us(n: int, k: int, bits: int, m: int) -> float:
    """What that of the schedules in `BETWEEN` took which the model expects least of."""
    case, found = problem(m, n, k, bits=bits), {}
    for one in tile_schedules(case):
        config = one.config
        if not (config.limbs or config.reduction.dsmem or is_large(one) or measured_later(one)):
            found[config.tile_m, config.block_rows, config.cluster, one.splits] = one
    _, times = BETWEEN[n, k, bits, m]
    # As launches tiles that are all cut take nothing besides; of short products the model knows times in graphs alone.
    model_us = expected_us if is_short(case) else estimate_us
    return times[min(times, key=lambda variant: model_us(case, found[variant]))]


@each("n, k, bits, m", BETWEEN)
def test_rows_in_between_are_served_by_about_the_fastest(n, k, bits, m):
    assert between_us(n, k, bits, m) <= 1.12 * min(BETWEEN[n, k, bits, m][1].values())


def test_rows_in_between_are_seldom_slower_than_cublas():
    """By 7 % at most, by more than 3 % in one of ten, and a sixth faster on average."""
    ratios = [between_us(*key) / cublas for key, (cublas, _) in BETWEEN.items()]
    assert max(ratios) <= 1.07
    assert sum(ratio > 1.03 for ratio in ratios) <= len(ratios) / 10
    assert geometric_mean(ratios) <= 0.84


def short_us(n: int, k: int, m: int) -> float:
    """What that of the schedules in `TILES` took which is taken, or else what it is expected to take."""
    case = problem(m, n, k)
    schedule = make_tile_schedule(case)
    tile = schedule.config.name.removeprefix("linear_wgmma_w4bf16_g128_"), schedule.splits
    return TILES[n, k, m][1].get(tile, expected_us(case, schedule))


@each("n, k, m", TILES)
def test_short_products_are_served_by_about_the_fastest(n, k, m):
    assert short_us(n, k, m) <= 1.12 * min(TILES[n, k, m][1].values())


def test_short_products_are_seldom_slower_than_cublas():
    """By 12 % at most, by more than 3 % in one of seven; half a percent slower than the fastest tile on average."""
    taken = {key: short_us(*key) for key in TILES}
    ratios = [us / TILES[key][0] for key, us in taken.items()]
    assert max(ratios) <= 1.12 and sum(ratio > 1.03 for ratio in ratios) <= len(ratios) / 7
    assert geometric_mean(ratios) <= 0.89
    assert mean(us / min(TILES[key][1].values()) for key, us in taken.items()) <= 1.006


def test_tiles_are_work_ranges_where_that_is_faster():
    """Never 2 % slower than the fastest measured, 0.2 % on average; 0.97 of the fastest tiles' in rounds."""
    taken, in_rounds = {}, {}
    for (n, k, m), (_, times) in RANGES.items():
        schedule = make_tile_schedule(problem(m, n, k))
        tile = schedule.config.name.removeprefix("linear_wgmma_w4bf16_g128_"), schedule.splits
        if tile in times:
            taken[n, k, m] = times[tile]
            in_rounds[n, k, m] = min(us for (name, _), us in times.items() if "ranges" not in name)
    assert len(taken) >= 0.9 * len(RANGES)
    regret = [us / min(RANGES[key][1].values()) for key, us in taken.items()]
    assert max(regret) <= 1.02 and mean(regret) <= 1.002
    assert geometric_mean(us / in_rounds[key] for key, us in taken.items()) <= 0.97


@pytest.mark.parametrize("n, k, bits, m", K_WARPGROUPS, ids=lambda number: str(number))
def test_warpgroups_take_turns_where_that_was_faster(n, k, bits, m):
    """The model takes the fastest tile of those measured, and meets its time within 16 %."""
    before, times = K_WARPGROUPS[n, k, bits, m]
    case = problem(m, n, k, bits=bits)
    schedule = chosen(case)
    assert interleaves_k(schedule)
    us = k_warpgroups_us(case, schedule)
    assert us == min(times.values()) < before
    assert estimate_us(case, schedule) == pytest.approx(us, rel=0.16)


OF_LIMBS_BEFORE = (4, "fp16", 128, False)


@each(
    "form, n, k, m",
    [(form, *size, m) for form, sizes in FORM_K_WARPGROUPS.items() for size, rows in sizes.items() for m in rows],
)
def test_warpgroups_take_turns_in_every_format_where_that_was_faster(form, n, k, m):
    """The model's choice is within 4 % of the fastest measured; it meets times of turns within 18 %.

    Few rows with zero points, or smaller groups, have come to limbs since, expected to be faster than all of them.
    """
    before, times = FORM_K_WARPGROUPS[form][n, k][m]
    bits, dtype, group_size, zero_point = form
    case = problem(m, n, k, bits=bits, dtype=dtype, group_size=group_size, zero_point=zero_point)
    schedule = chosen(case)
    newer = zero_point or group_size < 128
    if newer and isinstance(schedule, TileSchedule) and schedule.config.limbs:
        assert m <= 8 and estimate_us(case, schedule) < min(before, *times.values())
        return
    us = before
    if interleaves_k(schedule):
        us = times[schedule.config.tile_m, schedule.config.row_parts, schedule.config.block_rows]
        assert estimate_us(case, schedule) == pytest.approx(us, rel=0.18)
    # Of these the times before were those of limbs that a launch before made, which there is no more.
    gone = form == OF_LIMBS_BEFORE and interleaves_k(schedule)
    fastest: float = min([*times.values(), *([] if gone else [before])])
    assert us <= 1.04 * fastest


@each("form, tile", [(form, tile) for form, tiles in MORE_K_WARPGROUPS.items() for tile in tiles])
def test_as_many_warpgroups_take_turns_as_was_faster(form, tile):
    """Three where those took 2 % less time on average, two where three took longer; in between either."""
    bits, dtype, group_size, zero_point = form
    times = MORE_K_WARPGROUPS[form][tile]
    ratio = mean(three / two for two, three in times.values())
    k_warpgroups = {3} if ratio < 0.98 else {2} if ratio > 1.005 else {2, 3}
    for n, k, m in times:
        case = problem(m, n, k, bits=bits, dtype=dtype, group_size=group_size, zero_point=zero_point)
        found = {(one.tile_m, one.row_parts, one.block_rows): one.k_warpgroups for one in dsmem_configs(case)}
        assert found[tile] in k_warpgroups


@pytest.mark.parametrize("k, k_pad, group_size", [(520, 576, 64), (520, 576, 0), (520, 544, 32), (600, 640, 128)])
def test_turns_take_whole_k_blocks_of_the_padded_inputs(k, k_pad, group_size):
    """Of small groups, and of a scale a row, K is padded to fewer inputs than a k block has."""
    case = LinearProblem(16, 200, k, k_pad, integers(4, group_size), "bf16")
    found = [one for one in tile_schedules(case) if interleaves_k(one)]
    assert bool(found) == (k_pad % 128 == 0)
    assert all(one.k_blocks * one.config.block_k == k_pad for one in found)


def interleaves_k(schedule: StreamSchedule | TileSchedule) -> TypeGuard[TileSchedule]:
    """Whether `K_WARPGROUPS` has times of such schedules."""
    return isinstance(schedule, TileSchedule) and schedule.config.k_warpgroups > 1 and not schedule.config.limbs


def k_warpgroups_us(case: LinearProblem, schedule: StreamSchedule | TileSchedule) -> float:
    """What a tile took with as many rows, or with the fewest beyond that were measured."""
    assert interleaves_k(schedule)
    config = schedule.config
    tile = config.tile_m, config.row_parts, config.block_rows
    rows = [
        m
        for (*weight, m), (_, times) in K_WARPGROUPS.items()
        if weight == [case.n, case.k, case.format.bits] and tile in times
    ]
    return K_WARPGROUPS[case.n, case.k, case.format.bits, min(m for m in rows if m >= case.m)][1][tile]


def test_rows_that_are_not_there_are_counted():
    """Of a TMA tile of 256 rows TMA fills in the missing half, which takes longer than the products: measured with
    128."""
    case = problem(128, 57344, 8192)
    large, small = (measured_schedule(case, tile_m, 128, 2) for tile_m in (256, 128))
    k_block_clocks = cost_of(large.config).k_block_clocks
    assert k_block_clocks(case, large) > 1.2 * k_block_clocks(replace(case, m=256), large)
    assert k_block_clocks(case, small) == k_block_clocks(replace(case, m=256), replace(small, m_tiles=2))


@each("n, k", SHAPES)
@each("m", [17, 64, 128, 256, 1000, 8192])
@each("bits", [4, 8])
def test_something_is_chosen_and_can_be_compiled(m, n, k, bits):
    case = problem(m, n, k, bits=bits)
    schedule = make_tile_schedule(case)
    assert schedule.config.can_implement() is None
    assert schedule.num_ctas <= case.num_sms
    assert schedule.k_blocks * schedule.config.block_k == case.k_pad
    assert (
        (schedule.splits - 1) * schedule.split_k_blocks < schedule.k_blocks <= schedule.splits * schedule.split_k_blocks
    )
    assert expected_us(case, schedule) == min(expected_us(case, other) for other in tile_schedules(case))


@pytest.mark.parametrize("group_size", [0, 32, 64, 128, 256])
@pytest.mark.parametrize("bits, dtype, zero_point", [(4, "bf16", False), (8, "fp16", True), (8, "bf16", True)])
def test_every_format_has_configurations_for_any_number_of_rows(bits, dtype, group_size, zero_point):
    for m in (17, 40, 100, 200, 5000):
        k_pad = max(group_size, 64) * 3
        case = LinearProblem(m, 640, k_pad, k_pad, integers(bits, group_size, zero_point), dtype)
        assert len(candidate_configs(case)) >= 1


@pytest.mark.parametrize("whole", [0, 1, 7])
@pytest.mark.parametrize(
    "m, n, splits, num_ctas", [(300, 700, 1, 132), (5000, 700, 1, 8), (70, 4096, 5, 12), (64, 64, 3, 2)]
)
def test_all_parts_of_all_tiles_are_computed_once(m, n, splits, num_ctas, whole, run_on):
    pytest.importorskip("cutlass")
    from cute_kernels.gemm.wgmma import tiles
    from tests.linear import plain_work_tiles

    run_on(PlainThread())
    schedule = schedule_of(
        problem(m, n, 2048), WgmmaConfig(integers(4), "bf16", tile_m=64, reduction=WorkspaceSplitK()), splits
    )
    assert schedule is not None
    whole = min(whole, schedule.num_tiles_cut)
    schedule = replace(schedule, whole=whole)
    shape = plain_work_tiles.shape_of(schedule)
    done = np.zeros((schedule.blocks, schedule.m_tiles, schedule.k_blocks), int)
    parts: dict[tuple[int, int], int] = {}
    for cta in range(num_ctas):
        scheduler = stand_in(tiles.TileScheduler)(shape, cta, num_ctas)
        assert scheduler.count == schedule.num_work_tiles
        for index in range(scheduler.first, scheduler.count, scheduler.stride):
            work_tile = scheduler.work_tile(index)
            assert work_tile.begin < work_tile.end
            done[work_tile.block, work_tile.m_tile, work_tile.begin : work_tile.end] += 1
            assert (
                (work_tile.splits == splits)
                if index >= whole
                else (work_tile.begin, work_tile.end) == (0, schedule.k_blocks)
            )
            if work_tile.split:  # what it waits for comes from the work tiles just before
                before = scheduler.work_tile(index - 1)
                assert (before.block, before.m_tile, before.end) == (work_tile.block, work_tile.m_tile, work_tile.begin)
            if work_tile.splits > 1:  # parts of the workspace are each tile's own
                assert parts.setdefault((work_tile.block, work_tile.m_tile), work_tile.number) == work_tile.number
    assert sorted(parts.values()) == list(range(schedule.num_tiles_cut if splits > 1 else 0))
    assert (done == 1).all()


@pytest.mark.parametrize(
    "n, k, tile_m, cluster", [(700, 2048, 16, 2), (4096, 4096, 16, 3), (64, 384, 32, 3), (64, 512, 32, 4)]
)
def test_ctas_that_push_have_one_part_of_a_tile_each(n, k, tile_m, cluster, run_on):
    pytest.importorskip("cutlass")
    from cute_kernels.gemm.wgmma import tiles
    from tests.linear import plain_work_tiles

    run_on(PlainThread())
    config = WgmmaConfig(integers(4), "bf16", tile_m=tile_m, row_parts=2, block_k=128, reduction=Dsmem(cluster))
    schedule = schedule_of(problem(tile_m, n, k), config, cluster)
    assert schedule is not None and schedule_of(problem(tile_m + 1, n, k), config, cluster) is None
    shape = plain_work_tiles.shape_of(schedule)
    done = np.zeros((schedule.blocks, schedule.k_blocks), int)
    for cta in range(schedule.num_ctas):
        scheduler = stand_in(tiles.ClusterTileScheduler)(shape, cta, cluster)
        (index,) = range(scheduler.first, scheduler.count, scheduler.stride)
        work_tile = scheduler.work_tile(index)
        assert work_tile.begin < work_tile.end and (work_tile.split, work_tile.splits) == (cta % cluster, cluster)
        assert (work_tile.block, work_tile.m_tile) == (cta // cluster, 0)
        done[work_tile.block, work_tile.begin : work_tile.end] += 1
    assert (done == 1).all()


@pytest.mark.parametrize("n, m, num_ctas", [(1280, 64, 80), (1024, 33, 64), (1536, 17, 96), (1280, 96, 80)])
def test_few_features_are_shared_out_to_clusters_of_four(n, m, num_ctas):
    found = [one for one in tile_schedules(problem(m, n, 8192)) if one.config.cluster == 4]
    wide = [one for one in found if one.config.reduction.dsmem]
    assert wide and (len(found) > len(wide)) == (m > 64)
    assert all((one.num_ctas, one.split_k_blocks, one.workspace_words) == (num_ctas, 16, 0) for one in wide)


# us, launched, cold L2, an H200, 2026-11-27 (bench/results/step_study.json): (n, k, m): (now, the fastest other one)
NOW_CHOSEN = {
    (1280, 8192, 32): (9.65, 11.65), (1280, 8192, 64): (11.62, 13.1), (1280, 8192, 96): (13.42, 15.2),
    (1024, 8192, 64): (11.28, 13.01), (1536, 4096, 64): (9.71, 10.83),
    # Rows exchanged, another H200: beside what was chosen before.
    (1280, 8192, 97): (14.33, 15.72), (1280, 8192, 128): (14.5, 16.53), (1536, 8192, 128): (14.58, 16.32),
    (1024, 8192, 192): (15.03, 16.15), (1280, 4096, 128): (11.4, 12.96), (512, 7168, 256): (13.56, 14.6),
    (4096, 14336, 1): (13.97, 15.15), (4096, 14336, 2): (14.24, 15.2),
}  # fmt: skip


@pytest.mark.parametrize("n, k, m", NOW_CHOSEN, ids=str)
def test_clusters_of_four_and_long_rows_at_once_are_chosen_where_they_were_faster(n, k, m):
    case, (us, other) = problem(m, n, k), NOW_CHOSEN[n, k, m]
    served = chosen(case)
    assert isinstance(served, TileSchedule) and us < other
    assert served.config.cluster == 4 or (m <= 2 and served.config.mainloop.k_blocks == 64)
    assert estimate_us(case, served) == pytest.approx(us, rel=0.1 if m > 96 else 0.06)


@pytest.mark.parametrize("n, m, num_ctas", [(1280, 97, 80), (1280, 128, 80), (1024, 384, 96), (512, 300, 80)])
def test_more_rows_are_exchanged_in_clusters_of_four(n, m, num_ctas):
    """Whole rows of 128 features, each CTA its quarter of a tile's; all clusters have a place at once."""
    found = [one for one in tile_schedules(problem(m, n, 8192)) if isinstance(one.config.reduction, RowExchange)]
    wide = [one for one in found if one.config.cluster == 4]
    assert num_ctas in {one.num_ctas for one in wide} and max(one.num_ctas for one in wide) <= 99
    assert all((one.split_k_blocks, one.workspace_words, one.config.own_m % 16) == (16, 0, 0) for one in wide)


@pytest.mark.parametrize("n, m", [(1600, 64), (1600, 128), (8192, 64), (1600, 16), (1280, 512)])
def test_other_layers_have_no_clusters_of_four(n, m):
    """More features would want clusters on more than three quarters of the SMs."""
    assert all(one.config.cluster < 4 for one in tile_schedules(problem(m, n, 8192)))


@pytest.mark.parametrize("k, whole", [(8192, False), (8448, True), (14336, True), (16384, True), (16640, False)])
def test_limbs_of_long_rows_are_made_at_once_where_there_is_room(k, whole):
    found = [one for one in candidate_configs(problem(1, 4096, k)) if isinstance(one.mainloop, ResidentLimbs)]
    assert any(one.mainloop.k_blocks == 64 for one in found) == whole
    assert all(schedule_of(problem(1, 4096, k), one, 2) is not None for one in found if one.mainloop.k_blocks == 64)


@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("k", [520, 576, 2048, 2112])
@pytest.mark.parametrize("m", [1, 5, 8])
def test_no_schedule_leaves_a_part_of_k_out(group_size, k, m):
    k_pad = padded_shape((200, k), group_size)[1]
    case = LinearProblem(m, 200, k, k_pad, integers(4, group_size), "bf16")
    found = list(tile_schedules(case))
    assert found and all(one.k_blocks * one.config.block_k == k_pad for one in found)
    assert any(one.config.limbs for one in found) == (k_pad % 128 == 0)
