"""The consumer warpgroups. Each computes scores, softmax and P V of 64 rows of queries, one work tile after the other.

A block's softmax overlaps with the PV MMAs of the block before, as in FlashAttention-3 (Shah et al. 2024). The two
warpgroups take turns issuing MMAs, so that the softmax also overlaps with the other warpgroup's MMAs.

    tensor cores   Q K^T (b) | P V (b - 1) | ...        of one warpgroup, then of the other
    softmax                  | of block b
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import WARPGROUP_ROWS, WORK_BYTES, has_head_scale
from cute_kernels.attention.loads.memory import KEYS, VALUES
from cute_kernels.attention.mainloops.products import Fp8Products, HalfProducts
from cute_kernels.attention.mainloops.tile_queries import WARP_ROWS, QueryLoader, QueryRows, query_row
from cute_kernels.attention.mainloops.tile_results import ResultWriter
from cute_kernels.attention.mainloops.tile_softmax import Rows, Softmax
from cute_kernels.attention.mainloops.two_level import TwoLevelSums
from cute_kernels.attention.mainloops.warpgroup_barriers import await_turn, pass_turn, sync_warpgroup
from cute_kernels.attention.work_tiles import END, Work, Worker
from cute_kernels.device import numbers, ptx, wgmma, wgmma_tiles
from cute_kernels.device.loads import load_float
from cute_kernels.device.pipeline import PipelineState
from cute_kernels.device.softmax import MIN_SCORE_SCALE, OnlineSoftmax, rescale
from cute_kernels.formats.scores import tensors_in
from cute_kernels.formats.scores.terms import QueryColumn, ScoreState


@dataclass(frozen=True)
class Features:
    """Run-time values of a launch's features.

    Attributes:
        sinks, alibi_slopes: addresses of fp32 [num_q_heads].
        tree_mask: address of int32 [total_q, tree_words].
        tensors: addresses of the tensors of registered score options, by name.
    """

    window: Int32
    soft_cap: Float32
    sinks: Int64
    alibi_slopes: Int64
    tree_mask: Int64
    tree_words: Int32
    tensors: dict[str, Int64]

    @classmethod
    def of(cls, given, config: ExtendConfig) -> Features:
        """Takes the values of the features from a launch's arguments."""
        tensors = {tensor.name: getattr(given, tensor.name) for tensor in tensors_in(config.features)}
        names = (own.name for own in fields(cls) if own.name != "tensors")
        return cls(**{name: getattr(given, name) for name in names}, tensors=tensors)


@dataclass(frozen=True)
class Operands:
    """Addresses and strides that a launch passes to consumers.

    Attributes:
        q, out: [total_q, num_q_heads, head_dim].
        lse: fp32 [total_q, num_q_heads], or 0.
        other_out, other_lse: another launch's result to merge with, shaped as out and lse.
        partials: fp32 [splits, total_q, num_q_heads, head_dim], then [splits, total_q, num_q_heads] of log2 sums.
        k_scale, v_scale: fp32 scales beside the cache. The scales of a KV head begin ``*_scale_stride`` elements after
            those of the previous head. Column scales of a head are contiguous.
    """

    q: QueryRows
    out: Int64
    lse: Int64
    other_out: Int64
    other_lse: Int64
    partials: Int64
    k_scale: Int64
    v_scale: Int64
    k_scale_stride: Int32
    v_scale_stride: Int32
    softmax_scale: Float32

    @classmethod
    def of(cls, given) -> Operands:
        """Takes the operands from a launch's arguments."""
        addresses = {"q": QueryRows.of(given.q), "out": ptx.address(given.out)}
        others = (own.name for own in fields(cls) if own.name not in addresses)
        return cls(**addresses, **{name: getattr(given, name) for name in others})


