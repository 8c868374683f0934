"""The sizes and addresses of a launch by work ranges on the device, and the blocks of a CTA. :mod:`.schedule` makes the
layout on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import numbers
from cute_kernels.gemm.experts.ranges.config import ROW_BITS


def reciprocal(divisor):
    """Returns 2**31 / divisor, rounded up. `quotient` multiplies by this number instead of dividing by ``divisor``."""
    return Uint32(((Int64(1) << 31) + divisor - 1) // divisor)


def quotient(count, of):
    """Divides ``count`` by a divisor in two instructions. of: the divisor's `reciprocal`. ``count`` is at least 0, and
    ``count`` times the divisor is at most `MOST_DIVIDED`.

    Each CTA divides before it requests its first weights. A division in 64 bits would take seven instructions, an
    ordinary one thirty.
    """
    return Int32(numbers.multiply_high_u32(Uint32(2 * count), of))


@dataclass(frozen=True)
class RangeSizes:
    """Sizes of a launch; run-time integers."""

    n: Int32
    k: Int32
    num_tiles: Int32  # of 64 output features of an expert
    k_blocks: Int32  # that a block is multiplied with: of the padded K, or of a part of it
    num_blocks: Int32  # of output features of an expert
    block_reciprocal: Uint32  # as `reciprocal`
    num_ctas: Int32
    cta_reciprocal: Uint32
    num_experts: Int32
    places: Int32
    x_slots: Int32  # sets of limbs that shared memory holds, 1 or 2
    waits: Int32  # whether offsets may be of the kernel before this one
    activation: Int32
    out_kind: Int32


@dataclass(frozen=True)
class AssignedSizes(RangeSizes):
    """Sizes of a launch over unsorted assignments; ``places`` counts assignments here."""

    id_words: Int32  # of 32 bits, of an expert's id
    row_factor: Int32  # 2**ROW_BITS over the assignments of a row of x, rounded up
    part_bits: Int32  # log2 of the parts of K, which entries are counted with: all parts of one, then of the next

    def row(self, place) -> Any:
        """Returns the row of x of an assignment."""
        return (place * self.row_factor) >> ROW_BITS


@dataclass(frozen=True)
class RangeOperands:
    """Addresses of a launch. bias is 0 if there is none; rows is 0 if x is in the order of the places."""

    x: Int64  # [.., k] of the configuration's dtype
    codes: Int64  # of all experts, one after the other; scales too
    scales: Int64
    bias: Int64  # [experts, n] of x's dtype
    residual: Int64  # 0
    out: Int64  # [places, columns], of parts of K one after the other
    offsets: Int64  # int32 [experts + 1]: the first place of each expert; or ids of assignments
    rows: Int64  # int32 [places]: the row of x at each place, or 0: its own number


@dataclass(frozen=True)
class BlockRange:
    """A CTA's blocks of output features: ``count`` blocks from index ``first`` on. Indices run through the blocks of
    all entries, entry by entry.
    """

    shape: RangeSizes
    first: Int32
    count: Int32

    @staticmethod
    def of(shape, entries, cta) -> BlockRange:
        """Returns the range of CTA ``cta`` among the blocks of ``entries`` entries."""
        blocks = entries * shape.num_blocks
        each = quotient(blocks, shape.cta_reciprocal)
        rest = blocks - each * shape.num_ctas
        more = cutlass.select_(cta < rest, Int32(1), Int32(0))
        return BlockRange(shape, cta * each + cutlass.min(cta, rest), each + more)

    def block(self, index) -> tuple[Any, Any]:
        """Returns (entry, block of its expert's output features) of the ``index``-th block of the range."""
        flat = self.first + index
        entry = quotient(flat, self.shape.block_reciprocal)
        return entry, flat - entry * self.shape.num_blocks
