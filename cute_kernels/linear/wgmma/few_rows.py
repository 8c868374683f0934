"""What kernels of one tile of rows of x, which comes in digits, begin with: no division before the first copy.

A division by what is not known when compiling takes some 100 clocks, and `tiles.Items` has three, one behind the other,
in front of the first weights; a fence of the device, which a cluster's CTAs would release their barriers with, takes as
long again. Neither is needed: with one tile of rows an item's number is that of its block, but for the part of K; and
barriers have a fence of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.linear.wgmma.kernel import WgmmaKernel
from cute_kernels.linear.wgmma.tiles import Item, Shape
from cute_kernels.linear.work import RECIPROCAL_BITS


@dataclass(frozen=True)
class FewRowsShape(Shape):
    """Sizes of a launch of one tile of rows of x."""

    split_reciprocal: Any  # 2**RECIPROCAL_BITS over splits, rounded up


@dataclass(frozen=True)
class FewRowsItems:
    """As `tiles.Items`, of one tile of rows of x. ``cluster``: CTAs that have the parts of K of a block, or 1."""

    shape: FewRowsShape
    first: Any
    stride: Any
    count: Any
    cluster: int

    def item(self, index) -> Item:
        shape = self.shape
        if self.cluster > 1:
            block = index // self.cluster
            return self.part(block, block, index - block * self.cluster, Int32(self.cluster))
        place = cutlass.max(index - shape.whole, 0)
        number = Int32((Int64(place) * shape.split_reciprocal) >> RECIPROCAL_BITS)
        cut = index >= shape.whole
        block = cutlass.select_(cut, shape.whole + number, index)
        split = cutlass.select_(cut, place - number * shape.splits, Int32(0))
        item = self.part(block, number, split, cutlass.select_(cut, shape.splits, Int32(1)))
        return replace(item, end=cutlass.select_(cut, item.end, shape.units))

    def part(self, block, number, split, splits) -> Item:
        """A part of K of a block, the ``number``-th that is cut."""
        begin = split * self.shape.split_units
        end = cutlass.min(begin + self.shape.split_units, self.shape.units)
        return Item(block, Int32(0), begin, end, split, splits, number)


class FewRowsKernel(WgmmaKernel):
    """The part that kernels of few rows in digits share."""

    def sizes(self, x, n, num_tiles, units, whole, splits, activation, out_kind) -> Any:
        """The fields of a `FewRowsShape`."""
        reciprocal = ((Int64(1) << RECIPROCAL_BITS) + (splits - 1)) // splits
        return *super().sizes(x, n, num_tiles, units, whole, splits, activation, out_kind), reciprocal

    def arrive(self):
        # Barriers are all that was written, and have had their fence.
        cute.arch.cluster_arrive_relaxed()

    def items_of(self, shape, cta, num_ctas) -> FewRowsItems:  # type: ignore[override]
        blocks = cute.ceil_div(shape.num_tiles, self.config.block_tiles)
        return FewRowsItems(
            shape=shape,
            first=cta,
            stride=num_ctas,
            count=shape.whole + (blocks - shape.whole) * shape.splits,
            cluster=self.config.cluster,
        )
