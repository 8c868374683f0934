"""Split-KV decode attention, one launch: ring of tiles, online softmax in registers, last CTA of a row combines.

Shape of the work: a CTA takes ``num_heads`` KV heads of one request and one split of its tokens. One lane keeps a ring
of K and V tiles full with asynchronous copies (:mod:`.copies`); every warp waits for a tile, takes its KV head, its
blocks of 8 query heads and its slice of the tokens, and keeps scores, probabilities and output in registers; what the
bytes of K and of V mean is known to its two :mod:`.readers` alone. There is no CTA barrier in the loop but for the tile
in which the request ends. At the end the warps merge in shared memory; with more than one split, partial results go to
a workspace and the CTA that finishes a row last adds them up in a fixed order, so the output is bitwise reproducible.

Split-KV is Flash-Decoding's (Dao et al. 2023); the lazily rescaled maximum FlashAttention-4's (Zadouri et al. 2026).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_kernels.attention.config import BLOCK_QUERIES, WARP_THREADS, DecodeConfig
from cute_kernels.attention.copies import TileCopier
from cute_kernels.attention.merge import LOWEST, Merger, Results
from cute_kernels.attention.readers import make_readers
from cute_kernels.attention.readers.common import lane_max
from cute_kernels.device import ptx
from layouts.kv.tile import BLOCK_TOKENS, block_token

RECIPROCAL_BITS = 20  # x // n is x * ceil(2**20 / n) >> 20 for x * n < 2**20 and x < 2**11
RESCALE_SLACK = 8.0  # probabilities may grow to 2**8 before the accumulators are rescaled


class DecodeKernel:
    """One compiled variant of decode attention; :class:`DecodeConfig` says which."""

    def __init__(self, config: DecodeConfig):
        self.config = config
        self.key_reader, self.value_reader = make_readers(config)
        self.copier = TileCopier(config)
        self.merger = Merger(config, self.value_reader)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        seq_lens: cute.Tensor,
        out: cute.Tensor,
        lse: Int64,
        partials: Int64,
        k_scale: Int64,
        v_scale: Int64,
        k_scale_stride: Int32,
        v_scale_stride: Int32,
        softmax_scale: Float32,
        num_splits: Int32,
        mode: Int32,
        stream,
    ):
        """Launches over (splits, groups of KV heads x groups of query blocks, batch).

        q: [batch, 1, num_q_heads, head_dim]; out: [batch, 1, num_q_heads, v_head_dim]; caches: [batch, max_seq_len,
        num_kv_heads, row], 8-bit codes as bytes; seq_lens int32 [batch]. The others are addresses, which cost the
        caller less than tensors: lse fp32 [batch, 1, num_q_heads], written if bit 0 of ``mode``; partials fp32 [batch,
        num_q_heads, num_splits, 3/2 v_head_dim] (unnormalised values, then for every 4 of them their maximum in powers
        of 2 and their sum), every word EMPTY before and after. Bit 1 of ``mode``: write and leave the partial results
        of all splits. k_scale, v_scale: fp32 scales of formats that are given one, ``*_scale_stride`` elements from a
        KV head's to the next one's (0: one for all); those of a head's columns lie together, aligned to 16 bytes.
        """
        config = self.config
        cache_shape: Any = k_cache.shape
        q_shape: Any = q.shape
        batch, max_seq_len, num_kv_heads, _ = cache_shape
        group = q_shape[2] // num_kv_heads
        query_groups = cute.ceil_div(group, config.head_queries)
        source = self.copier.make_source(k_cache, v_cache)
        self.kernel(
            q,
            source,
            seq_lens,
            out,
            lse,
            partials,
            k_scale,
            v_scale,
            k_scale_stride,
            v_scale_stride,
            softmax_scale,
            max_seq_len,
            num_kv_heads,
            group,
            query_groups,
            cute.ceil_div(1 << RECIPROCAL_BITS, query_groups),
            mode,
        ).launch(
            grid=(num_splits, num_kv_heads // config.num_heads * query_groups, batch),
            block=(config.num_threads, 1, 1),
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        source,
        seq_lens: cute.Tensor,
        out: cute.Tensor,
        lse: Int64,
        partials: Int64,
        k_scale: Int64,
        v_scale: Int64,
        k_scale_stride: Int32,
        v_scale_stride: Int32,
        softmax_scale: Float32,
        max_seq_len: Int32,
        num_kv_heads: Int32,
        group: Int32,
        query_groups: Int32,
        query_groups_reciprocal: Int32,
        mode: Int32,
    ):
        config = self.config
        split, head_block, batch = cute.arch.block_idx()
        num_splits = cute.arch.grid_dim()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = cutlass.utils.SmemAllocator()
        ring = smem.allocate(max(config.ring_bytes, config.merge_bytes), byte_alignment=1024)
        barriers = smem.allocate_array(cutlass.Int64, 2 * config.num_stages)
        # A division would take over 100 cycles on the way to the first copy.
        head_part = (head_block * query_groups_reciprocal) >> RECIPROCAL_BITS
        query_part = head_block - head_part * query_groups
        place = Place(
            batch=batch,
            split=split,
            num_splits=num_splits,
            first_head=head_part * config.num_heads,
            first_query=query_part * config.head_queries,
            group=group,
            num_kv_heads=num_kv_heads,
            max_seq_len=max_seq_len,
        )
        roles = self.roles(warp, place.first_query)
        tiles = self.copier.open(source, ring, barriers, place)
        # The length, the queries and the first tiles come from memory at the same time: tile ``split`` is the split's
        # first whatever the length turns out to be. The queries go first: the tile has no use without them.
        length = ptx.load_global_words(ptx.address(seq_lens) + Int64(batch) * 4, 0, 1)[0].to(Int32)
        kv_head = place.first_head + roles.head
        given_scales = GivenScales(k_scale, v_scale, k_scale_stride, v_scale_stride)
        query = self.key_reader.fetch_query(
            self.query_addresses(place, roles, ptx.address(q), lane), given_scales.of_keys(kv_head), lane
        )
        self.start(place, tiles, barriers, warp, lane)

        length = cutlass.min(cutlass.max(length, 0), max_seq_len)
        num_tiles = (length + config.tile_tokens - 1) // config.tile_tokens
        active_splits = cutlass.min(num_tiles, num_splits)
        work = Work(place=place, length=length, active_splits=active_splits)
        results = Results(out, lse, partials, mode)
        if split < active_splits:
            v_scale_address = given_scales.of_values(kv_head)
            self.process(work, roles, query, v_scale_address, tiles, results, softmax_scale, ring, barriers, warp, lane)
        else:
            self.drain(work, barriers)
        if num_tiles == 0:
            if split == 0:
                self.merger.write_empty(work, results)

    def roles(self, warp, first_query) -> "Roles":
        """Which KV head, query heads and tokens of its CTA's tiles a warp takes."""
        config = self.config
        query_block = warp // config.num_heads % config.num_query_blocks
        return Roles(
            head=warp % config.num_heads,
            first_query=first_query + query_block * config.warp_queries,
            slice_index=warp // config.num_roles,
        )

    def query_addresses(self, place, roles, q, lane):
        """Address of the lane's query head in each of the warp's blocks; g = lane // 4 is its place in a block.

        Lanes past the last query head take that one: their results are never stored.
        """
        first = (place.batch * place.num_kv_heads + place.first_head + roles.head) * place.group
        addresses = []
        for block in range(self.config.blocks_per_warp):
            query = cutlass.min(roles.first_query + block * BLOCK_QUERIES + lane // 4, place.group - 1)
            addresses.append(q + Int64(first + query) * (self.config.head_dim * 2))
        return addresses

    @cute.jit
    def start(self, place, tiles, barriers, warp, lane):
        """Initialises the barriers and asks for the first tiles that the cache, if not the request, may have."""
        config = self.config
        one_issuer = self.copier.num_issuers == 1
        # What the first tiles need comes first; other warps than the issuing one wait for a CTA barrier anyway.
        first = config.early_tiles if one_issuer else 2 * config.num_stages
        self.init_barriers(barriers, 0, first, warp, lane)
        if const_expr(not one_issuer):
            cute.arch.sync_threads()
        if warp < self.copier.num_issuers:
            for i in cutlass.range_constexpr(config.early_tiles):
                if self.tile_token(place, i) < place.max_seq_len:
                    self.copier.copy_tile(
                        tiles, place, self.tile_token(place, i), place.max_seq_len, Int32(i), warp, lane
                    )
        self.init_barriers(barriers, first, 2 * config.num_stages, warp, lane)

    @cute.jit
    def init_barriers(self, barriers, begin: int, end: int, warp, lane):
        """Initialises some of the barriers: those of full stages, then those of empty ones."""
        if const_expr(begin < end):
            if warp == 0:
                if lane == 0:
                    for i in cutlass.range_constexpr(begin, end):
                        full = i < self.config.num_stages
                        arrivals = self.copier.arrivals if full else self.config.num_warps
                        cute.arch.mbarrier_init(barriers + i, arrivals)
                    cute.arch.mbarrier_init_fence()
                cute.arch.sync_warp()

    def tile_token(self, place, i):
        """First token of the i-th tile of a split: splits take turns."""
        return (place.split + i * place.num_splits) * self.config.tile_tokens

    @cute.jit
    def drain(self, work, barriers):
        """Waits for early tiles that turned out to lie past the request's end: nobody may leave before they land."""
        cute.arch.sync_threads()  # the barriers are initialised
        for i in cutlass.range_constexpr(self.config.early_tiles):
            token = self.tile_token(work.place, i)
            if (token >= work.length) & (token < work.place.max_seq_len):
                cute.arch.mbarrier_wait(barriers + i, 0)

    # -- main loop ------------------------------------------------------------------------------------------------

    @cute.jit
    def process(self, work, roles, query, v_scale, tiles, results, softmax_scale, ring, barriers, warp, lane):
        """Everything a CTA with at least one tile does."""
        config = self.config
        place = work.place
        full, empty = barriers, barriers + config.num_stages
        if warp < self.copier.num_issuers:
            for i in cutlass.range(config.early_tiles, config.num_stages - 1, 1, unroll=1):
                if self.tile_token(place, i) < work.length:
                    self.copier.copy_tile(tiles, place, self.tile_token(place, i), work.length, i, warp, lane)
        keys = self.key_reader.make_state(lane, roles.head, roles.slice_index)
        self.key_reader.take_query(keys, query, softmax_scale)
        values = self.value_reader.make_state(lane, roles.head, roles.slice_index, v_scale, keys)
        state = WarpState(keys, values, _Softmax(config.columns))
        cute.arch.sync_threads()  # the barriers are initialised

        stage, phase = Int32(0), Int32(0)
        refill_stage, refill_phase = Int32(config.num_stages - 1), Int32(1)
        token, stride = self.tile_token(place, 0), place.num_splits * config.tile_tokens
        while token < work.length:
            # Pinned, or the compiler makes two copies of the loop, one for the issuing warps.
            if ptx.pinned(warp) < self.copier.num_issuers:
                ahead = token + (config.num_stages - 1) * stride
                if ahead < work.length:
                    # The tile that last lay there was consumed one step ago; nothing waits on the first round.
                    cute.arch.mbarrier_wait(empty + refill_stage, refill_phase)
                    self.copier.copy_tile(tiles, place, ahead, work.length, refill_stage, warp, lane)
            cute.arch.mbarrier_wait(full + stage, phase)
            partial = token + config.tile_tokens > work.length
            if partial:
                # The request's last tile: the rows behind its end must not count, whatever they hold.
                self.copier.clear_values(tiles, stage, work.length - token, warp * WARP_THREADS + lane)
                cute.arch.sync_threads()
            first_token = token + roles.slice_index * config.slice_tokens
            addresses = self.copier.stage_addresses(tiles, stage)
            for block in cutlass.range_constexpr(config.blocks_per_slice):
                self.attend(state, addresses, block, partial, work.length - first_token)
            # Every other time round the ring: often enough, and without a counter of its own; not at the first tile.
            if (stage == config.num_stages - 1) & (phase == 1):
                self.value_reader.recentre(state.values)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(empty + stage)
            token = token + stride
            stage, phase = _advance(stage, phase, config.num_stages)
            refill_stage, refill_phase = _advance(refill_stage, refill_phase, config.num_stages)
        if const_expr(config.early_tiles > 1):
            self.drain(work, barriers)
        self.merger.finish(work, state, results, ring, warp, lane, roles.slice_index)

    @cute.jit
    def attend(self, state, addresses, block: int, partial, remaining: Int32):
        """Scores, online softmax and P V of one block of 32 tokens of a slice.

        partial: whether the request ends in this tile; then it has ``remaining`` tokens of the slice and after it.
        """
        columns = self.config.columns
        value_offset = self.value_reader.block_offset(block)
        scores = self.key_reader.scores(state.keys, addresses[0], self.key_reader.block_offset(block))
        headers = self.value_reader.load_scales(state.values, addresses[1], value_offset)
        s = cute.make_rmem_tensor(4 * columns, Float32)
        for j in cutlass.range_constexpr(4):
            for column in cutlass.range_constexpr(columns):
                s[columns * j + column] = scores[j][column]
        if partial:
            for j in cutlass.range_constexpr(4):
                if block_token(self.config.token_bits, state.keys.g, j) >= remaining - block * BLOCK_TOKENS:
                    for column in cutlass.range_constexpr(columns):
                        s[columns * j + column] = Float32(-Float32.inf)
        self.update_maximum(state, s, headers)
        probabilities = []
        for j in cutlass.range_constexpr(4):
            row = self.probabilities(state, [s[columns * j + column] for column in range(columns)])
            probabilities.append(row)
        self.value_reader.accumulate(state.values, addresses[1], value_offset, probabilities, headers)

    def probabilities(self, state, scores):
        """Exponentials of a token's scores, by column, added to the softmax sums."""
        row = []
        for column, score in enumerate(scores):
            p = ptx.exp2(ptx.fma(score, state.keys.score_scale, -state.softmax.maximum[column]))
            state.softmax.total[column] = state.softmax.total[column] + p
            row.append(p)
        return row

    @cute.jit
    def update_maximum(self, state, s, headers):
        """Raises the softmax reference when a probability would pass 2**RESCALE_SLACK; rare after the first blocks."""
        columns = self.config.columns
        log_scales = [self.value_reader.log_scale(headers, j) for j in range(4)]
        block_max = []
        for column in cutlass.range_constexpr(columns):
            bounds = [_bound(s[columns * j + column], state.keys.score_scale, log_scales[j]) for j in range(4)]
            block_max.append(ptx.fmax(ptx.fmax(bounds[0], bounds[1]), ptx.fmax(bounds[2], bounds[3])))
        exceeds = block_max[0] > state.softmax.maximum[0] + RESCALE_SLACK
        for column in cutlass.range_constexpr(1, columns):
            exceeds = exceeds | (block_max[column] > state.softmax.maximum[column] + RESCALE_SLACK)
        if cute.arch.vote_any_sync(exceeds):
            self.raise_maximum(state, block_max)

    def raise_maximum(self, state, block_max):
        """Takes the warp's new maxima as reference and rescales what was accumulated under the old ones."""
        softmax = state.softmax
        factors = []
        for column in range(self.config.columns):
            raised = ptx.fmax(lane_max(block_max[column], (4, 8, 16)), softmax.maximum[column])
            factor = ptx.exp2(softmax.maximum[column] - raised)
            softmax.maximum[column] = raised
            softmax.total[column] = softmax.total[column] * factor
            factors.append(factor)
        self.value_reader.rescale(state.values, factors)


class _Softmax:
    """Running maximum (log2 units) and sum per column of a lane; the sum is over the lane's own tokens."""

    def __init__(self, columns: int):
        self.maximum = cute.make_rmem_tensor(columns, Float32)
        self.total = cute.make_rmem_tensor(columns, Float32)
        self.maximum.fill(LOWEST)
        self.total.fill(0.0)


@dataclass(frozen=True)
class WarpState:
    """What a warp keeps from tile to tile, in registers: the states of its readers, and the softmax."""

    keys: Any
    values: Any
    softmax: Any


@dataclass(frozen=True)
class GivenScales:
    """Scales beside the caches, fp32: addresses, and elements from a KV head's to the next one's."""

    k_scale: Any
    v_scale: Any
    k_stride: Any
    v_stride: Any

    def of_keys(self, head):
        """Address of a KV head's scales of K."""
        return self.k_scale + Int64(head) * self.k_stride * 4

    def of_values(self, head):
        return self.v_scale + Int64(head) * self.v_stride * 4


@dataclass(frozen=True)
class Roles:
    """A warp's part of its CTA's tiles; run-time integers."""

    head: Any  # of the CTA's KV heads
    first_query: Any  # of the query heads of that KV head
    slice_index: Any


@dataclass(frozen=True)
class Place:
    """Where a CTA stands in the grid and what it may touch, known before the request's length is; run-time integers."""

    batch: Any
    split: Any
    num_splits: Any
    first_head: Any
    first_query: Any  # of the query heads of a KV head
    group: Any  # query heads per KV head
    num_kv_heads: Any
    max_seq_len: Any


@dataclass(frozen=True)
class Work:
    """What a CTA does once the length is known; run-time integers."""

    place: Any
    length: Any
    active_splits: Any  # splits of this row that have tokens

    def query_head(self, config: DecodeConfig, r):
        """(index among all query heads, whether it exists) of row r of the CTA's query heads."""
        place = self.place
        role = r // config.warp_queries
        head = role % config.num_heads
        within = place.first_query + role // config.num_heads * config.warp_queries + r % config.warp_queries
        return (place.first_head + head) * place.group + within, within < place.group

    def output_row(self, head):
        """Row of q and out of a query head."""
        return Int64(self.place.batch) * (self.place.num_kv_heads * self.place.group) + head

    def partial_head(self, head):
        """Row of the workspace where the splits of a query head begin."""
        return self.output_row(head) * self.place.num_splits


def _advance(stage, phase, num_stages: int):
    """The next place of a ring and the parity of its barrier."""
    stage = stage + 1
    wrapped = stage == num_stages
    return cutlass.select_(wrapped, Int32(0), stage), cutlass.select_(wrapped, phase ^ 1, phase)


def _bound(score, score_scale, log_scale):
    """log2 of what a token adds to the operand of P V: its score, plus the scale of its V row if there is one."""
    return score * score_scale if log_scale is None else ptx.fma(score, score_scale, log_scale)
