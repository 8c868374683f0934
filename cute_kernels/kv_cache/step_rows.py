"""What attention that appends for itself does first: rotated queries in shared memory, the newest rows in the cache.

Every CTA rotates the queries of its heads, whichever tokens it takes. Of the CTAs of a row, the one whose tiles end
with the newest token writes K and V of it. Consumer warps do both: until their first tile has come they have nothing
else to do. A *team* of lanes takes a row, as in :mod:`.kernel`; all lanes of a warp take the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.attention.barriers import announce_rows, sync_consumers
from cute_kernels.attention.config import DecodeConfig
from cute_kernels.attention.policies import BLOCK_QUERIES
from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.rows import Elements
from cute_kernels.device.write_row import encode_row, load_given, store_row
from cute_kernels.kv_cache.config import AppendConfig
from cute_kernels.kv_cache.rotate import Rotator
from cute_kernels.kv_cache.rows import make_row
from cute_kernels.kv_cache.step_config import query_pitch


@dataclass(frozen=True)
class NewRowOperands:
    """Of the newest tokens; run-time values. Addresses; bytes from a request's row to the next one's of k and v, and
    from a block, a token, a head to the next one of the caches."""

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


@dataclass(frozen=True)
class NewPlace:
    """Where a request's newest token goes; run-time values. There is none unless ``there``."""

    there: Boolean
    block: Int64
    row: Int64


