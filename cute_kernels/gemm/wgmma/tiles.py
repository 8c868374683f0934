"""Tile schedulers on the device, which find the parts of the output that a CTA computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.device.division import Divisor
from cute_kernels.gemm.wgmma.config import M_TILE_BAND, WgmmaConfig


@dataclass(frozen=True)
class TileGrid:
    """The order of a launch's tiles. It is made on the host, with constants that replace divisions.

    Tiles are ordered in bands of `M_TILE_BAND` token tiles; the last band may have fewer. Within a band, the token
    tiles of one block of output features follow one another. So work tiles that run at the same time read few different
    activations, and a launch reads each weight once for each band. The blocks of CTAs that share activations by TMA
    multicast count as one block.
    """

    num_work_tiles: Int32  # tiles and parts of tiles
    splits: Divisor  # parts of a tile that is cut
    band_tiles: Divisor  # of a whole band
    last_band: Int32  # its number
    last_width: Divisor  # token tiles of the last band

    @staticmethod
    def of(blocks, m_tiles, whole, splits) -> TileGrid:
        last_band = (m_tiles - 1) // M_TILE_BAND
        return TileGrid(
            num_work_tiles=whole + (blocks * m_tiles - whole) * splits,
            splits=Divisor.of(splits),
            band_tiles=Divisor.of(M_TILE_BAND * blocks),
            last_band=last_band,
            last_width=Divisor.of(m_tiles - M_TILE_BAND * last_band),
        )

    def place(self, tile) -> tuple[Any, Any]:
        """Returns (block of output features, token tile) of a tile."""
        band, rest = self.band_tiles.divide_int(tile)
        narrow, _ = self.last_width.divide_int(rest)
        is_last = band == self.last_band
        block = cutlass.select_(is_last, narrow, rest >> (M_TILE_BAND.bit_length() - 1))
        width = cutlass.select_(is_last, self.last_width.value, Int32(M_TILE_BAND))
        return block, Int32(band * M_TILE_BAND + rest - block * width)


@dataclass(frozen=True)
class TileSizes:
    """Sizes of a launch; run-time integers."""

    m: Int32
    n: Int32
    k: Int32
    num_tiles: Int32  # tiles of 64 output features
    k_blocks: Int32  # of the padded K
    scale_groups: Int32  # rows of stored scales of a tile: groups of the padded K, and what lies after them
    whole: Int32  # tiles that are computed whole
    splits: Int32  # parts that the K of the tiles after them is cut into
    split_k_blocks: Int32  # of a part; the last may have fewer
    activation: Int32
    out_kind: Int32
    grid: TileGrid | None  # `TileGrid`; None where tiles are otherwise counted: those of one token tile, and of experts
    # Where the scales of rows of x are, if x has some: fp32 [k blocks, x_scale_pitch].
    x_scales: Int64 | None = field(default=None, kw_only=True)
    x_scale_pitch: Int32 | None = field(default=None, kw_only=True)

    @property
    def counted(self) -> TileGrid:
        """Returns the order of tiles, a `TileGrid`, which must not be None."""
        assert self.grid is not None
        return self.grid


@dataclass(frozen=True)
class WorkTile:
    """A tile of the output, or one of the parts into which a tile is cut; run-time integers."""

    block: Int32  # of output features
    m_tile: Int32
    begin: Int32  # k blocks
    end: Int32
    split: Int32  # which part of K, or of the tile's rows,
    splits: Int32  # of how many
    number: Int32  # of the tile among those of all CTAs that are cut


@dataclass(frozen=True)
class TileScheduler:
    """The work tiles of one CTA: every ``stride``-th work tile of the launch; run-time integers.

    Full rounds of all CTAs compute whole tiles. The tiles of a last, incomplete round are cut along K (the hybrid
    schedules of Stream-K, Osama et al. 2023), or along rows of x. The parts of a tile have consecutive indices, so
    neighbouring CTAs compute them at the same time. A CTA that adds up a tile waits only for parts with lower indices.
    So no two CTAs wait for each other.

    With TMA multicast, ``multicast`` CTAs share the activations of a token tile. They compute neighbouring blocks at
    the same time. They count as one CTA, and their blocks count as one block.
    """

    shape: TileSizes
    first: Int32
    stride: Int32
    multicast: int = 1
    rank: Int32 | int = 0  # among those that share
    cuts: bool = True  # whether tiles may be cut
    cuts_rows: bool = False  # into parts of their rows of x, not along K

    @property
    def grid(self) -> TileGrid:
        return self.shape.counted

    @property
    def count(self):
        """The number of work tiles of all CTAs together."""
        return self.grid.num_work_tiles

    def work_tile(self, index) -> WorkTile:
        shape, grid = self.shape, self.grid
        cut, number, split, tile = index >= shape.whole, Int32(0), Int32(0), index
        if self.cuts:
            number, split = grid.splits.divide_int(cutlass.max(index - shape.whole, 0))
            split = cutlass.select_(cut, split, Int32(0))
            tile = cutlass.select_(cut, shape.whole + number, index)
        along_k = self.cuts and not self.cuts_rows
        begin = split * shape.split_k_blocks if along_k else Int32(0)
        block, m_tile = grid.place(tile)
        return WorkTile(
            block=self.own(block),
            m_tile=m_tile,
            begin=begin,
            end=self.end(cut, begin) if along_k else shape.k_blocks,
            split=split,
            splits=cutlass.select_(cut, shape.splits, Int32(1)) if self.cuts else Int32(1),
            number=self.own(number),
        )

    def end(self, cut, begin):
        """Returns the k block at which a work tile ends. If the tile is ``cut``, the work tile is the tile's part that
        begins at k block ``begin``. If not, the result is the end of K.
        """
        k_blocks = self.shape.k_blocks
        return cutlass.select_(cut, cutlass.min(begin + self.shape.split_k_blocks, k_blocks), k_blocks)

    def own(self, number):
        """Returns this CTA's own index. ``number`` counts CTAs that share activations by TMA multicast as one."""
        return number if self.multicast == 1 else number * self.multicast + self.rank


