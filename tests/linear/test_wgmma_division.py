"""Divisions without dividing are exact, and tiles lie where divisions would put them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.device.division import Divisor
from cute_kernels.gemm.wgmma.config import M_TILE_BAND
from cute_kernels.gemm.wgmma.tiles import TileGrid
from simulator import PlainThread
from tests.each import each

LARGEST = 2**31 - 1


@pytest.fixture(autouse=True)
def plain_integers(run_on):
    run_on(PlainThread())


def test_quotients_are_exact():
    """At multiples and just below them, where a multiplier that is off would be seen first."""
    near_powers = {2**power + offset for power in range(31) for offset in (-1, 0, 1)} | {LARGEST}
    for value in sorted({*range(1, 300), *near_powers} - {0}):
        divisor = Divisor.of(value)
        assert 0 <= divisor.shift < 32
        quotients = {
            0,
            1,
            2,
            LARGEST // value - 1,
            LARGEST // value,
            *range(0, LARGEST // value, LARGEST // value // 50 + 1),
        }
        for quotient in quotients:
            for number in (quotient * value - 1, quotient * value, quotient * value + value - 1, LARGEST):
                if 0 <= number <= LARGEST:
                    assert divisor.divide_int(number) == divmod(number, value), (number, value)


def test_quotients_of_many_numbers_are_exact():
    generator = np.random.default_rng(0)
    for value in generator.integers(1, 2 ** generator.integers(1, 31, 300)):
        divisor = Divisor.of(int(value))
        for number in generator.integers(0, LARGEST, 30):
            assert divisor.divide_int(int(number)) == divmod(int(number), int(value))


@each("m_tiles", [1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 163, 65536])
@each("blocks", [1, 2, 5, 32, 224, 448, 16384])
def test_tiles_are_counted_in_bands_tokens_first(blocks, m_tiles):
    grid = TileGrid.of(blocks, m_tiles, 0, 1)
    assert grid.num_work_tiles == blocks * m_tiles
    step = max(1, grid.num_work_tiles // 3000)
    tiles = {*range(0, grid.num_work_tiles, step), *range(max(0, grid.num_work_tiles - 40), grid.num_work_tiles)}
    for tile in tiles:
        band, rest = divmod(tile, blocks * M_TILE_BAND)
        width = min(M_TILE_BAND, m_tiles - band * M_TILE_BAND)
        assert grid.place(tile) == (rest // width, band * M_TILE_BAND + rest % width)
