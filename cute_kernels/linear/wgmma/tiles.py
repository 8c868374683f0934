"""Which parts of the output a CTA computes, as the device finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32

from cute_kernels.linear.wgmma.config import WgmmaConfig


@dataclass(frozen=True)
class Shape:
    """Sizes of a launch; run-time integers."""

    m: Any
    n: Any
    k: Any
    num_tiles: Any  # tiles of 64 output features
    units: Any  # of the padded K
    scale_groups: Any  # of the padded K, 1 where scales are per output feature
    whole: Any  # tiles that are computed whole
    splits: Any  # parts that the K of the tiles after them is cut into
    split_units: Any  # of a part; the last may have fewer
    activation: Any
    out_kind: Any


@dataclass(frozen=True)
class Item:
    """A tile of the output, or a part of K of one; run-time integers."""

    block: Any  # of output features
    token_tile: Any
    begin: Any  # units
    end: Any
    split: Any  # which part of K, or of the tile's rows,
    splits: Any  # of how many
    number: Any  # of the tile among those of all CTAs that are cut


@dataclass(frozen=True)
class Items:
    """The items of one CTA: every ``stride``-th; run-time integers.

    The first tiles are computed whole, as many as there are rounds of all CTAs; what would be a last, incomplete round
    is cut along K (the hybrid schedules of Stream-K, Osama et al. 2023), or along rows of x. The parts of a tile follow
    one another, so neighbouring CTAs have them at the same time, and whoever waits for parts waits for items before its
    own: no two CTAs wait for each other.

    CTAs that share activations, ``sharing`` of them, have neighbouring blocks of one token tile and take their items
    together: they are counted as one, and ``blocks`` as many of theirs.

    Tiles are counted in bands of ``band`` token tiles, and within a band tokens first: what runs at the same time then
    reads few activations and each weight once per band.
    """

    shape: Shape
    first: Any
    stride: Any
    count: Any  # over all CTAs
    blocks: Any  # of output features
    token_tiles: Any
    band: Any
    sharing: int = 1
    rank: Any = 0  # among those that share
    cuts_rows: bool = False  # tiles, into parts of their rows of x, not along K

    def item(self, index) -> Item:
        shape = self.shape
        place = cutlass.max(index - shape.whole, 0)
        number = place // shape.splits
        cut = index >= shape.whole
        split = cutlass.select_(cut, place - number * shape.splits, Int32(0))
        tile = cutlass.select_(cut, shape.whole + number, index)
        per_band = self.band * self.blocks
        band = tile // per_band
        rest = tile - band * per_band
        width = cutlass.min(self.band, self.token_tiles - band * self.band)
        block = rest // width
        begin = Int32(0) if self.cuts_rows else split * shape.split_units
        return Item(
            block=self.own(block),
            token_tile=Int32(band * self.band + rest - block * width),
            begin=begin,
            end=shape.units if self.cuts_rows else self.end(cut, begin),
            split=split,
            splits=cutlass.select_(cut, shape.splits, Int32(1)),
            number=self.own(number),
        )

    def end(self, cut, begin):
        """Behind the last unit of what begins at ``begin``, a part of K if it is ``cut``."""
        units = self.shape.units
        return cutlass.select_(cut, cutlass.min(begin + self.shape.split_units, units), units)

    def own(self, number):
        """This CTA's of what those that share activations count as one."""
        return number if self.sharing == 1 else number * self.sharing + self.rank


@dataclass(frozen=True)
class ClusterItems:
    """As :class:`Items`, of CTAs that push parts of K: each has one, of a tile of all rows of x.

    That takes none of the divisions which others have on the way to their first copy, some 100 clocks each.
    """

    shape: Shape
    first: Any  # the CTA's number
    cluster: int

    @property
    def count(self):
        """Behind the CTA's only item."""
        return self.first + 1

    @property
    def stride(self):
        return Int32(1)

    def item(self, index) -> Item:
        shape = self.shape
        block = index // self.cluster
        split = index - block * self.cluster
        begin = split * shape.split_units
        end = cutlass.min(begin + shape.split_units, shape.units)
        return Item(Int32(block), Int32(0), begin, end, split, Int32(self.cluster), Int32(block))


def parts_with(config: WgmmaConfig, rows):
    """Of the parts of a tile, how many have some of its ``rows``, at least 1; there may be more than the tile takes."""
    if config.row_parts == 1:
        return Int32(1)
    bits = config.part_tokens.bit_length() - 1
    present = cutlass.min((rows + (config.part_tokens - 1)) >> bits, config.row_parts)
    return cutlass.max(present, 1) if config.cuts_rows else present
