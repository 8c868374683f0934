"""The device code that cuts ranges of tiles into units, run in plain Python, against `cut_rows`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest

from cute_kernels.attention.assignment import Assigner, Range, Requests
from cute_kernels.attention.decode_schedule import ALIKE
from cute_kernels.device.cuda import WARP_THREADS
from simulator import PlainThread, running
from tests.attention.cut_rows import Unit, units_of_ctas

TILE_TOKENS, MOST_TOKENS = 64, 40000
NOWHERE: Any = None  # the place of a CTA's heads, which ranges do not depend on


class Lanes(PlainThread):
    """32 threads that stand for the lanes of a warp."""

    def __init__(self) -> None:
        super().__init__(arch={"shuffle_sync_up": self.shuffle_up, "shuffle_sync": lambda x, lane: self._all(x)[lane]})
        self.met = threading.Barrier(WARP_THREADS)
        self.values: list[int] = [0] * WARP_THREADS
        self.own = threading.local()

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Returns what ``function`` of each lane returns."""

        def of_lane(lane: int) -> Any:
            self.own.lane = lane
            try:
                return function(lane)
            except BaseException:
                self.met.abort()  # the others wait
                raise

        with ThreadPoolExecutor(WARP_THREADS) as threads:
            return list(threads.map(of_lane, range(WARP_THREADS)))

    def _all(self, value: int) -> list[int]:
        self.values[self.own.lane] = value
        self.met.wait()
        values = list(self.values)
        self.met.wait()
        return values

    def shuffle_up(self, value: int, distance: int) -> int:
        lane, values = self.own.lane, self._all(value)
        return values[lane - distance] if lane >= distance else values[lane]

    def warp_sum(self, value: int) -> int:
        return sum(self._all(value))

    def warp_max(self, value: int) -> int:
        return max(self._all(value))


class KnownLengths(Assigner):
    """An assigner whose lengths are Python's, instead of in the GPU's memory."""

    def __init__(self, lengths: list[int]):
        super().__init__(TILE_TOKENS)
        self.lengths = lengths

    def fetch_length(self, requests: Any, row: Any) -> int:
        return self.lengths[row]


@pytest.mark.parametrize("batch", [2, 31, 33, 64, 100, 300])
@pytest.mark.parametrize("seed", range(4))
def test_ranges_are_cut_into_the_units_that_plain_python_says(batch: int, seed: int):
    """Of CTAs before and after the last range; lengths 0, whole tiles and others; windows."""
    random = Random(100 * batch + seed)
    lengths = [random.choice([0, 1, 64, 65, random.randint(0, MOST_TOKENS)]) for _ in range(batch)]
    ranges, seen = random.choice([1, 2, 5, 33, 132, 264]), random.choice([None, 1, 100, 1000])
    lanes = Lanes()
    with running(lanes):
        assigner = KnownLengths(lengths)
        requests: Any = Requests(0, batch, MOST_TOKENS, seen, 1, ranges)  # type: ignore[arg-type]
        tiles: list[Any] = [assigner.tiles_of(requests, length) for length in lengths]
        ctas = max(batch, ranges) + 3
        wanted = units_of_ctas(tiles, 1, ctas, ranges)
        alike = max(tiles) * batch * ALIKE[0] <= sum(tiles) * ALIKE[1]
        for index in {0, ranges - 1, ctas - 1, *random.sample(range(ctas), 4)}:
            units = wanted[index] if index < ranges else []
            found = lanes.run(partial(_units_on_device, assigner, requests, index))
            assert found == [None if alike else units] * WARP_THREADS


def _units_on_device(assigner: KnownLengths, requests: Any, index: int, lane: Any) -> list[Unit] | None:
    """Returns the units that `DecodeKernel.process_range` finds for range ``index``; None where lengths are alike."""
    size: Any = assigner.tiles_per_range(requests, assigner.fetch_first_length(requests, lane), lane)
    if size == 0:
        return None
    row, start = assigner.find_row(requests, (index + 1) * size - 1, lane)
    span = Range(size, start - index * size)
    work: Any = assigner.range_work(requests, NOWHERE, index, row, assigner.length_of(requests, row), span)
    units, going = [], work.part < work.num_parts
    while going:
        begin = work.begin // TILE_TOKENS - assigner.first_tile(requests, work.length)
        own = range(begin, begin + (work.num_tiles() or 1))  # a request without tokens has a tile of none
        units.append(Unit(work.request, work.part, work.num_parts, work.first_unit + work.part, own))
        going = span.has_more()
        if going:
            work, span = assigner.row_before(requests, work, span)
    return units
