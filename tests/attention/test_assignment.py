"""The device's view of a launch's lengths, lane by lane: every length counts, and counts once."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from cute_kernels.attention import assignment
from cute_kernels.attention.assignment import Assigner, Requests
from cute_kernels.attention.schedule import ALIKE

TILE_TOKENS = 64
CUT = -1  # stands for the tiles of a part where lengths differ


class Lanes:
    """The lanes of a warp one after the other: what they sum up is known once each has been asked."""

    def __init__(self, lengths: list[int], max_seq_len: int):
        self.lengths, self.max_seq_len = lengths, max_seq_len
        self.terms: dict[str, list[int]] = {"sum": [], "max": []}
        self.totals: dict[str, int] = {}

    def load_global_words(self, address: int, offset: int, count: int) -> list[Any]:
        assert count == 1 and 0 <= address < 4 * len(self.lengths)
        return [SimpleNamespace(to=lambda kind: self.lengths[address // 4])]

    def _reduce(self, name: str, term: int) -> int:
        self.terms[name].append(term)
        return self.totals.get(name, term)

    def warp_sum(self, term: int) -> int:
        return self._reduce("sum", term)

    def warp_max(self, term: int) -> int:
        return self._reduce("max", term)

    def tiles_per_part(self) -> tuple[int, int, set[int]]:
        """(sum, largest) of the tiles that the lanes count, and what the warp then returns in each lane."""
        requests = Requests(0, len(self.lengths), self.max_seq_len, 0, parts=1, more_rows=1, shares=1)
        assigner = Assigner(TILE_TOKENS, windowed=False)
        compute = Assigner.tiles_per_part.__wrapped__  # type: ignore[attr-defined]
        for lane in range(32):
            compute(assigner, requests, assigner.fetch_lengths(requests, lane), lane)
        self.totals = {"sum": sum(self.terms["sum"]), "max": max(self.terms["max"])}
        results = {compute(assigner, requests, assigner.fetch_lengths(requests, lane), lane) for lane in range(32)}
        return self.totals["sum"], self.totals["max"], results


@pytest.mark.parametrize("batch", [1, 2, 31, 32, 33, 128, 256, 257, 300, 512, 513, 700, 1100, 4096])
@pytest.mark.parametrize("kind", ["differ", "alike", "one long", "none"])
def test_every_length_counts_once(batch, kind, monkeypatch):
    draw = random.Random(batch)
    lengths = {
        "differ": [draw.randint(-3, 1200) for _ in range(batch)],
        "alike": [1000] * batch,
        "one long": [1] * (batch - 1) + [1024],
        "none": [0] * batch,
    }[kind]
    lanes = Lanes(lengths, 1024)
    monkeypatch.setattr(assignment, "ptx", lanes)
    monkeypatch.setattr(assignment, "cutlass", SimpleNamespace(min=min, max=max, range=_range))
    for name, kind in {"Int32": int, "Int64": int, "const_expr": bool}.items():
        monkeypatch.setattr(assignment, name, kind)
    monkeypatch.setattr(Assigner, "cut", lambda *arguments: CUT)
    tiles = [max(1, -(-min(max(length, 0), 1024) // TILE_TOKENS)) for length in lengths]
    alike = max(tiles) * batch * ALIKE[0] <= sum(tiles) * ALIKE[1]
    assert lanes.tiles_per_part() == (sum(tiles), max(tiles), {0 if alike else CUT})


def _range(start: int, stop: int, step: int, unroll: int) -> range:
    return range(start, stop, step)
