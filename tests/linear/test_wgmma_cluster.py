"""CTAs of a cluster that have the parts of K of a tile: whose accumulators meet where, lane by lane in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma import epilogue, places, reduction, tiles
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.results import RowExchange
from cute_kernels.gemm.wgmma.schedule import tile_schedules
from cute_kernels.gemm.wgmma.stages import with_stages
from layouts import banks
from simulator import PlainThread, stand_in
from tests.attention import warp as machine
from tests.linear import plain_work_tiles
from tests.linear.warpgroup import WarpgroupWarp

STAGES = 1024
CTA_BYTES = 1 << 18  # of a CTA's window of the cluster's shared memory

CONFIGS = [
    WgmmaConfig(integers(4), "bf16", tile_m=256, reduction=RowExchange()),
    WgmmaConfig(integers(4), "bf16", tile_m=128, block_k=128, reduction=RowExchange()),
    WgmmaConfig(integers(8), "bf16", tile_m=64, block_k=128, reduction=RowExchange()),
    WgmmaConfig(integers(4), "bf16", tile_m=32, block_k=128, reduction=RowExchange()),
    WgmmaConfig(integers(4), "bf16", tile_m=128, block_k=128, reduction=RowExchange(4)),
    WgmmaConfig(integers(8), "bf16", tile_m=64, block_k=128, reduction=RowExchange(4)),
]


class ClusterWarp(WarpgroupWarp):
    """A warp of a cluster, all of whose memories lie one behind the other; its own begins at ``base``."""

    base = 0

    def store_shared(self, address, offset, values):
        super().store_shared(address + self.base, offset, values)

    def address_in(self, address, rank):
        return address + rank * CTA_BYTES

    def load_in_cluster(self, address, num_words):
        return self.load_shared_vector(address, 0, num_words)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_each_cta_has_all_of_k_of_its_share_of_the_tokens(config: WgmmaConfig, run_on):
    config = with_stages(config)
    assert config.can_implement() is None
    cluster, warps = config.cluster, config.consumer_warps
    gpu = ClusterWarp(np.full(cluster * CTA_BYTES, 0xFF, np.uint8), np.zeros(0, np.uint8))  # NaN where nothing is
    run_on(gpu)
    subject = reduction.RowReduction(config, epilogue.TileEpilogue(config), places.DensePlaces(config))
    generator = np.random.default_rng(0)
    parts = generator.standard_normal((cluster, warps, config.thread_acc, 32))
    parts = (parts * 10.0 ** generator.integers(-3, 4, parts.shape)).astype(np.float32)
    wanted = parts[-1]
    for part in parts[:-1]:  # in the order of `WorkspaceReduction.add_part`
        wanted = wanted + part
    acc = [[[machine.Float32(value) for value in warp] for warp in cta] for cta in parts]
    starts = [
        [subject.shares_place(store_of(config, warp), STAGES) for warp in range(warps)]
    ] * cluster  # the same in all CTAs
    for rank in range(cluster):
        gpu.base = rank * CTA_BYTES
        for warp in range(warps):
            for share in range(cluster):
                if share != rank:
                    subject.publish_share(starts[rank][warp], acc[rank][warp], share)
            subject.keep_share(acc[rank][warp], rank)
    own = config.own_m // 2
    for rank in range(cluster):
        for warp in range(warps):
            subject.load_shares(starts[rank][warp], acc[rank][warp], rank)
            found = np.stack([np.asarray(value) for value in acc[rank][warp][:own]])
            assert np.array_equal(found, wanted[warp, rank * own : (rank + 1) * own])
    written = [place % CTA_BYTES for access in gpu.accesses for place in access.addresses]
    assert STAGES <= min(written) and max(written) + 16 <= STAGES + config.num_stages * config.x_stage_bytes
    for access in gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


def store_of(config: WgmmaConfig, warp: int) -> epilogue.Store:
    group, row_warp = divmod(warp, 4)
    return stand_in(epilogue.Store)(0, group, row_warp * 32 + machine.LANES, row_warp, machine.LANES)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"tile_m": 16}, "16 rows for each CTA"),
        ({"tile_m": 128, "reduction": RowExchange(3)}, "cluster 3 is not one of 2"),
        ({"tile_m": 128, "n_tiles": 2}, "one tile a warpgroup"),
        ({"tile_m": 256, "num_stages": 3}, "do not fit into the stages"),
    ],
)
def test_clusters_that_cannot_be_are_refused(options, reason):
    assert reason in str(WgmmaConfig(integers(4), "bf16", **{"reduction": RowExchange(), **options}).can_implement())


@pytest.mark.parametrize("m, n, k", [(128, 4096, 4096), (100, 1000, 1152), (256, 8192, 8192), (300, 200, 2048)])
def test_the_ctas_of_a_cluster_have_the_parts_of_one_tile(m, n, k, run_on):
    """Each CTA has one work tile, no part of K is empty, and all run at once: nobody waits for who has not begun."""
    run_on(PlainThread())
    problem = LinearProblem(m, n, k, k, integers(4), "bf16")
    schedules = [schedule for schedule in tile_schedules(problem) if schedule.config.cluster > 1]
    assert schedules
    for schedule in schedules:
        cluster = schedule.config.cluster
        assert schedule.num_ctas == schedule.num_work_tiles <= problem.num_sms and schedule.num_ctas % cluster == 0
        assert (schedule.splits, schedule.whole, schedule.workspace_words) == (cluster, 0, 0)
        shape = plain_work_tiles.shape_of(schedule)
        done = np.zeros((schedule.blocks, schedule.m_tiles, schedule.k_blocks), int)
        for cta in range(schedule.num_ctas):
            scheduler = stand_in(tiles.ClusterTileScheduler)(shape, cta, cluster)
            (index,) = range(scheduler.first, scheduler.count, scheduler.stride)
            work_tile, first = scheduler.work_tile(index), scheduler.work_tile(cta - cta % cluster)
            assert (work_tile.split, work_tile.splits) == (cta % cluster, cluster)
            assert (work_tile.block, work_tile.m_tile) == (first.block, first.m_tile)
            assert work_tile.begin < work_tile.end
            done[work_tile.block, work_tile.m_tile, work_tile.begin : work_tile.end] += 1
        assert (done == 1).all()
