"""How decode attention cuts rows into units, in plain Python: what the device has to find."""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.attention.decode_schedule import ALIKE


@dataclass(frozen=True)
class Unit:
    """A part of a row, as :class:`cute_kernels.attention.cta.Work` has it.

    tiles: of the row, in the order in which they are taken. place: the number of its partial result, if the row has
    others.
    """

    row: int
    part: int
    num_parts: int
    place: int
    tiles: range


def units_of_ctas(tiles: list[int], parts: int, ctas: int, ranges: int) -> list[list[Unit]]:
    """Returns the units of each CTA in the order in which it processes them.

    This is what :class:`cute_kernels.attention.assignment.Assigner` computes on the device.

    Args:
        tiles: of each row, at least 1.
        parts: CTAs of a row where lengths are alike.
        ctas: of the launch, for a head block.
        ranges: CTAs that share all tiles where rows differ; 0 to cut every row into ``parts``.
    """
    total, most = sum(tiles), max(tiles, default=1)
    if not ranges or most * len(tiles) * ALIKE[0] <= total * ALIKE[1]:
        return [_grid_units(tiles, parts, index) for index in range(ctas)]
    size = -(-total // ranges)
    return [_range_units(tiles, size, index) for index in range(ctas)]


def _grid_units(tiles: list[int], parts: int, index: int) -> list[Unit]:
    row, part = divmod(index, parts)
    if row >= len(tiles) or part >= min(tiles[row], parts):
        return []
    count = min(tiles[row], parts)
    return [Unit(row, part, count, index, range(part, tiles[row], count))]


def _range_units(tiles: list[int], size: int, index: int) -> list[Unit]:
    units, start = [], 0
    for row, count in enumerate(tiles):
        first, last = start // size, (start + count - 1) // size
        own = range(max(index * size - start, 0), min(index * size + size - start, count))
        if own:
            units.append(Unit(row, index - first, last - first + 1, index + row, own))
        start += count
    return units[::-1]
