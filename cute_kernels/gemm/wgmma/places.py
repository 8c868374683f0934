"""Where a work tile's rows of x, weights, biases and results are: one interface for dense and grouped products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Int32, const_expr

from cute_kernels.gemm.wgmma.config import WgmmaConfig
from layouts.weights.hopper import TILE_N


@dataclass(frozen=True)
class Corner:
    """Where a warpgroup's tile of 64 features begins; run-time integers."""

    row: Int32  # of W
    token: Int32
    end: Int32  # after the last row of x
    bias: Int32  # of its first row among the biases, elements


class Places(Protocol):
    """A map from a work tile's numbers to rows, features and k blocks. The numbers are the fields of `.tiles.WorkTile`,
    or of the work tiles of grouped products."""

    def rows_of(self, shape, work_tile) -> tuple[Any, Any]:
        """Returns (first, end): a work tile has rows of x from ``first`` on, and none from ``end`` on."""
        ...

    def weight_tile(self, shape, work_tile, index) -> Any:
        """Returns a tile's number among the packed weight's tiles. index: the tile's number in the work tile's block of
        output features."""
        ...

    def bias_place(self, shape, work_tile, row) -> Any:
        """Returns the index of the bias of output feature ``row``."""
        ...


class DensePlaces:
    """The map of `Places` for the work tiles of a dense product."""

    def __init__(self, config: WgmmaConfig):
        self.config = config

    def rows_of(self, shape, work_tile) -> tuple[Any, Any]:
        first = work_tile.m_tile * self.config.tile_m
        if const_expr(self.config.reduction.cuts_rows):
            part = self.config.part_m
            first = first + work_tile.split * part
            return first, cutlass.min(shape.m, cutlass.select_(work_tile.splits > 1, first + part, shape.m))
        return first, shape.m

    def weight_tile(self, shape, work_tile, index) -> Any:
        return tile_of_block(self.config, shape, work_tile, index)

    def bias_place(self, shape, work_tile, row) -> Any:
        return row


def tile_of_block(config: WgmmaConfig, shape, work_tile, index) -> Any:
    """Returns a tile's number among the weight's tiles. index: the tile's number in the work tile's block; an index
    beyond the last tile stands for the last tile."""
    # Of the last block, tiles after the last one are that one again.
    return cutlass.min(work_tile.block * config.block_tiles + index, shape.num_tiles - 1)


def parts_of(config: WgmmaConfig, places: Places, shape, work_tile) -> Any:
    """Returns how many row parts of a work tile have rows."""
    first, end = places.rows_of(shape, work_tile)
    return parts_with(config, end - first)


def parts_with(config: WgmmaConfig, rows) -> Any:
    """Returns how many row parts of a tile have rows, at most `row_parts`; at least 1 where tiles are cut along rows.
    rows: rows of x from the tile's first row on, which may be more than the tile has."""
    if config.row_parts == 1:
        return Int32(1)
    bits = config.part_m.bit_length() - 1
    present = cutlass.min((rows + (config.part_m - 1)) >> bits, config.row_parts)
    return cutlass.max(present, 1) if config.reduction.cuts_rows else present


def corner_of(config: WgmmaConfig, places: Places, shape, work_tile, index, token=0) -> Corner:
    """Returns where a tile's results begin in the output. index: the tile's number in the work tile's block. token: the
    first row of x to store, counted from the work tile's first row."""
    row = (work_tile.block * config.block_tiles + index) * TILE_N
    first, end = places.rows_of(shape, work_tile)
    return Corner(row, first + token, end, places.bias_place(shape, work_tile, row))
