"""The ring of a producer warp's entries, over all blocks of a CTA's shares: nothing is read before it is there, or
after something else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import work_tiles
from cute_kernels.mla.config import MlaConfig
from cute_kernels.mla.loads import entries
from cute_kernels.mla.policies import Crossover, Decode, WholeTiles
from simulator import Meanings, PlainThread

LANES = 32
CONFIGS = [
    MlaConfig(tiles=WholeTiles(load))
    for prefetch in (0, 2, 3, 4, 5)
    for load in (Decode(prefetch=prefetch), Crossover(prefetch=prefetch), Decode(prefetch=prefetch, warps=8))
]
SHARES = [[(0, 25)], [(3, 28)], [(0, 7), (2, 9), (0, 1)], [(0, 0), (4, 5), (6, 6), (0, 0), (0, 3), (1, 2), (9, 9)]]
"""Blocks [begin, end) of every share."""


class State(list):
    """A tensor in registers."""

    def fill(self, value: int) -> None:
        self[:] = [value] * len(self)


@dataclass(frozen=True)
class WorkTiles:
    """The shares of a CTA, of rows that follow each other; ``left`` counts those that are."""

    shares: list[tuple[int, int]]
    row: int = 2
    start: int = 7
    shape: Any = None
    queries: Any = None

    @property
    def has_stream_k(self) -> bool:
        """Not where one share is all there is: an odd one, that both be tried."""
        return len(self.shares) > 1 or self.shares[0][0] % 2 == 0

    @property
    def left(self) -> int:
        return len(self.shares)

    def work(self, row: int, start: int, left: int) -> SimpleNamespace:
        assert (row, start, left) == (self.row, self.start, self.left), "only the first share begins anywhere"
        return self.next_tile(row, left)

    def next_tile(self, row: int, left: int) -> SimpleNamespace:
        assert left == self.row + len(self.shares) - row
        begin, end = self.shares[row - self.row]
        return SimpleNamespace(row=row, begin=begin, end=end, length=0, main_blocks=0, extra_length=0, left=left - 1)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """(row, block) of all, in order."""
        shares = enumerate(self.shares, self.row)
        return [(row, block) for row, share in shares for block in range(*share)]


@dataclass
class Machine:
    """Shared memory with copies that end when they are waited for and not before; blocks whose tokens were asked for.

    A copy that another lane has asked for in the same step is still under way for a lane that waits only now.
    """

    words: dict[int, Any] = field(default_factory=dict)
    copies: list[tuple[int, int, Any]] = field(default_factory=list)
    step: int = 0
    asked: set[tuple[int, int, int]] = field(default_factory=set)
    queries: list[int] = field(default_factory=list)

    def meanings(self) -> Meanings:
        known = PlainThread({entries.Entries: {"lines": lambda *_: [0]}}).meanings()
        arch = {
            "cp_async_commit_group": lambda: None,
            "cp_async_wait_group": self.wait,
            "sync_warp": lambda: None,
        }
        cute = {"make_rmem_tensor": lambda count, _: State([0] * count)}
        return replace(known, instructions=self, arch=arch, cute=cute)

    def wait(self, _) -> None:
        for step, place, entry in self.copies:
            if step < self.step:
                self.words[place] = entry
        self.copies = [copy for copy in self.copies if copy[0] >= self.step]

    # -- the locator: the entry of a row of a block is (row of the launch, block, row), its mark the first two --------

    def copy_entry(self, place: int, work, source, block: int, row: int) -> None:
        self.words.pop(place, None)  # who reads it now reads anything
        self.copies.append((self.step, place, (work.row, block, row) if block < work.end else None))

    def mark(self, work, block: int) -> Any:
        return work.row, block

    def marked(self, mark: Any) -> Any:
        return mark

    def token(self, source, entry, mark: Any, row: int) -> SimpleNamespace:
        if entry is None:
            return SimpleNamespace(valid=0, address=Place(None), behind=None)
        assert entry == (*mark, row)
        return SimpleNamespace(valid=1, address=Place(entry), behind=None)

    # -- memory ------------------------------------------------------------------------------------------------------

    def load_shared(self, place: int, _) -> SimpleNamespace:
        return SimpleNamespace(to=lambda _: self.words[place])

    def store_shared(self, place: int, offset: int, values: list) -> None:
        """A lane's own store: others see it when all have met, which they do where they wait for copies."""
        self.words.pop(place, None)
        self.copies.append((self.step, place + offset, values[0]))

    def prefetch_line_if(self, valid: int, address: Any) -> None:
        if valid:
            self.asked.add(address.entry)

    # -- the queries ---------------------------------------------------------------------------------------------------

    def prefetch(self, queries, work, condition: int) -> None:
        if condition:
            self.queries.append(work.row)


@dataclass(frozen=True)
class Place:
    """An address, of which any byte is as good."""

    entry: Any

    def __add__(self, _) -> Place:
        return self


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_entries_are_there_when_they_are_read(run_on, config, shares):
    machine = Machine()
    run_on(machine)
    made: Any = entries.Entries.of(config)
    ring: Any = entries.Entries(**(vars(made) | {"locator": machine}))
    all_tiles: Any = WorkTiles(shares)
    memory, first_row, blocks = SimpleNamespace(entries=1000), 16, all_tiles.blocks
    # Lanes go together, each with a cursor of its own; one of them leads.
    cursors = [work_tiles.Cursor.before(all_tiles, machine, int(lane == 0)) for lane in range(LANES)]

    def lanes(call: Callable[[int, Any], None]) -> None:
        for lane, cursor in enumerate(cursors):
            call(lane, cursor)
        machine.step += 1

    # What the first copies ask for is waited for by all, a step later.
    for i in range(ring.lead + 1):
        for lane, cursor in enumerate(cursors):
            ring.request(cursor, None, memory, i, first_row, lane)
    machine.step += 1
    ring.wait()
    assert ring.token(None, memory, 0, first_row, first_row).valid == bool(blocks)
    lanes(lambda lane, cursor: ring.prefetch_first(None, memory, first_row, lane))
    number = 0
    while number < cursors[0].found:
        # As `Fp8Load` reads: other groups of this block, the first ones of the next.
        for row in range(first_row, first_row + ring.rows):
            for later in (number, number + 1):
                token = ring.token(None, memory, later, first_row, row)
                assert token.valid == (later < len(blocks))
                assert not token.valid or token.address.entry == (*blocks[later], row)
        lanes(lambda lane, cursor, number=number: ring.step(cursor, None, memory, number, first_row, lane))
        number += 1
    assert number == len(blocks) and {cursor.found for cursor in cursors} == {number}
    wanted = {(*block, first_row + row) for block in blocks for row in range(ring.rows)}
    assert machine.asked == (wanted if config.tiles.load.prefetch else set())
    # Those of the first share are asked for in shared memory at once.
    assert machine.queries == list(range(all_tiles.row + 1, all_tiles.row + len(shares)))
