"""The consumer warps of decode attention. Each warp computes scores, online softmax and P V of its part of a unit's
tiles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.attention.barriers import sync_cleared, sync_consumers
from cute_kernels.attention.combine.merge import Merger
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.loads.copies import TileCopier
from cute_kernels.attention.mainloops.logits import Logits, LogitState
from cute_kernels.attention.policies import QUERY_VECTOR_BYTES
from cute_kernels.attention.readers.common import State, query_vectors, store_vectors
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_max
from cute_kernels.device.pipeline import PipelineState
from cute_kernels.device.softmax import COLUMN_LANES, OnlineSoftmax
from layouts.kv.tile import BLOCK_TOKENS, block_token


@dataclass(frozen=True)
class WarpState:
    """The state of a warp between tiles, in registers: the states of its readers, softmax and logits."""

    keys: State
    values: State
    softmax: OnlineSoftmax
    logits: LogitState


class WarpMainloop:
    """The mainloop in which each warp multiplies its own slice of a tile's tokens, and has a softmax of its own."""

    def __init__(
        self, config: DecodeConfig, copier: TileCopier, key_reader, value_reader, logits: Logits, merger: Merger
    ):
        self.config, self.copier, self.logits, self.merger = config, copier, logits, merger
        self.key_reader, self.value_reader = key_reader, value_reader

    def open_state(self, cta, work, query):
        """Makes the state that a warp keeps between the tiles of a unit."""
        roles = cta.roles
        keys = self.key_reader.make_state(cta.lane, roles.head, roles.slice_index)
        if const_expr(self.config.features.tail):
            self.key_reader.open_tail(keys, cta.features.tail, work, roles.head)
        self.key_reader.take_query(keys, query, cta.softmax_scale)
        if const_expr(self.config.shares_queries):
            keys.shared_query = self.share_query(cta, query_vectors(keys))
        v_scale = cta.given.of_values(work.place.first_head + roles.head)
        values = self.value_reader.make_state(cta.lane, roles.head, roles.slice_index, v_scale, keys)
        logits = self.logits.open(cta.features, work, roles, keys.t, cta.softmax_scale)
        return WarpState(keys, values, OnlineSoftmax.make(self.config.columns), logits)

    @cute.jit
    def attend_tiles(self, cta, work, query, tile: PipelineState):
        """Processes one unit. tile: the pipeline state of the unit's first tile. Returns the state after the last
        tile."""
        config, token = self.config, work.begin
        state = self.open_state(cta, work, query)
        slice_offset = cta.roles.slice_index * config.slice_tokens
        self.ask(state, token + slice_offset)
        while token < work.stop:
            self.await_tile(cta, work, token, tile)
            masked = self.logits.is_masked(state.logits, token, config.tile_tokens)
            first_token = token + slice_offset
            addresses = self.copier.stage_addresses(cta.tiles, tile.stage)
            for block in cutlass.range_constexpr(config.mainloop.blocks_per_slice):
                last = block == config.mainloop.blocks_per_slice - 1
                next_token = first_token + (work.stride if last else (block + 1) * BLOCK_TOKENS)
                self.attend(state, addresses, block, masked, first_token + block * BLOCK_TOKENS, next_token)
            self.recentre(state, tile)
            self.give_back(cta, tile)
            token = token + work.stride
            tile = cta.pipeline.next(tile)
        self.merger.finish(work, state, cta.results, cta.ring, cta.warp, cta.lane, cta.roles.slice_index)
        return tile

    @cute.jit
    def recentre(self, state, tile: PipelineState):
        """Recentres V's accumulators at the last tile of every second round of the ring, which is often enough. The
        pipeline's state says which round it is, so no counter is needed.
        """
        if (tile.stage == self.config.pipeline.num_stages - 1) & (tile.phase == 1):
            self.value_reader.recentre(state.values)

    @cute.jit
    def await_tile(self, cta, work, token: Int32, tile: PipelineState):
        """Waits for the tile that begins with ``token``. Writes zeros over rows of V that no query sees."""
        config, warp, lane = self.config, cta.warp, cta.lane
        cta.pipeline.consumer_wait(tile)
        if token + config.tile_tokens > work.length:
            # The request's last tile: the rows after its end must not count, whatever they hold.
            self.copier.clear_rows(cta.tiles, tile.stage, work.length - token, warp * WARP_THREADS + lane)
            sync_cleared(config)
        seen = self.logits.terms.reach(cta.features, work.place.shape.q_len)
        if const_expr(seen is not None):
            hidden = work.length - seen - token
            if hidden > 0:
                # Rows that no query sees may be anything too, and their pages gone.
                self.copier.clear_first_rows(cta.tiles, tile.stage, hidden, warp * WARP_THREADS + lane)
                sync_cleared(config)

    @cute.jit
    def give_back(self, cta, tile: PipelineState):
        """Releases a tile's stage for the calling warp."""
        cute.arch.sync_warp()
        if cta.lane == 0:
            cta.pipeline.consumer_release(tile)

    @cute.jit
    def share_query(self, cta, vectors):
        """Writes a role's queries to shared memory, in the key reader's form. Returns the address of the lane's
        queries."""
        config, roles = self.config, cta.roles
        role = cta.warp % config.num_roles
        address = cta.queries + role * config.role_query_bytes + cta.lane * QUERY_VECTOR_BYTES
        if roles.slice_index == 0:
            # All warps of the role have made the same.
            store_vectors(address, vectors)
        sync_consumers(config)
        return address

    def tokens_of(self, state, first_token):
        """Returns the positions of the block's four keys whose scores the lane holds."""
        return [first_token + block_token(self.config.token_bits, state.keys.g, j) for j in range(4)]

    @cute.jit
    def ask(self, state, first_token):
        """Starts loads for the next block, which begins with ``first_token``: the inputs of score options, and keys in
        the tail."""
        if const_expr(self.config.features.tail):
            self.key_reader.ask_tail(state.keys, first_token)
        if const_expr(self.logits.asks):
            self.logits.ask(state.logits, self.tokens_of(state, first_token))

    @cute.jit
    def attend(self, state, addresses, block: int, masked, first_token: Int32, next_token: Int32):
        """Computes logits, online softmax and P V of one block of 32 tokens of a slice.

        masked: whether some query does not see some key of the tile. next_token: the first token of the warp's next
        block.
        """
        columns = self.config.columns
        value_offset = self.value_reader.block_offset(block)
        key_offset = self.key_reader.block_offset(block)
        s = cute.make_rmem_tensor(4 * columns, Float32)
        if const_expr(self.config.features.tail):
            if self.key_reader.in_tail(state.keys, first_token):
                self.take(s, self.key_reader.tail_scores(state.keys, first_token))
            else:
                self.take(s, self.key_reader.scores(state.keys, addresses[0], key_offset))
            headers = self.value_reader.load_scales(state.values, addresses[1], value_offset)
        else:
            scores = self.key_reader.scores(state.keys, addresses[0], key_offset)
            headers = self.value_reader.load_scales(state.values, addresses[1], value_offset)
            self.take(s, scores)
        tokens = self.tokens_of(state, first_token)
        scale = self.logits.apply(state.logits, s, state.keys.score_scale, tokens, masked)
        self.ask(state, next_token)
        self.update_maximum(state, s, scale, headers)
        probabilities = []
        for j in cutlass.range_constexpr(4):
            row = self.probabilities(state, [s[columns * j + column] for column in range(columns)], scale)
            probabilities.append(row)
        self.value_reader.accumulate(state.values, addresses[1], value_offset, probabilities, headers)

    def take(self, s, scores):
        """Copies a lane's scores [4 tokens][column] into the register tensor ``s``."""
        for j, row in enumerate(scores):
            for column, score in enumerate(row):
                s[self.config.columns * j + column] = score

    def probabilities(self, state, scores, scale):
        """Computes the exponentials of a token's logits, one for each column, and adds them to the softmax totals."""
        row = []
        for column, score in enumerate(scores):
            p = ptx.exp2(ptx.fma(score, scale, -state.softmax.references[column]))
            state.softmax.totals[column] = state.softmax.totals[column] + p
            row.append(p)
        return row

    @cute.jit
    def update_maximum(self, state, s, scale, headers):
        """Raises the softmax reference if a probability would exceed 2**RESCALE_SLACK. After the first blocks this is
        rare.
        """
        columns = self.config.columns
        log_scales = [self.value_reader.log_scale(headers, j) for j in range(4)]
        block_max = []
        for column in cutlass.range_constexpr(columns):
            bounds = [_bound(s[columns * j + column], scale, log_scales[j]) for j in range(4)]
            block_max.append(ptx.fmax(ptx.fmax(bounds[0], bounds[1]), ptx.fmax(bounds[2], bounds[3])))
        exceeds = state.softmax.exceeds(0, block_max[0])
        for column in cutlass.range_constexpr(1, columns):
            exceeds = exceeds | state.softmax.exceeds(column, block_max[column])
        if cute.arch.vote_any_sync(exceeds):
            self.raise_maximum(state, block_max)

    def raise_maximum(self, state, block_max):
        """Raises the softmax references to the warp's new maxima, and rescales the sums made under the old
        references."""
        softmax, columns = state.softmax, range(self.config.columns)
        factors = [softmax.raise_to(column, lane_max(block_max[column], COLUMN_LANES)) for column in columns]
        self.value_reader.rescale(state.values, factors)


def _bound(score, score_scale, log_scale):
    """Returns log2 of a token's probability times its scale of V, before the softmax reference is subtracted: the
    scaled score, plus log2 of the scale if V's rows have scales.
    """
    return score * score_scale if log_scale is None else ptx.fma(score, score_scale, log_scale)
