"""What a CTA of MLA decode works on: a row, 64 of its heads, a part of its blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int64

from cute_kernels.mla.config import BLOCK_TOKENS, PartialForm


@dataclass(frozen=True)
class MlaSizes:
    """Run-time integers of a launch.

    A row is what shares its tokens: a query, all heads of it, if indices name the tokens; else a request, with the
    heads of all of its queries side by side, as they lie in memory.
    """

    rows: Any
    request_rows: Any  # rows of a request
    num_heads: Any  # of a row
    query_heads: Any  # of a query
    num_parts: Any  # into which each row is cut; 0: work ranges over all of them, see `stream_k`
    causal: Any  # 1 if later queries of a row see more tokens, else 0
    slack: Any  # fp32: by how many powers of 2 running maxima may fall behind


@dataclass(frozen=True)
class Results:
    """Addresses of what is written; ``sinks`` is read. 0 where absent."""

    out: Any  # bf16 or fp16 [rows, num_heads, 512]
    lse: Any  # fp32 [rows, num_heads]
    max_logits: Any  # fp32 [rows, num_heads]: the greatest scores, scaled
    sinks: Any  # fp32 [num_heads]
    partials: Any  # [rows * num_heads, num_parts, 512] values, then [rows * num_heads, num_parts] of statistics


@dataclass(frozen=True)
class WorkTile:
    """A work tile; blocks [begin, end) of the row, those of the extra cache behind ``main_blocks`` others."""

    shape: Any
    row: Any
    first_head: Any
    part: Any
    begin: Any
    end: Any
    length: Any  # tokens, those of the extra cache not counted
    main_blocks: Any
    extra_length: Any
    left: Any = None  # of the CTA's work range, behind this work tile
    publishes: Any = None  # whether an earlier part of the row is another CTA's, which ends the row
    resumes: Any = None  # whether a later part of the row is another CTA's, which began it

    @staticmethod
    def share(num_blocks, num_parts, part):
        """[begin, end) of a part: whole blocks, as equal as can be, empty ones last."""
        return WorkTile.cut(num_blocks, (num_blocks + num_parts - 1) // num_parts, part)

    @staticmethod
    def cut(num_blocks, size, part):
        """[begin, end) of a part of so many blocks, if there are."""
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
