"""How pages' numbers come through shared memory: lane by lane, against copies and barriers that keep count."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np
import pytest

from cute_kernels.kv_cache import page
from simulator import Int32, Int64, Meanings, stand_in

TABLE = 0x1000  # where the block table's memory begins


class Warp:
    """Shared memory, barriers and bulk copies, of a warp whose lanes run one after the other."""

    def __init__(self, table: np.ndarray):
        self.table, self.shared = table.view(np.uint8), np.zeros(1 << 12, np.uint8)
        self.lane = 0
        self.arrivals: dict[int, int] = {}  # that a barrier still waits for
        self.bytes: dict[int, int] = {}  # that it waits for, less what has come

    def meanings(self) -> Meanings:
        """What `simulator.running` puts in place."""
        arch = {
            "lane_idx": lambda: Int32(self.lane),
            "sync_warp": lambda: None,
            "mbarrier_init_fence": lambda: None,
            "mbarrier_init": self.init,
            "mbarrier_arrive": self.arrive,
            "mbarrier_arrive_and_expect_tx": lambda barrier, count: (self.arrive(barrier), self.expect(barrier, count)),
            "mbarrier_wait": self.wait,
        }
        return Meanings(self, arch, scalars={"Int32": Int32, "Int64": Int64, "const_expr": bool})

    def init(self, barrier: Any, count: int) -> None:
        assert index(barrier) not in self.arrivals, "initialised twice"
        self.arrivals[index(barrier)], self.bytes[index(barrier)] = count, 0

    def arrive(self, barrier: Any) -> None:
        self.arrivals[index(barrier)] -= 1

    def expect(self, barrier: Any, count: int) -> None:
        self.bytes[index(barrier)] += count

    def wait(self, barrier: Any, phase: int) -> None:
        assert (self.arrivals[index(barrier)], self.bytes[index(barrier)], phase) == (0, 0, 0), "would never end"

    def bulk_copy_to_shared(self, destination: Any, source: Any, num_bytes: Any, barrier: Any) -> None:
        to, at, count = (index(x) for x in (destination, source, num_bytes))
        assert to % 16 == at % 16 == count % 16 == 0, "bulk copies are of 16 bytes, aligned to as many"
        self.shared[to : to + count] = self.table[at - TABLE : at - TABLE + count]
        self.bytes[index(barrier)] -= count

    def store_shared(self, address: Any, offset: int, values: list[Any]) -> None:
        self.shared[index(address) + offset :][:4] = np.asarray(values[0])[:1].astype(np.int32).view(np.uint8)

    def load_shared(self, address: Any, offset: int) -> Any:
        return Int32(int(self.shared[index(address) + offset :][:4].view(np.int32)[0]))


class Barrier(int):
    """A barrier's address, as the DSL's pointer to it."""

    def toint(self) -> int:
        return int(self)


def run(run_on, lanes: int, entries: list[int] | None) -> list[int]:
    """The page that each lane of a warp gets; entries: the word of the table that each team asks for, None if known."""
    table = np.arange(100, 164, dtype=np.int32)
    warp = Warp(table)
    run_on(warp)
    fetch = page.PageFetch(lanes, num_warps=2)
    slots = [page.PageSlot(stand_in(Barrier(0x800)), Int32(0x100 + 16 * (lane // lanes))) for lane in range(32)]
    steps: list[Any] = [lambda slot, lane, word: fetch.open(slot, True, Int32(lane))]
    if entries is None:
        steps.append(lambda slot, lane, word: fetch.give(slot, Int32(7 + lane // lanes)))
    else:
        steps.append(lambda slot, lane, word: fetch.ask(slot, Int64(TABLE + 4 * entries[lane // lanes])))
    steps.append(lambda slot, lane, word: index(fetch.wait(slot, word)))
    words: list[Any] = [None] * 32
    for step in steps:  # a step of all lanes before the next one: what is between them waits for the warp
        for lane in range(32):
            warp.lane = lane
            words[lane] = step(slots[lane], lane, words[lane])
    return words


@pytest.mark.parametrize("lanes", [8, 16, 32])
def test_each_team_gets_its_page_wherever_it_stands_in_16_bytes(lanes, run_on):
    teams = 32 // lanes
    for first in range(4):
        entries = [first + 5 * team for team in range(teams)]
        assert run(run_on, lanes, entries) == [100 + entries[lane // lanes] for lane in range(32)]


@pytest.mark.parametrize("lanes", [8, 16, 32])
def test_pages_that_are_known_come_the_same_way(lanes, run_on):
    assert run(run_on, lanes, None) == [7 + lane // lanes for lane in range(32)]
