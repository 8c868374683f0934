"""MLA decode: gather tokens, dequantise, attend; 64 heads that share their tokens per CTA.

Shape of the work: three or four warpgroups. Two multiply, and keep 256 columns of the output each: 64 x 512 in fp32 is
all the registers that two warpgroups have left. :mod:`.mainloops.serial`, :mod:`.mainloops.stepped` and
:mod:`.mainloops.delayed_pv` are their orders. The others gather tokens and make bf16 tiles of them
(:mod:`.loads.gather`), 64 tokens each, two in shared memory, or have them brought by a tensor map
(:mod:`.loads.tma_tiles`).

docs/design/mla.md has the balance of clocks, bytes and registers behind it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.mla.barriers import announce_barriers, await_barriers
from cute_kernels.mla.combine.together import CooperativeCrossover, CooperativeStepped
from cute_kernels.mla.config import (
    BLOCK_HEADS,
    CONSUMER_WARPS,
    FLAG_BYTES,
    NUM_STAGES,
    ROW_VALUE_BYTES,
    WARPGROUP_WARPS,
    WEIGHT_BYTES,
    MlaConfig,
)
from cute_kernels.mla.loads.crossover import CrossoverLoad, SplitCrossoverLoad
from cute_kernels.mla.loads.gather import CopyLoad, DequantizeLoad
from cute_kernels.mla.loads.locate import Chosen, PagedSource, Pages, SparseSource, make_locator
from cute_kernels.mla.loads.queries import QueryLoader
from cute_kernels.mla.loads.tma_tiles import TmaTileLoad, TmaTileMap
from cute_kernels.mla.mainloops.delayed_pv import DelayedPV
from cute_kernels.mla.mainloops.products import SharedMemory
from cute_kernels.mla.mainloops.serial import Serial
from cute_kernels.mla.mainloops.softmax import RESCALE_SLACK
from cute_kernels.mla.mainloops.stepped import Stepped
from cute_kernels.mla.work import LaunchShape, Results
from cute_kernels.mla.work_tiles import Counts, PartTiles, WorkTiles


def make_load(config: MlaConfig) -> Any:
    """What fills tiles."""
    if config.cooperative:
        return CooperativeCrossover(config)
    if config.tma_tiles:
        return TmaTileLoad(config)
    if config.copies:
        return CopyLoad(config)
    if config.crossover:
        return SplitCrossoverLoad(config) if config.delays_pv else CrossoverLoad(config)
    return DequantizeLoad(config)


def make_mainloop(config: MlaConfig) -> Serial | Stepped | DelayedPV:
    """What multiplies, in the order that the configuration says."""
    if config.cooperative:
        return CooperativeStepped(config)
    return {"plain": Serial, "stepped": Stepped, "delayed_pv": DelayedPV}[config.order](config)


class MlaKernel:
    """One compiled variant; :class:`MlaConfig` says which."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.locator = make_locator(config.tokens)
        self.load = make_load(config)
        self.mainloop = make_mainloop(config)
        self.loader = QueryLoader(config)

    @cute.jit
    def sparse(
        self,
        q: cute.Tensor,
        out: Int64,
        lse: Int64,
        max_logits: Int64,
        sinks: Int64,
        partials: Int64,
        softmax_scale: Float32,
        num_parts: Int32,
        num_ctas: Int32,
        flags: Int64,
        cache: Int64,
        page_stride: Int64,
        token_stride: Int32,
        page_size: Int32,
        num_tokens: Int32,
        indices: Int64,
        topk: Int32,
        topk_length: Int64,
        extra_cache: Int64,
        extra_page_stride: Int64,
        extra_token_stride: Int32,
        extra_page_size: Int32,
        extra_num_tokens: Int32,
        extra_indices: Int64,
        extra_topk: Int32,
        extra_topk_length: Int64,
        stream,
    ):
        """Launches over (queries x blocks of 64 heads, parts), ``num_ctas`` in all, or over stream-K of all queries,
        in equal stretches, if num_parts is 0: see :mod:`.stream_k`; num_ctas is a multiple of the blocks of heads then.

        q: bf16 or fp16 [batch, q_len, num_heads, head_dim]. Addresses: out [batch, q_len, num_heads, 512] in q's dtype;
        lse fp32 [batch, q_len, num_heads]; max_logits likewise or 0; sinks fp32 [num_heads] or 0; partials: see
        `Results`, used if num_parts > 1, when out, lse and max_logits are the combining kernel's to write; on stream-K
        that and flags are the words and the flags of `States`; cache: pages ``page_stride`` bytes apart, of page_size
        tokens ``token_stride`` bytes apart (their data, if pages are split), multiples of 16; num_tokens: indices below
        it exist, at most 2**31 - 1; indices int32 [batch, q_len, topk]; topk_length int32 [batch] or 0. The same for
        the extra cache; extra_topk is 0 without one (page_size is then 1).
        """
        sizes: Any = q.shape
        batch, q_len, num_heads = sizes[0], sizes[1], sizes[2]
        # Who asks for the greatest scores gets running maxima that are.
        slack = cutlass.select_(max_logits != 0, Float32(0.0), Float32(RESCALE_SLACK))
        shape = LaunchShape(batch * q_len, q_len, num_heads, num_heads, num_parts, Int32(0), slack)
        main_pages = Pages.of(cache, page_stride, token_stride, page_size)
        extra_pages = Pages.of(extra_cache, extra_page_stride, extra_token_stride, extra_page_size)
        main = Chosen(main_pages, num_tokens, indices, topk, topk_length)
        extra = Chosen(extra_pages, extra_num_tokens, extra_indices, extra_topk, extra_topk_length)
        results = Results(out, lse, max_logits, sinks, partials)
        self.launch(q, SparseSource(main, extra), results, flags, shape, num_ctas, softmax_scale, stream)

    @cute.jit
    def paged(
        self,
        q: cute.Tensor,
        out: Int64,
        lse: Int64,
        max_logits: Int64,
        sinks: Int64,
        partials: Int64,
        softmax_scale: Float32,
        num_parts: Int32,
        num_ctas: Int32,
        flags: Int64,
        cache: Int64,
        page_stride: Int64,
        token_stride: Int32,
        page_size: Int32,
        num_pages: Int32,
        table: Int64,
        table_stride: Int32,
        max_pages: Int32,
        seq_lens: Int64,
        causal: Int32,
        stream,
    ):
        """Launches over (requests x blocks of 64 of their queries' heads, parts), or over stream-K of all requests.

        As :meth:`sparse`, with tokens 0 to seq_lens[b] of a request: addresses of table int32 [batch, max_pages], rows
        ``table_stride`` elements apart, and seq_lens int32 [batch]. causal: 1 if query i of q_len sees the tokens up to
        seq_lens[b] - q_len + i only, else 0.
        """
        sizes: Any = q.shape
        batch, q_len, num_heads = sizes[0], sizes[1], sizes[2]
        slack = cutlass.select_(max_logits != 0, Float32(0.0), Float32(RESCALE_SLACK))
        shape = LaunchShape(batch, 1, q_len * num_heads, num_heads, num_parts, causal, slack)
        pages = Pages.of(cache, page_stride, token_stride, page_size)
        source = PagedSource(pages, num_pages, table, table_stride, max_pages, seq_lens)
        if const_expr(self.config.tma_tiles):
            source = TmaTileMap(self.config).source(source, cache, page_stride, token_stride)
        results = Results(out, lse, max_logits, sinks, partials)
        self.launch(q, source, results, flags, shape, num_ctas, softmax_scale, stream)

    @cute.jit
    def launch(self, q, source, results, flags, shape, num_ctas, softmax_scale, stream):
        """Both entries: the grid."""
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
        memory = self.allocate()
        if const_expr(not self.config.cooperative):
            # The launch that adds up the parts waits for this one's end; its CTAs find room only as this one's leave.
            cute.arch.griddepcontrol_launch_dependents()
        kind = PartTiles if const_expr(self.config.cooperative) else WorkTiles
        work_tiles = kind.of(shape, source, queries, self.locator, counts, results.partials, flags, cta, lane)
        if warp == 0:
            if lane == 0:
                self.init_barriers(memory)
            cute.arch.sync_warp()
            announce_barriers(self.config)
            self.loader.ask(queries, memory, work_tiles.row, work_tiles.head_block)
        if const_expr(self.config.crossover):
            # Barriers are made visible by the fence behind their making.
            cute.arch.cluster_arrive_relaxed()
        if warp >= CONSUMER_WARPS:
            self.claim_registers(2)
            self.load.run(work_tiles, source, memory, warp - CONSUMER_WARPS, lane)
            if const_expr(self.config.cooperative):
                self.load.combine(work_tiles, results, memory, warp - CONSUMER_WARPS, lane)
        else:
            self.consume(work_tiles, results, memory, softmax_scale, warp, lane)

    @cute.jit
    def consume(self, work_tiles, results, memory, softmax_scale, warp, lane):
        """What consumer warps do."""
        await_barriers(self.config, produces=False)
        if warp >= WARPGROUP_WARPS:
            self.claim_registers(1)
            self.mainloop.second(work_tiles, results, memory, softmax_scale, warp - WARPGROUP_WARPS, lane)
        else:
            self.claim_registers(0)
            self.mainloop.first(work_tiles, results, memory, softmax_scale, warp, lane)

    def claim_registers(self, warpgroup: int) -> None:
        count = self.config.registers[warpgroup]
        if count > self.config.launch_registers:
            cute.arch.setmaxregister_increase(count)
        else:
            cute.arch.setmaxregister_decrease(count)

    def allocate(self) -> SharedMemory:
        smem = cutlass.utils.SmemAllocator()
        tiles = smem.allocate(NUM_STAGES * self.config.tile_bytes, byte_alignment=1024)
        queries = smem.allocate(self.config.query_bytes, byte_alignment=1024)
        weights = smem.allocate(WEIGHT_BYTES, byte_alignment=1024)
        row_values = smem.allocate(ROW_VALUE_BYTES, byte_alignment=16)
        flags = smem.allocate(NUM_STAGES * FLAG_BYTES, byte_alignment=16)
        entries = smem.allocate(max(self.config.entry_bytes, 4), byte_alignment=16)
        num_parts = NUM_STAGES * self.config.tile_parts
        full = smem.allocate_array(cutlass.Int64, 2 * num_parts + 1)
        return SharedMemory(
            tile_pointer=tiles,
            tiles=tiles.toint(),
            query_pointer=queries,
            queries=queries.toint(),
            weight_pointer=weights,
            row_values=row_values.toint(),
            flags=flags.toint(),
            entries=entries.toint(),
            full=full,
            empty=full + num_parts,
            queries_full=full + 2 * num_parts,
        )

    def init_barriers(self, memory: SharedMemory) -> None:
        for i in range(NUM_STAGES * self.config.tile_parts):
            cute.arch.mbarrier_init(memory.full + i, self.config.full_arrivals)
            cute.arch.mbarrier_init(memory.empty + i, self.config.empty_arrivals)
        cute.arch.mbarrier_init(memory.queries_full, 1)
        cute.arch.mbarrier_init_fence()
