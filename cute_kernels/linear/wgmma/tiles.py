"""Which parts of the output a CTA computes, as the device finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class Shape:
    """Sizes of a launch; run-time integers."""

    m: Any
    n: Any
    k: Any
    num_tiles: Any  # tiles of 64 output features
    units: Any  # of the padded K
    scale_groups: Any  # of the padded K, 1 where scales are per output feature
    splits: Any  # parts that K is cut into
    split_units: Any  # of a part; the last may have fewer
    activation: Any
    out_kind: Any


@dataclass(frozen=True)
class Item:
    """A part of K of one tile of the output; run-time integers."""

    block: Any  # of output features, this CTA's
    token_tile: Any
    begin: Any  # units
    end: Any
    split: Any  # which part of K


@dataclass(frozen=True)
class Items:
    """The items of one CTA: every ``stride``-th; run-time integers.

    The parts of a tile follow one another, so neighbouring CTAs have them at the same time, and whoever waits for
    parts waits for items before its own: no two CTAs wait for each other.

    CTAs of a cluster take neighbouring blocks of the same tokens, so a cluster counts as one with a wider block. Tiles
    are counted in bands of ``band`` token tiles, and within a band tokens first: what runs at the same time then
    reads few activations and each weight once per band.
    """

    shape: Shape
    first: Any
    stride: Any
    count: Any  # over all CTAs
    blocks: Any  # of a cluster's width
    token_tiles: Any
    band: Any
    cluster: int
    rank: Any  # of the CTA in its cluster

    def item(self, index) -> Item:
        shape = self.shape
        tile = index // shape.splits
        split = index - tile * shape.splits
        per_band = self.band * self.blocks
        band = tile // per_band
        rest = tile - band * per_band
        width = cutlass.min(self.band, self.token_tiles - band * self.band)
        block = rest // width
        begin = split * shape.split_units
        return Item(
            block=block * self.cluster + self.rank,
            token_tile=Int32(band * self.band + rest - block * width),
            begin=begin,
            end=cutlass.min(begin + shape.split_units, shape.units),
            split=split,
        )
