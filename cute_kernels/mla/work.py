"""The work tile of a CTA of MLA decode: a row, some of its heads, a part of its blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64

from cute_kernels.device.types import Index
from cute_kernels.mla.config import BLOCK_TOKENS, PartialForm


@dataclass(frozen=True)
class MlaSizes:
    """Run-time integers of a launch.

    A row consists of the queries that share tokens. In sparse decode it is one query with all its heads. In dense
    decode it is a request with the heads of all its queries, in the order of memory.
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
    """The addresses of results, and of the input ``sinks``. The address of an absent tensor is 0."""

    out: Int64  # bf16 or fp16 [rows, num_heads, 512]
    lse: Int64  # fp32 [rows, num_heads]
    max_logits: Int64  # fp32 [rows, num_heads]: the greatest scores, scaled
    sinks: Int64  # fp32 [num_heads]
    partials: Int64  # [rows * num_heads, num_parts, 512] values, then [rows * num_heads, num_parts] of statistics


@dataclass(frozen=True)
class WorkTile:
    """A work tile: blocks ``begin`` to ``end`` - 1 of a row. Block ``main_blocks`` is the first block of the extra
    cache.
    """

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
        """Returns the range (begin, end) of blocks of a part. All parts have the same number of blocks, except that the
        last ones may have fewer or none.
        """
        return WorkTile.cut(num_blocks, (num_blocks + num_parts - 1) // num_parts, part)

    @staticmethod
    def cut(num_blocks, size, part):
        """Returns the range (begin, end) of blocks of a part. size: number of blocks of a part; the last parts may have
        fewer or none.
        """
        begin = cutlass.min(part * size, num_blocks)
        return begin, cutlass.min(begin + size, num_blocks)

    def query_row(self, head):
        """Returns the index of a head of this work tile among all (row, head) pairs of the launch."""
        return self.row * self.shape.num_heads + self.first_head + head


def blocks_of(length):
    """Returns the number of blocks that ``length`` tokens take."""
    return (length + BLOCK_TOKENS - 1) // BLOCK_TOKENS


def partial_values(results: Results, shape: MlaSizes, query_row, part, form: PartialForm):
    """Returns the address of a partial result's 512 unnormalised values."""
    return results.partials + (Int64(query_row) * shape.num_parts + part) * form.row_bytes


def partial_stats(results: Results, shape: MlaSizes, query_row, part, form: PartialForm):
    """Returns the address of a partial result's statistics: maximum, sum, and factors of scaled values."""
    behind = Int64(shape.rows) * shape.num_heads * shape.num_parts * form.row_bytes
    return results.partials + behind + (Int64(query_row) * shape.num_parts + part) * form.stats_bytes
