"""How consumer warps wait for tiles and queries, release tiles, and load the next queries."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import const_expr

from cute_kernels.device import numbers
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.mla.config import WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.loads.queries import QueryLoader

SCORE_THREADS = WARPGROUP_WARPS * WARP_THREADS
QUERIES_READ = 5  # named barrier of the first warpgroup


class TilePipeline:
    """The consumers' side of the pipeline of tiles."""

    def __init__(self, config: MlaConfig):
        self.config = config

    def await_tile(self, memory, stage, phase) -> None:
        """Waits for a tile, or, by the number of its barriers, a part of one."""
        cute.arch.mbarrier_wait(memory.full + stage, phase)
        if self.config.tiles.load.fence == "reader":
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def release(self, memory, stage, lane):
        """Releases a tile, or a part of one, for a warp."""
        cute.arch.sync_warp()
        barrier = memory.empty + stage
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
            if const_expr(self.config.crossover):
                other = 1 - cute.arch.block_idx_in_cluster()
                numbers.arrive_in_cluster(numbers.address_in(barrier.toint(), other))

    def await_queries(self, memory, phase) -> None:
        """Waits for a work tile's queries."""
        cute.arch.mbarrier_wait(memory.queries_full, phase)


class NextQueries:
    """Loads the queries of the next work tile."""

    def __init__(self, config: MlaConfig):
        self.loader = QueryLoader(config)

    @cute.jit
    def ask(self, wanted, work, work_tiles, memory, warp):
        """Loads the queries of the next work tile, if there is one, once all warps of the warpgroup have read those of
        this one."""
        if wanted:
            cute.arch.barrier(barrier_id=QUERIES_READ, number_of_threads=SCORE_THREADS)
            if (warp == 0) & (work.left > 0):
                self.loader.ask(work_tiles.queries, memory, work.row + 1, work_tiles.head_block)


class NoNextQueries:
    """Loads nothing, where a CTA has one work tile."""

    def ask(self, wanted, work, work_tiles, memory, warp) -> None:
        """Asks for nothing."""
