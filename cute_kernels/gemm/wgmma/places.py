"""`Places`, which says where a work tile's rows of x, weights, biases and results are, for dense and grouped
products."""

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
    """Finds a work tile's rows of x, weights and biases. A work tile is a `.tiles.WorkTile`, or a work tile of a
    grouped product.
    """

    def rows_of(self, shape, work_tile) -> tuple[Any, Any]:
        """Returns (first, end). The rows of x of a work tile begin at ``first``. Rows from ``end`` on are not part of
        the work tile."""
        ...

    def weight_tile(self, shape, work_tile, index) -> Any:
        """Returns the index of a tile of 64 features in the packed weight. index: the tile's index in the work tile's
        block of output features.
        """
        ...

    def bias_place(self, shape, work_tile, row) -> Any:
        """Returns the index of the bias of output feature ``row``."""
        ...


class DensePlaces:
    """The `Places` of a dense product's work tiles."""

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
    """Returns the index of a tile of 64 features in the weight. index: the tile's index in the work tile's block.
    Beyond the weight's last tile, returns the last tile.
    """
    # Of the last block, tiles after the last one are that one again.
    return cutlass.min(work_tile.block * config.block_tiles + index, shape.num_tiles - 1)


def parts_of(config: WgmmaConfig, places: Places, shape, work_tile) -> Any:
    """Returns the number of row parts of a work tile that have rows."""
    first, end = places.rows_of(shape, work_tile)
    return parts_with(config, end - first)


def parts_with(config: WgmmaConfig, rows) -> Any:
    """Returns the number of row parts of a tile that have rows: at most `row_parts`. If tiles are cut along rows, the
    result is at least 1. rows: number of rows of x from the tile's first row to the end of x.
    """
    if config.row_parts == 1:
        return Int32(1)
    bits = config.part_m.bit_length() - 1
    present = cutlass.min((rows + (config.part_m - 1)) >> bits, config.row_parts)
    return cutlass.max(present, 1) if config.reduction.cuts_rows else present


def corner_of(config: WgmmaConfig, places: Places, shape, work_tile, index, token=0) -> Corner:
    """Returns where the results of a tile of 64 features begin in the output. index: the tile's index in the work
    tile's block. token: the first row of x to store, counted from the work tile's first row.
    """
    row = (work_tile.block * config.block_tiles + index) * TILE_N
    first, end = places.rows_of(shape, work_tile)
    return Corner(row, first + token, end, places.bias_place(shape, work_tile, row))
