"""Finds the part of the active experts' weights that a CTA takes, on the device from the routing.

The rows of an expert are cut into *entries* of up to ``m`` rows; an expert without rows has none.
:class:`cute_kernels.gemm.stream.work.Work` cuts the k blocks of all entries, one after the other, into equal work
ranges. An entry's blocks of output features are numbered after those of the entry before it. So every CTA reads
equally many bytes whichever experts are active, and the host needs upper bounds alone. :mod:`.schedule` says the same
in plain Python.

There are few partial results without slices of K: a CTA publishes at most one, of the block that its run ends in. It
has the place of the CTA's number in the workspace, however many blocks there are; the parts of a block are then
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.gemm.experts.schedule import TABLE_ENTRY_BYTES
from cute_kernels.gemm.stream.work import StreamSizes, Work


def reciprocal(divisor):
    """The number by which `quotient` replaces a division by ``divisor``: 2**31 over it, rounded up."""
    return Uint32(((Int64(1) << 31) + divisor - 1) // divisor)


def quotient(count, of):
    """A division in two instructions, of a count of at least 0 whose product with the divisor is below 2**31.

    Each CTA divides on the way to its first weights: 64 bits would be seven instructions, a division itself thirty.
    """
    return Int32(numbers.multiply_high_u32(Uint32(2 * count), of))


@dataclass(frozen=True)
class GroupedOperands:
    """Addresses of a launch. bias, zeros, rows and workspace are 0 where there is none."""

    x: Int64  # [.., k] of the configuration's dtype
    codes: Int64  # of all experts, one after the other; scales and zeros too
    scales: Int64
    zeros: Int64
    bias: Int64  # [experts, n] of x's dtype
    residual: Int64  # 0
    out: Int64  # [places, columns]
    workspace: Int64  # parts of m * block_rows fp32, EMPTY
    offsets: Int64  # int32 [experts + 1]: the first place of each expert
    rows: Int64  # int32 [places]: the row of x at each place, or 0: its own number


@dataclass(frozen=True)
class EntrySizes(StreamSizes):
    """Sizes of a launch; run-time integers. ``m`` is the rows that an entry may have; ``base`` and ``rest`` are 0
    until :meth:`cut`, and count ``grain`` k blocks each."""

    num_blocks: Int32  # of an expert
    entry_k_blocks: Int32  # of all blocks of an entry, in a slice
    block_reciprocal: Uint32  # as `reciprocal`, of num_blocks; slice_reciprocal is another
    num_groups: Int32
    group_reciprocal: Uint32
    num_experts: Int32
    entry_shift: Int32  # of 1, the rows that an entry may have
    x_slots: Int32  # sets of activations that shared memory holds, 1 or 2
    first_entry: Int32  # that this launch computes,
    max_entries: Int32  # and how many of those that there are
    slack: Int32  # k blocks that a group may have beyond its share so that blocks stay whole
    waits: Int32  # whether offsets may be of the kernel before this one
    grain: Int32  # 1, or the k blocks of a block where blocks stay whole

    @property
    def base_divisor(self):
        return cutlass.max(self.base, 1)

    def entries_of(self, rows):
        """The number of entries of an expert with so many rows."""
        return (rows + (self.m - 1)) >> self.entry_shift

    def block_of(self, k_block):
        return quotient(k_block, self.slice_reciprocal)

    def entry_of(self, block):
        """The entry of a block, counted over all entries of the launch."""
        return quotient(block, self.block_reciprocal)

    def range_of(self, group):
        first, count = super().range_of(group)
        return first * self.grain, count * self.grain

    def cut(self, num_entries) -> EntrySizes:
        """Deals out the k blocks of ``num_entries`` entries to groups; some groups get none if there are too few.

        Blocks stay whole, and leave no partial results, where no group has more than ``slack`` k blocks more by that.
        """
        blocks = num_entries * self.num_blocks
        k_blocks = num_entries * self.entry_k_blocks
        each, blocks_each = quotient(k_blocks, self.group_reciprocal), quotient(blocks, self.group_reciprocal)
        more = cutlass.select_(blocks > blocks_each * self.num_groups, Int32(1), Int32(0))
        whole = (blocks_each + more) * self.slice_k_blocks - each <= self.slack
        base = cutlass.select_(whole, blocks_each, each)
        rest = cutlass.select_(whole, blocks, k_blocks) - base * self.num_groups
        return replace(self, base=base, rest=rest, grain=cutlass.select_(whole, self.slice_k_blocks, Int32(1)))


@dataclass(frozen=True)
class GroupedSegment:
    """A CTA's k blocks of one block of one entry; run-time integers.

    block: among the expert's; begin, end, last: as in :class:`cute_kernels.gemm.stream.work.Segment`; flat_block: among
    those of all entries; entry: among the CTA's; first_row, rows: its places.
    """

    block: Int32
    begin: Int32
    end: Int32
    last: cutlass.Boolean
    flat_block: Int32
    entry: Int32
    expert: Int32
    first_row: Int32
    rows: Int32


@dataclass(frozen=True)
class GroupedWork(Work):
    """A CTA's part of the k blocks of all entries.

    table: shared memory that holds the CTA's entries, see :data:`.schedule.TABLE_BYTES`; own_entry, end_entry: the
    first of them, and what is after the last.
    """

    shape: EntrySizes  # EntrySizes
    table: Int32
    own_entry: Int32
    end_entry: Int32

    @staticmethod
    def of_entries(shape: EntrySizes, group, slice_index, table) -> GroupedWork:
        """``shape`` is cut already."""
        first, count = shape.range_of(group)
        first_block = shape.block_of(first)
        end_block = shape.block_of(first + count + (shape.slice_k_blocks - 1))
        return GroupedWork(
            shape=shape,
            group=group,
            slice_index=slice_index,
            first=first,
            count=count,
            first_block=first_block,
            num_segments=cutlass.select_(count > 0, end_block - first_block, Int32(0)),
            own_k_blocks=cutlass.min(shape.slice_k_blocks, shape.k_blocks - slice_index * shape.slice_k_blocks),
            table=table,
            own_entry=shape.entry_of(first_block),
            end_entry=shape.entry_of(end_block + (shape.num_blocks - 1)),
        )

    def segment(self, index) -> GroupedSegment:
        flat = super().segment(index)
        entry = self.shape.entry_of(flat.block)
        own = entry - self.own_entry
        words = ptx.load_shared_vector(self.table + own * TABLE_ENTRY_BYTES, 0, 4)
        expert, first_row, rows = (Int32(word) for word in words[:3])
        block = flat.block - entry * self.shape.num_blocks
        return GroupedSegment(block, flat.begin, flat.end, flat.last, flat.block, own, expert, first_row, rows)

    @property
    def x_rows(self):
        return self.shape.m * self.shape.x_slots

    def x_start(self, segment, slot_bytes):
        # Kept in a register: ptxas has the loop of products read each operand just before its use where it may compute
        # this again, which takes 1 to 2 % more of a long stream.
        return ptx.pinned(Int32((segment.entry & (self.shape.x_slots - 1)) * slot_bytes))

    def tile(self, segment, index: int, n_tiles: int):
        return segment.expert * self.shape.num_tiles + super().tile(segment, index, n_tiles)

    def rows(self, segment):
        return segment.rows

    def output_row(self, segment, token):
        return segment.first_row + token

    def bias_place(self, segment, row):
        return segment.expert * self.shape.n + row

    def first_part(self, segment):
        of_slices = segment.flat_block * self.shape.max_parts
        return cutlass.select_(self.shape.num_slices == 1, self.group_before(segment), of_slices)

    def group_before(self, segment):
        return self.first_group(segment.flat_block)