class NewRows:
    """Makes the rows of the newest token of a CTA's unit.

    Attributes:
        shared_bytes: of shared memory, for the queries.
    """

    def __init__(self, attention: DecodeConfig, append: AppendConfig):
        self.attention, self.append = attention, append
        self.lanes, runs = append.lanes, append.runs
        self.teams = WARP_THREADS // self.lanes
        self.k_elements = Elements(append.dtype, append.head_dim_k, self.lanes, runs)
        self.v_elements = Elements(append.dtype, append.head_dim_v, self.lanes, runs)
        self.k_row = make_row(append.k_format, append.head_dim_k, self.lanes, runs)
        self.v_row = make_row(append.v_format, append.head_dim_v, self.lanes, runs)
        self.rotator = Rotator(append.rope, append.rotary_dim, append.head_dim_k, self.lanes, runs)
        self.pitch = query_pitch(attention)
        self.shared_bytes = attention.num_rows * self.pitch

    def operands_of(self, given) -> NewRowOperands:
        """From a launch's arguments."""
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
        )

    def _strides_of(self, cache) -> Any:
        """Bytes from a block, a token and a head to the next one."""
        block, outer, inner = (Int64(stride) * (cache.element_type.width // 8) for stride in cache.stride[:3])
        return (block, inner, outer) if self.attention.features.head_major else (block, outer, inner)

    @cute.jit
    def make(self, cta, work, q):
        """Writes what a consumer warp has to write; shared addresses of the queries of its blocks, when all are there.

        The producer warps of the CTA that has the newest token wait for its rows (`announce_rows`) before its tile.
        """
        lane, team = cta.lane % self.lanes, cta.lane // self.lanes
        new, last = cta.new[0], work.place.shape.max_seq_len - 1
        # All that comes from memory is asked for before any of it is waited for.
        told = ptx.load_global_words(new.seq_lens + Int64(work.request) * 4, 0, 1)[0].to(Int32)
        steps = cute.make_rmem_tensor(max(2 * self.rotator.num_angles, 1), Uint32)
        if const_expr(self.append.rope != "none"):
            for i, word in enumerate(self.rotator.load_steps(new.phase_steps, lane)):
                steps[i] = word
        raw = cute.make_rmem_tensor(self.k_elements.piece.num_words, Uint32)
        self.fetch_query(raw, work, q, 0, cta.warp * self.teams + team, lane)
        newest = cutlass.max(work.length - 1, 0)
        owner = (newest // self.attention.tile_tokens - work.first_tile) % work.num_parts == work.part
        owner = owner & (work.length > 0)
        fresh = cute.make_rmem_tensor(max(self.k_elements.piece.num_words, self.v_elements.piece.num_words), Uint32)
        block, row = Int32(work.request), newest
        if const_expr(self.attention.page_tokens > 0):
            block, row = cta.tiles.pager.locate(work.request, newest)
        if owner:
            self.fetch_newest(fresh, cta, work, team, lane)
        cos = cute.make_rmem_tensor(max(self.rotator.num_angles, 1), Float32)
        sin = cute.make_rmem_tensor(max(self.rotator.num_angles, 1), Float32)
        if const_expr(self.append.rope != "none"):
            # As the request says it: a token that there is no cache for is rotated, but not written.
            self.rotator.make_angles(cos, sin, steps, told - 1, new.rope_factor, lane)
        if owner:
            there = (told <= last + 1) & (block >= 0) & (block < new.num_blocks)
            self.write_newest(fresh, cta, work, NewPlace(there, Int64(block), Int64(row)), cos, sin, team, lane)
            cute.arch.fence_proxy("async.global")
            announce_rows(self.attention)
        self.rotate_queries(raw, cta, work, q, cos, sin, team, lane)
        sync_consumers(self.attention)
        return self.query_addresses(cta, work)

    # -- queries ------------------------------------------------------------------------------------------------------

    def count_of(self, work):
        """Queries of each of the CTA's KV heads."""
        return cutlass.min(work.place.shape.group - work.place.first_row, self.attention.head_queries)

    def fetch_query(self, raw, work, q, head: int, row, lane) -> None:
        """Asks for a row of the CTA's ``head``-th KV head, past the last one for that."""
        shape, first = work.place.shape, work.place.first_row
        row = first + cutlass.min(row, self.count_of(work) - 1)
        source = q.address(self.attention, work.request, Int32(0), (work.place.first_head + head) * shape.group + row)
        self.fetch(raw, self.k_elements, source, lane)

    @cute.jit
    def rotate_queries(self, raw, cta, work, q, cos, sin, team, lane):
        """The warp's share of the CTA's query rows, to shared memory; ``raw``: of the first. Teams without a row
        repeat the last one."""
        elements, count = self.k_elements, self.count_of(work)
        values = cute.make_rmem_tensor(elements.count, Float32)
        for head in cutlass.range_constexpr(self.attention.num_heads):
            begin, step = cta.warp * self.teams, self.attention.num_warps * self.teams
            for base in cutlass.range(begin, count, step, unroll=1):
                if const_expr(head > 0):
                    self.fetch_query(raw, work, q, head, base + team, lane)
                self.unpack(values, elements, raw)
                if const_expr(head == 0):
                    if base + step < count:
                        self.fetch_query(raw, work, q, head, base + step + team, lane)
                if const_expr(self.append.rope != "none"):
                    self.rotator.rotate(values, cos, sin, lane)
                row = cutlass.min(base + team, count - 1)
                target = cta.new[1] + (head * self.attention.head_queries + row) * self.pitch
                self.store_shared(elements, target, lane, elements.pack(values))

    def store_shared(self, elements: Elements, row, lane, words) -> None:
        """Puts a lane's runs of a row where `query_addresses` finds them."""
        piece = elements.piece
        for run in range(piece.runs):
            own = words[run * piece.run_words : (run + 1) * piece.run_words]
            for first in range(0, len(own), piece.unit // 4):
                offset = run * piece.run_bytes + 4 * first
                ptx.store_shared(row + lane * piece.num_bytes, offset, own[first : first + piece.unit // 4])

    def query_addresses(self, cta, work) -> list[Any]:
        """Shared address of the lane's query in each of the warp's blocks; lanes past the last query take that one."""
        place, roles = work.place, cta.roles
        addresses = []
        for block in range(self.attention.blocks_per_warp):
            row = cutlass.min(roles.first_row + block * BLOCK_QUERIES + cta.lane // 4, place.shape.group - 1)
            of_cta = roles.head * self.attention.head_queries + row - place.first_row
            addresses.append(Int32(cta.new[1] + of_cta * self.pitch))
        return addresses

    # -- K and V ------------------------------------------------------------------------------------------------------

    def warps_of(self) -> tuple[int, int]:
        """Those that write K, and V: the last two, which have no queries if there are few."""
        last = self.attention.num_warps - 1
        return max(last - 1, 0), last

    @cute.jit
    def fetch_newest(self, fresh, cta, work, team, lane):
        """Asks for the first row that a warp writes."""
        of_k, of_v = self.warps_of()
        if cta.warp == of_k:
            self.fetch_row(fresh, cta, work, self.k_elements, 0, team, lane)
        if const_expr(of_v != of_k):
            if cta.warp == of_v:
                self.fetch_row(fresh, cta, work, self.v_elements, 0, team, lane)

    def fetch_row(self, fresh, cta, work, elements, base: int, team, lane) -> None:
        """Asks for a team's row of K or V: of the CTA's KV head ``base`` + team, past the last one for that."""
        new, of_k = cta.new[0], elements is self.k_elements
        source, stride = (new.k, new.k_stride) if of_k else (new.v, new.v_stride)
        source = source + Int64(work.request) * stride + Int64(self.head_of(work, base, team) * elements.row_bytes)
        self.fetch(fresh, elements, source, lane)

    def head_of(self, work, base: int, team):
        return work.place.first_head + cutlass.min(base + team, self.attention.num_heads - 1)

    @cute.jit
    def write_newest(self, fresh, cta, work, place, cos, sin, team, lane):
        """The newest token's rows of the CTA's KV heads; ``fresh``: as `fetch_newest` has asked for them."""
        of_k, of_v = self.warps_of()
        new = cta.new[0]
        if cta.warp == of_k:
            angles = (cos, sin) if const_expr(self.append.rope != "none") else None
            target = (self.k_row, cta.given.k_scale, new.k_cache, new.k_strides)
            self.write_rows(fresh, cta, work, self.k_elements, target, place, angles, team, lane)
        if cta.warp == of_v:
            if const_expr(of_v == of_k):
                self.fetch_row(fresh, cta, work, self.v_elements, 0, team, lane)
            target = (self.v_row, cta.given.v_scale, new.v_cache, new.v_strides)
            self.write_rows(fresh, cta, work, self.v_elements, target, place, None, team, lane)

    @cute.jit
    def write_rows(self, fresh, cta, work, elements, target, place, angles, team, lane):
        """Rows of all KV heads of the CTA; teams without a head repeat the last one's."""
        cache_row, scale, cache, strides = target
        block_stride, token_stride, head_stride = strides
        values = cute.make_rmem_tensor(elements.count, Float32)
        for base in cutlass.range_constexpr(0, self.attention.num_heads, self.teams):
            head = self.head_of(work, base, team)
            given = load_given(cache_row, scale, head, lane)
            if const_expr(base > 0):
                self.fetch_row(fresh, cta, work, elements, base, team, lane)
            self.unpack(values, elements, fresh)
            if const_expr(angles is not None):
                self.rotator.rotate(values, angles[0], angles[1], lane)
            encoded = encode_row(cache_row, values, given)
            row = place.block * block_stride + place.row * token_stride + Int64(head) * head_stride
            if place.there:
                store_row(cache_row, encoded, cache + row, lane)

    def fetch(self, raw, elements: Elements, source, lane) -> None:
        """Asks for a lane's part of the row at ``source``."""
        for i, word in enumerate(elements.piece.load(source, lane)):
            raw[i] = word

    def unpack(self, values, elements: Elements, raw) -> None:
        """A lane's numbers, in fp32."""
        for i, value in enumerate(elements.unpack([raw[i] for i in range(elements.piece.num_words)])):
            values[i] = value
