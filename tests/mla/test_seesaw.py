"""The seesaw's order, warp by warp under random schedules: nobody waits for ever, nothing is read or overwritten early.

The warpgroups' own code runs, a thread for every warp of which one goes on at a time; products, tiles and barriers are
models that know who still reads what.
"""

from __future__ import annotations

import functools
import inspect
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import seesaw
from cute_kernels.mla.config import MULTIPLYING_WARPS, NUM_STAGES, WARPGROUP_WARPS, MlaConfig

WARP_THREADS = 32
PRODUCER = MULTIPLYING_WARPS


class Scheduler:
    """Threads of which one runs at a time; at every step the next is drawn among those that can go on."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.turn = threading.Condition()
        self.waiting: dict[int, Any] = {}
        self.running: int | None = None
        self.error: BaseException | None = None

    def run(self, bodies: list) -> None:
        threads = [threading.Thread(target=self._body, args=(i, body), daemon=True) for i, body in enumerate(bodies)]
        self.waiting = {i: lambda: True for i in range(len(bodies))}
        with self.turn:
            self._next()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if self.error is not None:
            raise self.error

    def until(self, condition, who: int) -> None:
        """Lets others go on until ``condition`` holds."""
        with self.turn:
            self.waiting[who] = condition
            self._next()
            self._resume(who)

    def _body(self, who: int, body) -> None:
        try:
            with self.turn:
                self._resume(who)
            body()
        except BaseException as error:
            self.error = self.error or error
        with self.turn:
            if self.error is None:
                self._next()
            self.turn.notify_all()

    def _resume(self, who: int) -> None:
        self.turn.wait_for(lambda: self.running == who or self.error is not None)
        if self.error is not None:
            raise SystemExit
        del self.waiting[who]

    def _next(self) -> None:
        able = [who for who, condition in self.waiting.items() if condition()]
        self.running = self.random.choice(able) if able else None
        if not able and self.waiting:
            self.error = self.error or AssertionError(f"deadlock: {sorted(self.waiting)} wait for each other")
        self.turn.notify_all()


class Machine:
    """A CTA: tiles with what they hold, barriers, and the products that have been issued and not waited for."""

    def __init__(self, seed: int, config: MlaConfig):
        self.scheduler, self.config = Scheduler(seed), config
        self.local = threading.local()
        self.named: dict[int, list[int]] = {}
        self.generations: dict[int, int] = {}
        self.arrived: dict[tuple, int] = {}
        self.holds: dict[tuple, Any] = {}
        self.groups: dict[int, list[set]] = {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.issued: dict[int, set] = {warp: set() for warp in range(MULTIPLYING_WARPS)}

    @property
    def warp(self) -> int:
        return self.local.warp

    def step(self, condition=lambda: True) -> None:
        self.scheduler.until(condition, self.warp)

    def arrive(self, barrier_id: int, number_of_threads: int) -> None:
        self.step()
        arrived = self.named.setdefault(barrier_id, [])
        assert self.warp not in arrived, f"warp {self.warp} arrives at {barrier_id} twice"
        arrived.append(self.warp)
        if len(arrived) * WARP_THREADS == number_of_threads:
            self.named[barrier_id] = []
            self.generations[barrier_id] = self.generations.get(barrier_id, 0) + 1

    def sync(self, barrier_id: int, number_of_threads: int) -> None:
        self.step()
        generation = self.generations.get(barrier_id, 0)
        self.arrive(barrier_id, number_of_threads)
        self.step(lambda: self.generations.get(barrier_id, 0) > generation)

    def readers(self, place: tuple) -> list[int]:
        return [warp for warp, groups in self.groups.items() if any(place in g for g in (*groups, self.issued[warp]))]

    def commit(self) -> None:
        self.groups[self.warp].append(self.issued[self.warp])
        self.issued[self.warp] = set()

    def wait(self, pending: int = 0) -> None:
        self.step()
        groups = self.groups[self.warp]
        del groups[: max(0, len(groups) - pending)]

    def produce(self, num_blocks: int) -> None:
        """The gathering warpgroup as one: halves of tiles in order, each when it is given back."""
        self.local.warp = PRODUCER
        for block in range(num_blocks):
            stage, turn = block % NUM_STAGES, block // NUM_STAGES
            for half, arrivals in enumerate(self.config.empty_arrivals):
                self.step(lambda key=("empty", half, stage), n=turn * arrivals: self.arrived.get(key, 0) >= n)
                for part in (half, "rope")[: 2 - half]:
                    assert not self.readers((stage, part)), f"block {block} overwrites what is read"
                    self.holds[stage, part] = block
                self.arrived["full", half, stage] = turn + 1


class Model(seesaw.Seesaw):
    """The order with products and memory of a :class:`Machine`."""

    def __init__(self, machine: Machine):
        super().__init__(machine.config)
        self.machine, self.sums = machine, {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.published: dict[tuple, int] = {}
        self.turns = dict.fromkeys(range(MULTIPLYING_WARPS), 0)
        finish = SimpleNamespace(finish_rows=lambda *_: [1.0, 1.0], write=lambda *_: machine.step())
        self.writer: Any = finish

    def await_queries(self, memory) -> None:
        self.machine.step()

    def confirm(self, memory, stage, warp, lane) -> None:
        """Of the other CTA of a pair, which there is not."""

    def score(self, scores, memory, stage, phase) -> None:
        machine = self.machine
        turn = self.turns[machine.warp]
        assert phase == turn % 2
        self.turns[machine.warp] += 1
        for half in range(2):
            machine.step(lambda half=half: machine.arrived.get(("full", half, stage), 0) > turn)
        places = {(stage, part) for part in (0, 1, "rope")}
        assert {machine.holds[place] for place in places} == {2 * turn + stage}
        machine.issued[machine.warp] |= places
        machine.commit()

    def weigh(self, rows: Any, work, memory, stage, block, scale, warp, lane):
        reads = self.machine.groups[self.machine.warp]
        assert not any((stage, "rope") in group for group in reads), "scores are used before they are there"
        assert self.machine.holds[stage, "rope"] == block
        rows.packed = block
        return [1.0, 1.0]

    def publish_weights(self, packed, tile, warp, lane) -> None:
        self.machine.step()
        assert not self.machine.readers((tile, "rope")), "weights replace keys that are read"
        held = self.machine.holds[tile, "rope"]
        before = held[1] if isinstance(held, tuple) else set()
        self.machine.holds[tile, "rope"] = (packed, before | {warp})

    def publish_rows(self, values, memory, slot, warp, lane) -> None:
        self.machine.step()
        self.published[slot, warp] = self.published.get((slot, warp), 0) + 1

    def load_rows(self, memory, slot, warp, lane):
        self.machine.step()
        return [self.published[slot, warp]] * 2

    def follow(self, rows, memory, slot, scale, warp, lane) -> None:
        number = len(self.sums[self.machine.warp])
        assert self.load_rows(memory, slot, warp, lane)[0] == number // 2 + 1, "maxima of another block"

    def add_values(self, sums, weights, memory, stage, half: int) -> None:
        machine = self.machine
        block = len(self.sums[machine.warp])
        assert machine.holds[stage, half] == block
        assert not any("sums" in group for group in machine.groups[machine.warp]), "sums are added to twice at a time"
        places = {(stage, half), "sums"}
        if weights == "shared":
            assert machine.holds[stage, "rope"] == (block, set(range(WARPGROUP_WARPS)))
            places.add((stage, "rope"))
        else:
            assert weights == block
        self.sums[machine.warp].append(block)
        machine.issued[machine.warp] |= places
        machine.commit()

    def weights(self, memory, stage: int) -> Any:
        return "shared"

    def weight_fragment(self, packed) -> Any:
        return packed

    def weight_pointer(self, memory, stage: int) -> Any:
        return SimpleNamespace(toint=lambda: stage)

    def release(self, memory, stage, lane, half) -> None:
        self.machine.step()
        assert self.machine.warp not in self.machine.readers((stage, half))
        key = ("empty", half, stage)
        self.machine.arrived[key] = self.machine.arrived.get(key, 0) + 1


for method in ("first", "second", "add_even_left", "add_even_right", "publish"):
    setattr(Model, method, inspect.unwrap(getattr(seesaw.Seesaw, method)))


def no_rows() -> SimpleNamespace:
    return SimpleNamespace(sums=None, scores=None, packed=None, maxima=[0.0, 0.0], totals=[0.0, 0.0])


def play(monkeypatch, seed: int, num_blocks: int) -> None:
    """One CTA from its first to its last block."""
    machine = Machine(seed, MlaConfig(seesaw=True))
    model = Model(machine)
    arch = SimpleNamespace(barrier=machine.sync, barrier_arrive=machine.arrive, fence_proxy=lambda *_, **__: None)
    ranges = SimpleNamespace(range=lambda a, b, step, unroll: range(a, b, step), range_constexpr=range)
    for name, value in (
        ("cute", SimpleNamespace(arch=arch)),
        ("cutlass", ranges),
        ("Int32", int),
        ("wgmma_tiles", SimpleNamespace(wait=machine.wait)),
        ("lane_sum", lambda value, offsets: value),
        ("Rows", SimpleNamespace(make=no_rows)),
    ):
        monkeypatch.setattr(seesaw, name, value)
    monkeypatch.setattr(seesaw.softmax, "rescale", lambda *_: None)
    work = SimpleNamespace(begin=0, end=num_blocks)

    def multiply(warp: int) -> None:
        machine.local.warp = warp
        run = model.second if warp >= WARPGROUP_WARPS else model.first
        run(work, None, SimpleNamespace(queries=0), 1.0, warp % WARPGROUP_WARPS, 0)

    bodies = [functools.partial(multiply, warp) for warp in range(MULTIPLYING_WARPS)]
    machine.scheduler.run([*bodies, functools.partial(machine.produce, num_blocks)])
    assert all(blocks == list(range(num_blocks)) for blocks in model.sums.values())
    assert not any(machine.named.values())


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 8, 9])
def test_nobody_waits_for_ever_and_nothing_is_read_early(monkeypatch, num_blocks):
    for seed in range(15):
        play(monkeypatch, seed, num_blocks)
