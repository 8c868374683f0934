"""The append kernel. One launch applies bias, QK-norm, RoPE and cache transform to new tokens. It quantises K and V,
scatters them into the cache, and writes the rotated q.

Several lanes of a warp form a *team*, which takes one token and a few of its q heads, k heads or v heads. The teams of
a CTA take different tokens and the same heads, so a CTA runs one of three loops: for q, k or v. A team first starts
loading its first rows, and the data with which it finds the token's place in the cache. It computes the token's angles
once, then processes row by row in registers. Teams exchange no data.

A token has no place if its page is unmapped, its position lies outside the table or the cache, or its slot is -1. K and
V of such a token are not written; its q is written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.rows import Elements
from cute_kernels.device.write_row import divide_by, encode_row, load_given, store_row
from cute_kernels.kv_cache.config import (
    HAS_SEQ_LENS,
    HAS_TABLE,
    NUM_WARPS,
    Q_ROWS_IN_FLIGHT,
    Q_ROWS_PER_KV_ROW,
    ROWS_IN_FLIGHT,
    WIDE_POSITIONS,
    AppendConfig,
    rows_per_team,
)
from cute_kernels.kv_cache.operands import (
    Extras,
    Heads,
    Inputs,
    Place,
    Shares,
    Targets,
    Where,
    extras_of,
    inputs_of,
    targets_of,
    where_of,
)
from cute_kernels.kv_cache.rotate import Rotator
from cute_kernels.kv_cache.row_extras import RowExtras
from cute_kernels.kv_cache.row_transform import RowTransformer
from cute_kernels.kv_cache.rows import make_row

MAX_GRID_Y = 32768


class AppendKernel:
    """One compiled variant of the append kernel, as :class:`AppendConfig` describes it."""

    def __init__(self, config: AppendConfig):
        self.config = config
        self.k_elements = Elements(config.dtype, config.k.head_dim, config.lanes, config.runs)
        self.v_elements = Elements(config.dtype, config.v.head_dim, config.lanes, config.runs)
        self.k_row = make_row(config.k.format, config.k.head_dim, config.lanes, config.runs)
        self.v_row = make_row(config.v.format, config.v.head_dim, config.lanes, config.runs)
        self.rotator = Rotator(
            config.prologue.rope, config.prologue.rotary_dim, config.k.head_dim, config.lanes, config.runs
        )
        self.transformer = RowTransformer(
            config.transform,
            (config.k.head_dim, config.v.head_dim),
            config.lanes,
            config.runs,
        )
        self.row_extras = RowExtras(config, self.k_elements, self.v_elements, one_code=True)
        # Rows one after the other, by one copy of the code: where a warp runs it once or twice, or where it is long.
        self.rolled = config.decode or config.transform is not None
        self.row_words = self.row_extras.row_words
        self.raw_words = self.row_extras.ahead * self.row_words

    def launch(self, given, stream):
        """Launches over (blocks of heads, blocks of tokens); ``given`` has the arguments of
        :mod:`cute_kernels.kv_cache.arguments`."""
        config = self.config
        extras = extras_of(given, transformed=config.transform is not None)
        inputs, targets, where = inputs_of(given), targets_of(given), where_of(given, self.k_row.by_token)
        shares, grid = self._shares(inputs, given.wave)
        self.kernel(shares, inputs, where, given.phase_steps, targets, extras, given.rope_factor).launch(
            grid=grid,
            block=(NUM_WARPS * WARP_THREADS, 1, 1),
            # Said, or ptxas keeps some variants at 80 registers and spills.
            min_blocks_per_mp=config.least_ctas,
            preferred_smem_carveout=config.smem_percent,
            stream=stream,
        )

    def _shares(self, inputs: Inputs, wave):
        """Returns (shares, grid). The `Shares` say how the work is distributed among CTAs."""
        config, num_q_heads, num_kv_heads = self.config, inputs.num_q_heads, inputs.num_kv_heads
        blocks = cute.ceil_div(inputs.num_tokens, config.tokens_per_cta)
        q_rows, kv_rows = rows_per_team(blocks, num_q_heads, num_kv_heads, wave, Q_ROWS_PER_KV_ROW, cutlass.select_)
        kv_chunks = cute.ceil_div(num_kv_heads, kv_rows)
        chunks = cute.ceil_div(num_q_heads, q_rows) + 2 * kv_chunks
        # SMs are given the CTAs of one wave in turn, so those of a kind come one after the other: were a token's kinds
        # neighbours, and their number a divisor of that of the SMs, some SMs would be given nothing but K. In a longer
        # grid neighbours are chunks of the same tokens, which lie side by side in memory.
        by_kind = blocks * chunks <= wave
        # Attention's copies hold up the loads of CTAs on the same SMs, and so itself, unless these are few.
        few = blocks * chunks * config.ctas_per_sm <= wave
        shares = Shares(Int32(q_rows), Int32(kv_rows), kv_chunks, by_kind, few)
        rest = cutlass.min(blocks, MAX_GRID_Y)
        grid = (
            Int32(cutlass.select_(by_kind, blocks, chunks)),
            Int32(cutlass.select_(by_kind, chunks, rest)),
            Int32(cutlass.select_(by_kind, Int32(1), cute.ceil_div(blocks, MAX_GRID_Y))),
        )
        return shares, grid

    @cute.kernel
    def kernel(
        self,
        shares: Shares,
        inputs: Inputs,
        where: Where,
        phase_steps: Int64,
        targets: Targets,
        extras: Extras,
        rope_factor: Float32,
    ):
        # In the order of need: what comes before the first loads is few lines of the constant cache, cold in each SM.
        config = self.config
        if const_expr(config.leads):
            if shares.few:
                cute.arch.griddepcontrol_launch_dependents()
        block_x, block_y, block_z = cute.arch.block_idx()
        chunk = cutlass.select_(shares.by_kind, block_y, block_x)
        block = cutlass.select_(shares.by_kind, block_x, block_z * MAX_GRID_Y + block_y)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        warp_token = (block * NUM_WARPS + warp) * config.tokens_per_warp
        if warp_token < inputs.num_tokens:
            token = warp_token + lane // config.lanes
            valid = token < inputs.num_tokens
            token = cutlass.min(token, inputs.num_tokens - 1)  # teams without a token of their own work along
            # K first, then V, then q: rows that are most work begin first.
            is_q, is_v = chunk >= 2 * shares.kv_chunks, chunk >= shares.kv_chunks
            is_v = is_v & ~is_q
            before = cutlass.select_(is_q, 2 * shares.kv_chunks, cutlass.select_(is_v, shares.kv_chunks, Int32(0)))
            rows = cutlass.select_(is_q, shares.q_rows, shares.kv_rows)
            num_heads = cutlass.select_(is_q, inputs.num_q_heads, inputs.num_kv_heads)
            first = (chunk - before) * rows
            heads = Heads(first=first, count=cutlass.min(rows, num_heads - first))
            team_lane = lane % config.lanes
            source = self.source_of(inputs, heads, token, team_lane, is_q, is_v)
            raw = cute.make_rmem_tensor(self.raw_words, Uint32)
            steps = cute.make_rmem_tensor(max(2 * self.rotator.num_angles, 1), Uint32)
            self.fetch(raw, source, heads.count, is_q, is_v, team_lane)
            constants = cute.make_rmem_tensor(max(self.transformer.num_constants, 1), Float32)
            if const_expr(config.transform is not None):
                self.transformer.ask(constants, extras.transforms, heads.first, is_q, is_v, team_lane)
            length, own, slot = self.ask(steps, where, phase_steps, is_q, token, team_lane)
            asked = self.row_extras.registers()
            self.row_extras.ask(asked, extras, heads, is_q, is_v, team_lane)
            position, inside, page, row = self.locate(where, is_q, token, lane, length, slot)
            if const_expr(not config.decode):
                position = cutlass.select_(where.position_ids != 0, own, position)
            if const_expr(config.leads):
                position = ptx.pinned(Int32(position))  # lengths and, very likely, rows have arrived
                cute.arch.griddepcontrol_launch_dependents()
            place = Place(token, valid & (is_q | inside), page, where.num_pages, row, team_lane)
            if is_v:
                self.process_v(raw, asked, constants, source, heads, extras, targets, place)
            else:
                cos = cute.make_rmem_tensor(max(self.rotator.num_angles, 1), Float32)
                sin = cute.make_rmem_tensor(max(self.rotator.num_angles, 1), Float32)
                if const_expr(config.prologue.rope != "none"):
                    self.rotator.make_angles(cos, sin, steps, position, rope_factor, team_lane)
                if is_q:
                    self.process_q(raw, asked, constants, source, cos, sin, heads, extras, targets, place)
                else:
                    self.process_k(raw, asked, constants, source, cos, sin, heads, extras, targets, place)

    # -- getting there ------------------------------------------------------------------------------------------------

    def source_of(self, inputs, heads, token, lane, is_q, is_v):
        """Returns the address of the team's first row. For decode it returns the address of the lane's part of that row
        instead, so that no branch has to compute it.
        """
        base = cutlass.select_(is_q, inputs.q, cutlass.select_(is_v, inputs.v, inputs.k))
        stride = cutlass.select_(is_q, inputs.q_stride, cutlass.select_(is_v, inputs.v_stride, inputs.k_stride))
        row_bytes = cutlass.select_(is_v, Int32(self.v_elements.row_bytes), Int32(self.k_elements.row_bytes))
        source = base + Int64(token) * stride + Int64(heads.first * row_bytes)
        if not self.config.decode:
            return source
        k_bytes, v_bytes = (Int32(elements.piece.num_bytes) for elements in (self.k_elements, self.v_elements))
        return ptx.pinned(source + Int64(lane * cutlass.select_(is_v, v_bytes, k_bytes)))

    @cute.jit
    def ask(self, steps, where, phase_steps, is_q, token, lane):
        """Starts loading what `locate` and `make_angles` need, without waiting.

        Returns (length of the token's request if each request has one new token, the token's position id, the token's
        slot). A value that is not given or not needed is 0. Fills ``steps`` with the turns per position.
        """
        length, own, slot_words = Int32(0), Int32(0), cute.make_rmem_tensor(2, Uint32)
        slot_words.fill(0)
        if const_expr(self.config.decode):
            length = _load_word(where.seq_lens, token)
        else:
            if (where.mode & HAS_SEQ_LENS != 0) & (where.cu_seqlens == 0):
                length = _load_word(where.seq_lens, token)
            if (where.slots | where.position_ids) != 0:
                if (where.slots != 0) & ~is_q:
                    words = ptx.load_global_words(where.slots + Int64(token) * 8, 0, 2)
                    slot_words[0], slot_words[1] = words[0], words[1]
                if where.position_ids != 0:
                    shift = Int64(token) * cutlass.select_((where.mode & WIDE_POSITIONS) != 0, Int64(8), Int64(4))
                    # Of 64-bit positions the lower half: they fit it.
                    own = ptx.load_global_words(where.position_ids + shift, 0, 1)[0].to(Int32)
        if const_expr(self.config.prologue.rope != "none"):
            # Teams of v heads, too: a condition would cost the others more than it saves.
            for i, word in enumerate(self.rotator.load_steps(phase_steps, lane)):
                steps[i] = word
        return length, own, _join(slot_words[0], slot_words[1])

    @cute.jit
    def fetch(self, raw, source, count, is_q, is_v, lane):
        """Starts loading the team's first rows, without waiting."""
        if const_expr(self.config.decode and self.k_elements == self.v_elements):  # one copy of the code for all
            most = cutlass.select_(is_q, Int32(Q_ROWS_IN_FLIGHT), Int32(ROWS_IN_FLIGHT))
            self.fetch_rows(raw, source, self.k_elements, Q_ROWS_IN_FLIGHT, cutlass.min(count, most), lane)
        elif is_q:
            self.fetch_rows(raw, source, self.k_elements, Q_ROWS_IN_FLIGHT, count, lane)
        elif is_v:
            self.fetch_rows(raw, source, self.v_elements, ROWS_IN_FLIGHT, count, lane)
        else:
            self.fetch_rows(raw, source, self.k_elements, ROWS_IN_FLIGHT, count, lane)

    @cute.jit
    def fetch_rows(self, raw, source, elements, ahead, count, lane):
        """Starts loading the next ``count`` rows, but at most ``ahead`` of them."""
        lane = Int32(0) if const_expr(self.config.decode) else lane
        for u in cutlass.range_constexpr(ahead):
            if u < count:
                for i, word in enumerate(elements.piece.load(source, lane, u * elements.row_bytes)):
                    raw[u * self.row_words + i] = word

    @cute.jit
    def locate(self, where, is_q, token, lane, length, slot):
        """Finds the place of a team's token. Returns (position for RoPE, whether the token has a place, page, row of
        the page).

        ``length`` and ``slot`` are results of `ask`. The page index may still be loading, and may be invalid. Teams of
        q heads do not look for a page.
        """
        position, page, row = Int32(0), Int32(-1), Int32(0)
        if const_expr(self.config.decode):
            position = length - 1
            inside = position >= 0
            if ~is_q:
                page, row, inside = self.find_page(where, token, position, inside)
            return position, inside, page, row
        request, inside = token, where.mode & HAS_SEQ_LENS != 0
        if where.mode & HAS_SEQ_LENS != 0:
            ahead = Int32(1)  # tokens from this one to the request's end
            if where.cu_seqlens != 0:
                request = self.find_request(where, token, lane)
                bounds = [_load_word(where.cu_seqlens, request + i) for i in range(2)]
                length = _load_word(where.seq_lens, request)
                ahead = bounds[1] - token
                inside = (token >= bounds[0]) & (ahead > 0)
            position = length - ahead
            inside = inside & (position >= 0)
        if ~is_q:
            if where.slots != 0:
                inside = slot >= 0
                quotient = divide_by(slot, where.page_divisor)
                inside = inside & (quotient < Int64(where.num_pages))
                page = quotient.to(Int32)
                row = (slot - quotient * Int64(where.page_size)).to(Int32)
            else:
                page, row, inside = self.find_page(where, request, position, inside)
        return position, inside, page, row

    @cute.jit
    def find_page(self, where, request, position, inside):
        """Returns where a request's position lies: (page, row of the page, whether the place exists). The place exists
        if ``inside`` holds and the block table or cache reaches the position."""
        page, row = request, position
        if where.mode & HAS_TABLE != 0:
            index = divide_by(Int64(cutlass.max(position, 0)), where.page_divisor).to(Int32)
            entry = Int64(request) * where.table_stride + cutlass.min(index, where.max_pages - 1)
            page = _load_word(where.block_table, entry)
            row = position - index * where.page_size
            inside = inside & (index < where.max_pages)
        else:
            inside = inside & (position < where.page_size)
        return page, row, inside

    @cute.jit
    def find_request(self, where, token, lane):
        """Returns the last request whose first new token is ``token`` or comes before it. At each step of the search,
        each lane of a team tests one request.
        """
        lanes = self.config.lanes
        team_lane = lane % lanes
        low, span = Int32(0), where.batch
        while span > 1:
            step = (span + lanes - 1) // lanes
            index = low + team_lane * step
            begin = _load_word(where.cu_seqlens, cutlass.min(index, where.batch))
            before = (begin <= token) & (index < where.batch) & (team_lane * step < span)
            votes = Uint32(cute.arch.vote_ballot_sync(before))
            if const_expr(lanes < WARP_THREADS):
                votes = (votes >> (lane - team_lane)) & ((1 << lanes) - 1)
            low = low + cutlass.max(cute.arch.popc(votes).to(Int32) - 1, 0) * step
            span = step
        return cutlass.min(low, where.batch - 1)

    # -- row by row ---------------------------------------------------------------------------------------------------

    @cute.jit
    def process_q(self, raw, asked, constants, source, cos, sin, heads, extras, targets, place):
        """Applies bias, norm, RoPE and transform to the team's q heads, and stores them.

        The loop is unrolled, except for decode and for transformed rows. In decode, fetching copies of the code would
        take longer than the few rows take. With a transform, the code is too long to unroll.
        """
        elements, ahead = self.k_elements, Q_ROWS_IN_FLIGHT
        values = cute.make_rmem_tensor(elements.count, Float32)
        target = targets.q_out + Int64(place.token) * targets.q_out_stride + Int64(heads.first * elements.row_bytes)
        done = Int32(0)
        while done < heads.count:
            if const_expr(not self.rolled):
                for u in cutlass.range_constexpr(ahead):
                    if done + u < heads.count:
                        self.unpack(raw, values, elements, u)
                        self.turn_q(values, asked, constants, cos, sin, extras, heads, done + u, place)
                        if place.valid:
                            elements.piece.store(target, place.lane, elements.pack(values), u * elements.row_bytes)
                done = done + ahead
                target = target + ahead * elements.row_bytes
            else:
                for _ in cutlass.range(cutlass.min(heads.count - done, ahead), unroll=1):
                    self.unpack(raw, values, elements, 0)
                    self.advance(raw, ahead)
                    self.turn_q(values, asked, constants, cos, sin, extras, heads, done, place)
                    if place.valid:
                        elements.piece.store(target, place.lane, elements.pack(values))
                    done = done + 1
                    target = target + elements.row_bytes
            source = source + ahead * elements.row_bytes
            if const_expr(not self.config.decode):
                self.fetch_rows(raw, source, elements, ahead, heads.count - done, place.lane)
            elif done < heads.count:
                self.fetch_rows(raw, source, elements, ahead, heads.count - done, place.lane)
                left = heads.count - done
                self.row_extras.ask_bias(asked, extras.q_bias, elements, heads.first + done, ahead, left, place.lane)

    @cute.jit
    def turn_q(self, values, asked, constants, cos, sin, extras, heads, done, place):
        """Applies bias, norm, RoPE and transform to a row of the team's q heads. done: index of the row among the
        team's rows.
        """
        head = heads.first + done
        given = (extras.q_bias, extras.q_norm, extras.norm_eps)
        self.turn(values, asked, cos, sin, given, head, Q_ROWS_IN_FLIGHT, place.lane)
        if const_expr(self.config.transform is not None):
            next_head = cutlass.min(head + 1, heads.first + heads.count - 1)
            self.transformer.transform_q(values, constants, extras.transforms, head, next_head, place)

    @cute.jit
    def process_k(self, raw, asked, constants, source, cos, sin, heads, extras, targets, place):
        """Applies bias, norm, RoPE and transform to the team's k heads, and writes them to the cache."""
        target = (self.k_row, extras.k_scale, extras.k_bias, targets.k_cache, targets.k_strides)

        def prepare(values, head):
            given = (extras.k_bias, extras.k_norm, extras.norm_eps)
            self.turn(values, asked, cos, sin, given, head, ROWS_IN_FLIGHT, place.lane)
            if const_expr(self.config.transform is not None):
                next_head = cutlass.min(head + 1, heads.first + heads.count - 1)
                self.transformer.transform_k(values, constants, extras.transforms, next_head, place.lane)

        self.process_rows(raw, asked, source, self.k_elements, heads, target, place, prepare)

    @cute.jit
    def process_v(self, raw, asked, constants, source, heads, extras, targets, place):
        """Applies bias and transform to the team's v heads, and writes them to the cache."""
        target = (self.v_row, extras.v_scale, extras.v_bias, targets.v_cache, targets.v_strides)

        def prepare(values, head):
            ahead = ROWS_IN_FLIGHT
            self.row_extras.add_bias(values, asked, extras.v_bias, self.v_elements, head, ahead, place.lane)
            if const_expr(self.config.transform is not None):
                next_head = cutlass.min(head + 1, heads.first + heads.count - 1)
                self.transformer.transform_v(values, constants, extras.transforms, next_head, place.lane)

        self.process_rows(raw, asked, source, self.v_elements, heads, target, place, prepare)

    @cute.jit
    def process_rows(self, raw, asked, source, elements, heads, target, place, prepare):
        """Writes the team's heads of K or of V to the cache. prepare: applies the steps before quantisation to a row's
        values."""
        cache_row, scale, bias, cache, strides = target
        ahead = ROWS_IN_FLIGHT
        values = cute.make_rmem_tensor(elements.count, Float32)
        head, stop = heads.first, heads.first + heads.count
        while head < stop:
            for _ in cutlass.range(cutlass.min(stop - head, ahead), unroll=1):
                given = load_given(cache_row, scale, head, place.lane)
                self.unpack(raw, values, elements, 0)
                self.advance(raw, ahead)
                prepare(values, head)
                self.write(cache_row, values, given, cache, strides, place, head)
                head = head + 1
            source = source + ahead * elements.row_bytes
            if const_expr(not self.config.decode):
                self.fetch_rows(raw, source, elements, ahead, stop - head, place.lane)
            elif head < stop:  # seldom
                self.fetch_rows(raw, source, elements, ahead, stop - head, place.lane)
                self.row_extras.ask_bias(asked, bias, elements, head, ahead, stop - head, place.lane)

    @cute.jit
    def write(self, cache_row, values, given, cache, strides, place, head):
        """Quantises a row and stores it at the place of the team's token."""
        encoded = encode_row(cache_row, values, given)
        # The page arrives last. A shuffle that changes nothing keeps the compiler from waiting for it before the loop.
        page = cute.arch.shuffle_sync(place.page, cute.arch.lane_idx())
        if place.valid & (page >= 0) & (page < place.num_pages):
            page_stride, token_stride, head_stride = strides
            if const_expr(cache_row.by_token):
                row = Int64(place.token) * page_stride + Int64(head) * head_stride
            else:
                row = Int64(page) * page_stride + Int64(place.row) * token_stride + Int64(head) * head_stride
            store_row(cache_row, encoded, cache + row, place.lane)

    def unpack(self, raw, values, elements: Elements, slot: int):
        """Writes row ``slot`` of ``raw`` to ``values``, in fp32."""
        words = [raw[slot * self.row_words + i] for i in range(elements.piece.num_words)]
        for i, value in enumerate(elements.unpack(words)):
            values[i] = value

    def advance(self, raw, ahead):
        """Drops the first of the ``ahead`` rows in ``raw``, and moves each other row one slot forward."""
        for i in range((ahead - 1) * self.row_words):
            raw[i] = raw[i + self.row_words]

    @cute.jit
    def turn(self, values, asked, cos, sin, given, head, ahead, lane):
        """Applies bias, norm and RoPE to a q or k row. given: (address of the bias, address of the norm weights, the
        norm's epsilon)."""
        bias, norm, eps = given
        self.row_extras.add_bias(values, asked, bias, self.k_elements, head, ahead, lane)
        self.row_extras.normalise(values, asked, norm, eps, lane)
        if const_expr(self.config.prologue.rope != "none"):
            self.rotator.rotate(values, cos, sin, lane)


def _load_word(base: Int64, index) -> Int32:
    return ptx.load_global_words(base + Int64(index) * 4, 0, 1)[0].to(Int32)


def _join(low: Uint32, high: Uint32) -> Int64:
    return (Int64(high.to(Int32)) << 32) | Int64(low)
