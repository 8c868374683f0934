"""Items as the device finds them, in Python's integers."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from cute_kernels.device import division
from cute_kernels.linear.wgmma import tiles
from cute_kernels.linear.wgmma.schedule import TileSchedule

CHOOSE = SimpleNamespace(min=min, max=max, select_=lambda condition, one, other: one if condition else other)
WORD = (1 << 32) - 1


def multiply_high(a: int, b: int) -> int:
    """The upper half of a product of two words."""
    assert 0 <= a <= WORD and 0 <= b <= WORD
    return a * b >> 32


def install(monkeypatch, *modules: ModuleType) -> None:
    """Makes modules, and those that items are found by, calculate with Python's integers."""
    for module in (tiles, division, *modules):
        monkeypatch.setattr(module, "cutlass", CHOOSE)
        for name in ("Int32", "Int64", "Uint32"):
            monkeypatch.setattr(module, name, int, raising=False)
    monkeypatch.setattr(division, "numbers", SimpleNamespace(multiply_high_u32=multiply_high))


def grid_of(schedule: TileSchedule) -> tiles.TileGrid:
    return tiles.TileGrid.of(schedule.blocks, schedule.m_tiles, schedule.whole, schedule.splits)


def shape_of(schedule: TileSchedule, **more: Any) -> Any:
    """What of a `tiles.Shape` items are found by."""
    names = ("whole", "splits", "split_k_blocks", "k_blocks", "num_tiles")
    grid = None if schedule.config.one_m_tile else grid_of(schedule)
    sizes = {"grid": grid, **{name: getattr(schedule, name) for name in names}, **more}
    return SimpleNamespace(**sizes, counted=sizes["grid"])
