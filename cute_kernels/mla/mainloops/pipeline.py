"""The consumers' side of the pipeline: waits for tiles and queries, releases of tiles, and loads of the next
queries."""

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
    """The waits and arrivals of consumer warps on the barriers of tiles and queries."""

    def __init__(self, config: MlaConfig):
        self.config = config

    def await_tile(self, memory, stage, phase) -> None:
        """Waits until a tile is full. stage: the index of its barrier, or of a part's, see `MlaConfig.part_number`."""
        cute.arch.mbarrier_wait(memory.full + stage, phase)
        if self.config.tiles.load.fence == "reader":
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def release(self, memory, stage, lane):
        """Releases a tile, or a part of a tile, for a warp: arrives on its empty barrier, with crossover in both
        CTAs."""
        cute.arch.sync_warp()
        barrier = memory.empty + stage
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
            if const_expr(self.config.crossover):
                other = 1 - cute.arch.block_idx_in_cluster()
                numbers.arrive_in_cluster(numbers.address_in(barrier.toint(), other))

    def await_queries(self, memory, phase) -> None:
        """Waits until a work tile's queries are in shared memory."""
        cute.arch.mbarrier_wait(memory.queries_full, phase)


class NextQueries:
    """Loads the queries of the next work tile."""

    def __init__(self, config: MlaConfig):
        self.loader = QueryLoader(config)

    @cute.jit
    def ask(self, wanted, work, work_tiles, memory, warp):
        """Starts loading the queries of the next work tile, if ``wanted`` and if there is a next work tile. First waits
        until all warps of the warpgroup have read this work tile's queries."""
        if wanted:
            cute.arch.barrier(barrier_id=QUERIES_READ, number_of_threads=SCORE_THREADS)
            if (warp == 0) & (work.left > 0):
                self.loader.ask(work_tiles.queries, memory, work.row + 1, work_tiles.head_block)


class NoNextQueries:
    """The replacement of `NextQueries` in CTAs with one work tile: it loads nothing."""

    def ask(self, wanted, work, work_tiles, memory, warp) -> None:
        """Does nothing: there is no next work tile."""
