"""How decode attention cuts rows into parts, in plain Python: what the device has to find."""

from __future__ import annotations

from cute_kernels.attention.decode_schedule import ALIKE, CUT_STEPS, FEW_ROWS


def cut_rows(tiles: list[int], parts: int, more_rows: int, shares: int) -> list[tuple[int, int, int]]:
    """The units of a launch in the order of their numbers, as (row, part, number of the row's parts).

    This is what :class:`cute_kernels.attention.assignment.Assigner` computes on the device.

    Args:
        tiles: of each row, at least 1.
        parts: CTAs of a row.
        more_rows: rows of CTAs beyond those of ``tiles``; 0 to cut every row into ``parts``.
        shares: of about equal size that all rows together are cut into where they differ.
    """
    total, most = sum(tiles), max(tiles, default=1)
    if not more_rows or most * len(tiles) * ALIKE[0] <= total * ALIKE[1]:
        counts = [min(count, parts) for count in tiles]
    else:
        each = _part_tiles(tiles, (len(tiles) + more_rows) * parts, shares)
        counts = [-(-count // each) for count in tiles]
    return [(row, part, count) for row, count in enumerate(counts) for part in range(count)]


def _part_tiles(tiles: list[int], ctas: int, shares: int) -> int:
    """Tiles of a part at most where rows differ."""
    total, batch = sum(tiles), len(tiles)
    if batch * FEW_ROWS > shares:
        return -(-total // min(shares, ctas - batch))
    limit = min(shares, ctas)
    least, most = -(-total // shares), -(-total // (limit - batch))
    for _ in range(CUT_STEPS):
        middle = (least + most) // 2
        if sum(-(-count // middle) for count in tiles) <= limit:
            most = middle
        else:
            least = min(middle + 1, most)
    return most
