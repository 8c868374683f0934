"""CTAs of a cluster that share activations by TMA multicast: who has which tile, what configurations there are, when
they are chosen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma import memory, tiles
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.gemm.wgmma.mainloops import Limbs, MmaSync
from cute_kernels.gemm.wgmma.results import RowExchange
from cute_kernels.gemm.wgmma.schedule import make_tile_schedule, schedule_of
from simulator import PlainThread
from tests.linear import plain_work_tiles

SHARED = WgmmaConfig(integers(4), "bf16", multicast=2)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"multicast": 3}, "multicast 3 is not one of 1, 2"),
        ({"tile_m": 64, "block_k": 128, "row_parts": 2}, "rows in one part"),
        ({"reduction": RowExchange()}, "RegisterWgmma with RowExchange"),
        ({"tile_m": 16, "block_k": 128, "mainloop": Limbs()}, "do not multicast activations to Limbs"),
        ({"tile_m": 16, "mainloop": MmaSync()}, "do not multicast activations to MmaSync"),
    ],
)
def test_what_cannot_be_shared_is_refused(options, reason):
    assert SHARED.can_implement() is None
    assert reason in str(replace(SHARED, **options).can_implement())


def tile_scheduler(schedule: TileSchedule, m: int, cta: int) -> tiles.TileScheduler:
    """Those of a CTA, as the kernel finds them."""
    shape = plain_work_tiles.shape_of(schedule, m=m)
    return tiles.dense_scheduler(schedule.config, shape, cta, schedule.num_ctas)  # type: ignore


@pytest.mark.parametrize(
    "m, n, k, num_sms", [(8192, 8192, 512, 132), (300, 1000, 2048, 132), (5000, 64, 512, 8), (2049, 4000, 128, 7)]
)
def test_sharers_have_neighbouring_blocks_of_the_same_rows_all_the_time(m, n, k, num_sms, run_on):
    """They take the same number of work tiles, each with one token tile, so that nobody waits for who has come to an
    end."""
    run_on(PlainThread())
    problem = LinearProblem(m, n, k, k, integers(4), "bf16", num_sms=num_sms)
    schedule = schedule_of(problem, replace(SHARED, num_stages=5))
    assert schedule is not None and schedule.num_ctas <= num_sms and schedule.num_ctas % 2 == 0
    blocks = -(-schedule.num_tiles // schedule.config.block_tiles)
    done = np.zeros((2 * schedule.blocks, schedule.m_tiles), int)
    for first in range(0, schedule.num_ctas, 2):
        both = [tile_scheduler(schedule, m, first + rank) for rank in range(2)]
        rounds = [range(scheduler.first, scheduler.count, scheduler.stride) for scheduler in both]
        assert rounds[0] == rounds[1] and len(rounds[0])
        for index in rounds[0]:
            own, other = (scheduler.work_tile(index) for scheduler in both)
            assert (own.m_tile, own.begin, own.end) == (other.m_tile, other.begin, other.end)
            assert (own.begin, own.end, own.split, own.splits) == (0, schedule.k_blocks, 0, 1)
            assert own.block % 2 == 0 and other.block == own.block + 1
            for work_tile in (own, other):
                done[work_tile.block, work_tile.m_tile] += 1
    assert (done == 1).all()
    assert schedule.blocks == -(-blocks // 2)  # a last block that is not there stores nothing


def test_each_stage_is_given_back_to_all_that_fill_it(run_on):
    counts = []
    arch = {
        "mbarrier_init": lambda barrier, count: counts.append((barrier, count)),
        "mbarrier_init_fence": lambda: None,
    }
    run_on(PlainThread(arch=arch))
    config = replace(SHARED, num_stages=3)
    found = memory.barriers_from(config, 0)  # type: ignore
    memory.init_barriers(config, SimpleNamespace(**found))  # type: ignore
    assert dict(counts) == {**dict.fromkeys(range(3), 2), **dict.fromkeys(range(3, 6), 2 * config.consumer_warps)}


@pytest.mark.parametrize("m", [1024, 2048, 4096])
def test_many_rows_are_shared_where_no_rounds_are_lost_by_it(m):
    for n, k in ((8192, 8192), (57344, 8192)):
        case = LinearProblem(m, n, k, k, integers(4), "bf16")
        assert make_tile_schedule(case).config.multicast == 2
    few = LinearProblem(1024, 4096, 4096, 4096, integers(4), "bf16")  # one round, longer by what meeting takes
    assert make_tile_schedule(few).config.multicast == 1
