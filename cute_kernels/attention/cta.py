"""The run-time values that a CTA works with: the launch's sizes, the CTA's heads and queries, and the CTA's current
unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.attention.decode_config import RECIPROCAL_BITS, DecodeConfig
from cute_kernels.attention.loads.copies import Tiles
from cute_kernels.attention.policies import BLOCK_QUERIES
from cute_kernels.device.pipeline import Pipeline
from cute_kernels.formats.scores.terms import QueryColumn


@dataclass(frozen=True)
class Tail:
    """Addresses of k_tail, the keys of unfinished blocks, and of tail_slots, each request's slot of k_tail."""

    rows: Int64
    slots: Int64


@dataclass(frozen=True)
class FeatureValues:
    """Run-time values of the features that a variant has.

    Attributes:
        window: number of keys that a query sees, its own key included.
        soft_cap: the cap of scores, in natural units.
        sinks, alibi_slopes: addresses of fp32 [num_q_heads].
        bias: address of the bias.
        bias_strides: elements of the bias from one request, query, head and key position to the next.
        shift: address of q_shift, fp32 [batch, q_len, num_q_heads]; None if nothing is transformed.
        out_factor: address of fp32 [num_kv_heads, v_head_dim]; None if nothing is transformed.
        tensors: addresses of the tensors of registered options, by name.
    """

    window: Int32
    soft_cap: Float32
    sinks: Int64
    alibi_slopes: Int64
    bias: Int64
    bias_strides: tuple[Int64, Int64, Int64, Int64]
    shift: Int64 | None = None
    out_factor: Int64 | None = None
    tensors: dict[str, Int64] = field(default_factory=dict)
    tail: Tail | None = None


@dataclass(frozen=True)
class Results:
    """The addresses that a CTA writes to: output, log-sum-exps and workspace; run-time values.

    Attributes:
        shifts: (address of the queries' shifts, softmax scale); None without shifts.
        out_factor: address of the factors of the output's columns; None without factors.
    """

    out: Int64
    lse: Int64
    workspace: Int64
    mode: Int32
    sinks: Int64
    shifts: tuple[Int64, Float32] | None = None
    out_factor: Int64 | None = None


@dataclass(frozen=True)
class GivenScales:
    """The fp32 scales beside the caches: addresses, and strides in elements from one KV head to the next."""

    k_scale: Int64
    v_scale: Int64
    k_stride: Int32
    v_stride: Int32

    def of_keys(self, head):
        """Returns the address of K's scales of a KV head."""
        return self.k_scale + Int64(head) * self.k_stride * 4

    def of_values(self, head):
        return self.v_scale + Int64(head) * self.v_stride * 4


@dataclass(frozen=True)
class QueryRows:
    """The rows of q in global memory: their address, and the strides in bytes of requests and of query positions.

    The rows of a position's heads lie one after the other. q may be a view of a larger tensor, such as a fused
    projection.
    """

    base: Int64
    request_bytes: Int64
    query_bytes: Int64

    @staticmethod
    def of(q) -> QueryRows:
        """Describes ``q``, a tensor [batch, q_len, num_q_heads, head_dim] of 16 bits."""
        return QueryRows(q.iterator.toint(), Int64(q.stride[0]) * 2, Int64(q.stride[1]) * 2)

    def address(self, config: DecodeConfig, request, query, head):
        """Returns the address of one query head's row. query: position of the query in its request."""
        address = self.base + Int64(request) * self.request_bytes + Int64(head) * (config.head_dim * 2)
        return address + Int64(query) * self.query_bytes if config.features.queries else address


@dataclass(frozen=True)
class Cta:
    """The run-time values that a thread needs for all units of its CTA, known before the first unit."""

    roles: Roles
    tiles: Tiles
    results: Results
    given: GivenScales
    features: FeatureValues
    softmax_scale: Float32
    ring: cute.Pointer
    queries: Int32  # address of shared memory, where the configuration shares them
    pipeline: Pipeline
    warp: Int32
    lane: Int32
    new: tuple[Any, Int32] | None = None  # what a kernel makes newest rows of; where its queries are


