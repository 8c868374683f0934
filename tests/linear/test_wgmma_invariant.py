"""Batch-invariant products: one cut of K for every number of rows, and CTAs that have its parts one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cute_kernels.formats.weights import integers
from cute_kernels.gemm import choice
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma import invariant
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.results import MOST_SEQUENTIAL_M, RowExchange, SequentialSplitK
from cute_kernels.gemm.wgmma.schedule import estimate_us, make_tile_schedule
from simulator import Altered, PlainThread, stand_in
from tests import facts
from tests.each import each

NAME_ENDS = 27  # characters of a kernel's name before what the measured table has of it
ROWS = (1, 8, 17, 64, 100, 300, 1000, 8192)
SHAPES = [
    (4096, 4096), (4096, 14336), (8192, 8192), (1280, 8192), (8192, 1024), (5120, 12800), (28672, 4096), (200, 520),
    (64, 64), (128256, 4096),
]  # fmt: skip
FORMATS = [(4, 128, False, "bf16"), (4, 32, True, "fp16"), (8, 0, False, "bf16"), (4, 256, False, "bf16")]


def problem(m: int, n: int, k: int, bits=4, group_size=128, zero_point=False, dtype="bf16") -> LinearProblem:
    k_pad = -(-k // 64) * 64 if group_size == 0 else -(-k // max(group_size, 64)) * max(group_size, 64)
    return LinearProblem(m, n, k, k_pad, integers(bits, group_size, zero_point), dtype, batch_invariant=True)


def chosen(case: LinearProblem) -> TileSchedule:
    schedule = choice.chosen(case)
    assert isinstance(schedule, TileSchedule)
    return schedule


def begins(schedule: TileSchedule) -> list[int]:
    """The inputs that the parts of K of a tile begin at."""
    return [part * schedule.split_k_blocks * schedule.config.block_k for part in range(schedule.splits)]


@each("n, k", SHAPES)
@each("form", FORMATS)
def test_every_schedule_for_every_number_of_rows_begins_its_parts_at_the_same_inputs(n, k, form):
    found = set()
    for m in ROWS:
        schedules = list(invariant.schedules(problem(m, n, k, *form)))
        assert schedules
        for schedule in schedules:
            assert schedule.config.can_implement() is None
            assert not schedule.config.limbs and schedule.config.k_warpgroups == 1
            assert schedule.k_blocks * schedule.config.block_k == problem(m, n, k, *form).k_pad
            assert (schedule.splits - 1) * schedule.split_k_blocks < schedule.k_blocks
            cuts = schedule.whole and not schedule.config.reduction.sequential
            assert not (schedule.splits > 1 and cuts)  # a whole tile beside others in parts would have other bits
            found.add(tuple(begins(schedule)))
    assert len(found) == 1


def test_few_rows_of_small_layers_are_cut_and_those_of_large_ones_are_not():
    parts = {shape: invariant.parts_of_k(problem(1, *shape)) for shape in SHAPES}
    assert parts[4096, 14336] > 1 and parts[4096, 4096] > 1 and parts[1280, 8192] > 1
    assert parts[28672, 4096] == parts[128256, 4096] == parts[64, 64] == 1


def test_the_rows_do_not_decide_how_k_is_cut():
    for n, k in SHAPES:
        assert len({invariant.parts_of_k(problem(m, n, k)) for m in (1, 700)}) == 1


@pytest.mark.parametrize("n, k", SHAPES)
def test_the_fastest_by_the_model_is_chosen(n, k):
    for m in ROWS:
        case = problem(m, n, k)
        best = min(invariant.expected_us(case, one) for one in invariant.schedules(case))
        assert invariant.expected_us(case, chosen(case)) == best
        assert set(choice.candidates(case)) == set(invariant.schedules(case))


@pytest.mark.parametrize("n, k", [(4096, 4096), (4096, 14336), (8192, 8192), (5120, 12800), (28672, 4096)])
def test_many_rows_are_expected_to_take_little_longer_than_without(n, k):
    for m in (256, 1024, 4096):
        case = problem(m, n, k)
        plain = replace(case, batch_invariant=False)
        assert estimate_us(case, chosen(case)) < 1.3 * estimate_us(plain, make_tile_schedule(plain))


@pytest.mark.parametrize("m", [1, 16, 32])
def test_parts_of_many_inputs_have_long_k_blocks_where_a_cta_has_one_warpgroup(m):
    """Nobody decodes while it waits; of few inputs the first stage would come later, which costs as much."""
    long = chosen(problem(m, 4096, 14336)).config
    assert (long.block_k, long.warpgroups) == (invariant.LONG_BLOCK_K, 1)
    for n, k in ((4096, 4096), (8192, 8192)):
        assert chosen(problem(m, n, k)).config.block_k == 128


def has_long_k_blocks(n: int, k: int, m: int) -> bool:
    return chosen(problem(m, n, k)).config.block_k == invariant.LONG_BLOCK_K


def test_many_rows_have_no_partial_results_in_memory():
    for n, k in SHAPES:
        assert chosen(problem(8192, n, k)).workspace_words == 0


@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 96])
def test_few_rows_of_few_features_meet_in_clusters_of_four(m):
    """Whose CTAs have one tile each: only its parts are added in the order of parts in memory."""
    for n, k in ((1280, 8192), (1024, 8192), (512, 7168)):
        case = problem(m, n, k)
        assert invariant.parts_of_k(replace(case, m=1)) == 4
        config = chosen(case).config
        assert (config.cluster, config.block_tiles, config.k_warpgroups) == (4, 1, 1)
    assert not invariant.wide_configs(problem(m, 2048, 8192))  # clusters would not all have a place
    assert not invariant.wide_configs(problem(97, 1280, 8192))


@pytest.mark.parametrize(
    ("n", "k", "m", "tile_m"), [(1280, 8192, 128, 64), (1280, 8192, 256, 128), (1024, 8192, 192, 64)]
)
def test_more_rows_of_few_features_are_exchanged_in_clusters_of_four(n, k, m, tile_m):
    config = chosen(problem(m, n, k)).config
    assert config.reduction == RowExchange(4) and config.tile_m == tile_m


def test_clusters_of_four_are_faster_than_of_two_up_to_96_rows_as_measured():
    for (n, k, m), (plain, times) in FOUR.items():
        if m <= 96:
            schedule = chosen(problem(m, n, k))
            two = min(time for name, time in times.items() if name.endswith("/2"))
            assert measured(times, schedule) < 0.85 * two and measured(times, schedule) <= 1.15 * plain


def test_two_sets_of_accumulators_want_registers():
    tile: dict[str, Any] = {"block_k": 64, "reduction": SequentialSplitK()}
    most = WgmmaConfig(integers(4), "bf16", tile_m=MOST_SEQUENTIAL_M, **tile)
    assert most.can_implement() is None
    assert "two sets of accumulators" in str(replace(most, tile_m=MOST_SEQUENTIAL_M + 16).can_implement())


FOUR = facts.table("linear_invariant", "FOUR")
# Of these the rows between take the same kernels.
OTHERS = {
    shape: of for shape, of in facts.table("linear_invariant", "INVARIANT").items() if not has_long_k_blocks(*shape)
}
LONG = facts.table("linear_invariant", "LONG")
MEASURED = OTHERS | LONG | FOUR
MANY_ROWS_OF_FOUR = {(1280, 8192, m) for m in (384, 512)}  # which two parts suit better: 1.17 and 1.29 of plain


def measured(times: dict[str, float], schedule: Any) -> float:
    """Clusters with tiles of 64 rows were measured with one group of MMAs in flight, and have had two since. Large
    tiles were stored by TMA, which took up to 2 % less (docs/design/history/linear.md)."""
    name = schedule.config.name[NAME_ENDS:].replace("_s2f2r8_cluster2", "_s2r8_cluster2")
    stored = f"{name}_tmastore/{schedule.splits}"
    return 1.02 * times[stored] if stored in times else times[f"{name}/{schedule.splits}"]


@each("n, k, m", MEASURED)
def test_choices_are_near_the_fastest_measured_and_seldom_far_from_plain_products(n, k, m):
    plain, times = MEASURED[n, k, m]
    schedule = chosen(problem(m, n, k))
    us = measured(times, schedule)
    # Another number of parts would be another weight's.
    assert us <= 1.06 * min(time for name, time in times.items() if name.endswith(f"/{schedule.splits}"))
    assert us <= (1.31 if (n, k, m) in MANY_ROWS_OF_FOUR else 1.25) * plain


def test_most_products_take_at_most_fifteen_percent_more():
    found = []
    for (n, k, m), (plain, times) in MEASURED.items():
        schedule = chosen(problem(m, n, k))
        found.append(measured(times, schedule) / plain)
    assert sum(ratio > 1.155 for ratio in found) <= 7


def sequential(m: int, n: int, k: int, parts: int, num_sms: int) -> TileSchedule:
    case = replace(problem(m, n, k), num_sms=num_sms)
    schedule = invariant.schedule_of(case, invariant.sequential_configs(case)[0], parts)
    assert schedule is not None
    return schedule


@pytest.mark.parametrize(
    "m, n, k, parts, num_sms", [(300, 700, 2048, 3, 132), (1000, 1024, 2048, 4, 7), (128, 64, 1664, 5, 2)]
)
def test_a_cta_has_all_parts_of_its_tiles_the_last_one_first(m, n, k, parts, num_sms, run_on):
    pytest.importorskip("cutlass")
    from cute_kernels.gemm.wgmma import tiles
    from tests.linear import plain_work_tiles

    run_on(PlainThread())
    schedule = sequential(m, n, k, parts, num_sms)
    assert schedule.workspace_words == 0 and schedule.num_ctas <= num_sms
    shape = plain_work_tiles.shape_of(schedule)
    done = np.zeros((schedule.blocks, schedule.m_tiles, schedule.k_blocks), int)
    for cta in range(schedule.num_ctas):
        scheduler = stand_in(tiles.SequentialScheduler)(shape, cta, schedule.num_ctas)
        found = [scheduler.work_tile(i) for i in range(scheduler.first, scheduler.count, scheduler.stride)]
        assert len(found) % parts == 0
        for first in range(0, len(found), parts):
            tile = found[first : first + parts]
            assert len({(one.block, one.m_tile) for one in tile}) == 1
            assert [one.split for one in tile] == list(range(parts)) and {one.splits for one in tile} == {parts}
            numbers = [one.begin // schedule.split_k_blocks for one in tile]
            assert numbers == [parts - 1, *range(parts - 1)]
            for one in tile:
                assert one.begin < one.end
                done[one.block, one.m_tile, one.begin : one.end] += 1
    assert (done == 1).all()


@pytest.mark.parametrize("m, n, k, parts, num_sms", [(64, 4096, 4096, 4, 132), (200, 640, 2048, 3, 17)])
def test_parts_of_a_tile_run_in_one_round_and_who_adds_them_up_comes_last(m, n, k, parts, num_sms):
    """So of every prefix of the CTAs that has a place, the first one to wait has what it waits for."""
    case = replace(problem(m, n, k), num_sms=num_sms)
    schedules = [one for one in invariant.schedules_of(case, parts) if one.config.reduction.splits_k]
    beside = [one for one in schedules if one.config.cluster == 1]
    assert beside
    for schedule in beside:
        assert schedule.num_ctas % parts == 0 and schedule.whole == 0
        for index in range(parts - 1, schedule.num_work_tiles, parts):
            group = [(index - part) // schedule.num_ctas for part in range(parts)]
            assert len(set(group)) == 1


class Accumulators(list):
    """Of one thread."""

    def fill(self, value: float) -> None:
        self[:] = [value] * len(self)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_are_added_in_the_order_of_parts_that_meet_in_memory(parts, run_on):
    """The last one's accumulators, then the first's, the second's ...: fp32 sums depend on it."""
    pytest.importorskip("cutlass")
    from types import SimpleNamespace

    from cute_kernels.gemm.wgmma import reduction

    registers = {"make_rmem_tensor": lambda size, _: Accumulators([np.nan] * size)}
    run_on(Altered(PlainThread({reduction: {"corner_of": lambda *_: None}}), cute=registers))
    stored: list[list[float]] = []
    epilogue: Any = SimpleNamespace(
        dense=False, run=lambda *given: stored.append(list(given[4])), finish=lambda: None, prepare=lambda *_: None
    )
    config = next(iter(invariant.sequential_configs(problem(64, 4096, 4096))))
    works = reduction.SequentialReduction(config, epilogue, None)  # pyright: ignore[reportArgumentType]
    random = np.random.default_rng(parts)
    works.begin()
    for tile in range(3):
        of_k = (random.standard_normal((parts, config.thread_acc)) * 10.0 ** random.integers(-6, 7)).astype(np.float32)
        for split, part in enumerate([parts - 1, *range(parts - 1)]):
            work_tile = SimpleNamespace(split=split, splits=parts)
            works.finish(None, None, None, None, work_tile, Accumulators(of_k[part]), 0, 0)
        want = of_k[-1]
        for part in range(parts - 1):  # as `WorkspaceReduction.add_part`
            want = want + of_k[part]
        assert len(stored) == tile + 1
        assert (np.array(stored[tile], np.float32) == want).all()
