"""Which tiles of the output a CTA computes, as the device finds them."""

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
    activation: Any
    out_kind: Any


@dataclass(frozen=True)
class Tile:
    """One tile of the output; run-time integers."""

    block: Any  # of output features, this CTA's
    token_tile: Any


@dataclass(frozen=True)
class Tiles:
    """The tiles of one CTA: every ``stride``-th; run-time integers.

    CTAs of a cluster take neighbouring blocks of the same tokens, so a cluster counts as one with a wider block. Tiles
    are counted in bands of ``band`` token tiles, and within a band tokens first: what runs at the same time then
    reads few activations and each weight once per band.
    """

    first: Any
    stride: Any
    count: Any  # over all CTAs
    blocks: Any  # of a cluster's width
    token_tiles: Any
    band: Any
    cluster: int
    rank: Any  # of the CTA in its cluster

    def tile(self, index) -> Tile:
        per_band = self.band * self.blocks
        band = index // per_band
        rest = index - band * per_band
        width = cutlass.min(self.band, self.token_tiles - band * self.band)
        block = rest // width
        return Tile(block * self.cluster + self.rank, Int32(band * self.band + rest - block * width))
