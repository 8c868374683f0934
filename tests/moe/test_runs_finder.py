"""Which expert each entry is of, as a warp of the kernel of runs finds it out, lane by lane on a GPU of threads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.moe.runs import finder
from cute_kernels.moe.runs.config import ROUND_EXPERTS
from cute_kernels.moe.runs.finder import ExpertFinder, load_places
from tests.moe.machine import Machine

CASES = {
    "each a row": (1,) * 8,
    "some none": (3, 0, 1, 8, 0, 0, 9, 0),
    "fewer experts than lanes": (5, 17, 0),
    "one expert": (4,),
    "one expert, many entries": (300,),
    "no rows": (0,) * 40,
    "all at the last expert": (*(0,) * 127, 33),
    "hot experts": tuple(40 * (i % 50 == 7) + (i % 3 == 0) for i in range(128)),
    "every lane's every expert": tuple(5 * i % 19 for i in range(ROUND_EXPERTS)),
    "two rounds": tuple(7 * i % 3 for i in range(2 * ROUND_EXPERTS)),
    "all in the second round": (*(0,) * ROUND_EXPERTS, 20, 0, 1),
    "the last of four rounds": (1, *(0,) * (4 * ROUND_EXPERTS - 2), 100),
    "four rounds, of which the last is short": tuple(int(i % 64 == 63) * 9 for i in range(400)),
}


@pytest.mark.parametrize("entry_rows", [8, 16])
@pytest.mark.parametrize("counts", CASES.values(), ids=list(CASES))
def test_every_entry_is_found(counts: tuple[int, ...], entry_rows: int, monkeypatch):
    """In all rounds that there may be, if there is more than one that is enough."""
    wanted, first = [], 0
    for expert, count in enumerate(counts):
        wanted += [(expert, first + i, min(entry_rows, count - i)) for i in range(0, count, entry_rows)]
        first += count
    for rounds in (1, 2, 4):
        if len(counts) <= rounds * ROUND_EXPERTS:
            assert entries_of(counts, entry_rows, rounds, monkeypatch) == wanted


def entries_of(counts: tuple[int, ...], entry_rows: int, rounds: int, monkeypatch) -> list[tuple[int, int, int]]:
    """(expert, first row, rows) of all entries that there are, in their order; all lanes know them."""
    machine = Machine()
    machine.install(monkeypatch, finder)
    offsets = machine.put(torch.tensor([0, *counts]).cumsum(0).int())
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(32)]

    def work() -> None:
        lane = machine.lane
        subject = ExpertFinder.of(load_places(offsets, len(counts), rounds, lane), lane, entry_rows)
        for number in range(subject.total):
            entry = subject.find(number)
            found[lane].append((int(entry.expert), int(entry.first_row), int(entry.rows)))

    machine.run(work, [(0, 0, 0)], 32)
    assert all(own == found[0] for own in found)
    return found[0]
