"""The order of products and hand-overs, warp by warp under random schedules: nobody waits for ever, nothing is read
or overwritten early.

The warpgroups' own code runs, a thread for every warp of which one goes on at a time; products, tiles and barriers are
models that know who still reads what.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import multiply, serial
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

    def __init__(self, seed: int, config: MlaConfig, shares: list[int]):
        self.scheduler, self.config, self.shares = Scheduler(seed), config, shares
        self.local = threading.local()
        self.named: dict[int, list[int]] = {}
        self.generations: dict[int, int] = {}
        self.full: dict[int, int] = {}
        self.empty: dict[int, int] = {}
        self.holds: dict[Any, Any] = {}
        self.groups: dict[int, list[set]] = {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.asked = 0  # how often queries were asked for, which come at once

    def ask(self, share: int) -> None:
        """New queries in the place of the old ones."""
        assert not self.readers("queries"), "queries replace those that are read"
        self.holds["queries"] = share
        self.asked += 1

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

    def readers(self, place: Any) -> list[int]:
        return [warp for warp, groups in self.groups.items() if any(place in group for group in groups)]

    def issue(self, places: set) -> None:
        self.groups[self.warp].append(places)

    def wait(self) -> None:
        self.step()
        self.groups[self.warp].clear()

    def produce(self, num_blocks: int) -> None:
        """The gathering warpgroup as one: tiles in order, each when it is given back."""
        self.local.warp = PRODUCER
        for block in range(num_blocks):
            stage, turn = block % NUM_STAGES, block // NUM_STAGES
            arrivals = turn * self.config.empty_arrivals
            self.step(lambda stage=stage, arrivals=arrivals: self.empty.get(stage, 0) >= arrivals)
            assert not self.readers(stage), f"block {block} overwrites what is read"
            self.holds[stage] = block
            self.full[stage] = turn + 1


class Model(serial.Serial):
    """The order with products and memory of a :class:`Machine`."""

    def __init__(self, machine: Machine):
        super().__init__(machine.config)
        self.machine, self.sums = machine, {warp: [] for warp in range(MULTIPLYING_WARPS)}
        self.published = dict.fromkeys(range(WARPGROUP_WARPS), 0)
        self.loaded = dict.fromkeys(range(WARPGROUP_WARPS), 0)
        self.writer: Any = SimpleNamespace(finish_rows=lambda *_: [1.0, 1.0], write=lambda *_: machine.step())
        self.loader: Any = SimpleNamespace(ask=lambda queries, memory, row, head_block: machine.ask(row))

    def await_queries(self, memory, phase) -> None:
        """A barrier knows no more of its last phase than the parity."""
        self.machine.step(lambda: self.machine.asked > 0 and (self.machine.asked - 1) % 2 == phase)

    def await_tile(self, memory, stage, phase) -> None:
        turn = self.block // NUM_STAGES
        assert (stage, phase) == (self.block % NUM_STAGES, turn % 2)
        self.machine.step(lambda: self.machine.full.get(stage, 0) > turn)

    @property
    def block(self) -> int:
        """The one that a warp is at, of all shares: it has added all before."""
        return len(self.sums[self.machine.warp])

    @property
    def share(self) -> int:
        """The one of the block that a warp is at."""
        return next(i for i, end in enumerate(itertools.accumulate(self.machine.shares)) if self.block < end)

    def score(self, scores, memory, stage, phase) -> None:
        self.await_tile(memory, stage, phase)
        assert self.machine.holds[stage] == self.block
        assert self.machine.holds["queries"] == self.share
        self.machine.issue({stage, "scores", "queries"})

    def weigh(self, rows: Any, work, memory, stage, block, scale, warp, lane):
        assert not any("scores" in group for group in self.machine.groups[self.machine.warp]), "scores are not there"
        assert self.machine.holds[stage] == work.before + block == self.block
        rows.packed = self.block
        return [1.0, 1.0]

    def publish_weights(self, packed, tile, warp, lane) -> None:
        self.machine.step()
        assert not self.machine.readers("weights"), "weights replace those that are read"
        block, warps = self.machine.holds.get("weights", (None, set()))
        self.machine.holds["weights"] = packed, {warp} | (warps if block == packed else set())

    def publish_rows(self, values, memory, warp, lane) -> None:
        self.machine.step()
        assert self.published[warp] == self.loaded[warp], "factors replace those that nobody has read"
        self.published[warp] += 1

    def load_rows(self, memory, warp, lane) -> Any:
        self.machine.step()
        self.loaded[warp] += 1
        assert self.loaded[warp] == self.published[warp], "factors of another block"
        return [1.0, 1.0]

    def add_values(self, sums, weights, memory, stage, half: int) -> None:
        machine = self.machine
        assert machine.holds[stage] == self.block
        assert not any("sums" in group for group in machine.groups[machine.warp]), "sums are added to twice at a time"
        if half:
            assert machine.holds["weights"] == (self.block, set(range(WARPGROUP_WARPS)))
            machine.issue({stage, "sums", "weights"})
        else:
            assert weights == self.block
            machine.issue({stage, "sums"})
        self.sums[machine.warp].append(self.block)

    def weight_fragment(self, packed) -> Any:
        return packed

    def release(self, memory, stage, lane) -> None:
        self.machine.step()
        assert self.machine.warp not in self.machine.readers(stage)
        self.machine.empty[stage] = self.machine.empty.get(stage, 0) + 1


for method in ("first", "second", "first_share", "second_share", "ask_next_queries"):
    setattr(Model, method, inspect.unwrap(getattr(serial.Serial, method)))


def no_rows() -> SimpleNamespace:
    return SimpleNamespace(sums=None, scores=None, packed=None, maxima=[0.0, 0.0], totals=[0.0, 0.0])


@dataclass(frozen=True)
class Items:
    """Shares with so many blocks; every row is one."""

    shares: list[int]
    step: int = 1
    first: int = 0
    queries: Any = None

    @property
    def count(self) -> int:
        return len(self.shares)

    def place(self, index: int) -> tuple[int, int, int]:
        return index, 0, 0

    def work(self, index: int) -> SimpleNamespace:
        before, shape = sum(self.shares[:index]), SimpleNamespace(slack=8.0)
        return SimpleNamespace(begin=0, end=self.shares[index], before=before, shape=shape)


def play(monkeypatch, seed: int, shares: list[int], left_out: int | None = None) -> None:
    """One CTA from its first to its last share. left_out: a named barrier that nobody waits at."""
    machine = Machine(seed, MlaConfig(), shares)
    machine.ask(0)
    model = Model(machine)

    def barrier(barrier_id: int, number_of_threads: int) -> None:
        machine.step() if barrier_id == left_out else machine.sync(barrier_id, number_of_threads)

    def barrier_arrive(barrier_id: int, number_of_threads: int) -> None:
        machine.step() if barrier_id == left_out else machine.arrive(barrier_id, number_of_threads)

    arch = SimpleNamespace(barrier=barrier, barrier_arrive=barrier_arrive, fence_proxy=lambda *_, **__: None)
    ranges = SimpleNamespace(range=lambda a, b, step, unroll: range(a, b, step), range_constexpr=range)
    for name, value in (
        ("cute", SimpleNamespace(arch=arch)),
        ("cutlass", ranges),
        ("wgmma_tiles", SimpleNamespace(wait=machine.wait, tile=lambda *_: "weights")),
        ("Rows", SimpleNamespace(make=no_rows)),
        ("advance", lambda stage, phase, stages: ((stage + 1) % stages, phase ^ (stage + 1 == stages))),
    ):
        monkeypatch.setattr(serial, name, value)
    for name, value in (
        ("cute", SimpleNamespace(arch=arch)),
        ("cutlass", ranges),
        ("Int32", int),
        ("lane_sum", lambda value, offsets: value),
    ):
        monkeypatch.setattr(multiply, name, value)
    monkeypatch.setattr(serial.softmax, "rescale", lambda *_: None)
    num_blocks = sum(shares)
    memory = SimpleNamespace(queries=0, weight_pointer=SimpleNamespace(toint=lambda: 0))

    def run_warp(warp: int) -> None:
        machine.local.warp = warp
        run = model.second if warp >= WARPGROUP_WARPS else model.first
        run(Items(shares), None, memory, 1.0, warp % WARPGROUP_WARPS, 0)

    bodies = [functools.partial(run_warp, warp) for warp in range(MULTIPLYING_WARPS)]
    machine.scheduler.run([*bodies, functools.partial(machine.produce, num_blocks)])
    assert all(blocks == list(range(num_blocks)) for blocks in model.sums.values())
    assert not machine.named.get(serial.WEIGHTS_READY)


@pytest.mark.parametrize("shares", [[0], [1], [9], [3, 2], [1, 1, 1, 1], [0, 0, 0], [0, 2, 0, 0, 3, 0]], ids=str)
def test_nobody_waits_for_ever_and_nothing_is_read_early(monkeypatch, shares):
    for seed in range(15):
        play(monkeypatch, seed, shares)


@pytest.mark.parametrize("left_out", [serial.WEIGHTS_READY, serial.WEIGHTS_FREE])
def test_neither_barrier_can_be_left_out(monkeypatch, left_out):
    """The model finds what the barriers are for."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(monkeypatch, seed, [5, 3], left_out)


@pytest.mark.parametrize("shares", [[3, 2], [0, 0, 0]], ids=str)
def test_queries_cannot_be_asked_for_by_one_warp_alone(monkeypatch, shares):
    """The model finds it if a warp asks when it has its own last scores, or, without any, its own queries."""
    with pytest.raises(AssertionError):
        for seed in range(15):
            play(monkeypatch, seed, shares, multiply.QUERIES_READ)