class Consumer:
    """The loop of the consumer warps, over work tiles and blocks of keys."""

    def __init__(self, config: ExtendConfig):
        self.config = config
        self.loader, self.softmax, self.writer = QueryLoader(config), Softmax(config), ResultWriter(config)
        self.worker = Worker(config, self.softmax.terms)
        self.products = Fp8Products(config) if config.fp8 else HalfProducts(config)
        self.two_level = TwoLevelSums(config, self) if config.fp8 else None
        self.has_key_scale = has_head_scale(config.formats[0])

    @cute.jit
    def run(self, shape, operands, features, memory, group: Int32, warp: Int32, lane: Int32):
        """Processes all work tiles of the CTA. group: the warpgroup, 0 or 1. warp: the warp of the group, 0 to 3."""
        # Warpgroup 0 goes first. Both have the same work tiles and blocks, so they alternate to the end. Then the last
        # arrival of warpgroup 1 is pending, as this is one more than warpgroup 0 waits for. It may stay: nobody waits
        # at that barrier any more, and named barriers end with their CTA.
        if group == 1:
            pass_turn(group)
        state, slot = memory.pipelines[KEYS].consumer_state(), memory.work.consumer_state()
        work = self.receive(memory, slot, lane)
        self.ask_queries(shape, operands, work, memory, group, warp, lane)
        while work.request != END:
            slot = memory.work.next(slot)
            work, state = self.attend(shape, operands, features, work, memory, group, warp, lane, slot, state)

    @cute.jit
    def receive(self, memory, slot: PipelineState, lane: Int32):
        """Waits for the next work tile, releases its slot and returns it."""
        memory.work.consumer_wait(slot)
        address = memory.slots + slot.stage * WORK_BYTES
        words = [*ptx.load_shared_vector(address, 0, 4), *ptx.load_shared_vector(address, 16, 4)]
        work = Work.of_words(words)
        cute.arch.sync_warp()
        if lane == 0:
            memory.work.consumer_release(slot)
        return work

    @cute.jit
    def ask_queries(self, shape, operands, work, memory, group, warp, lane):
        if work.request != END:
            tile = memory.queries + group * self.config.query_bytes
            first_row = work.first_row + group * WARPGROUP_ROWS
            self.loader.ask(shape, work, operands.q, tile, first_row, warp, lane)

    @cute.jit
    def attend(self, shape, operands, features, work, memory, group, warp, lane, slot, state: PipelineState):
        """Processes one work tile. Its queries are being loaded when the call begins. Returns (next work tile, next
        state of K's and V's pipelines)."""
        span = self.worker.span(shape, work)
        tile = memory.queries + group * self.config.query_bytes
        query_scales = memory.query_scales + group * (4 * WARPGROUP_ROWS)
        codes = memory.codes + group * self.config.query_code_bytes
        self.loader.finish(operands, work, tile, codes, query_scales, warp, lane)
        sync_warpgroup(group)
        rows = self.make_rows(shape, operands, features, work, span, query_scales, group, warp, lane)
        sums = wgmma_tiles.make_sums(self.config.operand_columns[VALUES])
        sums.fill(0.0)
        packed = cute.make_rmem_tensor(self.products.packed_words, Uint32)
        factors = cute.make_rmem_tensor(2, Float32)
        if span.begin < span.end:
            self.begin(features, work, span, rows, packed, factors, memory, group, lane, state)
        for i in cutlass.range(span.begin + 1, span.end, 1, unroll=1):
            following = memory.pipelines[KEYS].next(state)
            block = span.end - 1 - (i - span.begin)
            self.go_on(features, work, span, rows, sums, packed, factors, memory, group, lane, block, state)
            state = following
        # Nobody reads these queries any more.
        sync_warpgroup(group)
        after = self.receive(memory, slot, lane)
        self.ask_queries(shape, operands, after, memory, group, warp, lane)
        if span.begin < span.end:
            self.finish(rows, sums, packed, factors, memory, lane, state)
            state = memory.pipelines[KEYS].next(state)
        self.writer.write(shape, operands, features, work, rows, sums, group, warp, lane)
        return after, state

    # -- blocks -------------------------------------------------------------------------------------------------------

    def begin(self, features, work, span, rows, packed, factors, memory, group, lane, state) -> None:
        """Computes the probabilities of a work tile's first block."""
        scores = wgmma_tiles.make_sums(self.config.tile_tokens)
        self.score(scores, memory, group, state)
        tile = self.softmax.load_tile_scales(memory.scales_of(KEYS, state.stage))
        values = self.finish_scores(scores, memory, state, lane, 0)
        factors.fill(0.0)
        self.weigh(features, work, span, rows, values, factors, tile, lane, span.end - 1)
        self.products.pack(values, packed)

    def go_on(self, features, work, span, rows, sums, packed, factors, memory, group, lane, block, state) -> None:
        """Adds P V of the block before, whose values are in stage ``state``, and computes the probabilities of block
        ``block``.
        """
        if self.two_level is not None:
            given = (features, work, span, rows, sums, packed, factors, memory, group, lane, block, state)
            self.two_level.go_on(*given)
            return
        following = memory.pipelines[KEYS].next(state)
        scores = wgmma_tiles.make_sums(self.config.tile_tokens)
        await_turn(group)
        self.score(scores, memory, group, following)
        tile = self.softmax.load_tile_scales(memory.scales_of(KEYS, following.stage))
        self.add_values(sums, packed, memory, state)
        wgmma_tiles.commit()
        pass_turn(group)
        values = self.finish_scores(scores, memory, following, lane, 1)
        factors.fill(1.0)
        self.weigh(features, work, span, rows, values, factors, tile, lane, block)
        self.finish_values(sums, memory, state, lane)
        rescale(sums, factors, self.config.operand_columns[VALUES] // 2)
        self.products.pack(values, packed)

    def finish(self, rows, sums, packed, factors, memory, lane, state) -> None:
        """Adds P V of the last block."""
        if self.two_level is not None:
            self.two_level.finish(rows, sums, packed, factors, memory, lane, state)
            return
        self.add_values(sums, packed, memory, state)
        wgmma_tiles.commit()
        self.finish_values(sums, memory, state, lane)

    def score(self, scores, memory, group, state) -> None:
        """Waits for the keys of a block, and issues the MMAs of its scores."""
        memory.pipelines[KEYS].consumer_wait(state)
        self.products.score(scores, memory, group, state.stage)
        wgmma_tiles.commit()

    def add_values(self, sums, packed, memory, state) -> None:
        """Waits for the values of a block, and issues sums += P V. The caller commits the MMAs."""
        memory.pipelines[VALUES].consumer_wait(state)
        self.products.multiply_values(sums, packed, memory, state.stage)

    def finish_scores(self, scores, memory, state, lane, pending: int) -> Any:
        """Waits for scores, releases K's stage and returns the scores. There are two waits, because LLVM would copy the
        scores before a single wait.
        """
        count = self.config.tile_tokens // 2
        wgmma_tiles.wait(pending)
        found = wgmma.wait_for([scores[i] for i in range(count)], pending)
        values = cute.make_rmem_tensor(count, Float32)
        for i in range(count):
            values[i] = found[i]
        self.release(memory.pipelines[KEYS], state, lane)
        return values

    def finish_values(self, sums, memory, state, lane) -> None:
        """Waits for P V and releases V's stage. There are two waits, as in :meth:`finish_scores`."""
        count = self.config.operand_columns[VALUES] // 2
        wgmma_tiles.wait()
        found = wgmma.wait_all([sums[i] for i in range(count)])
        for i in range(count):
            sums[i] = found[i]
        self.release(memory.pipelines[VALUES], state, lane)

    @cute.jit
    def weigh(self, features, work, span, rows, values, factors, tile, lane, block):
        """Computes probabilities of a block from its scores, and the factors that rescale earlier accumulators.

        ptxas moves a wait for MMAs to the beginning of its basic block, before instructions that do not need the MMAs.
        A branch between softmax and wait keeps the softmax before the wait. The branch is always taken, but the
        compiler cannot know this.
        """
        masked = self.worker.is_masked(work, span, block)
        masked = self.softmax.terms.may_hide(rows.state, block * self.config.tile_tokens, masked)
        self.softmax.take(values, rows, features, work, block, masked, tile, lane)
        if numbers.active_lanes() != 0:
            self.softmax.weigh(values, rows, factors, tile)

    @cute.jit
    def release(self, pipeline, state: PipelineState, lane: Int32):
        """Releases a tile's stage for the calling warp."""
        cute.arch.sync_warp()
        if lane == 0:
            pipeline.consumer_release(state)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def make_rows(self, shape, operands, features, work, span, query_scales, group, warp, lane) -> Rows:
        """Returns the softmax state of a thread's two rows before the first block."""
        k_unit = self.config.units[0]
        scale = operands.softmax_scale * (ptx.LOG2_E * k_unit)
        if const_expr(self.has_key_scale):
            scale *= load_float(operands.k_scale + Int64(work.head) * operands.k_scale_stride * 4)
        positions, scales, queries, masks = [], [], [], []
        for i in range(2):
            row = warp * WARP_ROWS + lane // 4 + 8 * i
            _, place, head = query_row(shape, work, work.first_row + group * WARPGROUP_ROWS + row)
            positions.append(work.before + place)
            if const_expr(self.config.tree):
                masks.append(cutlass.min(work.q_start + place, shape.total_q - 1))
            own = scale
            if const_expr(self.config.converts_queries):
                own = scale * ptx.load_shared(query_scales + row * 4, 0).bitcast(Float32)
            if const_expr(self.has_key_scale):
                # A head of zeros has scale 0, queries of zeros the least one; masked scores, -inf, meet no 0.
                own = ptx.fmax(own, Float32(MIN_SCORE_SCALE))
            scales.append(own)
            queries.append(QueryColumn(place, cutlass.min(head, shape.num_q_heads - 1)))
        state = ScoreState()
        state.values, state.length, state.positions = features, span.last_position + 1, positions
        self.softmax.terms.open(state, work, queries, operands.softmax_scale)
        return Rows(positions, scales, state, masks, OnlineSoftmax.make(2))