@dataclass(frozen=True)
class Roles:
    """The part of the CTA's tiles that one warp multiplies: a KV head, queries and a slice of tokens; run-time
    integers.
    """

    head: Int32  # of the CTA's KV heads
    first_row: Int32  # of the queries of that KV head
    slice_index: Int32


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes of a launch; run-time integers. ``x_reciprocal`` is the factor that replaces a division by x."""

    batch: Int32
    q_len: Int32
    num_q_heads: Int32
    num_kv_heads: Int32
    group: Int32  # query heads per KV head
    group_reciprocal: Int32
    query_groups: Int32  # CTAs that share a KV head's queries
    query_groups_reciprocal: Int32
    head_blocks: Int32
    max_seq_len: Int32


@dataclass(frozen=True)
class Place:
    """The first KV head and the first row of queries of a CTA, in any request; run-time integers.

    A KV head's rows of queries are ordered by query position, then by the head within its group of query heads: ``row =
    position * group + head``.
    """

    shape: DecodeSizes
    first_head: Int32
    first_row: Int32

    def query_of(self, config: DecodeConfig, head, row):
        """Returns (query position, query head) of a row of the CTA's ``head``-th KV head."""
        query, within = Int32(0), row
        if config.features.queries:
            query = (row * self.shape.group_reciprocal) >> RECIPROCAL_BITS
            within = row - query * self.shape.group
        return query, (self.first_head + head) * self.shape.group + within

    def column(self, config: DecodeConfig, roles: Roles, t, column: int) -> QueryColumn:
        """Returns the query to which a lane's accumulator column belongs. Columns beyond the last query get the last
        query. t: lane % 4.
        """
        row = roles.first_row + column // 2 * BLOCK_QUERIES + 2 * t + column % 2
        query, head = self.query_of(config, roles.head, cutlass.min(row, self.shape.group * self.shape.q_len - 1))
        return QueryColumn(query, head)


@dataclass(frozen=True)
class Work:
    """A CTA's unit: a part of a request's tokens; run-time integers.

    Attributes:
        part: index of the unit among the ``num_parts`` parts of the request.
        first_unit: index of the request's part 0 among the partial results of all requests.
        length: number of tokens of the request.

    The unit's tiles begin at tokens ``begin``, ``begin + stride`` and so on, before ``stop``.
    """

    place: Place
    request: Int32
    part: Int32
    num_parts: Int32
    first_unit: Int32
    length: Int32
    begin: Int32
    stop: Int32
    stride: Int32

    def num_tiles(self):
        """Returns how many tiles the unit has."""
        return cutlass.max(self.stop - self.begin + self.stride - 1, 0) // self.stride

    def uniform(self) -> Work:
        """Returns the unit in uniform registers. All lanes must have the same values."""
        numbers = (getattr(self, name) for name in Work.__dataclass_fields__ if name != "place")
        return Work(self.place, *(cute.arch.make_warp_uniform(number) for number in numbers))

    def query_row(self, config: DecodeConfig, r):
        """Returns, for row r of the CTA's queries, (index in [q_len, num_q_heads], query head, whether the row
        exists)."""
        place, shape = self.place, self.place.shape
        role = r // config.warp_queries
        row = place.first_row + role // config.mainloop.num_heads * config.warp_queries + r % config.warp_queries
        query, head = place.query_of(config, role % config.mainloop.num_heads, row)
        return query * shape.num_q_heads + head, head, row < shape.group * shape.q_len

    def output_row(self, query_row):
        """Returns the index of the row of out [batch * q_len * num_q_heads, v_head_dim] for ``query_row``, an index in
        [q_len, num_q_heads] of the request."""
        return Int64(self.request) * (self.place.shape.q_len * self.place.shape.num_q_heads) + query_row

    def partial_row(self, query_row, part):
        """Returns the index of the workspace's row for part ``part``'s partial result of ``query_row``, an index in
        [q_len, num_q_heads]."""
        rows = self.place.shape.q_len * self.place.shape.num_q_heads
        return Int64(self.first_unit + part) * rows + query_row
