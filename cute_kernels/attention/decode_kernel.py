"""Split-KV decode attention in one launch: a ring of tiles, online softmax in registers, and a combine by the CTAs of a
row's last splits.

A CTA takes ``num_heads`` KV heads of one request and a part of its tokens (:mod:`.assignment`). Producer warps keep a
ring of K and V tiles full (:mod:`.loads.ring`, :mod:`.loads.copies`). A consumer warp waits for a tile, and takes its
KV head, its blocks of 8 queries and its slice of the tokens. It keeps scores, probabilities and output in registers
(:mod:`.mainloops.warp`). Only the two :mod:`.readers` know the formats of K and V; only :mod:`.mainloops.logits` knows
what changes scores before the softmax. In the loop, consumer warps wait for each other only at the tile in which the
request ends. At the end consumer warps merge their results in shared memory; the parts of a row are merged through a
workspace (:mod:`.combine.merge`). The order of merging is fixed, so the output is bitwise reproducible.

    warps                             what they do
    0 to num_warps - 1                consumers: a KV head, blocks of queries and a slice of every tile each
    then filling_warps                producers: the first initialises barriers; all copy a part of each tile
    then up to cta_threads            nothing; they lend their registers to the consumers

    barrier                  of              arrivals                             who waits
    pipeline, full           each stage      1 with the copies' bytes, unless     consumers
                                             all copies are by words; if any are,
                                             also 1 of every producer thread
    pipeline, empty          each stage      num_warps, each consumer's lane 0    producers
    READY (1)                the CTA         producers say that barriers are      consumers
                                             initialised
    CONSUMERS (2)            consumers       all of them: the merge               all of them
    PRODUCERS (3)            producers       all of them, if there are several:   all of them
                                             after initialisation, and before
                                             partial tiles
    MERGED (4)               the CTA         all of them, between units, if the   all of them
                                             merge buffer overlaps the ring
    ROWS_WRITTEN (10)        the CTA         consumers: new rows lie in the       producers
                                             cache (a step in one launch)

A stage has a tile of K and one of V: num_stages of them, one full barrier for both.

Split-KV is Flash-Decoding's (Dao et al. 2023); the lazily rescaled maximum FlashAttention-4's (Zadouri et al. 2026).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_kernels.attention.arguments import BIAS_STRIDES
from cute_kernels.attention.assignment import Assigner, Range, Requests
from cute_kernels.attention.barriers import await_ready, sync_merged
from cute_kernels.attention.combine.merge import Merger
from cute_kernels.attention.cta import (
    Cta,
    DecodeSizes,
    FeatureValues,
    GivenScales,
    Place,
    QueryRows,
    Results,
    Roles,
    Tail,
)
from cute_kernels.attention.decode_config import CONSUMER_REGISTERS, PRODUCER_REGISTERS, RECIPROCAL_BITS, DecodeConfig
from cute_kernels.attention.loads.copies import TileCopier
from cute_kernels.attention.loads.ring import RingFiller
from cute_kernels.attention.mainloops.logits import Logits
from cute_kernels.attention.mainloops.warp import WarpMainloop
from cute_kernels.attention.policies import BLOCK_QUERIES, QUERY_VECTOR_BYTES
from cute_kernels.attention.readers import make_readers
from cute_kernels.device import ptx
from cute_kernels.device.division import Divisor
from cute_kernels.device.lists import Lists
from cute_kernels.device.pages import Pages
from cute_kernels.device.pipeline import Pipeline, PipelineState
from cute_kernels.formats.scores import tensors_in


class DecodeKernel:
    """One compiled variant of decode attention; :class:`DecodeConfig` says which.

    rows: None, except in a kernel that also appends. There it is the object that rotates the queries and writes the
    newest token's rows of K and V (:class:`cute_kernels.kv_cache.step_rows.NewRows`).
    """

    def __init__(self, config: DecodeConfig, rows: Any = None):
        self.config = config
        self.appends, self.rows = rows is not None, rows
        self.key_reader, self.value_reader = make_readers(config)
        self.copier = TileCopier(config)
        self.filler = RingFiller(config, self.copier, writes_rows=self.appends)
        logits = Logits(config)
        self.terms = logits.terms
        merger = Merger(config, self.value_reader)
        self.mainloop = WarpMainloop(config, self.copier, self.key_reader, self.value_reader, logits, merger)
        self.assigner = Assigner(config.tile_tokens)

    def launch(self, given, stream):
        """Launches a grid of CTAs (splits, groups of KV heads x groups of query blocks, rows of CTAs); ``given`` has
        the arguments of :mod:`cute_kernels.attention.arguments`."""
        config = self.config
        features, uneven = self.feature_values(given), (Int32(0), Int32(0))
        block_table, max_pages, table_stride = Int64(0), Int32(0), Int32(0)
        if config.has_features:
            uneven = (given.more_rows, given.ranges)
            block_table, max_pages, table_stride = given.block_table, given.max_pages, given.table_stride
        batch, q_len, num_q_heads, _ = given.q.shape
        token_mode, head_mode = (2, 1) if config.features.head_major else (1, 2)
        block_tokens, num_kv_heads = given.k_cache.shape[token_mode], given.k_cache.shape[head_mode]
        max_seq_len, lists = max_pages * block_tokens if config.page_tokens else block_tokens, None
        if config.features.by_head:
            lists, block_tokens, max_seq_len = Lists.of(given), given.page_size, given.max_blocks * given.block_tokens
        group = num_q_heads // num_kv_heads
        rows = group * q_len
        query_groups = cute.ceil_div(rows, config.head_queries)
        head_blocks = num_kv_heads // config.mainloop.num_heads * query_groups
        shape = DecodeSizes(
            batch=batch,
            q_len=q_len,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            group=group,
            group_reciprocal=cute.ceil_div(1 << RECIPROCAL_BITS, group),
            query_groups=query_groups,
            query_groups_reciprocal=cute.ceil_div(1 << RECIPROCAL_BITS, query_groups),
            head_blocks=head_blocks,
            max_seq_len=max_seq_len,
        )
        pages = Pages(block_table, table_stride, given.k_cache.shape[0], Divisor.of(block_tokens), lists)
        shifts = (given.q_shift, given.softmax_scale) if config.features.shift else None
        out_factor = features.out_factor if config.features.v_factor else None
        out = given.out.iterator.toint()
        results = Results(out, given.lse, given.workspace, given.mode, features.sinks, shifts, out_factor)
        self.kernel(
            self.copier.make_source(given.k_cache, given.v_cache),
            QueryRows.of(given.q),
            given.seq_lens.iterator.toint(),
            results,
            GivenScales(given.k_scale, given.v_scale, given.k_scale_stride, given.v_scale_stride),
            features,
            pages,
            shape,
            given.softmax_scale,
            uneven,
            self.rows.operands_of(given) if self.appends else None,
        ).launch(
            grid=(given.num_splits, head_blocks, batch + uneven[0]),
            block=(config.cta_threads, 1, 1),
            min_blocks_per_mp=config.pipeline.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=config.after_append,
            stream=stream,
        )

    def feature_values(self, given) -> FeatureValues:
        """Returns the run-time values of the features. Without features the launch has no arguments for them: all
        values are 0."""
        config = self.config
        if not config.has_features:
            strides = Int64(0), Int64(0), Int64(0), Int64(0)
            return FeatureValues(Int32(0), Float32(0.0), Int64(0), Int64(0), Int64(0), strides)
        s0, s1, s2, s3 = (getattr(given, name) for name in BIAS_STRIDES)
        plain = (given.window, given.soft_cap, given.sinks, given.alibi_slopes, given.bias, (s0, s1, s2, s3))
        undone = (given.q_shift, given.out_factor) if config.features.transformed else (None, None)
        tensors = {tensor.name: getattr(given, tensor.name) for tensor in tensors_in(config.features)}
        tail = Tail(given.k_tail, given.tail_slots) if config.features.tail else None
        return FeatureValues(*plain, *undone, tensors, tail)

    @cute.kernel
    def kernel(
        self, source, q, seq_lens: Int64, results, given, features, pages, shape, softmax_scale: Float32, uneven, new
    ):
        config = self.config
        part, head_block, row = cute.arch.block_idx()
        parts = cute.arch.grid_dim()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = cutlass.utils.SmemAllocator()
        ring = smem.allocate(config.pool_bytes, byte_alignment=1024)  # where the 128-byte swizzle repeats
        queries = Int32(0)
        if const_expr(config.query_bytes > 0):
            queries = Int32(smem.allocate(config.query_bytes, byte_alignment=QUERY_VECTOR_BYTES).toint())
        rotated = Int32(0)
        if const_expr(self.appends):
            rotated = Int32(smem.allocate(self.rows.shared_bytes, byte_alignment=QUERY_VECTOR_BYTES).toint())
        barriers = smem.allocate_array(cutlass.Int64, 2 * config.pipeline.num_stages)
        empty = barriers + config.pipeline.num_stages
        pipeline = Pipeline(barriers, empty, config.pipeline.num_stages, self.copier.arrivals, config.num_warps)
        # A division would take over 100 cycles on the way to the first copy.
        head_part = (head_block * shape.query_groups_reciprocal) >> RECIPROCAL_BITS
        query_part = head_block - head_part * shape.query_groups
        place = Place(shape, head_part * config.mainloop.num_heads, query_part * config.head_queries)
        if const_expr(config.features.by_head):
            pages = pages.of_row(row, place.first_head)  # a CTA has one KV head
        roles = self.roles(warp, place.first_row)
        tiles = self.copier.open(source, ring, pipeline, place, pages)
        seen = self.terms.reach(features, shape.q_len)
        requests = Requests(seq_lens, shape.batch, shape.max_seq_len, seen, parts, uneven[1])
        own = (new, rotated) if const_expr(self.appends) else None
        cta = Cta(roles, tiles, results, given, features, softmax_scale, ring, queries, pipeline, warp, lane, own)
        if const_expr(self.appends):
            if warp == config.num_warps:
                self.filler.init_barriers(pipeline, 0, 2 * config.pipeline.num_stages, Int32(0), lane)
            # Lengths and pages may be results of launches that this wait is the first for.
            cute.arch.griddepcontrol_wait()
        if const_expr(config.units):
            size = Int32(0)
            if row >= shape.batch:
                # A row of CTAs beyond the batch: it has work only where lengths differ.
                first_length = self.assigner.fetch_first_length(requests, lane)
                size = self.assigner.tiles_per_range(requests, first_length, lane)
            if (row < shape.batch) | (size > 0):
                self.run(cta, place, requests, q, row, part)
        else:
            self.run(cta, place, requests, q, row, part)

    @cute.jit
    def run(self, cta, place, requests, q, row, part):
        """Starts all loads that a CTA can start before it knows its unit, then finds the unit and processes it."""
        config, shape, lane = self.config, place.shape, cta.lane
        # Rows past the last one hold further units, if there are any.
        own_row = cutlass.min(row, shape.batch - 1) if const_expr(config.units) else row
        # Lengths, pages and first tiles come from memory at the same time. The first tile of a CTA is tile ``part``,
        # unless lengths differ.
        asked_length = self.assigner.fetch_length(requests, own_row)
        first_length = self.assigner.fetch_first_length(requests, lane) if const_expr(config.units) else None
        lists = cta.tiles.pages.lists
        count = lists.ask_count() if const_expr(lists is not None) else None
        early = part * config.tile_tokens < shape.max_seq_len
        if const_expr(config.units):
            early = early & (row < shape.batch)
        pages = self.filler.make_early_pages()
        if (cta.warp >= config.num_warps) & (cta.warp < config.num_warps + config.filling_warps):
            self.filler.start(cta.tiles, own_row, part, requests.parts, pages, early, cta.warp - config.num_warps, lane)
        if const_expr(lists is not None):
            # The count has come by now, as have the first tile's entries of the list.
            asked_length = lists.tokens(count, asked_length)
        if cta.warp < config.num_warps:
            await_ready(config)
        # First use of the length, which waits for its load: loads issued after this line would wait as well.
        length = self.assigner.limit_length(requests, asked_length)
        work = self.assigner.grid_work(requests, place, row, part, length)
        if const_expr(config.units):
            self.process_range(cta, requests, q, first_length, work, early, pages)
        else:
            expected = self.is_expected(work)
            state, issued = self.take_early_tile(cta, work, early, expected)
            if work.part < work.num_parts:
                self.process(cta, work, q, state, issued, pages, expected)

    def is_expected(self, work):
        """Returns whether a unit of the CTA's own row begins with the tile that the CTA has loaded early."""
        return (work.part < work.num_parts) & (work.begin == work.part * self.config.tile_tokens)

    @cute.jit
    def take_early_tile(self, cta, work, early, expected):
        """Handles the tile that the CTA has loaded before it knew its unit. Returns (the consumers' pipeline state,
        number of tiles of the unit in flight).

        | early | expected, with tokens | the early tile |
        |---|---|---|
        | no | any | there is none: state and number begin at 0 |
        | yes | yes | it is the unit's first tile, in flight: the state is its stage |
        | yes | no | it is released unread: the state is the stage after it |
        """
        state, issued = cta.pipeline.consumer_state(), Int32(0)
        if const_expr(self.config.pipeline.early_tiles > 0):
            if early:
                if expected & (work.length > 0):
                    issued = Int32(1)
                else:
                    self.pass_over(cta.pipeline, cta.warp, cta.lane)
                    state = cta.pipeline.next(state)
        return state, issued

    @cute.jit
    def process(self, cta, work, q, state, issued, pages, known):
        """Processes the CTA's only unit.

        Args:
            state, issued: the results of `take_early_tile`.
            pages: the result of `RingFiller.make_early_pages`.
            known: the result of `is_expected`.
        """
        config = self.config
        if cta.warp < config.num_warps:
            self.borrow_registers()
            self.attend_unit(cta, work, q, state)
            self.mainloop.merger.finish_row(work, cta.results, cta.ring, cta.warp, cta.lane)
        else:
            self.lend_registers()
            if cta.warp < config.num_warps + config.filling_warps:
                self.filler.fill(cta, work, state, issued, pages, self.knows_pages(work, known), False)
                self.filler.finish()

    def borrow_registers(self) -> None:
        """Takes the registers that producer warps lend."""
        if self.config.lends_registers:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)

    def lend_registers(self) -> None:
        if self.config.lends_registers:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)

    def knows_pages(self, work, expected):
        """Returns whether the pages that the CTA looked up early are those of the unit's tiles.

        If the grid has n CTAs for a row, early pages are those of every n-th tile. So the unit has to be expected, and
        its row has to have n parts.
        """
        return expected & (work.num_parts == cute.arch.grid_dim()[0])

    @cute.jit
    def attend_unit(self, cta, work, q, state: PipelineState):
        """Loads the queries of a unit, while its first tile is on its way, and attends to the unit's tiles.

        Returns the pipeline state after the unit's last tile.
        """
        if const_expr(self.appends):
            addresses = self.rows.make(cta, work, q)
        else:
            if const_expr(self.config.after_append):
                # Every unit waits here, even one without new tokens: so the end of this launch implies the append's.
                cute.arch.griddepcontrol_wait()
            addresses = self.query_addresses(work.place, cta.roles, q, work.request, cta.lane)
        k_scale = cta.given.of_keys(work.place.first_head + cta.roles.head)
        query = self.key_reader.fetch_query(addresses, k_scale, cta.lane)
        return self.mainloop.attend_tiles(cta, work, query, state)

    @cute.jit
    def process_range(self, cta, requests, q, first_length, work, early, pages):
        """Processes all units of the CTA. If lengths are alike, this is ``work``, the CTA's part of its own row. If
        lengths differ, these are the units of the CTA's range of tiles, from the last row to the first.
        """
        config, place, lane = self.config, work.place, cta.lane
        size = self.assigner.tiles_per_range(requests, first_length, lane)
        span = Range(size, Int32(0))
        if size > 0:
            index = work.first_unit + work.part
            row, start = self.assigner.find_row(requests, (index + 1) * size - 1, lane)
            span = Range(size, start - index * size)
            work = self.assigner.range_work(requests, place, index, row, self.assigner.length_of(requests, row), span)
        expected = (size == 0) & self.is_expected(work)
        state, issued = self.take_early_tile(cta, work, early, expected)
        going = work.part < work.num_parts
        if cta.warp < config.num_warps:
            self.borrow_registers()
            # Made uniform in each branch: ptxas spills a number that lives in registers on both sides of setmaxnreg.
            work, span = work.uniform(), span.uniform()
            while going:
                state = self.attend_unit(cta, work, q, state)
                going = span.has_more()
                if going:
                    sync_merged(config)
                    work, span = self.assigner.row_before(requests, work, span)
            self.mainloop.merger.finish_row(work, cta.results, cta.ring, cta.warp, cta.lane)
        else:
            self.lend_registers()
            if cta.warp < config.num_warps + config.filling_warps:
                work, span = work.uniform(), span.uniform()
                known, later = self.knows_pages(work, expected), Boolean(False)
                use = state.stage  # of the pipeline's stages, counted from 0: one number takes fewer registers than two
                while going:
                    state = cta.pipeline.consumer_state_of(use)
                    use = use + work.num_tiles()
                    self.filler.fill(cta, work, state, issued, pages, known, later)
                    going = span.has_more()
                    if going:
                        work, span = self.assigner.row_before(requests, work, span)
                        issued, known, later = Int32(0), Boolean(False), Boolean(True)
                self.filler.finish()

    def roles(self, warp, first_row) -> "Roles":
        """Returns the KV head, the queries and the slice of tokens that a warp takes of its CTA's tiles."""
        config = self.config
        query_block = warp // config.mainloop.num_heads % config.mainloop.num_query_blocks
        return Roles(
            head=warp % config.mainloop.num_heads,
            first_row=first_row + query_block * config.warp_queries,
            slice_index=warp // config.num_roles,
        )

    def query_addresses(self, place, roles, q, request, lane):
        """Returns the addresses of the lane's queries, one in each of the warp's blocks of queries: query lane // 4 of
        the block.

        Lanes beyond the last query take the last query's address; their results are never stored.
        """
        shape = place.shape
        addresses = []
        for block in range(self.config.mainloop.blocks_per_warp):
            row = cutlass.min(roles.first_row + block * BLOCK_QUERIES + lane // 4, shape.group * shape.q_len - 1)
            query, head = place.query_of(self.config, roles.head, row)
            address = q.address(self.config, request, query, head)
            # Pinned as one number until the append has ended: its terms would take more registers than are free.
            addresses.append(ptx.pinned(address) if self.config.after_append else address)
        return addresses

    @cute.jit
    def pass_over(self, pipeline, warp, lane):
        """Releases the early tile unread, after it has arrived. Until then the CTA may not exit or reuse the tile's
        stage.
        """
        if warp < self.config.num_warps:
            first = PipelineState(0, 0)
            pipeline.consumer_wait(first)
            cute.arch.sync_warp()
            if lane == 0:
                pipeline.consumer_release(first)
