"""The device code that cuts ranges of tiles into units, run in plain Python, against `cut_rows`."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.attention.assignment import Assigner, Range, Requests
from simulator import PlainThread, running
from tests.attention.cut_rows import Unit, units_of_ctas

TILE_TOKENS = 64
NOWHERE: Any = None  # the place of a CTA's heads, which ranges do not depend on


class KnownLengths(Assigner):
    """An assigner whose lengths are Python's, instead of in the GPU's memory."""

    def __init__(self, lengths: list[int]):
        super().__init__(TILE_TOKENS)
        self.lengths = lengths

    def fetch_length(self, requests: Any, row: Any) -> int:
        return self.lengths[row]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(0, 40000)), min_size=2, max_size=60),
    st.one_of(st.none(), st.sampled_from([1, 64, 100, 1000])),
    st.integers(1, 150),
)
def test_ranges_are_cut_into_the_units_that_plain_python_says(lengths: list[int], seen: int | None, ranges: int):
    with running(PlainThread()):
        assigner = KnownLengths(lengths)
        requests: Any = Requests(0, len(lengths), 40000, seen, 1, ranges)  # type: ignore[arg-type]
        first: list[Any] = [assigner.first_tile(requests, length) for length in lengths]
        tiles = [assigner.tiles_of(requests, length) for length in lengths]
        ctas = max(len(lengths), ranges)
        wanted = units_of_ctas(tiles, 1, ctas, ranges)
        size = -(-sum(tiles) // ranges)
        if max(map(len, wanted)) > 1 or any(unit.num_parts > 1 for units in wanted for unit in units):
            for index in range(ctas):
                assert _units_on_device(assigner, requests, tiles, first, size, index) == wanted[index]


def _units_on_device(
    assigner: KnownLengths, requests: Any, tiles: list[int], first: list[int], size: int, index: int
) -> list[Unit]:
    """Returns the units that `DecodeKernel.process_range` finds for range ``index``."""
    row, start = _row_of_tile(tiles, min((index + 1) * size, sum(tiles)) - 1)
    span: Any = Range(size, start - index * size)  # type: ignore[arg-type]
    work: Any = assigner.range_work(requests, NOWHERE, index, row, assigner.lengths[row], span)
    units, going = [], work.part < work.num_parts
    while going:
        begin = work.begin // TILE_TOKENS - first[work.request]
        count = work.num_tiles() or 1  # a request without tokens has a tile of none
        own = range(begin, begin + count)
        units.append(Unit(work.request, work.part, work.num_parts, work.first_unit + work.part, own))
        going = span.has_more()
        if going:
            work, span = assigner.row_before(requests, work, span)
    return units


def _row_of_tile(tiles: list[int], tile: int) -> tuple[int, int]:
    """Returns (the row that has a tile, the number of the row's first tile)."""
    start = 0
    for row, count in enumerate(tiles):
        if tile < start + count:
            return row, start
        start += count
    raise AssertionError(f"there are {start} tiles, not {tile + 1}")
