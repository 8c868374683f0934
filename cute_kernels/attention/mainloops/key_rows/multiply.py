"""The consumer warpgroups of key rows. Each takes 64 of a tile's tokens and all queries of a work tile: scores, softmax
and P V.

A warp scores 16 tokens, and accumulates a quarter of the values' columns over all of its warpgroup's tokens. So the
four warps share probabilities and a softmax reference. They write probabilities under the current reference. The
barrier after which probabilities are read also tells whether one of them was too large. Only then do the warps raise
the reference and write their probabilities again.

The warpgroups take turns issuing MMAs. In a turn, a warpgroup issues the scores of a block, then P V of the block
before. It turns values into operands while the scores are computed. Its softmax overlaps with the other warpgroup's
turn. A warp that issues MMAs with register operands waits for its earlier MMAs, so all other work stands before or
after a turn.

A block is a chain of waits, so codes are loaded ahead. Codes of values are loaded before a turn. Codes of keys are
loaded at the end of the block before. Whether their tile has arrived is tested during that block's softmax, which hides
the test's latency.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.extend_config import ExtendConfig
from cute_kernels.attention.extend_policies import GROUP_TOKENS, SLAB_COLUMNS, WARPGROUP_WARPS, has_head_scale
from cute_kernels.attention.loads.memory import KEYS, VALUES
from cute_kernels.attention.mainloops.key_rows.codes import CHUNK_BYTES, WARP_TOKENS, ScaledByteRows, magic_of, rows_of
from cute_kernels.attention.mainloops.key_rows.memory import arrive_if, store_matrix_x2, store_word_if
from cute_kernels.attention.mainloops.key_rows.queries import QueryWriter
from cute_kernels.attention.mainloops.key_rows.results import KeyRowsResults, sum_index
from cute_kernels.attention.mainloops.tile_queries import query_row
from cute_kernels.attention.mainloops.tiles import Consumer
from cute_kernels.attention.mainloops.warpgroup_barriers import WARPGROUP_THREADS, await_turn, pass_turn, sync_warpgroup
from cute_kernels.attention.work_tiles import END, Worker
from cute_kernels.device import ptx, wgmma
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import in_pairs, lane_max
from cute_kernels.device.loads import load_float, load_word_below
from cute_kernels.device.pipeline import PipelineState
from cute_kernels.device.softmax import COLUMN_LANES, MIN_SCORE_SCALE, RESCALE_SLACK, OnlineSoftmax
from cute_kernels.device.types import Index, RegisterTensor
from cute_kernels.formats.scores.terms import ScoreTerms

MIN_VALUE_SCALE = 2.0**-80  # replaces smaller scales of V, so that probabilities stay finite
MAX_TOTAL = 2.0**90  # above any sum of a lane's probabilities of a block, even with the least scale
KEY_STEPS, VALUE_STEPS = 8, GROUP_TOKENS // 16  # MMA steps: of 16 columns of K, of 16 tokens of V
STEPS_AT_ONCE = 2  # steps whose operands are handed to the MMAs together
VALUE_GROUPS = VALUE_STEPS // STEPS_AT_ONCE  # commit groups of `KeyRowsConsumer.add_values`
STEP_SLAB = SLAB_COLUMNS // 16  # steps of 16 columns in a slab


@dataclass(frozen=True)
class Sums:
    """A thread's accumulators and softmax state of a work tile, in registers.

    Attributes:
        values: accumulators of P V, fp32 [2 MMAs][columns][2 row halves], in the order of `results.sum_index`.
        softmax: the softmax state of each column. All threads of a warpgroup have the same references.
        probabilities: offset in bytes of the buffer that takes the next block's probabilities.
    """

    values: RegisterTensor[Float32]
    softmax: OnlineSoftmax
    probabilities: RegisterTensor[Int32]


@dataclass(frozen=True)
class Ahead:
    """The next block of tokens, whose keys are loaded before the current block ends.

    Attributes:
        codes: the words that `KeyRowsConsumer.fetch_keys` loads for the block's keys.
        state: the pipeline state of the block's tiles.
        missing: whether the block exists, but had not arrived when it was tested.
        source: the stage from which ``codes`` are loaded. If there is no next block, it is the current stage, and the
            codes are not used.
        start: the address of the lane's keys in stage ``source``.
    """

    codes: RegisterTensor[Uint32]
    state: PipelineState
    missing: Boolean
    source: Int32
    start: Int32


@dataclass(frozen=True)
class Lane:
    """The position of a thread, and its addresses.

    Attributes:
        group: the warpgroup, 0 or 1.
        warp: the warp of the warpgroup, 0 to 3.
        keys, values: bytes from a tile's start to the lane's codes of K, and of V.
        probabilities: the lane's shared address in the first of the warpgroup's buffers.
        headers: bytes from the start of K's headers, and of V's, to the lane's headers.
        scales: for K, and for V, the bytes by which the scales of the lane's rows are shifted in shared memory.
        next_value: bytes from the values of the lane's first token to the values of its second token.
        magic: the result of `magic_of`.
    """

    group: Int32
    warp: Int32
    lane: Int32
    keys: Int32
    values: Int32
    probabilities: Int32
    headers: tuple[Any, Any]
    scales: tuple[Any, Any]
    next_value: Index
    magic: tuple[Uint32, Uint32, Uint32]


class KeyRowsConsumer:
    """The loop of the consumer warps, over work tiles and blocks of keys."""

    receive, release = Consumer.receive, Consumer.release

    def __init__(self, config: ExtendConfig):
        self.config = config
        self.blocks = config.tile_rows // 8
        self.columns = 2 * self.blocks  # of a thread
        self.heads = config.tile_heads
        self.keys, self.values = (rows_of(form, config.paired) for form in config.formats)
        self.key_scale, self.value_scale = config.tile_scales
        self.queries, self.results = QueryWriter(config), KeyRowsResults(config)
        self.worker = Worker(config, ScoreTerms(config.features, self.columns, 2))
        shape = config.key_rows
        assert shape is not None
        self.shape = shape

    @cute.jit
    def run(self, shape, source, operands, features, memory, group: Int32, warp: Int32, lane: Int32):
        """Processes all work tiles of the CTA. group: the warpgroup, 0 or 1. warp: the warp of the group, 0 to 3."""
        # Warpgroup 0 goes first. Both have the same requests and blocks, so they alternate to the end.
        if group == 1:
            pass_turn(group)
        state, slot = memory.tile_pipeline.consumer_state(), memory.work.consumer_state()
        start = self.with_probabilities(self.place_of(group, warp, lane, magic_of(shape.batch, lane)), memory)
        work = self.receive(memory, slot, lane)
        while work.request != END:
            slot = memory.work.next(slot)
            work = work.of_head(self.heads, group)
            place = self.shifted(start, source, work)
            state = self.attend(shape, operands, features, work, memory, place, state)
            work = self.receive(memory, slot, lane)

    def place_of(self, group, warp, lane, magic) -> Lane:
        matrix, row = lane // 8, lane % 8
        # stmatrix.x4: two blocks of queries, two halves of the warp's tokens; the 128-byte swizzle is chunk ^ row.
        chunk = ((2 * warp + matrix % 2) ^ row) * CHUNK_BYTES
        return Lane(
            group,
            warp,
            lane,
            self.keys.key_place(warp, lane) + self.keys.group_place(group),
            self.values.value_place(warp, lane) + self.values.group_place(group),
            (matrix // 2 * 8 + row) * wgmma.ROW_BYTES + chunk,
            (0, 0),
            (0, 0),
            0,
            magic,
        )

    def with_probabilities(self, start: Lane, memory) -> Lane:
        """Returns ``start`` with the address of the lane's probabilities in place of their offset, so that blocks need
        not compute the address again.
        """
        return replace(
            start, probabilities=ptx.pinned(Int32(self.own_probabilities(memory, start) + start.probabilities))
        )

    def shifted(self, start: Lane, source, work) -> Lane:
        """Returns ``start`` with the shifts that a work tile's rows have in shared memory. The shifts are added once
        for a work tile: in each block they would lengthen the critical path by 100 clocks."""
        keys, values = self.keys, self.values
        key, _, _ = keys.shifts(source.keys, work.head, start.lane)
        value, even, more = values.shifts(source.values, work.head, start.lane)
        return replace(
            start,
            keys=ptx.pinned(Int32(start.keys + key)),
            values=ptx.pinned(Int32(start.values + even)),
            headers=(
                ptx.pinned(Int32(keys.key_header_place(start.group, start.warp, start.lane) + key)),
                ptx.pinned(Int32(values.value_header_place(start.group, start.warp, start.lane) + value)),
            ),
            scales=(key, value),
            next_value=values.row_bytes + more,
        )

    @cute.jit
    def attend(self, shape, operands, features, work, memory, place, state: PipelineState):
        """Processes one work tile. Returns the pipeline's next state."""
        pipeline = memory.tile_pipeline
        span = self.worker.span(shape, work)
        from_fp16 = self.queries.write(shape, operands, work, memory, place.group, place.warp, place.lane)
        scale = self.score_scale(operands, work, from_fp16)
        sums, codes = self.make_sums(), cute.make_rmem_tensor(self.key_words, Uint32)
        self.clear_probabilities(memory, sums, place)
        queries = wgmma.descriptor(cute.arch.make_warp_uniform(self.queries.tile(memory, place.group)))
        before = state  # of the previous block's values; at first the block's own, times probabilities of zero
        if span.begin < span.end:
            pipeline.consumer_wait(state)
            self.fetch_keys(memory, place, codes, state.stage)
        for i in cutlass.range(span.begin, span.end, 1, unroll=1):
            block = span.end - 1 - (i - span.begin)
            keys = self.make_keys(place, codes)
            values = self.fetch_values(memory, place, before.stage)
            masked = self.masked_word(features, work, span, block)
            await_turn(place.group)
            dots = self.start_scores(queries, keys)
            self.add_values(memory, sums, place, values)
            pass_turn(place.group)
            done = cutlass.select_((place.lane == 0) & (i > span.begin), Int32(1), Int32(0))
            arrive_if(done, (pipeline.empty + before.stage).toint())  # releases the stage
            before = state
            state = pipeline.next(state)
            ahead = self.look_ahead(memory, place, codes, i + 1 < span.end, state, before.stage)
            self.weigh(
                shape, features, work, span, memory, sums, place, scale, dots, block, before.stage, ahead, masked
            )
        if span.begin < span.end:
            self.add_values(memory, sums, place, self.fetch_values(memory, place, before.stage))
            self.release(pipeline, before, place.lane)
            self.wait_for(sums, [])
        # Pinned: what is computed from a thread's position would otherwise be kept, or spilled, throughout the loop.
        here = replace(place, lane=ptx.pinned(place.lane), warp=ptx.pinned(place.warp), group=ptx.pinned(place.group))
        self.results.write(shape, operands, features, work, memory, sums, here)
        return state

    def score_scale(self, operands, work, from_fp16):
        """Returns the factor that turns dot products into exponents of 2, without a row's scale. Masked scores are
        -inf, so the factor may not be 0."""
        scale = operands.softmax_scale * (ptx.LOG2_E * self.config.units[0]) * from_fp16
        if has_head_scale(self.config.formats[0]):
            scale = scale * load_float(operands.k_scale + Int64(work.head) * operands.k_scale_stride * 4)
        return ptx.fmax(scale, Float32(MIN_SCORE_SCALE))

    def make_sums(self) -> Sums:
        values = cute.make_rmem_tensor(4 * self.columns, Float32)
        offset = cute.make_rmem_tensor(1, Int32)
        values.fill(0.0)
        offset[0] = Int32(0)
        return Sums(values, OnlineSoftmax.make(self.columns), offset)

    # -- probabilities ------------------------------------------------------------------------------------------------

    def own_probabilities(self, memory, place):
        """Returns the shared address of the warpgroup's two buffers of probabilities."""
        return memory.probabilities + place.group * (2 * self.shape.probability_bytes)

    def last_place(self, memory, sums, place):
        return self.own_probabilities(memory, place) + (self.shape.probability_bytes - sums.probabilities[0])

    def is_first(self, place):
        """Returns 1 in a warpgroup's first thread, else 0."""
        return cutlass.select_((place.warp == 0) & (place.lane == 0), Int32(1), Int32(0))

    @cute.jit
    def clear_probabilities(self, memory, sums, place):
        """Writes probabilities of zero for the first turn, which has no block before, and clears the warpgroup's
        flag."""
        start = self.last_place(memory, sums, place) + CHUNK_BYTES * (place.warp * WARP_THREADS + place.lane)
        size = self.shape.probability_bytes
        for offset in cutlass.range_constexpr(0, size, CHUNK_BYTES * WARPGROUP_THREADS):
            if const_expr(offset + CHUNK_BYTES * WARPGROUP_THREADS <= size):
                ptx.store_shared_zero16(start, offset)
            else:
                if (place.warp * WARP_THREADS + place.lane) * CHUNK_BYTES + offset < size:
                    ptx.store_shared_zero16(start, offset)
        store_word_if(self.is_first(place), memory.flag(place.group), 0)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(place.group)

    # -- what stands before a turn ------------------------------------------------------------------------------------

    @property
    def key_words(self) -> int:
        """Number of words that :meth:`fetch_keys` loads for a lane: codes and headers."""
        return self.keys.key_words + self.keys.key_header_words

    def look_ahead(self, memory, place, codes, more, state, current) -> Ahead:
        """Tests whether the next block's tiles have arrived. The caller tests early: otherwise the test's latency would
        delay the loads of codes.
        """
        missing = more & ~memory.tile_pipeline.has_filled(state)
        source = cutlass.select_(more, state.stage, current)
        return Ahead(codes, state, missing, source, ptx.pinned(Int32(place.keys + memory.tile(KEYS, source))))

    def fetch_keys(self, memory, place, codes, stage, start=None) -> None:
        """Loads the codes and headers of the warp's 16 tokens of K."""
        words = self.keys.load_keys(place.keys + memory.tile(KEYS, stage) if start is None else start)
        headers = self.keys.load_key_headers(self.keys.header_start(memory, KEYS, stage) + place.headers[KEYS])
        for index, word in enumerate([*words, *(word for rows in headers for word in rows)]):
            codes[index] = word

    def make_keys(self, place, codes) -> list[list[Uint32]]:
        """Makes the A registers of keys for all steps, from the words that `fetch_keys` has loaded."""
        count = self.keys.key_words
        words = [codes[i] for i in range(count)]
        headers = [[codes[i], codes[i + 1]] for i in range(count, self.key_words, 2)]
        ready = wgmma.fence([word for a in self.keys.key_operands(words, headers, place.magic) for word in a])
        return [ready[4 * step : 4 * step + 4] for step in range(KEY_STEPS)]

    def fetch_values(self, memory, place, stage) -> tuple[list[Any], list[Any]]:
        """Loads codes and headers of the values in ``stage``. Returns both."""
        words = self.values.load_values(place.values + memory.tile(VALUES, stage), place.next_value, GROUP_TOKENS)
        address = self.values.header_start(memory, VALUES, stage) + place.headers[VALUES]
        return words, self.values.load_value_headers(address, GROUP_TOKENS)

    # -- products -----------------------------------------------------------------------------------------------------

    def add_values(self, memory, sums, place, values) -> None:
        """Issues P V of the block whose probabilities were written last. values: the result of `fetch_values`."""
        b = wgmma.descriptor(cute.arch.make_warp_uniform(self.last_place(memory, sums, place)))
        words, headers = values
        mmas = range(2)
        totals = [[sums.values[i] for i in self._places(m)] for m in mmas]
        for first in range(0, VALUE_STEPS, STEPS_AT_ONCE):
            steps = [self.values.value_operands(words, headers, first + i, place.magic) for i in range(STEPS_AT_ONCE)]
            ready = wgmma.fence([word for step in steps for a in step for word in a])
            for i in range(STEPS_AT_ONCE):
                for m in mmas:
                    a = ready[4 * (2 * i + m) : 4 * (2 * i + m) + 4]
                    totals[m] = wgmma.mma(totals[m], a, wgmma.advanced(b, (first + i) * wgmma.STEP_BYTES), dtype="f16")
            wgmma.commit()
        self._set(sums, [value for total in totals for value in total])

    def start_scores(self, b, operands) -> list[Any]:
        """Issues the dot products of the warp's tokens with all queries. operands: the result of :meth:`make_keys`.

        b: the queries' descriptor."""
        dots: list[Any] = []
        slab_bytes = self.config.tile_rows * SLAB_COLUMNS * 2
        for first in range(0, KEY_STEPS, STEPS_AT_ONCE):
            ready = wgmma.fence([word for a in operands[first : first + STEPS_AT_ONCE] for word in a])
            for i in range(STEPS_AT_ONCE):
                step = first + i
                own = wgmma.advanced(b, step // STEP_SLAB * slab_bytes + step % STEP_SLAB * wgmma.STEP_BYTES)
                a = ready[4 * i : 4 * i + 4]
                if dots:
                    dots = wgmma.mma(dots, a, own, dtype="f16")
                else:
                    dots = wgmma.first_mma(2 * self.columns, a, own, dtype="f16")
        wgmma.commit()
        return dots

    def wait_for(self, sums, dots) -> list[Any]:
        """Waits for all MMAs. Updates ``sums`` in place, and returns the finished ``dots``."""
        own = [sums.values[i] for m in range(2) for i in self._places(m)]
        finished = wgmma.wait_for([*own, *dots], 0)
        self._set(sums, finished[: len(own)])
        return finished[len(own) :]

    def _places(self, mma: int) -> range:
        """Returns the indices of an MMA's accumulators in the order of registers."""
        return range(2 * self.columns * mma, 2 * self.columns * (mma + 1))

    def _set(self, sums, values) -> None:
        for place, value in enumerate(values):
            sums.values[place] = value

    # -- softmax ------------------------------------------------------------------------------------------------------

    @cute.jit
    def weigh(
        self,
        shape,
        features,
        work,
        span,
        memory,
        sums,
        place,
        scale,
        dots,
        block: Int32,
        stage: Int32,
        ahead: Ahead,
        masked: Int32,
    ):
        """Computes a block's probabilities from ``dots``, and writes them to shared memory for all warps of the
        warpgroup. P V of the previous block overlaps with the softmax, and has ended on return. Also loads the codes of
        the next block's keys."""
        row = place.warp * WARP_TOKENS + place.lane // 4
        lines = self.load_scales(memory, place, KEYS, stage, row)
        value_scales = self.load_scales(memory, place, VALUES, stage, row)
        found = wgmma.wait_for(dots, VALUE_GROUPS)
        s = cute.make_rmem_tensor(2 * self.columns, Float32)
        for i in cutlass.range_constexpr(2 * self.columns):
            s[i] = found[i]
        if masked != 0:
            first = block * self.config.tile_tokens
            if const_expr(self.heads == 1):
                first = first + place.group * GROUP_TOKENS
            self.mask(shape, features, work, s, place, first + row)
        if const_expr(self.key_scale):
            lines = [ptx.fmax(line * scale, Float32(MIN_SCORE_SCALE)) for line in lines]
        else:
            lines = [scale, scale]
        self.share(memory, sums, place, s, lines, value_scales, ahead)

    def masked_word(self, features, work, span, block):
        """Returns 1 if some query may not see some key of a block, else 0."""
        masked = self.worker.is_masked(work, span, block)
        if self.config.features.window:
            # The last query is the first to lose sight of a key.
            masked = masked | (block * self.config.tile_tokens <= span.last_position - features.window)
        return ptx.pinned(Int32(cutlass.select_(masked, Int32(1), Int32(0))))

    def load_scales(self, memory, place, operand: int, stage, row) -> list[Any]:
        """Loads the scales of the lane's two tokens; an empty list if rows have no scales. The loads overlap with MMAs.
        row: index of the first token's row among the warpgroup's rows.
        """
        if not (self.key_scale, self.value_scale)[operand]:
            return []
        rows = (self.keys, self.values)[operand]
        assert isinstance(rows, ScaledByteRows)
        address = memory.tile(operand, stage) + rows.scale_place(place.group, row) + place.scales[operand]
        return [ptx.load_shared(address, 8 * i * rows.row_bytes).bitcast(Float32) for i in range(2)]

    @cute.jit
    def mask(self, shape, features, work, s, place, token: Int32):
        """Sets scores to -inf where a query does not see a key. token: the lane's first token; its second token is
        ``token`` + 8."""
        for column in cutlass.range_constexpr(self.columns):
            row = work.first_row + 8 * (column // 2) + 2 * (place.lane % 4) + column % 2
            _, query, _ = query_row(shape, work, row)
            stop = work.kv_stop
            if const_expr(self.config.features.causal):
                stop = cutlass.min(work.before + query + 1, stop)
            for half in cutlass.range_constexpr(2):
                index = sum_index(column, half)
                seen = token + 8 * half < stop
                if const_expr(self.config.features.window):
                    seen = seen & (token + 8 * half > work.before + query - features.window)
                if const_expr(self.config.tree):
                    seen = seen & self.tree_sees(shape, features, work, query, token + 8 * half)
                s[index] = cutlass.select_(seen, s[index], -Float32.inf)

    def tree_sees(self, shape, features, work, query, token):
        """Returns whether the tree's mask lets a query of the request see a token."""
        number, new = cutlass.min(work.q_start + query, shape.total_q - 1), token - work.before
        address = features.tree_mask + (Int64(number) * features.tree_words + Int64(new >> 5)) * 4
        word = load_word_below(new >> 5, features.tree_words, address)
        return (new < 0) | (((word >> Uint32(new & 31)) & Uint32(1)) != 0)

    @cute.jit
    def share(self, memory, sums, place, s, lines, value_scales, ahead):
        """Publishes the warp's probabilities to the warpgroup, and adds them to the softmax totals. Raises the softmax
        reference if probabilities are too large for fp16."""
        totals = cute.make_rmem_tensor(self.columns, Float32)
        target = place.probabilities + sums.probabilities[0]
        exceeds = self.write_probabilities(sums, totals, target, s, lines, value_scales)
        if const_expr(self.value_scale):
            # Only such small scales hide a sum beyond MAX_TOTAL: with greater ones P * scale is too large for fp16.
            if cute.arch.vote_any_sync((value_scales[0] < MIN_VALUE_SCALE) | (value_scales[1] < MIN_VALUE_SCALE)):
                exceeds = exceeds | (in_pairs(ptx.fmax, [totals[c] for c in range(self.columns)]) > MAX_TOTAL)
        self.wait_for(sums, [])
        store_word_if(Int32(exceeds), memory.flag(place.group), 1)
        again = self.any_of_warpgroup(memory, place)
        while again != 0:  # once: a branch lays out all of a tile's code otherwise, 2 to 6 % slower at 40 columns
            bounds = self.bounds_of(value_scales)
            self.raise_reference(memory, sums, place, s, lines, bounds)
            self.write_probabilities(sums, totals, target, s, lines, value_scales, bounds)
            again = self.any_of_warpgroup(memory, place)
        if ahead.missing:
            memory.tile_pipeline.consumer_wait(ahead.state)
        self.fetch_keys(memory, place, ahead.codes, ahead.source, ahead.start)
        for column in cutlass.range_constexpr(self.columns):
            sums.softmax.totals[column] = sums.softmax.totals[column] + totals[column]
        sums.probabilities[0] = self.shape.probability_bytes - sums.probabilities[0]

    def any_of_warpgroup(self, memory, place):
        """Returns 1 if some thread of the warpgroup has set the flag, because its probabilities are too large; else 0.
        Synchronises the warpgroup, so that MMAs see all probabilities that were written before."""
        cute.arch.fence_proxy("async.shared", space="cta")
        sync_warpgroup(place.group)
        return Int32(ptx.load_shared(memory.flag(place.group), 0))

    def write_probabilities(self, sums, totals, target, s, lines, value_scales, bounds=None):
        """Computes P, and writes P times V's scales to shared memory for MMAs. Stores the sums of P in ``totals``.
        Returns whether some product is too large for fp16.

        target: the lane's address. bounds: None, or the result of `bounds_of` once the reference has been raised.
        Bounds limit logits, so that no product exceeds 1. A raised reference alone does not ensure this, since fp32
        rounds logits near 2^30 coarsely.
        """
        largest: Any = None
        for first in range(0, self.blocks, 2):
            words = []
            for block in range(first, min(first + 2, self.blocks)):
                logits = [[self.logit(sums, s, lines, 2 * block + c, j) for c in range(2)] for j in range(2)]
                if bounds is not None:  # a NaN stays one
                    pairs = zip(logits, bounds, strict=True)
                    logits = [[cutlass.select_(x > -bound, -bound, x) for x in own] for own, bound in pairs]
                p = [[ptx.exp2(x) for x in own] for own in logits]
                for c in range(2):
                    totals[2 * block + c] = p[0][c] + p[1][c]
                for j in range(2):
                    own = [x * value_scales[j] for x in p[j]] if self.value_scale else p[j]
                    words.append(ptx.pack_f16x2(*own))
            for word in words:
                largest = word if largest is None else ptx.max_f16x2(largest, word)
            offset = first * 8 * wgmma.ROW_BYTES
            if len(words) == 4:
                ptx.store_matrix_x4(target, offset, words, transpose=True)
            else:
                store_matrix_x2(target, offset, words)
        product = ptx.fmax(ptx.half2_low_to_float(largest), ptx.half2_high_to_float(largest))
        return product > 2.0**RESCALE_SLACK

    def logit(self, sums, s, lines, column: int, half: int, start=None):
        """Returns a logit plus ``start``, as an exponent of 2. start: by default minus the softmax reference."""
        start = -sums.softmax.references[column] if start is None else start
        return ptx.fma(s[sum_index(column, half)], lines[half], start)

    def bounds_of(self, value_scales) -> list[Any]:
        """Returns log2 of V's scales of the lane's two tokens. They are the bounds of `write_probabilities`: if the
        reference is at least logit + bound, P times V's scale is at most 1.
        """
        if not self.value_scale:
            return [Float32(0.0)] * 2
        return [ptx.log2(ptx.fmax(scale, Float32(MIN_VALUE_SCALE))) for scale in value_scales]

    def raise_reference(self, memory, sums, place, s, lines, bounds) -> None:
        """Raises the softmax references to the warpgroup's maxima, and rescales the sums made under the old
        references."""
        maxima = []
        for column in range(self.columns):
            logits = [self.logit(sums, s, lines, column, j, start=bounds[j]) for j in range(2)]
            maxima.append(lane_max(ptx.fmax(*logits), COLUMN_LANES))
        told = memory.told + place.group * self.shape.group_told_bytes
        row_bytes = 4 * self.config.tile_rows
        own = told + place.warp * row_bytes + 8 * (place.lane % 4)
        for block in range(self.blocks):
            ptx.store_shared(own, 32 * block, maxima[2 * block : 2 * block + 2])
        sync_warpgroup(place.group)  # all maxima are there, and all threads have read the flag
        store_word_if(self.is_first(place), memory.flag(place.group), 0)
        for block in range(self.blocks):
            heard = [
                ptx.load_shared_vector(told + 8 * (place.lane % 4), warp * row_bytes + 32 * block, 2)
                for warp in range(WARPGROUP_WARPS)
            ]
            for c in range(2):
                column = 2 * block + c
                factor = sums.softmax.raise_to(column, *(words[c].bitcast(Float32) for words in heard))
                for mma in range(2):
                    for half in range(2):
                        index = 2 * self.columns * mma + sum_index(column, half)
                        sums.values[index] = sums.values[index] * factor
