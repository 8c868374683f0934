"""The work of a CTA of MLA decode: a row, 64 of its heads, a part of its blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64

from cute_kernels.device.types import Index
from cute_kernels.mla.config import BLOCK_TOKENS, PartialForm


@dataclass(frozen=True)
class MlaSizes:
    """Run-time integers of a launch.

    A row is the queries that share tokens. If indices name the tokens, it is a query with all its heads. Otherwise it
    is a request, with the heads of all of its queries as they lie in memory.
    """

    rows: Int32
    request_rows: Index  # rows of a request
    num_heads: Int32  # of a row
    query_heads: Int32  # of a query
    num_parts: Int32  # into which each row is cut; 0: work ranges over all of them, see `stream_k`
    causal: Int32  # 1 if later queries of a row see more tokens, else 0
    slack: Float32  # fp32: by how many powers of 2 running maxima may fall behind


@dataclass(frozen=True)
class Results:
    """Addresses that are written; ``sinks`` is read. 0 where absent."""

    out: Int64  # bf16 or fp16 [rows, num_heads, 512]
    lse: Int64  # fp32 [rows, num_heads]
    max_logits: Int64  # fp32 [rows, num_heads]: the greatest scores, scaled
    sinks: Int64  # fp32 [num_heads]
    partials: Int64  # [rows * num_heads, num_parts, 512] values, then [rows * num_heads, num_parts] of statistics


@dataclass(frozen=True)
class WorkTile:
    """A work tile; blocks [begin, end) of the row, those of the extra cache after ``main_blocks`` others."""

    shape: MlaSizes
    row: Int32
    first_head: Int32 | None
    part: Int32 | None
    begin: Int32 | None
    end: Int32
    length: Int32  # tokens, those of the extra cache not counted
    main_blocks: Int32
    extra_length: Int32
    left: Int32 | None = None  # of the CTA's work range, after this work tile
    publishes: Boolean | None = None  # whether an earlier part of the row is another CTA's, which ends the row
    resumes: Boolean | None = None  # whether a later part of the row is another CTA's, which began it

    @staticmethod
    def share(num_blocks, num_parts, part):
        """Returns [begin, end) of a part: whole blocks, as equal as can be, empty ones last."""
        return WorkTile.cut(num_blocks, (num_blocks + num_parts - 1) // num_parts, part)

    @staticmethod
    def cut(num_blocks, size, part):
        """Returns [begin, end) of a part of so many blocks, as far as they exist."""
        begin = cutlass.min(part * size, num_blocks)
        return begin, cutlass.min(begin + size, num_blocks)

    def query_row(self, head):
        """The number of a head's row among all of the launch."""
        return self.row * self.shape.num_heads + self.first_head + head


def blocks_of(length):
    """Blocks of tokens that ``length`` indices fill."""
    return (length + BLOCK_TOKENS - 1) // BLOCK_TOKENS


def partial_values(results: Results, shape: MlaSizes, query_row, part, form: PartialForm):
    """Address of a partial result's 512 unnormalised values."""
    return results.partials + (Int64(query_row) * shape.num_parts + part) * form.row_bytes


def partial_stats(results: Results, shape: MlaSizes, query_row, part, form: PartialForm):
    """Address of a partial result's maximum, sum and so on."""
    behind = Int64(shape.rows) * shape.num_heads * shape.num_parts * form.row_bytes
    return results.partials + behind + (Int64(query_row) * shape.num_parts + part) * form.stats_bytes
