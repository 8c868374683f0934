"""What work tiles are found by, for `simulator.PlainThread`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cute_kernels.gemm.wgmma import tiles
from cute_kernels.gemm.wgmma.launch import TileSchedule


def grid_of(schedule: TileSchedule) -> tiles.TileGrid:
    return tiles.TileGrid.of(schedule.blocks, schedule.m_tiles, schedule.whole, schedule.splits)


def shape_of(schedule: TileSchedule, **more: Any) -> Any:
    """What of a `tiles.TileSizes` items are found by."""
    names = ("whole", "splits", "split_k_blocks", "k_blocks", "num_tiles")
    grid = None if schedule.config.one_m_tile else grid_of(schedule)
    sizes = {"grid": grid, **{name: getattr(schedule, name) for name in names}, **more}
    return SimpleNamespace(**sizes, counted=sizes["grid"])
