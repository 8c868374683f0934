"""MLA decode: a CTA gathers tokens, dequantises them, and computes attention of 64 heads that share them.

Roles of the three or four warpgroups of a CTA:

    consumers   warpgroup 0: scores, softmax, left half of the output; warpgroup 1: right half. 64 x 512 accumulators in
                fp32 take all registers that two warpgroups can spare. See `mainloops`.
    producers   one or two warpgroups: fill tiles of 64 tokens in 16 bits, two in shared memory. They gather and decode
                (`loads.fp8`), gather and copy (`loads.gather`), or load by TMA (`loads.tma_tiles`).

    mbarrier       one for each     arrivals                                                      who waits
    full           part of a tile   the load's `full_arrivals`, and bytes of asynchronous copies  consumers
    empty          part of a tile   consumer warps that read it; with crossover of both CTAs      producers
    queries_full   CTA              1, and the bytes of the queries                               consumers

A kernel is a load, a mainloop and a way to combine partial results. Stream-K and a second launch are chosen at run time
(`work_tiles`, `combine.second_launch`). A cooperative combine is compiled in (`combine.one_launch`).
docs/design/mla_structure.md draws the structure; docs/design/mla.md explains it by clocks, bytes and registers.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from cute_kernels.mla.barriers import announce_barriers, await_barriers
from cute_kernels.mla.combine.consumers import PersistentConsumers
from cute_kernels.mla.combine.one_launch import CombiningProducers, PartConsumers
from cute_kernels.mla.config import BLOCK_HEADS, CONSUMER_WARPS, WARPGROUP_WARPS, MlaConfig
from cute_kernels.mla.loads.destination import CrossoverTiles, OwnTiles
from cute_kernels.mla.loads.fp8 import Fp8Load, SplitFp8Load
from cute_kernels.mla.loads.gather import CopyLoad
from cute_kernels.mla.loads.locate import make_locator
from cute_kernels.mla.loads.queries import QueryLoader
from cute_kernels.mla.loads.tma_tiles import TmaTileLoad
from cute_kernels.mla.mainloops.delayed_pv import DelayedPV
from cute_kernels.mla.mainloops.pipeline import NoNextQueries
from cute_kernels.mla.mainloops.serial import Serial
from cute_kernels.mla.mainloops.stepped import Stepped
from cute_kernels.mla.policies import CooperativeTiles, Copies, Crossover, SplitCrossover, SplitTiles, TmaTiles
from cute_kernels.mla.shared_memory import allocate, init_barriers
from cute_kernels.mla.work_tiles import Counts, PartTiles, WorkTiles


def make_load(config: MlaConfig) -> CopyLoad | Fp8Load | SplitFp8Load | TmaTileLoad:
    """Makes the producers' load, which fills tiles."""
    load = config.tiles.load
    if isinstance(load, TmaTiles):
        return TmaTileLoad(config)
    if isinstance(load, Copies):
        return CopyLoad(config)
    if isinstance(load, SplitCrossover):
        return SplitFp8Load(config)
    if isinstance(load, Crossover):
        return Fp8Load(config, CrossoverTiles(config, drains=not config.cooperative))
    return Fp8Load(config, OwnTiles(config))


def make_consumers(config: MlaConfig) -> PersistentConsumers | PartConsumers:
    """Makes the consumers, with the mainloop that the configuration names."""
    if isinstance(config.tiles, CooperativeTiles):
        return PartConsumers(Stepped(config, NoNextQueries()))
    if isinstance(config.tiles, SplitTiles):
        return PersistentConsumers(DelayedPV(config))
    return PersistentConsumers(Stepped(config) if config.tiles.mainloop == "stepped" else Serial(config))


class MlaKernel:
    """One compiled variant of MLA decode, as :class:`MlaConfig` describes it. :class:`.entry.DecodeEntry` is its host
    side.
    """

    def __init__(self, config: MlaConfig):
        self.config = config
        self.locator = make_locator(config.tokens)
        self.load = make_load(config)
        self.consumers = make_consumers(config)
        self.combine = CombiningProducers(config)
        self.loader = QueryLoader(config)

    @cute.jit
    def launch(self, q, source, results, flags, shape, num_ctas, softmax_scale, stream):
        """Launches ``num_ctas`` CTAs, of paged or of sparse decode."""
        head_blocks = (shape.num_heads + BLOCK_HEADS - 1) // BLOCK_HEADS
        queries = self.loader.source(q, shape)
        counts = Counts.of(shape, head_blocks, num_ctas)
        self.kernel(queries, source, results, flags, shape, counts, softmax_scale).launch(
            grid=(num_ctas, 1, 1),
            block=(self.config.num_threads, 1, 1),
            cluster=(self.config.cluster, 1, 1) if self.config.crossover else None,
            min_blocks_per_mp=1,
            cooperative=self.config.cooperative,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, queries, source, results, flags: Int64, shape, counts, softmax_scale: Float32):
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = allocate(self.config)
        if const_expr(not self.config.cooperative):
            # The launch that adds up the parts waits for this one's end; its CTAs find room only as this one's leave.
            cute.arch.griddepcontrol_launch_dependents()
        kind = PartTiles if const_expr(self.config.cooperative) else WorkTiles
        work_tiles = kind.of(shape, source, queries, self.locator, counts, results.partials, flags, cta, lane)
        if warp == 0:
            if lane == 0:
                init_barriers(self.config, memory)
            cute.arch.sync_warp()
            announce_barriers(self.config)
            self.loader.ask(queries, memory, work_tiles.row, work_tiles.head_block)
        if const_expr(self.config.crossover):
            # Barriers are made visible by the fence after their making.
            cute.arch.cluster_arrive_relaxed()
        if warp >= CONSUMER_WARPS:
            self.claim_registers(2)
            self.load.run(work_tiles, source, memory, warp - CONSUMER_WARPS, lane)
            if const_expr(self.config.cooperative):
                self.combine.run(work_tiles, results, memory, warp - CONSUMER_WARPS, lane)
        else:
            self.consume(work_tiles, results, memory, softmax_scale, warp, lane)

    @cute.jit
    def consume(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """Runs a consumer warp. warp: 0 to 7."""
        await_barriers(self.config, produces=False)
        if warp >= WARPGROUP_WARPS:
            self.claim_registers(1)
            self.consumers.values(work_tiles, results, memory, softmax_scale, warp - WARPGROUP_WARPS, lane)
        else:
            self.claim_registers(0)
            self.consumers.scores(work_tiles, results, memory, softmax_scale, warp, lane)

    def claim_registers(self, warpgroup: int) -> None:
        count = self.config.tiles.load.registers[warpgroup]
        if count > self.config.launch_registers:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)
