"""Which parts of the output a CTA computes, as the device finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32

from cute_kernels.device.division import Divisor
from cute_kernels.linear.wgmma.config import TOKEN_BAND, WgmmaConfig


@dataclass(frozen=True)
class TileGrid:
    """How the tiles of a launch are counted, with what dividing by those numbers takes; made on the host.

    They are counted in bands of `TOKEN_BAND` token tiles, the last one of those that are left, and within a band tokens
    first: what runs at the same time then reads few activations and each weight once per band. Blocks of CTAs that
    share activations count as one.
    """

    num_items: Any  # tiles and parts of tiles
    splits: Divisor  # parts of a tile that is cut
    band_tiles: Divisor  # of a whole band
    last_band: Any  # its number
    last_width: Divisor  # token tiles of the last band

    @staticmethod
    def of(blocks, token_tiles, whole, splits) -> TileGrid:
        last_band = (token_tiles - 1) // TOKEN_BAND
        return TileGrid(
            num_items=whole + (blocks * token_tiles - whole) * splits,
            splits=Divisor.of(splits),
            band_tiles=Divisor.of(TOKEN_BAND * blocks),
            last_band=last_band,
            last_width=Divisor.of(token_tiles - TOKEN_BAND * last_band),
        )

    def place(self, tile) -> tuple[Any, Any]:
        """(block of output features, token tile) of a tile."""
        band, rest = self.band_tiles.divide_int(tile)
        narrow, _ = self.last_width.divide_int(rest)
        is_last = band == self.last_band
        block = cutlass.select_(is_last, narrow, rest >> (TOKEN_BAND.bit_length() - 1))
        width = cutlass.select_(is_last, self.last_width.value, Int32(TOKEN_BAND))
        return block, Int32(band * TOKEN_BAND + rest - block * width)


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
    grid: Any  # `TileGrid`; None where tiles are otherwise counted: those of one token tile, and of experts


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
    together: they are counted as one, and the grid's blocks as many of theirs.
    """

    shape: Shape
    first: Any
    stride: Any
    sharing: int = 1
    rank: Any = 0  # among those that share
    cuts: bool = True  # whether tiles may be cut
    cuts_rows: bool = False  # into parts of their rows of x, not along K

    @property
    def count(self):
        """Of all CTAs."""
        return self.shape.grid.num_items

    def item(self, index) -> Item:
        shape, grid = self.shape, self.shape.grid
        cut, number, split, tile = index >= shape.whole, Int32(0), Int32(0), index
        if self.cuts:
            number, split = grid.splits.divide_int(cutlass.max(index - shape.whole, 0))
            split = cutlass.select_(cut, split, Int32(0))
            tile = cutlass.select_(cut, shape.whole + number, index)
        along_k = self.cuts and not self.cuts_rows
        begin = split * shape.split_units if along_k else Int32(0)
        block, token_tile = grid.place(tile)
        return Item(
            block=self.own(block),
            token_tile=token_tile,
            begin=begin,
            end=self.end(cut, begin) if along_k else shape.units,
            split=split,
            splits=cutlass.select_(cut, shape.splits, Int32(1)) if self.cuts else Int32(1),
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
    """As :class:`Items`, of CTAs of clusters that have the parts of K of a tile: each CTA has one part."""

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
        tile = index // self.cluster
        split = index - tile * self.cluster
        begin = split * shape.split_units
        end = cutlass.min(begin + shape.split_units, shape.units)
        block, token_tile = shape.grid.place(tile) if shape.grid else (Int32(tile), Int32(0))
        return Item(block, token_tile, begin, end, split, Int32(self.cluster), Int32(tile))


def parts_with(config: WgmmaConfig, rows):
    """Of the parts of a tile, how many have some of its ``rows``, at least 1; there may be more than the tile takes."""
    if config.row_parts == 1:
        return Int32(1)
    bits = config.part_tokens.bit_length() - 1
    present = cutlass.min((rows + (config.part_tokens - 1)) >> bits, config.row_parts)
    return cutlass.max(present, 1) if config.cuts_rows else present
