"""Work tiles that are found without divisions are those that divisions find."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.schedule import LinearProblem
from cute_kernels.gemm.wgmma import few_rows, tiles
from cute_kernels.gemm.wgmma.schedule import limb_configs, schedule_of
from cute_kernels.gemm.work import RECIPROCAL_BITS
from simulator import PlainThread, stand_in
from tests.linear import plain_work_tiles


@pytest.mark.parametrize("n", [64, 1000, 8192, 57344])
@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("whole", [0, 5])
def test_items_are_those_of_one_tile_of_rows(n: int, splits: int, whole: int, run_on):
    run_on(PlainThread())
    case = LinearProblem(16, n, 2688, 2688, integers(4), "bf16")
    config = next(one for one in limb_configs(case) if not one.dsmem_reduction)
    schedule = schedule_of(case, config, splits)
    assert schedule is not None
    schedule = replace(schedule, whole=min(whole, schedule.num_tiles_cut))
    reciprocal = -(-(1 << RECIPROCAL_BITS) // splits)
    shape = plain_work_tiles.shape_of(schedule, grid=plain_work_tiles.grid_of(schedule), split_reciprocal=reciprocal)
    known, found = (
        stand_in(tiles.TileScheduler)(shape, 0, 1),
        stand_in(few_rows.FewRowsTileScheduler)(shape, 0, 1, schedule.num_work_tiles),
    )
    assert schedule.num_work_tiles > 0
    for index in range(schedule.num_work_tiles):
        assert found.work_tile(index) == known.work_tile(index)
