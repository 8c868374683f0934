"""Finds, on the device, the part of the weights that a CTA multiplies; :mod:`.schedule` computes the same on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64

RECIPROCAL_BITS = 40  # x // n is x * ceil(2**40 / n) >> 40 for x * n < 2**40


@dataclass(frozen=True)
class StreamSizes:
    """Sizes of a launch; run-time integers."""

    m: Int32
    n: Int32
    k: Int32
    num_tiles: Int32  # tiles of 64 output features
    k_blocks: Int32  # of the padded K
    slice_k_blocks: Int32  # of a slice of K; the last slice may have fewer
    slice_reciprocal: Int64  # 2**RECIPROCAL_BITS over slice_k_blocks, rounded up
    num_slices: Int32  # CTAs of a group: each takes a slice of K
    base: Int32  # k blocks of a slice, over all blocks, that a group takes;
    rest: Int32  # the first ``rest`` groups take one more
    max_parts: Int32  # partial results of a block, at most
    activation: Int32
    out_kind: Int32

    def range_of(self, group):
        """Returns the range (first, count) of k blocks of a group of CTAs. Indices of k blocks run through all blocks
        of output features.
        """
        first = group * self.base + cutlass.min(group, self.rest)
        return first, self.base + cutlass.select_(group < self.rest, Int32(1), Int32(0))

    def block_of(self, k_block):
        """Returns the block of output features that a k block belongs to. k_block: the k block's index in the slice,
        over all blocks.
        """
        return Int32((Int64(k_block) * self.slice_reciprocal) >> RECIPROCAL_BITS)


@dataclass(frozen=True)
class Segment:
    """The k blocks of the CTA's slice that the CTA multiplies for one block: ``begin`` to ``end`` - 1; run-time
    integers.

    last: whether the CTA's group is the last of the groups that share the block. The last group adds up the result.
    """

    block: Int32
    begin: Int32
    end: Int32
    last: cutlass.Boolean


@dataclass(frozen=True)
class Work:
    """A CTA's part of the weights: ``count`` k blocks of slice ``slice_index``, from ``first`` on; run-time integers.

    A CTA computes its blocks from the last to the first. A CTA's last block may also be the first block of the next
    group, which that group computes at the end. So this CTA's part of the block is ready long before the next group
    adds it up.
    """

    shape: StreamSizes
    group: Int32
    slice_index: Int32
    first: Int32
    count: Int32
    first_block: Int32
    num_segments: Int32
    own_k_blocks: Int32  # of the slice

    @staticmethod
    def of(shape: StreamSizes, group, slice_index) -> Work:
        first, count = shape.range_of(group)
        # A division would take over 100 cycles on the way to the first copy.
        first_block = shape.block_of(first)
        num_segments = shape.block_of(first + count - 1) - first_block + 1
        own_k_blocks = cutlass.min(shape.slice_k_blocks, shape.k_blocks - slice_index * shape.slice_k_blocks)
        return Work(shape, group, slice_index, first, count, first_block, num_segments, own_k_blocks)

    def segment(self, index) -> Segment:
        block = self.first_block + (self.num_segments - 1) - index
        start = block * self.shape.slice_k_blocks
        begin = cutlass.max(self.first - start, 0)
        stop = cutlass.min(self.first + self.count - start, self.shape.slice_k_blocks)
        return Segment(block, begin, cutlass.min(stop, self.own_k_blocks), stop == self.shape.slice_k_blocks)

    def first_group(self, block):
        """Returns the first group of CTAs that computes a part of ``block``, a block of which this CTA's group computes
        a part.
        """
        shape = self.shape
        start = block * shape.slice_k_blocks
        longer = shape.rest * (shape.base + 1)
        behind = shape.rest + (start - longer) // shape.base
        before = cutlass.select_(start < longer, start // (shape.base + 1), behind)
        return cutlass.select_(start < self.first, before, self.group)

    def tile(self, segment, index: int, n_tiles: int):
        """Returns the ``index``-th tile of a segment's block. If the number of tiles is odd, the last block takes the
        last tile twice."""
        return cutlass.min(segment.block * n_tiles + index, self.shape.num_tiles - 1)

    # -- places ---------------------------------------------------------------------------------------------------

    @property
    def first_k_block(self):
        """First k block of the slice."""
        return self.slice_index * self.shape.slice_k_blocks

    def missing_x(self, index, k_block, end, k_block_bytes: int):
        """Returns the activations that k blocks ``k_block`` to ``end`` - 1 of the ``index``-th segment need and that
        are not loaded yet: (offset in the slice, size), in bytes for each token.

        The first segment loads the activations of its k blocks. The second segment loads the rest of the slice. Later
        segments load none.
        """
        seen = cutlass.select_(index == 1, self.segment(0).end, Int32(0))
        first = cutlass.max(k_block, seen) * k_block_bytes
        # x ends before the padded K does.
        stop = cutlass.min(end * k_block_bytes, self.shape.k * 2 - self.first_k_block * k_block_bytes)
        return first, cutlass.select_(index < 2, cutlass.max(stop - first, 0), Int32(0))

    def k_block_of_tile(self, tile, k_block):
        """Returns the index, among the k blocks of all tiles, of k block ``k_block`` of the slice in tile ``tile``."""
        return Int64(tile) * self.shape.k_blocks + (self.first_k_block + k_block)
