"""The ring of a gathering warp's entries: nothing is read before it is there, or after something else is."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import entries
from cute_kernels.mla.config import MlaConfig

LANES = 32
CONFIGS = [
    MlaConfig(prefetch=prefetch, crossover=crossover, gather_warps=warps)
    for prefetch in (0, 2, 3, 4, 5)
    for crossover, warps in ((False, 4), (True, 4), (False, 8))
]
METHODS = ("prefetch_first", "step", "request")


@dataclass
class Machine:
    """Shared memory with copies that end when they are waited for and not before; blocks whose tokens were asked for.

    A copy that another lane has asked for in the same step is still under way for a lane that waits only now.
    """

    words: dict[int, tuple[int, int]] = field(default_factory=dict)
    copies: list[tuple[int, int, tuple[int, int]]] = field(default_factory=list)
    step: int = 0
    asked: set[tuple[int, int]] = field(default_factory=set)

    def wait(self, _) -> None:
        for step, place, entry in self.copies:
            if step < self.step:
                self.words[place] = entry
        self.copies = [copy for copy in self.copies if copy[0] >= self.step]

    # -- the locator: the entry of a row of a block is (block, row) --------------------------------------------------

    def copy_entry(self, place: int, work, source, block: int, row: int) -> None:
        self.words.pop(place, None)  # who reads it now reads anything
        self.copies.append((self.step, place, (block, row)))

    def locate(self, work, source, entry, block: int, row: int) -> SimpleNamespace:
        assert entry == (block, row)
        return SimpleNamespace(valid=1, address=(block, row), behind=None)

    # -- memory ------------------------------------------------------------------------------------------------------

    def load_shared(self, place: int, _) -> SimpleNamespace:
        return SimpleNamespace(to=lambda _: self.words[place])

    def prefetch_line_if(self, valid: int, address: tuple[int, int]) -> None:
        self.asked.add(address)


def install(monkeypatch, machine: Machine) -> None:
    arch = SimpleNamespace(cp_async_commit_group=lambda: None, cp_async_wait_group=machine.wait, sync_warp=lambda: None)
    monkeypatch.setattr(entries, "cute", SimpleNamespace(arch=arch))
    monkeypatch.setattr(entries, "cutlass", SimpleNamespace(range_constexpr=range))
    for name in ("ptx", "numbers"):
        monkeypatch.setattr(entries, name, machine)
    monkeypatch.setattr(entries.Entries, "lines", lambda *_: [()])
    for name in METHODS:
        monkeypatch.setattr(entries.Entries, name, getattr(entries.Entries, name).__wrapped__)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_entries_are_there_when_they_are_read(monkeypatch, config, begin):
    machine = Machine()
    install(monkeypatch, machine)
    made: Any = entries.Entries.of(config)
    ring = entries.Entries(**(vars(made) | {"locator": machine}))
    memory, work, end = SimpleNamespace(entries=1000), SimpleNamespace(begin=begin), begin + 25
    first_row = 16

    def lanes(call) -> None:
        for lane in range(LANES):
            call(lane)
        machine.step += 1

    # Lanes wait together: what the first copies ask for is waited for by all, a step later.
    for lane in range(LANES):
        for i in range(ring.lead + 1):
            ring.request(work, None, memory, begin + i, first_row, lane)
    machine.step += 1
    ring.wait()
    ring.token(work, None, memory, begin, first_row)
    lanes(lambda lane: ring.prefetch_first(work, None, memory, first_row, lane))
    for block in range(begin, end):
        # As `Dequantizing` reads: other groups of this block, the first ones of the next.
        for row in range(ring.rows):
            ring.token(work, None, memory, block + 1, first_row + row)
            if config.warp_groups > 1:
                ring.token(work, None, memory, block, first_row + row)
        lanes(lambda lane, block=block: ring.step(work, None, memory, block, first_row, lane))
    if config.prefetch:
        wanted = {(block, first_row + row) for block in range(begin, end) for row in range(ring.rows)}
        assert wanted <= machine.asked
    else:
        assert not machine.asked
