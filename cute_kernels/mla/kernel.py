"""MLA decode: gather tokens, dequantise, attend; 64 heads that share their tokens per CTA.

Shape of the work: three warpgroups. The third gathers tokens and makes bf16 tiles of them (:mod:`.gather`), 64 tokens
each, two in shared memory. The first multiplies queries and keys, takes the softmax, and adds its weights times the
left 256 columns of the same tile to the output; it leaves the weights in shared memory for the second, which adds the
right 256 columns. A 64 x 512 output in fp32 is all the registers that two warpgroups have left.

The division of work is that of FlashMLA's FP8 kernel (DeepSeek 2025), whose dequantisation goes through fp32; see
docs/design/mla.md for what the integer path and this tile layout change in the balance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx, wgmma_tiles
from cute_kernels.device.lanes import lane_sum
from cute_kernels.device.ring import advance
from cute_kernels.mla import softmax
from cute_kernels.mla.config import (
    BLOCK_HEADS,
    BLOCK_TOKENS,
    FACTOR_BYTES,
    FLAG_BYTES,
    HEAD_DIM,
    MULTIPLYING_WARPS,
    NUM_STAGES,
    NUM_THREADS,
    QUERY_BYTES,
    SCORE_REGISTERS,
    TILE_BYTES,
    V_HEAD_DIM,
    VALUE_REGISTERS,
    WARPGROUP_WARPS,
    WEIGHT_BYTES,
    MlaConfig,
)
from cute_kernels.mla.gather import SLAB_BYTES, make_gatherer
from cute_kernels.mla.locate import Chosen, PagedSource, Pages, SparseSource, count_blocks, make_locator
from cute_kernels.mla.output import Writer
from cute_kernels.mla.work import Results, Shape, Work
from cute_kernels.sm90 import WARP_THREADS

HALF = V_HEAD_DIM // 2  # columns of the output that a warpgroup keeps
HALF_SLABS = HALF // wgmma_tiles.SLAB_COLUMNS
HALF_SUMS = HALF // 2  # of a thread
QUERY_PIECES = HEAD_DIM // 8  # of 16 bytes, of a head
QUERY_BATCH = 9  # loads of a thread under way
MULTIPLYING_THREADS = MULTIPLYING_WARPS * WARP_THREADS
# Named barriers, all of both multiplying warpgroups; 0 is that of all threads.
QUERIES_READY, WEIGHTS_READY, WEIGHTS_FREE = 1, 2, 3


@dataclass(frozen=True)
class Memory:
    """Shared memory of a CTA: addresses, pointers where tensors are made of them, barriers."""

    tile_pointer: Any
    tiles: Any
    query_pointer: Any
    queries: Any
    weight_pointer: Any
    weights: Any
    factors: Any  # fp32 [64]
    flags: Any
    full: Any
    empty: Any


class MlaKernel:
    """One compiled variant; :class:`MlaConfig` says which."""

    def __init__(self, config: MlaConfig):
        self.config = config
        self.locator = make_locator(config.tokens)
        self.gatherer = make_gatherer(config)
        self.writer = Writer()

    @cute.jit
    def sparse(
        self,
        q: cute.Tensor,
        out: Int64,
        lse: Int64,
        sinks: Int64,
        partials: Int64,
        softmax_scale: Float32,
        num_parts: Int32,
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
        """Launches over (queries x blocks of 64 heads, parts).

        q: bf16 [batch, q_len, num_heads, 576]. Addresses: out bf16 [batch, q_len, num_heads, 512]; lse fp32 [batch,
        q_len, num_heads]; sinks fp32 [num_heads] or 0; partials: see `Results`, used if num_parts > 1, when out and lse
        are the combining kernel's to write; cache: pages ``page_stride`` bytes apart, of page_size tokens
        ``token_stride`` bytes apart, multiples of 16; num_tokens: indices below it exist, at most 2**31 - 1; indices
        int32 [batch, q_len, topk]; topk_length int32 [batch] or 0. The same for the extra cache; extra_topk is 0
        without one (page_size is then 1).
        """
        sizes: Any = q.shape
        batch, q_len, num_heads = sizes[0], sizes[1], sizes[2]
        shape = Shape(batch * q_len, q_len, num_heads, num_heads, num_parts, Int32(0))
        main_pages = Pages(cache, page_stride, token_stride, page_size)
        extra_pages = Pages(extra_cache, extra_page_stride, extra_token_stride, extra_page_size)
        main = Chosen(main_pages, num_tokens, indices, topk, topk_length)
        extra = Chosen(extra_pages, extra_num_tokens, extra_indices, extra_topk, extra_topk_length)
        results = Results(out, lse, sinks, partials)
        self.launch(q, SparseSource(main, extra), results, shape, softmax_scale, stream)

    @cute.jit
    def paged(
        self,
        q: cute.Tensor,
        out: Int64,
        lse: Int64,
        sinks: Int64,
        partials: Int64,
        softmax_scale: Float32,
        num_parts: Int32,
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
        """Launches over (requests x blocks of 64 of their queries' heads, parts).

        As :meth:`sparse`, with tokens 0 to seq_lens[b] of a request: addresses of table int32 [batch, max_pages], rows
        ``table_stride`` elements apart, and seq_lens int32 [batch]. causal: 1 if query i of q_len sees the tokens up to
        seq_lens[b] - q_len + i only, else 0.
        """
        sizes: Any = q.shape
        batch, q_len, num_heads = sizes[0], sizes[1], sizes[2]
        shape = Shape(batch, 1, q_len * num_heads, num_heads, num_parts, causal)
        pages = Pages(cache, page_stride, token_stride, page_size)
        source = PagedSource(pages, num_pages, table, table_stride, max_pages, seq_lens)
        self.launch(q, source, Results(out, lse, sinks, partials), shape, softmax_scale, stream)

    @cute.jit
    def launch(self, q, source, results, shape, softmax_scale, stream):
        """Both entries: the grid."""
        head_blocks = (shape.num_heads + BLOCK_HEADS - 1) // BLOCK_HEADS
        self.kernel(ptx.address(q), source, results, shape, head_blocks, softmax_scale).launch(
            grid=(shape.rows * head_blocks, shape.num_parts, 1),
            block=(NUM_THREADS, 1, 1),
            cluster=(self.config.cluster, 1, 1) if self.config.crossover else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, q: Int64, source, results, shape, head_blocks: Int32, softmax_scale: Float32):
        index, part, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate()
        if warp == 0:
            if lane == 0:
                self.init_barriers(memory)
        row = index // head_blocks
        length, extra_length = self.locator.lengths(source, row // shape.request_rows)
        main_blocks, num_blocks = count_blocks(length, extra_length)
        begin, end = Work.share(num_blocks, shape.num_parts, part)
        first_head = (index - row * head_blocks) * BLOCK_HEADS
        work = Work(shape, row, first_head, part, begin, end, length, main_blocks, extra_length)
        if const_expr(self.config.crossover):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp >= MULTIPLYING_WARPS:
            cute.arch.setmaxregister_decrease(self.config.gather_registers)
            self.gatherer.run(work, source, memory, warp - MULTIPLYING_WARPS, lane)
        elif warp >= WARPGROUP_WARPS:
            cute.arch.setmaxregister_decrease(VALUE_REGISTERS)
            self.load_queries(q, work, memory, warp * WARP_THREADS + lane)
            self.add_right(work, results, memory, warp - WARPGROUP_WARPS, lane)
        else:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            self.load_queries(q, work, memory, warp * WARP_THREADS + lane)
            cute.arch.barrier(barrier_id=QUERIES_READY, number_of_threads=MULTIPLYING_THREADS)
            self.attend(work, results, memory, softmax_scale, warp, lane)
        if const_expr(self.config.crossover):
            # Nobody leaves while the other may still write or arrive here.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def allocate(self) -> Memory:
        smem = cutlass.utils.SmemAllocator()
        tiles = smem.allocate(NUM_STAGES * TILE_BYTES, byte_alignment=1024)
        queries = smem.allocate(QUERY_BYTES, byte_alignment=1024)
        weights = smem.allocate(WEIGHT_BYTES, byte_alignment=1024)
        factors = smem.allocate(FACTOR_BYTES, byte_alignment=16)
        flags = smem.allocate(NUM_STAGES * FLAG_BYTES, byte_alignment=16)
        barriers = NUM_STAGES * self.config.num_halves
        full = smem.allocate_array(cutlass.Int64, 2 * barriers)
        return Memory(
            tile_pointer=tiles,
            tiles=tiles.toint(),
            query_pointer=queries,
            queries=queries.toint(),
            weight_pointer=weights,
            weights=weights.toint(),
            factors=factors.toint(),
            flags=flags.toint(),
            full=full,
            empty=full + barriers,
        )

    def init_barriers(self, memory: Memory) -> None:
        for i in range(NUM_STAGES * self.config.num_halves):
            cute.arch.mbarrier_init(memory.full + i, self.config.full_arrivals)
            cute.arch.mbarrier_init(memory.empty + i, self.config.empty_arrivals)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def load_queries(self, q, work, memory, tid):
        """Copies the CTA's heads into swizzled shared memory; heads that do not exist become 0."""
        base = q + Int64(work.query_row(0)) * (HEAD_DIM * 2)
        num_heads = work.shape.num_heads - work.first_head
        for first in cutlass.range_constexpr(0, BLOCK_HEADS * QUERY_PIECES, QUERY_BATCH * MULTIPLYING_THREADS):
            pieces = []
            for i in cutlass.range_constexpr(QUERY_BATCH):
                index = tid + (first + i * MULTIPLYING_THREADS)
                exists = cutlass.select_(index // QUERY_PIECES < num_heads, Int32(1), Int32(0))
                pieces.append(self.load_piece(base, index, exists))
            for i in cutlass.range_constexpr(QUERY_BATCH):
                index = tid + (first + i * MULTIPLYING_THREADS)
                head = index // QUERY_PIECES
                piece = index - head * QUERY_PIECES
                slab = piece // (wgmma_tiles.ROW_BYTES // wgmma_tiles.PIECE_BYTES)
                place = slab * SLAB_BYTES + wgmma_tiles.piece_offset(head, piece % 8)
                ptx.store_shared(memory.queries + place, 0, pieces[i])
        cute.arch.fence_proxy("async.shared", space="cta")

    def load_piece(self, base, index, exists):
        """16 bytes of the queries, which lie one behind the other."""
        return numbers.load_global_if(exists, base + Int64(index) * 16, 0)

    # -- the first warpgroup ------------------------------------------------------------------------------------------

    @cute.jit
    def attend(self, work, results, memory, softmax_scale, warp, lane):
        """Scores, softmax, the left half of the output."""
        scale = softmax_scale * ptx.LOG2_E
        sums = wgmma_tiles.make_sums(HALF)
        sums.fill(0.0)
        scores = wgmma_tiles.make_sums(BLOCK_TOKENS)
        packed = cute.make_rmem_tensor(BLOCK_TOKENS // 4, Uint32)
        maxima = cute.make_rmem_tensor(2, Float32)
        maxima.fill(softmax.LOWEST)
        totals = cute.make_rmem_tensor(2, Float32)
        totals.fill(0.0)
        stage, phase = Int32(0), Int32(0)
        for block in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.score(scores, memory, stage, phase)
            if const_expr(self.config.staggered):
                if block > work.begin:
                    self.hand_over_weights()
            if const_expr(self.config.tokens == "sparse"):
                softmax.mask(scores, self.load_flags(memory, stage), lane)
            else:
                softmax.mask_end(scores, work, block, warp, lane)
            factors = softmax.raise_maxima(scores, maxima, scale)
            softmax.exponentiate(scores, maxima, totals, factors, scale, packed)
            cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
            self.publish_weights(packed, memory, warp, lane)
            self.publish_factors(factors, memory, warp, lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            if const_expr(not self.config.staggered):
                self.hand_over_weights()
            softmax.rescale(sums, factors, HALF_SUMS)
            self.add_values(sums, self.weight_fragment(packed), memory, stage, 0)
            self.release(memory, stage, lane, 0)
            stage, phase = advance(stage, phase, NUM_STAGES)
        if const_expr(self.config.staggered):
            if work.begin < work.end:
                self.hand_over_weights()
        for row in cutlass.range_constexpr(2):
            totals[row] = lane_sum(totals[row], softmax.ROW_LANES)
            maxima[row] = maxima[row] * scale
        cute.arch.barrier(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        factors = self.writer.finish_rows(work, results, maxima, totals, warp, lane)
        self.publish_factors(factors, memory, warp, lane)
        self.hand_over_weights()
        self.writer.write(work, results, sums, factors, memory.queries, warp, lane, 0)

    def score(self, scores, memory, stage, phase) -> None:
        """scores = queries times the keys of a tile, which it waits for: left columns, RoPE columns, right columns."""
        right = self.config.num_halves - 1
        self.await_tile(memory, stage, phase, 0)
        wgmma_tiles.begin()
        for first, count in ((0, HALF_SLABS), (2 * HALF_SLABS, 1), (HALF_SLABS, HALF_SLABS)):
            if right and first == HALF_SLABS:
                self.await_tile(memory, stage, phase, right)
            columns = count * wgmma_tiles.SLAB_COLUMNS
            queries = wgmma_tiles.tile(memory.query_pointer + first * SLAB_BYTES, BLOCK_HEADS, columns)
            keys = wgmma_tiles.tile(
                memory.tile_pointer + (stage * TILE_BYTES + first * SLAB_BYTES), BLOCK_TOKENS, columns
            )
            wgmma_tiles.multiply(scores, queries, keys, BLOCK_TOKENS, zero=first == 0)
        wgmma_tiles.finish()

    def hand_over_weights(self) -> None:
        """Lets the second warpgroup begin with the weights and factors that were published last."""
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_READY, number_of_threads=MULTIPLYING_THREADS)

    def add_values(self, sums, weights, memory, stage, half: int) -> None:
        """sums += weights times a half of the values of a tile."""
        place = memory.tile_pointer + (stage * TILE_BYTES + half * HALF_SLABS * SLAB_BYTES)
        values = wgmma_tiles.transposed_tile(place, BLOCK_TOKENS, HALF)
        wgmma_tiles.begin()
        wgmma_tiles.multiply(sums, weights, values, HALF, b_transposed=True)
        wgmma_tiles.finish()

    def weight_fragment(self, packed) -> cute.Tensor:
        """The packed weights, which are in the order of the scores' accumulators, as an A operand in registers."""
        layout = cute.make_layout(((2, 2, 2), 1, BLOCK_TOKENS // 16))
        return cute.make_tensor(cute.recast_ptr(packed.iterator, dtype=BFloat16), layout)

    def load_flags(self, memory, stage):
        place = memory.flags + stage * FLAG_BYTES
        return [*ptx.load_shared_vector(place, 0, 4), *ptx.load_shared_vector(place, 16, 4)]

    def publish_weights(self, packed, memory, warp, lane) -> None:
        """Stores a thread's weights as the K-major tile [64 heads, 64 tokens] of the second warpgroup."""
        row = warp * 16 + lane // 4
        for i in range(0, softmax.NUM_SCORES, 2):
            below, column = wgmma_tiles.sum_place(i)
            place = wgmma_tiles.piece_offset(row, Int32(column // 8)) + below * wgmma_tiles.ROW_BYTES + lane % 4 * 4
            ptx.store_shared(memory.weights + place, 0, [packed[i // 2]])

    @cute.jit
    def publish_factors(self, factors, memory, warp, lane):
        if lane % 4 == 0:
            place = memory.factors + (warp * 16 + lane // 4) * 4
            ptx.store_shared(place, 0, [factors[0]])
            ptx.store_shared(place, 32, [factors[1]])

    def await_tile(self, memory, stage, phase, half: int) -> None:
        """Waits for a tile, or for a half of it if they come one by one."""
        cute.arch.mbarrier_wait(memory.full + (half * NUM_STAGES + stage), phase)
        if self.config.fence == "reader":
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def release(self, memory, stage, lane, half: cutlass.Constexpr):
        """A warp is done with a tile, or with a half of it."""
        cute.arch.sync_warp()
        barrier = memory.empty + (half * NUM_STAGES + stage)
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)
            if const_expr(self.config.crossover):
                other = 1 - cute.arch.block_idx_in_cluster()
                numbers.arrive_in_cluster(numbers.address_in(barrier.toint(), other))

    # -- the second warpgroup -----------------------------------------------------------------------------------------

    @cute.jit
    def add_right(self, work, results, memory, warp, lane):
        """The right half of the output. warp: 0 to 3."""
        cute.arch.barrier_arrive(barrier_id=QUERIES_READY, number_of_threads=MULTIPLYING_THREADS)
        cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
        sums = wgmma_tiles.make_sums(HALF)
        sums.fill(0.0)
        weights = wgmma_tiles.tile(memory.weight_pointer, BLOCK_HEADS, BLOCK_TOKENS)
        right = self.config.num_halves - 1
        stage, phase = Int32(0), Int32(0)
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            self.await_tile(memory, stage, phase, right)
            cute.arch.barrier(barrier_id=WEIGHTS_READY, number_of_threads=MULTIPLYING_THREADS)
            softmax.rescale(sums, self.load_factors(memory, warp, lane), HALF_SUMS)
            self.add_values(sums, weights, memory, stage, 1)
            cute.arch.barrier_arrive(barrier_id=WEIGHTS_FREE, number_of_threads=MULTIPLYING_THREADS)
            self.release(memory, stage, lane, right)
            stage, phase = advance(stage, phase, NUM_STAGES)
        cute.arch.barrier(barrier_id=WEIGHTS_READY, number_of_threads=MULTIPLYING_THREADS)
        factors = self.load_factors(memory, warp, lane)
        self.writer.write(work, results, sums, factors, memory.queries, warp, lane, 1)

    def load_factors(self, memory, warp, lane):
        place = memory.factors + (warp * 16 + lane // 4) * 4
        return [ptx.load_shared(place, offset).bitcast(Float32) for offset in (0, 32)]
