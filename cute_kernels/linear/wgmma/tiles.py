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
    split: Any  # which part of K,
    splits: Any  # of how many
    number: Any  # of the tile among those that are cut

    @property
    def first_part(self) -> Any:
        """Where the sums of its tile's first part are, counted in parts of a tile."""
        return self.number * (self.splits - 1)


@dataclass(frozen=True)
class RunItem(Item):
    """An item of `RunItems`."""

    first_cta: Any  # that has a part of its tile

    @property
    def first_part(self) -> Any:
        return self.first_cta


@dataclass(frozen=True)
class Items:
    """The items of one CTA: every ``stride``-th; run-time integers.

    The first tiles are computed whole, as many as there are rounds of all CTAs; what would be a last, incomplete round
    is cut along K (the hybrid schedules of Stream-K, Osama et al. 2023). The parts of a tile follow one another, so
    neighbouring CTAs have them at the same time, and whoever waits for parts waits for items before its own: no two
    CTAs wait for each other.

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

    def item(self, index) -> Item:
        shape = self.shape
        place = cutlass.max(index - shape.whole, 0)
        number = place // shape.splits
        cut = index >= shape.whole
        split = cutlass.select_(cut, place - number * shape.splits, Int32(0))
        tile = cutlass.select_(cut, shape.whole + number, index)
        block, token_tile = self.place_of(tile)
        begin = split * shape.split_units
        return Item(
            block=block,
            token_tile=token_tile,
            begin=begin,
            end=cutlass.select_(cut, cutlass.min(begin + shape.split_units, shape.units), shape.units),
            split=split,
            splits=cutlass.select_(cut, shape.splits, Int32(1)),
            number=number,
        )

    def place_of(self, tile) -> tuple[Any, Any]:
        """The block of output features and the token tile of a tile."""
        per_band = self.band * self.blocks
        band = tile // per_band
        rest = tile - band * per_band
        width = cutlass.min(self.band, self.token_tiles - band * self.band)
        block = rest // width
        return block, Int32(band * self.band + rest - block * width)


@dataclass(frozen=True)
class RunItems(Items):
    """The items of one CTA where the units of the tiles that are cut are dealt out in equal runs (Stream-K).

    A run is shorter than a tile, so it has the end of one tile and the beginning of the next, a part of one or, seldom,
    one as it is. A CTA begins with the beginning, whose sums it leaves for the CTA behind it, then completes the other
    tile, for which all that has been left for long, and computes its whole tiles at last. Nobody waits for a CTA that
    waits. ``first`` is 0 and ``stride`` 1; whole tiles are as many for each CTA.
    """

    cta: Any
    num_ctas: Any
    run: Any  # units

    @staticmethod
    def of(shape: Shape, cta, num_ctas, blocks, token_tiles, band) -> RunItems:
        units = (blocks * token_tiles - shape.whole) * shape.units  # of the tiles that are cut
        run = (units + num_ctas - 1) // num_ctas
        begin = cta * run
        end = cutlass.min(begin + run, units)
        pieces = cutlass.select_(begin < units, (end - 1) // shape.units - begin // shape.units + 1, Int32(0))
        return RunItems(
            shape=shape,
            first=Int32(0),
            stride=Int32(1),
            count=pieces + shape.whole // num_ctas,
            blocks=blocks,
            token_tiles=token_tiles,
            band=band,
            cta=cta,
            num_ctas=num_ctas,
            run=run,
        )

    def item(self, index) -> RunItem:
        units, run = self.shape.units, self.run
        begin = self.cta * run
        end = cutlass.min(begin + run, (self.blocks * self.token_tiles - self.shape.whole) * units)
        pieces = self.count - self.shape.whole // self.num_ctas
        cut = index < pieces
        number = cutlass.max((end - 1) // units - index, 0)
        start = number * units  # of the tile
        first_cta, last_cta = start // run, (start + units - 1) // run
        whole = self.cta + (index - pieces) * self.num_ctas
        block, token_tile = self.place_of(cutlass.select_(cut, self.shape.whole + number, whole))
        return RunItem(
            block=block,
            token_tile=token_tile,
            begin=cutlass.select_(cut, cutlass.max(begin - start, 0), Int32(0)),
            end=cutlass.select_(cut, cutlass.min(end - start, units), units),
            split=cutlass.select_(cut, self.cta - first_cta, Int32(0)),
            splits=cutlass.select_(cut, last_cta - first_cta + 1, Int32(1)),
            number=number,
            first_cta=first_cta,
        )


def parts_with(config: WgmmaConfig, rows):
    """Of the parts of a tile, how many have some of its ``rows``, at least 1; there may be more than the tile takes."""
    if config.row_parts == 1:
        return Int32(1)
    bits = config.part_tokens.bit_length() - 1
    return cutlass.min((rows + (config.part_tokens - 1)) >> bits, config.row_parts)
