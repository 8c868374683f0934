"""The pipeline's barriers, played through: whoever is quick or slow, a stage is read when both copies of it are
there."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest


class Barrier:
    """An mbarrier: phases of so many arrivals; a wait for a parity passes when the last complete phase has it."""

    def __init__(self, arrivals: int):
        self.arrivals, self.pending, self.phase = arrivals, arrivals, 0

    def arrive(self) -> None:
        self.pending -= 1
        if self.pending == 0:
            self.pending, self.phase = self.arrivals, self.phase + 1

    def passes(self, parity: int) -> bool:
        return (self.phase - 1) % 2 == parity


Role = Iterator[tuple[Barrier, int]]  # yields what it waits for


def copier(full, empty, stages: int, chunks: int, log: list, name: str) -> Role:
    """Copies of weights, and copies of activations, which are brought to some stages but take part in all of them."""
    stage, phase = 0, 1
    for chunk in range(chunks):
        yield empty[stage], phase
        log.append((name, chunk))
        full[stage].arrive()
        stage, phase = _advance(stage, phase, stages)


def multiplier(full, empty, stages: int, chunks: int, log: list) -> Role:
    stage, phase = 0, 0
    for chunk in range(chunks):
        yield full[stage], phase
        assert {("weights", chunk), ("activations", chunk)} <= set(log), "read before it was there"
        assert ("weights", chunk + stages) not in log, "overwritten before it was read"
        empty[stage].arrive()
        stage, phase = _advance(stage, phase, stages)


def _advance(stage: int, phase: int, stages: int) -> tuple[int, int]:
    return ((stage + 1) % stages, phase ^ (stage + 1 == stages))


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_warps_breaks_the_ring(stages: int, seed: int):
    chunks, warps = 5 * stages + 3, 8
    full, empty = [Barrier(2) for _ in range(stages)], [Barrier(warps) for _ in range(stages)]
    log: list[tuple[str, int]] = []
    roles = [copier(full, empty, stages, chunks, log, name) for name in ("weights", "activations")]
    roles += [multiplier(full, empty, stages, chunks, log) for _ in range(warps)]
    waits = {number: next(role) for number, role in enumerate(roles)}
    generator = random.Random(seed)
    speeds = [generator.random() ** 3 + 0.01 for _ in roles]
    while waits:
        ready = [number for number, (barrier, parity) in waits.items() if barrier.passes(parity)]
        assert ready, "everybody waits"
        number = generator.choices(ready, [speeds[n] for n in ready])[0]
        try:
            waits[number] = next(roles[number])
        except StopIteration:
            del waits[number]
    assert len(log) == 2 * chunks
