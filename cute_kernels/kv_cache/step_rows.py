"""`NewRows`, the first phase of a kernel that appends and attends in one launch. It rotates queries into shared memory,
and writes the newest rows to the cache.

Every CTA rotates the queries of its heads. Only the CTA whose tiles include a request's newest token writes that
token's K and V. Consumer warps rotate and write, since they would otherwise wait for their first tile. Several lanes, a
*team*, take a row, as in :mod:`.kernel`; all lanes of a warp take the same branches. The transform follows RoPE; its
code is that of an append.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.barriers import announce_rows, sync_consumers
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.policies import BLOCK_QUERIES
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.rows import Elements
from cute_kernels.device.types import RegisterTensor
from cute_kernels.device.write_row import encode_row, load_given, store_row
from cute_kernels.kv_cache.config import AppendConfig
from cute_kernels.kv_cache.operands import Constants, Terms, constants_of, terms_of
from cute_kernels.kv_cache.rotate import Rotator
from cute_kernels.kv_cache.row_extras import Asked, RowExtras
from cute_kernels.kv_cache.row_transform import RowTransformer
from cute_kernels.kv_cache.rows import make_row


@dataclass(frozen=True)
class NewRowOperands:
    """Addresses and strides of the newest tokens and of the caches; run-time values. k and v have a stride of requests,
    the caches have strides of blocks, tokens and heads, all in bytes."""

    k: Int64
    v: Int64
    k_stride: Int64
    v_stride: Int64
    k_cache: Int64
    v_cache: Int64
    k_strides: tuple[Int64, Int64, Int64]
    v_strides: tuple[Int64, Int64, Int64]
    num_blocks: Int32
    seq_lens: Int64
    phase_steps: Int64
    rope_factor: Float32
    constants: Constants | None = None  # of variants that have a transform
    terms: Terms | None = None  # of those with biases or norms
    positions: tuple[Int64, Int64] | None = None  # address, and bytes of one, of those that are given them


@dataclass(frozen=True)
class NewPlace:
    """Where a request's newest token is written; run-time values. ``there`` is False if nothing is written."""

    there: Boolean
    block: Int64
    row: Int64


@dataclass(frozen=True)
class Coming:
    """The registers into which a row is being loaded: its words, the transform's constants, and biases and norm weights
    (``asked``).
    """

    words: RegisterTensor[Uint32]
    constants: RegisterTensor[Float32]
    asked: Asked


