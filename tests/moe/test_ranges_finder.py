"""Which expert each entry is of, as a warp of the kernel of runs finds it out, lane by lane on a GPU of threads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.gemm.experts.ranges import finder
from cute_kernels.gemm.experts.ranges.config import LANE_EXPERTS, ROUND_EXPERTS
from cute_kernels.gemm.experts.ranges.finder import ExpertFinder
from tests.moe.machine import Machine

CASES = {
    "each a row": (1,) * 8,
    "some none": (3, 0, 1, 8, 0, 0, 9, 0),
    "fewer experts than lanes": (5, 17, 0, 2),
    "one lane's experts, all at one": (0, 4, 0, 0),
    "one expert, many entries": (300, 0, 0, 0),
    "no rows": (0,) * 40,
    "all at the last expert": (*(0,) * 127, 33),
    "hot experts": tuple(40 * (i % 50 == 7) + (i % 3 == 0) for i in range(128)),
    "the last expert of each lane": tuple(3 * (i % LANE_EXPERTS == LANE_EXPERTS - 1) for i in range(ROUND_EXPERTS)),
    "more places than 16 bits": (70000, 0, 1, 65536, 0, 0, 0, 9),
    "every lane's every expert": tuple(5 * i % 19 for i in range(ROUND_EXPERTS)),
    "two rounds": tuple(7 * i % 3 for i in range(2 * ROUND_EXPERTS)),
    "all in the second round": (*(0,) * ROUND_EXPERTS, 20, 0, 1, 0),
    "a lane's end in each round": (9, 0, 0, 8, *(0,) * ROUND_EXPERTS, 0, 0, 0, 17),
    "the last of four rounds": (1, *(0,) * (4 * ROUND_EXPERTS - 2), 100),
    "four rounds, of which the last is short": tuple(int(i % 64 == 63) * 9 for i in range(400)),
}


MOST_SHOWN = 200  # entries, of which threads are asked


def shown(total: int) -> list[int]:
    """The numbers of so many entries: all, or the first and the last ones."""
    half = MOST_SHOWN // 2
    return [*range(total)] if total <= MOST_SHOWN else [*range(half), *range(total - half, total)]


@pytest.mark.parametrize("entry_rows", [4, 8])
@pytest.mark.parametrize("counts", CASES.values(), ids=list(CASES))
def test_every_entry_is_found(counts: tuple[int, ...], entry_rows: int, run_on):
    """In all rounds that there may be, if there is more than one that is enough."""
    wanted, first = [], 0
    for expert, count in enumerate(counts):
        wanted += [(expert, first + i, min(entry_rows, count - i)) for i in range(0, count, entry_rows)]
        first += count
    for rounds in (1, 2, 4):
        if len(counts) <= rounds * ROUND_EXPERTS:
            assert entries_of(counts, entry_rows, rounds, run_on) == [wanted[i] for i in shown(len(wanted))]


def entries_of(counts: tuple[int, ...], entry_rows: int, rounds: int, run_on) -> list[tuple[int, int, int]]:
    """(expert, first place, rows) of all entries that there are, in their order; all lanes know them.

    Whoever reads behind the last offset finds places that no expert has.
    """
    machine = Machine()
    run_on(machine)
    behind = torch.full((8 * ROUND_EXPERTS,), 1 << 30, dtype=torch.int32)
    offsets = machine.put(torch.cat([torch.tensor([0, *counts]).cumsum(0).int(), behind]))
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(32)]

    def work() -> None:
        lane = machine.lane
        subject = ExpertFinder.of(finder.load_places(offsets, len(counts), rounds, lane), lane, entry_rows)
        for number in shown(int(subject.total)):
            entry = subject.find(number)
            first, rows = int(entry.first_place), int(entry.rows)
            assert [entry.place(row) for row in range(rows)] == [*range(first, first + rows)]
            found[lane].append((int(entry.expert), first, rows))

    machine.run(work, [(0, 0, 0)], 32)
    assert all(own == found[0] for own in found)
    return found[0]


COUNTED = {
    "zeros": [0] * 32,
    "ones": [1] * 32,
    "a bit each": [1 << (lane % 12) for lane in range(32)],
    "the first lane's": [4095, *[0] * 31],
    "the last lane's": [*[0] * 31, 4096],
    "all bits": [8191] * 32,
    "thousands": [(lane * 2654435761 >> 7) % 5000 for lane in range(32)],
    "many bits": [(1 << 25) - 1 - lane for lane in range(32)],
}


@pytest.mark.parametrize("counts", COUNTED.values(), ids=list(COUNTED))
def test_numbers_are_added_up_over_lanes(counts: list[int], run_on):
    machine = Machine()
    run_on(machine)
    found: dict[int, tuple[int, int]] = {}

    def work() -> None:
        found[machine.lane] = finder.sums_before(counts[machine.lane], machine.lane)

    machine.run(work, [(0, 0, 0)], 32)
    assert found == {lane: (sum(counts[:lane]), sum(counts)) for lane in range(32)}
