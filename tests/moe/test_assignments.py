"""Which expert each entry is of, among assignments as a router leaves them, lane by lane on a GPU of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.experts.ranges import assignments
from cute_kernels.gemm.experts.ranges.assignments import AssignmentFinder
from cute_kernels.gemm.experts.ranges.config import LANE_ASSIGNMENTS, MOST_ASSIGNMENTS
from cute_kernels.gemm.experts.ranges.schedule import row_factor
from cute_kernels.gemm.experts.ranges.work import AssignedSizes
from simulator import stand_in
from tests.moe.machine import Machine

ENTRY_ROWS = (4, 8)  # of an entry; four where each row has two columns of an MMA
COUNTS = (1, 2, 7, 16, 31, 32, 33, 40, 63, 64)
UNKNOWN = {torch.int32: (-1, -(2**31), 2**31 - 1), torch.int64: (-1, 2**32, 2**33 + 1, -(2**63), 2**63 - 1)}


class Found(NamedTuple):
    """An entry: its expert and the assignments that are its rows."""

    expert: int
    places: tuple[int, ...]


def find(ids: torch.Tensor, num_experts: int, run_on, lane_assignments: int, rows: int) -> list[Found]:
    """All entries that there are, in their order; all lanes know them.

    Whoever reads behind the last id finds an expert.
    """
    machine = Machine()
    run_on(machine)
    address = machine.put(torch.cat([ids, torch.zeros(MOST_ASSIGNMENTS, dtype=ids.dtype)]))
    words = ids.element_size() // 4
    found: list[list[Found]] = [[] for _ in range(32)]

    def work() -> None:
        lane = machine.lane
        experts = [
            assignments.load_expert(address, i * WARP_THREADS + lane, len(ids), words, num_experts)
            for i in range(lane_assignments)
        ]
        subject = AssignmentFinder.of(experts, num_experts, lane, rows)
        for number in range(subject.total):
            entry = subject.find(number)
            places = [int(entry.place(row)) for row in range(entry.rows)]
            found[lane].append(Found(int(entry.expert), tuple(places)))

    machine.run(work, [(0, 0, 0)], 32)
    assert all(own == found[0] for own in found)
    return found[0]


def entries_of(ids: torch.Tensor, num_experts: int, rows: int) -> list[Found]:
    """In the order of their first assignments: plain Python."""
    own: dict[int, list[int]] = {}
    for place, expert in enumerate(ids.tolist()):
        if 0 <= expert < num_experts:
            own.setdefault(expert, []).append(place)
    cut = [
        Found(expert, tuple(places[i : i + rows]))
        for expert, places in own.items()
        for i in range(0, len(places), rows)
    ]
    return sorted(cut, key=lambda one: one.places[0])


def lanes_for(count: int) -> list[int]:
    """How many assignments a lane may have where there are so many."""
    return [number for number in LANE_ASSIGNMENTS if count <= number * WARP_THREADS]


def check(ids: torch.Tensor, num_experts: int, run_on) -> list[Found]:
    """With as many assignments a lane as there may be, all the same. Returns the entries of the most rows."""
    found: list[Found] = []
    for rows in ENTRY_ROWS:
        found = entries_of(ids, num_experts, rows)
        for lane_assignments in lanes_for(len(ids)):
            assert find(ids, num_experts, run_on, lane_assignments, rows) == found
        known = [place for place, expert in enumerate(ids.tolist()) if 0 <= expert < num_experts]
        assert sorted(place for entry in found for place in entry.places) == known
        for expert, places in found:
            assert 1 <= len(places) <= rows and {int(ids[place]) for place in places} == {expert}
    return found


# Ids of both dtypes are loaded as experts first, and sorted alike.
@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [*((experts, torch.int32) for experts in (4, 8, 60, 128, 512)), (4, torch.int64), (512, torch.int64)],
)
def test_every_assignment_is_in_one_entry_of_its_expert(num_experts, dtype, run_on):
    """Among all experts, and among few of them; with ids that are none of an expert, and without."""
    generator = torch.Generator().manual_seed(num_experts)
    strange = torch.tensor([*UNKNOWN[dtype], num_experts, num_experts + 1], dtype=dtype)
    for count in COUNTS:
        for among, share in ((num_experts, 0.0), (min(num_experts, 3), 0.3)):
            ids = torch.randint(0, among, (count,), generator=generator).to(dtype)
            unknown = torch.rand(count, generator=generator) < share
            ids[unknown] = strange[torch.randint(0, len(strange), (count,), generator=generator)][unknown]
            check(ids, num_experts, run_on)


CASES: dict[str, tuple[Callable[[], list[int]], int]] = {
    "one assignment": (lambda: [5], 1),
    "all at one expert": (lambda: [6] * 32, 4),
    "one more than an entry": (lambda: [7] * 9, 2),
    "two experts in turn": (lambda: [1, 2] * 16, 4),
    "the first has the last": (lambda: [0, *range(1, 8), *[0] * 8], 9),
    "each another expert": (lambda: [*range(8)], 8),
    "the first and the last expert": (lambda: [0, 7, 7, 0], 2),
    "the first ones unknown": (lambda: [-1] * 20 + [3], 1),
    "the last ones unknown": (lambda: [3] + [8] * 31, 1),
    "all unknown": (lambda: [-1, 8, 9, -5], 0),
    "a full warp unknown": (lambda: [8] * 32, 0),
    "unknown ones between": (lambda: [2, -1] * 16, 2),
    "all of two a lane at one expert": (lambda: [6] * 64, 8),
    "one more than a warp's": (lambda: [*[7] * 32, 3], 5),
    "an entry that begins with the last of the first ones": (lambda: [*[1] * 31, 2, *[2] * 9], 6),
    "an entry of both": (lambda: [*[0] * 28, *[5] * 8], 5),
    "each lane's two at two experts": (lambda: [*[3] * 32, *[4] * 32], 8),
    "the first ones of both unknown": (lambda: [*[-1] * 32, *[9] * 30, 0, 1], 2),
}


@pytest.mark.parametrize("dtype", UNKNOWN, ids=str)
@pytest.mark.parametrize("ids, entries", CASES.values(), ids=list(CASES))
def test_entries_are_in_the_order_of_their_first_assignments(ids, entries, dtype, run_on):
    found = check(torch.tensor(ids(), dtype=dtype), 8, run_on)
    assert len(found) == entries
    assert [entry.places[0] for entry in found] == sorted(entry.places[0] for entry in found)


@pytest.mark.parametrize("word", [2**32, 3 * 2**32, -(2**32), 2**63 - 2**32])
def test_an_id_whose_low_word_alone_is_an_expert_is_none(word, run_on):
    ids = torch.tensor([0, word, 1, word + 1, word + 7, 7])
    for lane_assignments in LANE_ASSIGNMENTS:
        entries = [Found(0, (0,)), Found(1, (2,)), Found(7, (5,))]
        assert find(ids, 8, run_on, lane_assignments, ENTRY_ROWS[-1]) == entries


def test_bits_are_counted_from_the_lowest_on(run_on):
    run_on(Machine())
    for bits in (1, 1 << 31, 0xFFFFFFFF, 0x80000001, 0x00F0A000, 0xAAAAAAAA):
        places = [place for place in range(32) if bits >> place & 1]
        assert [assignments.nth_bit(bits, number) for number in range(len(places))] == places


def shape_of(topk: int) -> AssignedSizes:
    """Of rows of x with so many assignments each; all else is 0."""
    fields = dict.fromkeys(AssignedSizes.__dataclass_fields__, 0)
    return stand_in(AssignedSizes)(**fields | {"row_factor": row_factor(topk)})


@pytest.mark.parametrize("topk", range(1, MOST_ASSIGNMENTS + 1))
def test_neighbouring_assignments_have_a_row_of_x_together(topk: int):
    rows = [shape_of(topk).row(place) for place in range(MOST_ASSIGNMENTS)]
    assert rows == [place // topk for place in range(MOST_ASSIGNMENTS)]


@pytest.mark.parametrize("topk", range(1, 9))
def test_an_entrys_rows_of_x_are_the_tokens_of_its_assignments(topk: int, run_on):
    ids = torch.randint(-1, 6, (MOST_ASSIGNMENTS // topk, topk), generator=torch.Generator().manual_seed(topk))
    entries, shape = check(ids.flatten(), 6, run_on), shape_of(topk)
    assert all(int(ids[shape.row(place), place % topk]) == expert for expert, places in entries for place in places)