class NewRows:
    """Makes rotated queries, and the newest token's rows of K and V, for a CTA of a step in one launch.

    Attributes:
        shared_bytes: bytes of shared memory for the rotated queries.
    """

    def __init__(self, attention: DecodeConfig, append: AppendConfig, positions: bool = False):
        self.attention, self.append, self.positions = attention, append, positions
        self.has_terms = append.prologue.has_bias or append.prologue.has_norm
        self.lanes, runs = append.lanes, append.runs
        self.teams = WARP_THREADS // self.lanes
        self.k_elements = Elements(append.dtype, append.k.head_dim, self.lanes, runs)
        self.v_elements = Elements(append.dtype, append.v.head_dim, self.lanes, runs)
        self.k_row = make_row(append.k.format, append.k.head_dim, self.lanes, runs)
        self.v_row = make_row(append.v.format, append.v.head_dim, self.lanes, runs)
        self.rotator = Rotator(append.prologue.rope, append.prologue.rotary_dim, append.k.head_dim, self.lanes, runs)
        head_dims = append.k.head_dim, append.v.head_dim
        self.transformer = RowTransformer(append.transform, head_dims, self.lanes, runs)
        self.row_extras = RowExtras(append, self.k_elements, self.v_elements)
        self.pitch, self.shared_bytes = attention.rotated_pitch, attention.rotated_bytes

    def operands_of(self, given) -> NewRowOperands:
        """Makes the operands from a launch's arguments."""
        caches = (given.k_cache, given.v_cache)
        k_strides, v_strides = (self._strides_of(cache) for cache in caches)
        return NewRowOperands(
            k=ptx.address(given.k),
            v=ptx.address(given.v),
            k_stride=Int64(given.k.stride[0]) * 2,
            v_stride=Int64(given.v.stride[0]) * 2,
            k_cache=ptx.address(given.k_cache),
            v_cache=ptx.address(given.v_cache),
            k_strides=k_strides,
            v_strides=v_strides,
            num_blocks=given.k_cache.shape[0],
            seq_lens=ptx.address(given.seq_lens),
            phase_steps=given.phase_steps,
            rope_factor=given.rope_factor,
            constants=None if self.append.transform is None else constants_of(given),
            terms=terms_of(given) if self.has_terms else None,
            positions=(given.position_ids, given.position_bytes) if self.positions else None,
        )

    def _strides_of(self, cache) -> Any:
        """Returns the strides in bytes of a cache's blocks, tokens and heads."""
        block, outer, inner = (Int64(stride) * (cache.element_type.width // 8) for stride in cache.stride[:3])
        return (block, inner, outer) if self.attention.features.head_major else (block, outer, inner)

    @cute.jit
    def make(self, cta, work, q):
        """Writes a consumer warp's share of new rows and rotated queries, and waits for the other consumer warps.
        Returns the shared-memory addresses of the queries of the warp's blocks.

        In the CTA that writes the newest token, also calls `announce_rows` once the token's rows are written, so that
        the producer warps load the token's tile.
        """
        lane, team = cta.lane % self.lanes, cta.lane // self.lanes
        new, last = cta.new[0], work.place.shape.max_seq_len - 1
        # All that comes from memory is asked for before any of it is waited for.
        told = ptx.load_global_words(new.seq_lens + Int64(work.request) * 4, 0, 1)[0].to(Int32)
        own = Int32(0)
        if const_expr(self.positions):
            base, size = new.positions
            own = ptx.load_global_words(base + Int64(work.request) * size, 0, 1)[0].to(Int32)  # the lower half
        steps = cute.make_rmem_tensor(max(2 * self.rotator.num_angles, 1), Uint32)
        if const_expr(self.append.prologue.rope != "none"):
            for i, word in enumerate(self.rotator.load_steps(new.phase_steps, lane)):
                steps[i] = word
        query = self.coming(self.k_elements.piece.num_words)
        self.fetch_query(query, cta, work, q, self.first_row(cta) + team, lane)
        if const_expr(self.append.transform is not None):
            kv_head = work.place.first_head + self.own_head(cta)
            self.transformer.ask_queries(query.constants, new.constants, kv_head, lane)
        if const_expr(self.has_terms):
            self.row_extras.ask_norm(query.asked, new.terms.q_norm, lane)
        newest = cutlass.max(work.length - 1, 0)
        ahead = newest // self.attention.tile_tokens * self.attention.tile_tokens - work.begin
        owner = (ahead >= 0) & (newest < work.stop) & (ahead % work.stride == 0)
        fresh = self.coming(max(self.k_elements.piece.num_words, self.v_elements.piece.num_words))
        block, row = Int32(work.request), newest
        if const_expr(self.attention.page_tokens > 0):
            block, row = cta.tiles.pages.ask(work.request, newest)
        if owner:
            self.fetch_newest(fresh, cta, work, team, lane)
        cos = cute.make_rmem_tensor(max(self.rotator.num_angles, 1), Float32)
        sin = cute.make_rmem_tensor(max(self.rotator.num_angles, 1), Float32)
        if const_expr(self.append.prologue.rope != "none"):
            # As the request says it: a token that there is no cache for is rotated, but not written.
            position = own if const_expr(self.positions) else told - 1
            self.rotator.make_angles(cos, sin, steps, position, new.rope_factor, lane)
        if owner:
            there = (told <= last + 1) & (block >= 0) & (block < new.num_blocks)
            place = NewPlace(there, Int64(block), Int64(row))
            self.write_newest(fresh, cta, work, place, cos, sin, team, lane)
            cute.arch.fence_proxy("async.global")
            announce_rows(self.attention)
        self.rotate_queries(query, cta, work, q, cos, sin, team, lane)
        sync_consumers(self.attention)
        return self.query_addresses(cta, work)

    def coming(self, num_words: int) -> Coming:
        """Makes the registers for loading a row, its constants, biases and norm weights."""
        constants = cute.make_rmem_tensor(max(self.transformer.num_constants, 1), Float32)
        return Coming(cute.make_rmem_tensor(num_words, Uint32), constants, self.row_extras.registers())

    # -- queries ------------------------------------------------------------------------------------------------------

    def count_of(self, work):
        """Returns the number of queries of each of the CTA's KV heads."""
        return cutlass.min(work.place.shape.group - work.place.first_row, self.attention.head_queries)

    def own_head(self, cta):
        """Returns the KV head whose queries the warp rotates, as an index among the CTA's KV heads."""
        return cta.roles.head if self.attention.mainloop.num_heads > 1 else 0

    def first_row(self, cta):
        """Returns the index, among the queries of a KV head, of the first query that a warp rotates. The warps of a
        head take the head's queries in turn.
        """
        turn = cta.warp // self.attention.mainloop.num_heads if self.attention.mainloop.num_heads > 1 else cta.warp
        return turn * self.teams

    def fetch_query(self, query, cta, work, q, row, lane) -> None:
        """Starts loading query ``row`` of the warp's KV head, and the query's bias. Beyond the last query, loads the
        last query.
        """
        shape, first = work.place.shape, work.place.first_row
        row = first + cutlass.min(row, self.count_of(work) - 1)
        head = (work.place.first_head + self.own_head(cta)) * shape.group + row
        self.fetch(query.words, self.k_elements, q.address(self.attention, work.request, Int32(0), head), lane)
        if self.has_terms:
            self.row_extras.ask_bias(query.asked, cta.new[0].terms.q_bias, self.k_elements, head, 1, 1, lane)

    @cute.jit
    def rotate_queries(self, query, cta, work, q, cos, sin, team, lane):
        """Rotates the warp's share of the CTA's queries, and stores them in shared memory. query: the registers of the
        warp's first query, which is being loaded. Teams without a query repeat the last query.
        """
        elements, count, terms = self.k_elements, self.count_of(work), cta.new[0].terms
        values = cute.make_rmem_tensor(elements.count, Float32)
        step = self.attention.num_warps // self.attention.mainloop.num_heads * self.teams
        for base in cutlass.range(self.first_row(cta), count, step, unroll=1):
            self.unpack(values, elements, query.words)
            if const_expr(self.has_terms):
                self.row_extras.add_bias(values, query.asked, terms.q_bias, elements, base + team, 1, lane)
            if base + step < count:
                self.fetch_query(query, cta, work, q, base + step + team, lane)
            if const_expr(self.has_terms):
                self.row_extras.normalise(values, query.asked, terms.q_norm, terms.norm_eps, lane)
            if const_expr(self.append.prologue.rope != "none"):
                self.rotator.rotate(values, cos, sin, lane)
            self.transformer.turn_query(values, query.constants, lane)
            row = cutlass.min(base + team, count - 1)
            target = cta.new[1] + (self.own_head(cta) * self.attention.head_queries + row) * self.pitch
            self.store_shared(elements, target, lane, elements.pack(values))

    def store_shared(self, elements: Elements, row, lane, words) -> None:
        """Stores a lane's runs of a row in shared memory. row: the row's address."""
        piece = elements.piece
        for run in range(piece.runs):
            own = words[run * piece.run_words : (run + 1) * piece.run_words]
            for first in range(0, len(own), piece.unit // 4):
                offset = run * piece.run_bytes + 4 * first
                ptx.store_shared(row + lane * piece.num_bytes, offset, own[first : first + piece.unit // 4])

    def query_addresses(self, cta, work) -> list[Any]:
        """Returns the shared-memory address of the lane's query in each of the warp's blocks. Lanes beyond the last
        query get the last query's address.
        """
        place, roles = work.place, cta.roles
        addresses = []
        for block in range(self.attention.mainloop.blocks_per_warp):
            row = cutlass.min(roles.first_row + block * BLOCK_QUERIES + cta.lane // 4, place.shape.group - 1)
            of_cta = roles.head * self.attention.head_queries + row - place.first_row
            addresses.append(Int32(cta.new[1] + of_cta * self.pitch))
        return addresses

    # -- K and V ------------------------------------------------------------------------------------------------------

    @property
    def writers(self) -> int:
        """Number of warps that write K; as many other warps write V. Each team of a warp writes one KV head's row at a
        time.
        """
        wanted = -(-self.attention.mainloop.num_heads // self.teams)
        return max(1, min(wanted, self.attention.num_warps // 2))

    def writes(self, cta, elements) -> Any:
        """Returns whether the warp writes rows of K or, if ``elements`` are V's, rows of V. The last warps of the CTA
        write: if queries are few, these warps have no queries to rotate."""
        last, of_k = self.attention.num_warps - 1, int(elements is self.k_elements)
        if self.writers == 1:
            return cta.warp == max(last - of_k, 0)
        return (last - cta.warp < 2 * self.writers) & ((last - cta.warp) % 2 == of_k)

    def first_head(self, cta):
        """Returns the first KV head that a writing warp writes, as an index among the CTA's KV heads."""
        return (self.attention.num_warps - 1 - cta.warp) // 2 * self.teams if self.writers > 1 else 0

    @cute.jit
    def fetch_newest(self, fresh, cta, work, team, lane):
        """Starts loading a writing warp's first row with its bias, norm weights and constants."""
        if self.writes(cta, self.k_elements):
            self.fetch_row(fresh, cta, work, self.k_elements, self.first_head(cta), team, lane)
            if const_expr(self.has_terms):
                self.row_extras.ask_norm(fresh.asked, cta.new[0].terms.k_norm, lane)
        if const_expr(self.attention.num_warps > 1):
            if self.writes(cta, self.v_elements):
                self.fetch_row(fresh, cta, work, self.v_elements, self.first_head(cta), team, lane)

    def fetch_row(self, fresh, cta, work, elements, base, team, lane) -> None:
        """Starts loading a team's row of K or V with its bias and constants. The row belongs to the CTA's KV head
        ``base`` + team, or to the last head if there is no such head."""
        new, of_k, head = cta.new[0], elements is self.k_elements, self.head_of(work, base, team)
        source, stride = (new.k, new.k_stride) if of_k else (new.v, new.v_stride)
        source = source + Int64(work.request) * stride + Int64(head * elements.row_bytes)
        self.fetch(fresh.words, elements, source, lane)
        if self.has_terms:
            bias = new.terms.k_bias if of_k else new.terms.v_bias
            self.row_extras.ask_bias(fresh.asked, bias, elements, head, 1, 1, lane)
        if self.append.transform is not None:
            ask = self.transformer.ask_k if of_k else self.transformer.ask_v
            ask(fresh.constants, new.constants, head, lane)

    def head_of(self, work, base, team):
        return work.place.first_head + cutlass.min(base + team, self.attention.mainloop.num_heads - 1)

    @cute.jit
    def write_newest(self, fresh, cta, work, place, cos, sin, team, lane):
        """Writes the newest token's rows of the CTA's KV heads. fresh: the registers of the row that `fetch_newest` has
        started loading.
        """
        new = cta.new[0]
        if self.writes(cta, self.k_elements):
            angles = (cos, sin) if const_expr(self.append.prologue.rope != "none") else None
            target = (self.k_row, cta.given.k_scale, new.k_cache, new.k_strides)
            self.write_rows(fresh, cta, work, self.k_elements, target, place, angles, team, lane)
        if self.writes(cta, self.v_elements):
            if const_expr(self.attention.num_warps == 1):
                self.fetch_row(fresh, cta, work, self.v_elements, 0, team, lane)
            target = (self.v_row, cta.given.v_scale, new.v_cache, new.v_strides)
            self.write_rows(fresh, cta, work, self.v_elements, target, place, None, team, lane)

    @cute.jit
    def write_rows(self, fresh, cta, work, elements, target, place, angles, team, lane):
        """Writes the warp's share of the CTA's rows of K or V. Teams without a KV head write the last head's row
        again."""
        cache_row, scale, cache, strides = target
        block_stride, token_stride, head_stride = strides
        values = cute.make_rmem_tensor(elements.count, Float32)
        for ahead in cutlass.range_constexpr(0, self.attention.mainloop.num_heads, self.writers * self.teams):
            base = self.first_head(cta) + ahead
            head = self.head_of(work, base, team)
            given = load_given(cache_row, scale, head, lane)
            if const_expr(ahead > 0):
                self.fetch_row(fresh, cta, work, elements, base, team, lane)
            self.unpack(values, elements, fresh.words)
            if const_expr(self.has_terms):
                self.add_terms(values, fresh.asked, cta.new[0].terms, elements, lane)
            if const_expr(angles is not None):
                self.rotator.rotate(values, angles[0], angles[1], lane)
            if const_expr(elements is self.k_elements):
                self.transformer.transform_k(values, fresh.constants, None, None, lane)
            else:
                self.transformer.transform_v(values, fresh.constants, None, None, lane)
            encoded = encode_row(cache_row, values, given)
            row = place.block * block_stride + place.row * token_stride + Int64(head) * head_stride
            if place.there:
                store_row(cache_row, encoded, cache + row, lane)

    def add_terms(self, values, asked, terms, elements, lane) -> None:
        """Adds the bias to a row of K or V. If it is a row of K, applies the norm as well."""
        if elements is self.k_elements:
            self.row_extras.add_bias(values, asked, terms.k_bias, elements, 0, 1, lane)
            self.row_extras.normalise(values, asked, terms.k_norm, terms.norm_eps, lane)
        else:
            self.row_extras.add_bias(values, asked, terms.v_bias, elements, 0, 1, lane)

    def fetch(self, raw, elements: Elements, source, lane) -> None:
        """Starts loading a lane's part of the row at ``source``."""
        for i, word in enumerate(elements.piece.load(source, lane)):
            raw[i] = word

    def unpack(self, values, elements: Elements, raw) -> None:
        """Converts a lane's words ``raw`` to fp32 numbers in ``values``."""
        for i, value in enumerate(elements.unpack([raw[i] for i in range(elements.piece.num_words)])):
            values[i] = value
