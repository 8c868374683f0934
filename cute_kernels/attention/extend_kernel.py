"""Extend attention: many new queries over a cache, in one warp-specialised, persistent launch.

A CTA draws work tiles of 128 rows (positions x heads of a KV head's group) from a counter (:mod:`.work_tiles`).
Producer warps fill tiles of keys and of values in shared memory, 128 tokens at head_dim 128. They load 16-bit tiles by
TMA (:mod:`.loads.tma`) and decode rows of codes once for all 128 rows of queries (:mod:`.loads.rows`). Two consumer
warpgroups multiply the tiles (:mod:`.mainloops.tiles`).

    warps                    what they do
    0 to 3, 4 to 7           consumers, in two warpgroups: each has 64 rows of a work tile (with key rows:
                             64 of a tile's tokens, or one of two KV heads)
    8, then filling_warps    producers: the first draws work tiles as well; all fill tiles
    others                   nothing; they have given their registers away

    barrier                  of                 arrivals                                 who waits
    K's and V's, full        num_stages each    tile_fillers: a warp that decodes, or    consumers
                                                1 with a TMA tile's bytes
    K's and V's, empty       num_stages each    8, each consumer's lane 0                producers
    full, with key rows      num_stages, for    two of every producer thread, for its    consumers
                             K and V together   raw rows of K and of V
    work, full               WORK_SLOTS         1, the first producer's lane 0           consumers, producers
    work, empty              WORK_SLOTS         8 and filling_warps                      the first producer
    FIRST_WARPGROUP (1, 2)   a warpgroup        its warps: shared memory of their own    its warps
    FIRST_TURN (3, 4)        consumers          the other warpgroup has issued its       a warpgroup
                                                products
    CONSUMERS (5)            consumers          key rows: a head's queries are there     all of them

One CTA computes a work tile, in a fixed order of blocks: equal inputs give bitwise equal outputs.

docs/design/extend_attention.md has the balance of clocks, bytes and registers behind this design.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import MMA_WARPS, WARPGROUP_WARPS, WORK_BYTES
from cute_kernels.attention.loads.memory import Rows, Source
from cute_kernels.attention.mainloops.tiles import Features, Operands
from cute_kernels.attention.work_tiles import END, ExtendSizes, Lengths, Work
from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor
from cute_kernels.device.lists import Lists
from cute_kernels.device.pages import Pages
from cute_kernels.device.pipeline import PipelineState
from cute_kernels.device.types import extents
from cute_kernels.formats.kv import load_code


class ExtendKernel:
    """The extend attention kernel, in the variant of an :class:`ExtendConfig`."""

    def __init__(self, config: ExtendConfig):
        self.config = config
        self.memory, producer, consumer = map(load_code, config.parts)
        self.producer, self.consumer = producer(config), consumer(config)
        self.worker = self.consumer.worker

    def launch(self, given, stream):
        """Launches ``num_ctas`` CTAs; ``given`` has the arguments of :func:`.arguments.extend_arguments`."""
        config = self.config
        (total_q, num_q_heads, _), cache = extents(given.q), extents(given.k_cache)
        ends = extents(given.cu_seqlens)
        batch = ends[0] - 1
        tokens, kv_heads = (cache[2], cache[1]) if config.features.head_major else (cache[1], cache[2])
        max_seq_len, lists = self.room(given.max_pages, tokens), None
        if config.features.by_head:
            lists, tokens, max_seq_len = Lists.of(given), given.page_size, given.max_blocks * given.block_tokens
        group = num_q_heads // kv_heads
        num_slots = total_q * group // config.tile_rows + batch
        shape = ExtendSizes(
            total_q=total_q,
            batch=batch,
            num_q_heads=num_q_heads,
            max_seq_len=max_seq_len,
            group=Divisor.of(group),
            kv_heads=Divisor.of(kv_heads // config.tile_heads * config.value_parts),
            splits=Divisor.of(given.num_splits),
            num_slots=num_slots,
            num_tiles=num_slots * (kv_heads // config.tile_heads * config.value_parts) * given.num_splits,
            window=given.window,
        )
        caches = zip((given.k_cache, given.v_cache), config.cache_bytes, strict=True)
        keys, values = (Rows.of(tensor, size, config.features.head_major) for tensor, size in caches)
        pages = Pages(given.block_table, given.max_pages, cache[0], Divisor.of(tokens), lists)
        lengths = ptx.address(given.cu_seqlens), ptx.address(given.seq_lens), given.counter, given.prefix_only
        maps = self.producer.make_maps(given.k_cache, given.v_cache)
        source = Source(keys, values, pages, maps, given.tile_scales)
        self.kernel(
            shape,
            source,
            Operands.of(given),
            Features.of(given, config),
            Lengths(*lengths, lists),
        ).launch(grid=(given.num_ctas, 1, 1), block=(config.num_threads, 1, 1), min_blocks_per_mp=1, stream=stream)

    def room(self, max_pages, tokens):
        """Returns how many tokens a request may have. max_pages: the launch argument. tokens: number of tokens of a
        block of the cache.
        """
        if self.config.unpacked:
            return max_pages
        return max_pages * tokens if self.config.page_tokens else tokens

    @cute.kernel
    def kernel(self, shape, source, operands, features, lengths):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.memory.allocate(config)
        if warp == 0:
            if lane == 0:
                memory.init_barriers()
        if const_expr(config.ones_rows > 0):
            if warp == 0:
                memory.write_ones(lane)
        cute.arch.sync_threads()
        producing, consuming = config.registers
        if warp >= MMA_WARPS:
            cute.arch.setmaxregister_decrease(producing)
            if warp < MMA_WARPS + config.filling_warps:
                self.produce(shape, source, lengths, memory, warp - MMA_WARPS, lane)
        else:
            cute.arch.setmaxregister_increase(consuming)
            group = warp // WARPGROUP_WARPS
            own = warp % WARPGROUP_WARPS
            if const_expr(config.key_rows is None):
                self.consumer.run(shape, operands, features, memory, group, own, lane)
            else:
                self.consumer.run(shape, source, operands, features, memory, group, own, lane)

    @cute.jit
    def produce(self, shape, source, lengths, memory, warp: Int32, lane: Int32):
        """Fills tiles of K and V for all work tiles of the CTA. The first producer warp finds the work tiles and
        publishes them."""
        if const_expr(self.config.key_rows is not None):
            self.producer.prefetch_maps(source)
        state, slot = memory.pipelines[0].producer_state(), memory.work.consumer_state()
        tile, running = Int32(cute.arch.block_idx()[0]), Int32(1)
        while running != 0:
            if warp == 0:
                tile = self.publish(shape, lengths, memory, tile, PipelineState(slot.stage, slot.phase ^ 1), lane)
            work = self.consumer.receive(memory, slot, lane)
            slot = memory.work.next(slot)
            if work.request == END:
                running = Int32(0)
            else:
                span = self.worker.span(shape, work)
                first_valid = self.worker.first_valid(shape, work)
                own = source
                if const_expr(self.config.features.by_head):
                    own = replace(source, pages=source.pages.of_row(work.request, work.head))
                state = self.producer.fill(own, work, span, first_valid, memory, warp, lane, state)
                # Not before: who draws early has two work tiles where others have none.
                if warp == 0:
                    tile = self.worker.draw(shape, lengths.counter, lane)

    @cute.jit
    def publish(self, shape, lengths, memory, tile: Int32, slot: PipelineState, lane: Int32):
        """Publishes work tile ``tile`` to the CTA's warps. If the tile is empty, draws further tiles until one is not
        empty, or none is left. Returns the index of the last drawn tile.
        """
        found = Int32(0)
        request, part, first_row, num_rows = Int32(END), Int32(0), Int32(0), Int32(0)
        q_start, before, kv_start, kv_stop = Int32(0), Int32(0), Int32(0), Int32(0)
        while found == 0:
            if tile >= shape.num_tiles:
                request, found = Int32(END), Int32(1)
            else:
                request, part, first_row, num_rows, q_start, before, kv_start, kv_stop = self.worker.find(
                    shape, lengths, tile, lane
                )
                if (first_row >= 0) & (first_row < num_rows):
                    found = Int32(1)
                else:
                    tile = self.worker.draw(shape, lengths.counter, lane)
        memory.work.producer_acquire(slot)
        if lane == 0:
            words = Work(request, part, first_row, num_rows, q_start, before, kv_start, kv_stop).words()
            address = memory.slots + slot.stage * WORK_BYTES
            ptx.store_shared(address, 0, words[:4])
            ptx.store_shared(address, 16, words[4:])
            memory.work.producer_commit(slot)
        cute.arch.sync_warp()
        return tile