class OneByOne:
    """The base of tile schedulers that count only their own CTA's work tiles: 0, 1, 2 and so on."""

    @property
    def first(self):
        return Int32(0)

    @property
    def stride(self):
        return Int32(1)


@dataclass(frozen=True)
class SequentialScheduler(OneByOne):
    """The work tiles of one CTA, which has every ``num_ctas``-th tile and computes all of the tile's parts of K;
    run-time integers.

    The CTA computes the last part of each tile first: see `.reduction.SequentialReduction`.
    """

    shape: TileSizes
    cta: Int32
    num_ctas: Int32

    @property
    def count(self):
        """The number of parts of K of all of the CTA's tiles."""
        tiles = (self.shape.whole - self.cta + (self.num_ctas - 1)) // self.num_ctas
        return tiles * self.shape.splits

    def work_tile(self, index) -> WorkTile:
        shape = self.shape
        own, split = shape.counted.splits.divide_int(index)
        block, m_tile = shape.counted.place(self.cta + own * self.num_ctas)
        part = cutlass.select_(split == 0, shape.splits, split) - 1
        begin = part * shape.split_k_blocks
        end = cutlass.min(begin + shape.split_k_blocks, shape.k_blocks)
        return WorkTile(block, m_tile, begin, end, split, shape.splits, Int32(0))


@dataclass(frozen=True)
class ClusterTileScheduler:
    """The only work tile of a CTA of a cluster: one part of K of the cluster's tile."""

    shape: TileSizes
    first: Int32  # the CTA's number
    cluster: int

    @property
    def count(self):
        """The end of the loop over work tiles: one more than the index of the CTA's only work tile."""
        return self.first + 1

    @property
    def stride(self):
        return Int32(1)

    def work_tile(self, index) -> WorkTile:
        shape = self.shape
        tile = index // self.cluster
        split = index - tile * self.cluster
        begin = split * shape.split_k_blocks
        end = cutlass.min(begin + shape.split_k_blocks, shape.k_blocks)
        block, m_tile = shape.grid.place(tile) if shape.grid else (Int32(tile), Int32(0))
        return WorkTile(block, m_tile, begin, end, split, Int32(self.cluster), Int32(tile))


def dense_sizes(config: WgmmaConfig, given, whole=None, splits=None) -> tuple[Any, ...]:
    """Returns the fields of a `TileSizes` from a launch's arguments, except the grid. whole, splits: the values of
    these two fields if the launch has no such arguments."""
    m, k = given.x.shape
    k_blocks = given.k_blocks
    whole, splits = given.whole if whole is None else whole, given.splits if splits is None else splits
    scale_groups = k_blocks * config.block_k // config.group_size if config.group_size else Int32(1)
    split_k_blocks = (k_blocks + splits - 1) // splits
    cut = scale_groups + config.format.more_groups, whole, splits, split_k_blocks
    return m, given.n, k, given.num_tiles, k_blocks, *cut, given.activation, given.out_kind


def x_scales_of(given) -> dict[str, Any]:
    """Returns the fields of `TileSizes` for the scales of x's rows, by name. A field is None if the launch has no such
    argument."""
    return {name: getattr(given, name, None) for name in ("x_scales", "x_scale_pitch")}


def dense_grid(config: WgmmaConfig, given) -> TileGrid | None:
    """Returns the order of a product's tiles. Returns None if there is only one token tile: a tile's index is then the
    index of its block.
    """
    if config.one_m_tile:
        return None
    blocks = cute.ceil_div(given.num_tiles, config.block_tiles * config.multicast)
    return TileGrid.of(blocks, cute.ceil_div(given.x.shape[0], config.tile_m), given.whole, given.splits)


class DenseRounds:
    """Distributes a dense product's tiles to CTAs, in rounds of all CTAs. It is the ``rounds`` of a reduction."""

    @staticmethod
    def sizes(config: WgmmaConfig, given) -> TileSizes:
        """Makes the `TileSizes` of a launch from its arguments ``given``. Runs on the host."""
        return TileSizes(*dense_sizes(config, given), grid=dense_grid(config, given), **x_scales_of(given))

    @staticmethod
    def scheduler(config: WgmmaConfig, shape, cta, num_ctas) -> Any:
        """Returns the tile scheduler of a CTA."""
        return dense_scheduler(config, shape, cta, num_ctas)


def dense_scheduler(
    config: WgmmaConfig, shape: TileSizes, cta, num_ctas
) -> TileScheduler | SequentialScheduler | ClusterTileScheduler:
    """Returns the tile scheduler of a CTA of a dense product."""
    rank = 0
    if const_expr(config.reduction.sequential):
        return SequentialScheduler(shape, cta, num_ctas)
    if const_expr(config.cluster > 1):
        return ClusterTileScheduler(shape, cta, config.cluster)
    if const_expr(config.multicast > 1):
        bits = config.multicast.bit_length() - 1
        cta, rank, num_ctas = cta >> bits, cta & (config.multicast - 1), num_ctas >> bits
    cuts = config.reduction.splits_k or config.reduction.cuts_rows
    return TileScheduler(shape, cta, num_ctas, config.multicast, rank, cuts, config.reduction.cuts_rows)
